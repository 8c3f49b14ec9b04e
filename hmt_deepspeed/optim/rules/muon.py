"""Muon in a low-rank space: one momentum of the projected gradient, orthogonalised, its rows normalised.

Muon (Jordan et al., 2024) steps along the polar factor of its momentum; NorMuon (2510.05491) divides each row of that by
the root of its running mean square, and gives the whole its norm back. In a basis ``Q`` with ``A = G Q``, m x r::

    M   <- mu M + (1 - mu) A,  N = mu M + (1 - mu) A      Nesterov's
    U    = sqrt(m) N (N^T N)^(-1/2)                       entries of mean square 1
    v_j <- beta_2 v_j + (1 - beta_2) ||U_j||^2 / r        a number a row
    O_j  = U_j / sqrt(v_j) ||U|| / ||U / sqrt(v)||
    R_j  = c phi_j S_j,  phi_j = ||O_j|| / ||A_j||        the residual, as of every rule
    W   <- (1 - lr wd) W - lr scale (O Q^T + R P^T)

Rows stay where they are: who holds some of them sums ``N^T N``, r x r, and three numbers. Another basis ``Q'`` takes
``M Q^T Q'`` over. Of a matrix without a basis, at full rank, this is Muon itself, the smaller side's Gram matrix n x n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.formulas import TINY, clipped_images, full_residual
from hmt_deepspeed.optim.rules.inverse_root import inverse_root
from hmt_deepspeed.optim.rules.moments import Recalled
from hmt_deepspeed.optim.rules.residual import ResidualMatrix, ResidualStack
from hmt_deepspeed.optim.rules.side_by_side import joined
from hmt_deepspeed.optim.rules.stack import Gradients, Stack
from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor, restored_state
from hmt_deepspeed.optim.rules.symmetric_product import symmetric_product

__all__ = ["MOMENTUM", "Momentum", "MuonMatrix", "MuonStack", "RowMomentum"]

MOMENTUM = 0.95  # mu, as published, whatever Adam's beta_1 of the parameters beside
ROW_SQUARES = "row_mean_square"
_ROOTS = 4  # tensors like a Gram matrix that are alive while its root is found


class Momentum(KeptStates):
    """A momentum.

    Args:
        shape: rows x r, of the rows held here. dtype: of the momentum, see :class:`StateTensor`.
        names, seed: key the stochastic rounding: of the matrix, or of each of several.
        several: (E,) of several matrices, which all tensors have as leading dimension; () of one.

    Attributes:
        momentum: rows x r.
    """

    STATES: ClassVar[Mapping[str, str]] = {"momentum": "momentum"}

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        names: Sequence[str],
        seed: int,
        several: tuple[int, ...] = (),
    ) -> None:
        super().__init__(device, names, seed, several)
        self.momentum = StateTensor(shape, dtype, True, device, several)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states().values())

    def rotate(self, overlap: Tensor) -> None:
        old, key = self.momentum, self.rounding_key(0)
        moved = old.read() @ overlap
        shape = (old.shape[0], overlap.shape[-1])
        self.momentum = StateTensor(shape, old.dtype, True, self.device, self.several)
        self.momentum.write(moved, key)

    def column_energies(self, counted: slice) -> Tensor:
        """Squared norm of each column over the ``counted`` rows of those held, of all matrices: (r,) fp32."""
        return self.momentum.read()[..., counted, :].square().flatten(0, -2).sum(0)

    def state_dict(self) -> dict[str, Any]:
        read = {name: state.read() for name, state in self.states().items()}
        return {**read, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, attribute in self.STATES.items():
            old: StateTensor = getattr(self, attribute)
            how = old.dtype, old.signed, self.device, self.several
            setattr(self, attribute, restored_state(state[name], *how))
        self.steps = int(state["steps"])


class RowMomentum(Momentum):
    """A momentum and the mean square of each row of the directions that it gave.

    Attributes:
        row_squares: rows x 1, fp32, a running mean from 0.
    """

    STATES: ClassVar[Mapping[str, str]] = {**Momentum.STATES, ROW_SQUARES: "row_squares"}

    def __init__(self, shape: tuple[int, int], dtype: str, *how: Any) -> None:
        super().__init__(shape, dtype, *how)
        self.row_squares = StateTensor((shape[0], 1), "fp32", False, self.device, self.several)


class MuonStack(ResidualStack):
    """Steps of matrices alike under :class:`MuonMatrix`."""

    first: MuonMatrix

    @property
    def sums_states(self) -> bool:
        return True

    def _each(self, most: int) -> int:
        return max(1, min(super()._each(most), most // (_ROOTS * self.rank**2)))

    def groups(self, most: int, in_place: bool) -> list[tuple[int, int]]:
        """As of every rule; and their Gram matrices, with what the roots of these take, are no larger than a part."""
        fits = self.size * _ROOTS * self.rank**2 <= most
        return super().groups(most, in_place) if fits else self._ranges(most)

    def once(self, step: Tensor) -> dict[str, Tensor]:
        """The residual's c, which matrices take the step and the rule's scale of these for the parts; keys of rounding."""
        taken = (self.factor != 0).float()
        found = {"residual_scale": self.residual_scale(), "taken": taken}
        found["scale"] = taken * self.first.scale
        if self.first.state_dtype != "fp32":
            found["momentum"] = self.keys(step, Stream.FIRST_STATE)
        return found

    def advance_part(self, gradient: Gradients, counted: slice) -> tuple[Tensor, Tensor]:
        """``[N | S]`` in the place of ``[A | S]``, ``N`` for whole rows; and ``N^T N`` of the counted ones."""
        if isinstance(gradient, list):
            update = self._take_whole(gradient)
        else:
            update, each = gradient.float(), self.factor.view(-1, 1, 1)
            update.mul_(each).masked_fill_(each == 0, 0.0)
            inside, outside = update[..., : self.rank], update[..., self.rank :]
            if outside.shape[2]:
                self._norms = _row_norms(inside), _row_norms(outside)
        direction = update[..., : self.rank]
        torch.lerp(direction, self._momentum(direction), MOMENTUM, out=direction)
        held = direction[:, counted]
        return update, symmetric_product(held.mT, held).flatten(1)

    def _momentum(self, image: Tensor) -> Tensor:
        """The momentum once it has taken ``A``: B x rows x r fp32."""
        state, taken = self.state("momentum"), self.shared("taken")
        momentum = state.read()
        momentum.lerp_(image, (taken * (1 - MOMENTUM)).view(-1, 1, 1))
        state.write_some(momentum, partial(self.shared, "momentum"), taken)
        return momentum

    def _take_whole(self, gradient: list[Tensor]) -> Tensor:
        """``A`` of whole rows; these and what the basis has seen of them are kept for the residual."""
        projections = self.projections()
        images, squares = project_together(gradient, projections)
        images, squares = clipped_images(images, squares, self.factor)
        self._whole = gradient, images, squares, self.grams(projections)
        return images.clone()

    def complete(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor, counted: slice
    ) -> Tensor:
        """``[O | R]`` but for the norm of ``O``; squared norms of ``U``, of ``U / sqrt(v)`` and of the residual."""
        own = zip(parts, updates, self.roots(parts, sums), strict=True)
        return joined(
            [
                part.complete_part(update, root, counted)
                for part, update, root in own
                if isinstance(part, MuonStack)
            ]
        )

    def roots(self, parts: Sequence[Stack], sums: Tensor) -> Sequence[Tensor]:
        """``sqrt(m) (N^T N)^(-1/2)`` of each part, B x r x r, given ``N^T N`` over all rows."""
        roots = inverse_root(sums.unflatten(1, (self.rank, self.rank)))
        roots *= self.shape[0] ** 0.5
        return roots.split([part.size for part in parts])

    def complete_part(self, update: Tensor, root: Tensor, counted: slice) -> Tensor:
        """:meth:`complete` of a part, B x 3.

        Args:
            root: ``sqrt(m) (N^T N)^(-1/2)``, B x r x r.
        """
        direction, residual = update[..., : self.rank], update[..., self.rank :]
        turned, means = direction @ root, self[f"{ROW_SQUARES}.data"].squeeze(2)
        squares = _row_norms(turned).square_()
        share = (self.shared("taken") * (1 - self.betas[1])).unsqueeze(1)
        means.lerp_(squares / self.rank, share)
        weights = means.clamp_min(TINY).rsqrt()
        torch.mul(turned, weights.unsqueeze(2), out=direction)
        moved = squares * weights.square()
        outside = self._residual(direction, residual, moved)
        return torch.stack((squares, moved, outside), dim=1)[..., counted].sum(dim=2)

    def _residual(self, direction: Tensor, residual: Tensor, moved: Tensor) -> Tensor:
        """``c phi S`` in the place of ``S``, or what :meth:`changed` takes of whole rows; squared norms of its rows."""
        known = self.shared("residual_scale").unsqueeze(1)
        if self.reads_whole_rows:
            gradient, images, squares, grams = self._whole
            del self._whole
            ratio, missed = full_residual(direction, images, squares, grams)
            images *= (ratio * known).unsqueeze(2)
            self._kept = ScaledRows(gradient, ratio * known).times(self.factor), images
            return missed * known.square()
        if not residual.shape[2]:
            return torch.zeros_like(moved)
        seen, probed = self._norms
        del self._norms
        ratio = moved.sqrt() / torch.maximum(seen, probed).clamp_min_(TINY) * known
        residual *= ratio.unsqueeze(2)
        return (ratio * probed).square_()

    def _limited(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """As of every residual, of updates that get the norm of ``U`` back."""
        squares, moved, outside = sums.unbind(dim=1)
        ratio = (squares / moved.clamp_min(TINY)).sqrt()
        return self.limited(outside * ratio.square(), self.shared("scale") * ratio)


def _row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=2)


class MuonMatrix(ResidualMatrix):
    """States of one matrix under Muon."""

    STACK = MuonStack
    KEPT: ClassVar[type[Momentum]] = RowMomentum
    moments: Momentum

    def _new_states(self) -> Momentum:
        shape, names = (self.num_rows, self.rank), self.held_names
        how = self.state_dtype, self.device, names, self.settings.seed, self.several
        return self.KEPT(shape, *how)

    def _transfer_moments(
        self, basis: Tensor | None, overlap_sum: Tensor | None, recalled: Sequence[Recalled]
    ) -> None:
        assert not recalled
        self.moments.rotate(self._overlap(basis))

    def column_energies(self, counted: slice) -> Tensor:
        return self.moments.column_energies(counted)
