"""One trainable parameter of :class:`~hmt_deepspeed.optim.hmt.HMT`: its rule, states and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hmt_deepspeed.kernels.low_rank_projection import project
from hmt_deepspeed.kernels.low_rank_update import low_rank_update_
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.bases.basis import keyed_seed
from hmt_deepspeed.optim.rules.apply import apply_whole_, apply_whole_rounded_
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.dense import DenseState, dense_adamw_, new_dense_state, state_keys
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, stored_projection
from hmt_deepspeed.optim.settings.assign import Assignment
from hmt_deepspeed.rules import MIN_INT8_ELEMENTS

__all__ = ["ParameterRow", "Slot"]


class ParameterRow(NamedTuple):
    """One row of the start table."""

    name: str
    rule: str
    reason: str
    rank: int | None
    state_bytes: int


class Slot:
    """Rule, states and step of one parameter.

    Args:
        param: fp32, bf16 or fp16.
        assigned: its rule.
        seed: of the random draws. state_dtype: of dense moments.
        rounded: bf16 weights have no fp32 master and are rounded stochastically.
        state: where the master goes, the optimizer's ``state[param]``.

    Attributes:
        matrix: of a matrix rule, else None. dense: moments of dense AdamW, once it has stepped.
        linear: takes projected gradients when the module is patched.
        encoded: the weight in INT8, else None.
        due: the coming step refreshes the basis from the full gradient.
    """

    def __init__(
        self,
        param: nn.Parameter,
        assigned: Assignment,
        seed: int,
        state_dtype: str,
        rounded: bool,
        state: dict[str, Any],
    ) -> None:
        self.param, self.assigned, self.state = param, assigned, state
        self.seed = seed
        self.state_dtype = state_dtype
        self.rounded = rounded and param.dtype == torch.bfloat16
        self.matrix: MatrixRule | None = None
        self.dense: DenseState | None = None
        self.linear: ProjectedLinear | None = None
        self.encoded: Int8Weight | None = None
        self.due = False
        if assigned.settings is not None:
            shape = (param.shape[0], param.shape[1])
            rows = (0, assigned.settings.oriented(*shape)[0])
            self.matrix = build_matrix(
                self.name, shape, rows, assigned.settings, param.dtype, param.device
            )

    @property
    def name(self) -> str:
        return self.assigned.name

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of the full gradient that a refresh needs; 0 for a rule that redraws from a seed."""
        if self.matrix is None or self.matrix.redraws:
            return 0
        return self.param.numel() * self.param.element_size()

    # -- gradient -------------------------------------------------------------------------------

    def prepare(self, step: int, due: bool) -> None:
        """Open the accumulation window of a step: set what backward projects on, or nothing before a refresh."""
        assert self.matrix is not None
        self.due = due
        if not due:
            self.matrix.prepare(step)
        if self.linear is not None:
            self.linear.projection = None if due else stored_projection(self.matrix)

    def full_gradient(self) -> Tensor | None:
        """``p.grad`` as its rule sees it: of the transpose, where that is projected."""
        assert self.matrix is not None
        gradient = self.param.grad
        return gradient.t() if gradient is not None and self.matrix.transposed else gradient

    def redraw(self, number: int) -> None:
        """Take basis ``number`` of a rule that redraws from a seed."""
        assert self.matrix is not None
        if isinstance(self.matrix, ProjectedMatrix):
            basis = self.matrix.seeded_basis(self.matrix.rank, number).to(self.param.dtype)
            self.matrix.adopt(basis, self.matrix.overlap_sum(basis, slice(None)))
        self.matrix.draw = number  # only now: the old number gives the basis that moments come from

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients themselves: projected by backward, and ``p.grad``."""
        pending = None if self.linear is None else self.linear.pending
        return [g for g in (pending, self.param.grad) if g is not None]

    def reduced(self) -> Tensor | None:
        """The accumulated gradient as the rule takes it: rows x width; None without a gradient.

        Fresh memory, except for the whole gradient of a rule that takes it.
        """
        assert self.matrix is not None
        gradient = self.full_gradient()
        if self.matrix.takes_whole:
            return gradient
        pending = None if self.linear is None else self.linear.pending
        total = None if pending is None else pending.float()
        if gradient is not None:
            columns = self.matrix.projection
            assert columns is not None
            part = project(gradient, columns)
            total = part if total is None else total + part
        return total

    def square_norm(self) -> Tensor | None:
        """Squared norm of the gradient, estimated when projected; 0-dim fp32."""
        if self.matrix is None:
            gradient = self.param.grad
            if gradient is None:
                return None
            return torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        reduced = self.reduced()
        if reduced is None:
            return None
        return self.matrix.square_norm(self.matrix.measure(reduced, slice(None)))

    # -- step -----------------------------------------------------------------------------------

    def step(self, group: Mapping[str, Any], step: int, clipped: Tensor | float = 1.0) -> None:
        """Update the weight; without a gradient nothing happens.

        Args:
            clipped: what clipping has multiplied the gradient by.
        """
        hyper = self.assigned.hyper(group)
        if self.matrix is not None:
            self._step_matrix(self.matrix, hyper, step, clipped)
        elif self.param.grad is not None:
            self._step_dense(self.param.grad, hyper, step)

    def _step_matrix(
        self, matrix: MatrixRule, hyper: Mapping[str, Any], step: int, clipped: Tensor | float
    ) -> None:
        reduced = self.reduced()
        if reduced is None:
            return
        if self.linear is not None:
            self.linear.take()
        matrix.observe(matrix.measure(reduced, slice(None)), clipped)
        if matrix.takes_whole:
            reduced = reduced.to(torch.float32, copy=True)  # p.grad stays the user's
        update, sums = matrix.advance(reduced, 1.0, betas=hyper["betas"], eps=hyper["eps"])
        update = matrix.finish(update, sums)
        lr, decay = hyper["lr"], hyper["weight_decay"]
        key = matrix.rounding_key(step)
        left, right = update, matrix.projection
        if matrix.transposed:  # B U^T instead of U B^T
            left, right = (update.t(), None) if right is None else (right, update)
        if self.encoded is None:
            self._apply(left, right, lr, decay, key)
        elif right is None:
            self.encoded.update_whole_(left, lr, decay, key)
        else:
            self.encoded.update_(left, right, lr, decay, key)

    def _apply(self, left: Tensor, right: Tensor | None, lr: float, decay: float, key: int) -> None:
        """``W <- (1 - lr wd) W - lr left right^T``; ``left`` is the whole update without ``right``."""
        weight = self._writable()
        if right is None:
            if self.rounded:
                apply_whole_rounded_(weight, left, lr, decay, key)
            else:
                apply_whole_(weight, left, lr, decay)
        else:
            low_rank_update_(weight, left, right, lr, decay, key)
        self._write_back(weight)

    def _dense_state(self) -> DenseState:
        if self.dense is None:
            param = self.param
            self.dense = new_dense_state(
                tuple(param.shape), self.state_dtype, param.numel(), param.device
            )
        return self.dense

    def _step_dense(self, gradient: Tensor, hyper: Mapping[str, Any], step: int) -> None:
        weight = self._writable()
        dense_adamw_(
            weight.view(-1),
            gradient.reshape(-1),
            self._dense_state(),
            factor=None,
            key=keyed_seed(self.seed, self.name, "round", step),
            state_keys=state_keys(self.seed, self.name, step),
            **hyper,
        )
        self._write_back(weight)

    def _writable(self) -> Tensor:
        """Contiguous target of the update: the weights themselves or an fp32 master."""
        if self.rounded or self.param.dtype == torch.float32:
            return self.param.contiguous()
        if "master" not in self.state:
            self.state["master"] = self.param.detach().float().contiguous()
        return self.state["master"]

    def _write_back(self, weight: Tensor) -> None:
        if weight is not self.param:
            self.param.copy_(weight)

    # -- table and checkpoint -------------------------------------------------------------------

    def describe(self) -> ParameterRow:
        """Row of the start table; bytes include the master."""
        if self.matrix is not None:
            size = self.matrix.state_bytes()
        else:
            size = sum(s.nbytes for s in self._dense_state()[:2])
        if self.param.dtype != torch.float32 and not self.rounded and self.encoded is None:
            size += 4 * self.param.numel()
        rank = None if self.matrix is None else self.matrix.rank
        return ParameterRow(self.name, self.assigned.rule, self._reason(), rank, size)

    def _reason(self) -> str:
        """Why the rule is what it is; of a low-rank matrix where it is not what the options say."""
        settings, shape = self.assigned.settings, self.assigned.shape
        if settings is None or self.matrix is None:
            return self.assigned.reason
        wanted, stored = settings.lowered_from(*shape), self.matrix.state_dtype
        which = "rank" if len(self.matrix.candidates) == 1 else "largest rank"
        parts = [] if wanted is None else [f"{which} lowered from {wanted}"]
        if stored != settings.state_dtype:
            parts.append(f"moments in {stored}, under {MIN_INT8_ELEMENTS} elements")
        return ", ".join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers of everything but the master; of an INT8 weight its codes."""
        if self.matrix is not None:
            state = {"rule": self.assigned.layout, **self.matrix.state_dict()}
            if self.encoded is not None:
                state |= {"codes": self.encoded.codes, "scales": self.encoded.scales}
            return state
        if self.dense is None:
            return {}
        first, second, step = self.dense
        moments = {"exp_avg": first.read(), "exp_avg_sq": second.read(), "step": step}
        return {"rule": self.assigned.layout, **moments}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore moments, the master or codes, and the matrix.

        Raises:
            ValueError: the states of another rule or shape.
        """
        shape = self.assigned.shape
        fits = saved["rule"] == self.assigned.layout
        if fits and self.matrix is None:
            fits = tuple(saved["exp_avg"].shape) == shape
        elif fits and isinstance(self.matrix, ProjectedMatrix) and "basis" in saved:
            fits = saved["basis"].shape[0] == self.matrix.shape[1]
        if not fits:
            states = {key: tuple(v.shape) for key, v in saved.items() if isinstance(v, Tensor)}
            raise ValueError(
                f"{self.name}: the state dict has {saved['rule']} states {states}, this optimizer's rule is "
                f"{self.assigned.layout} for {shape}: construct it with the options and the model of the saved run"
            )
        if self.encoded is not None:
            if "codes" in saved:
                self.encoded.load_(saved["codes"], saved["scales"])
        elif "master" in saved:
            master = saved["master"].to(self.param.device, torch.float32, copy=True)
            self.state["master"] = master
        if self.matrix is not None:
            self.matrix.load_state_dict(saved)
            return
        first, second, step = self._dense_state()
        for state, key in ((first, "exp_avg"), (second, "exp_avg_sq")):
            value = saved[key].to(self.param.device, torch.float32)
            state.write(value.clone(), None)
        step.copy_(saved["step"])
