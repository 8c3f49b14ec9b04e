"""One matrix between stacks: the steps of a stack of one, on tensors without the leading dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.probes import ProbeDraws
from hmt_deepspeed.optim.rules.stack import Gradients

ALL = slice(None)


class Alone:
    """One step of one matrix, of the rows that it holds.

    Args:
        matrix: its basis stays as it is until the step ends. factor: what the gradient is multiplied by.
        hyper: ``betas`` and ``eps``.
    """

    def __init__(self, matrix: MatrixRule, factor: float = 1.0, **hyper: Any) -> None:
        self.matrix, self.stack = matrix, matrix.STACK([matrix])
        self.factor, self.hyper = torch.tensor([factor]), hyper

    def _given(self, gradient: Tensor) -> Gradients:
        return [gradient] if self.stack.reads_whole_rows else gradient.unsqueeze(0)

    def measure(self, gradient: Tensor, counted: slice = ALL) -> Tensor:
        return self.stack.measure([self.stack], [self._given(gradient)], counted)[0]

    def square_norm(self, sums: Tensor) -> Tensor:
        return self.stack.square_norms(sums.unsqueeze(0))[0]

    def observe(self, sums: Tensor, scale: float = 1.0) -> None:
        self.stack.observe(sums.unsqueeze(0), scale)

    def advance(self, gradient: Tensor, counted: slice = ALL) -> tuple[Tensor, Tensor]:
        """The update before :meth:`finish` and its sums; ``gradient`` stays as it is."""
        moments = self.matrix.moments
        moments.steps += 1
        given = self._given(gradient.clone())
        self.stack.start(self.factor, **self.hyper, step=torch.tensor(moments.steps))
        (update,), sums = self.stack.advance([self.stack], [given], counted)
        return update[0], sums[0]

    def finish(self, update: Tensor, sums: Tensor) -> Tensor:
        """The update with its scale applied, rows x width."""
        (change,) = self.stack.finish([self.stack], [update.unsqueeze(0)], sums.unsqueeze(0))
        if change.beside is not None:
            return change.whole(0, self.stack.update_columns(change)[0])
        inside, outside = change.scale[0]
        rank = self.stack.rank
        return torch.cat(
            (change.update[0, :, :rank] * inside, change.update[0, :, rank:] * outside), dim=1
        )


class Together:
    """Steps of matrices of one kind in one stack: of each what :func:`step` does."""

    def __init__(self, matrices: list[MatrixRule]) -> None:
        self.matrices, self.stack = matrices, matrices[0].STACK(matrices)

    def step(self, gradients: Tensor, **hyper: Any) -> Tensor:
        """Updates, matrices x rows x width, by gradients as the matrices take them."""
        for matrix in self.matrices:
            matrix.moments.steps += 1
        stack, number = [self.stack], torch.tensor(self.matrices[0].moments.steps)
        self.stack.observe(self.stack.measure(stack, [gradients], ALL), 1.0)
        self.stack.start(torch.ones(len(gradients)), **hyper, step=number)
        (update,), sums = self.stack.advance(stack, [gradients.clone()], ALL)
        (change,) = self.stack.finish(stack, [update], sums)
        rank, (inside, outside) = self.stack.rank, change.scale.unbind(1)
        parts = change.update[..., :rank], change.update[..., rank:]
        return torch.cat((parts[0] * inside.view(-1, 1, 1), parts[1] * outside.view(-1, 1, 1)), -1)


def step(matrix: MatrixRule, gradient: Tensor, factor: float = 1.0, **hyper: Any) -> Tensor:
    """The update of a step with the gradient as the matrix takes it, all of whose rows are here."""
    alone = Alone(matrix, factor, **hyper)
    alone.observe(alone.measure(gradient))
    return alone.finish(*alone.advance(gradient))


def draw_probes(matrix: MatrixRule, step: int = 0) -> None:
    """The probe columns of a step."""
    matrix.prepare(step)
    ProbeDraws().draw([matrix])
