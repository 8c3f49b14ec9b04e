"""One trainable parameter of :class:`~hmt_deepspeed.optim.hmt.HMT`: its rule, gradient, weight and states."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hmt_deepspeed.kernels.low_rank_projection import project, project_together
from hmt_deepspeed.kernels.noise import base_key
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.dense import (
    DenseState,
    SmallParameter,
    dense_adamw_,
    new_dense_state,
)
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, stored_projection
from hmt_deepspeed.optim.settings.assign import Assignment
from hmt_deepspeed.rules import MIN_INT8_ELEMENTS, dense_states_dtype

__all__ = ["ParameterRow", "Slot"]


class ParameterRow(NamedTuple):
    """One row of the start table."""

    name: str
    rule: str
    reason: str
    rank: int | None
    state_bytes: int


class Slot:
    """Rule, gradient, weight and states of one parameter.

    Args:
        param: fp32, bf16 or fp16.
        assigned: its rule.
        seed: of the random draws. state_dtype: of dense moments.
        rounded: bf16 weights have no fp32 master and are rounded stochastically.
        state: where the master goes, the optimizer's ``state[param]``. group: its parameter group.

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
        group: dict[str, Any],
    ) -> None:
        self.group = group
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
            settings, shape = assigned.settings, assigned.matrix_shape
            rows, on = (0, settings.oriented(*shape)[0]), (param.dtype, param.device)
            self.matrix = build_matrix(
                self.name, shape, rows, settings, *on, assigned.count, settings.own_bases
            )

    @property
    def kind(self) -> Hashable:
        """Equal for slots whose matrices may be in one stack: hyperparameters, and where the weights are."""
        encoded = self.encoded is not None
        return id(self.group), self.assigned.lr_scale, self.param.dtype, encoded, self.rounded

    @property
    def hyper(self) -> dict[str, Any]:
        """lr, betas, eps and weight_decay of its step."""
        return self.assigned.hyper(self.group)

    @property
    def has_master(self) -> bool:
        """Whether an fp32 master is beside weights of 16 bits."""
        return not (self.rounded or self.param.dtype == torch.float32)

    @property
    def name(self) -> str:
        return self.assigned.name

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of the full gradient that a refresh needs; 0 for a rule that finds no bases."""
        if self.matrix is None or not self.matrix.finds_bases:
            return 0
        return self.param.numel() * self.param.element_size()

    # -- gradient -------------------------------------------------------------------------------

    def prepare(self, step: Tensor | int, due: bool) -> None:
        """Open the accumulation window of a step, before whose end the basis is found where that is due.

        Args:
            step: its number, or where it is on the device.
        """
        assert self.matrix is not None
        self.due = due
        self.matrix.prepare(step)

    def project(self) -> None:
        """Let backward project on the columns of the coming step."""
        if self.linear is not None and self.matrix is not None:
            self.linear.projection = None if self.due else stored_projection(self.matrix)
            self.linear.own, self.linear.transposed = self.matrix.own_bases, self.matrix.transposed

    def full_gradient(self) -> Tensor | None:
        """``p.grad`` as its rule sees it: of the transpose, where that is projected."""
        assert self.matrix is not None
        gradient = self.param.grad
        return gradient.mT if gradient is not None and self.matrix.transposed else gradient

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
        """The accumulated gradient as the rule takes it: rows x width, E x rows x width of experts, where rows are whole
        the user's own; None without a gradient."""
        assert self.matrix is not None
        gradient = self.full_gradient()
        if self.matrix.takes_whole:
            return gradient
        total = None if self.linear is None else self.linear.pending
        if gradient is not None:
            columns = self.matrix.projection
            assert columns is not None
            if self.matrix.count == 1:
                part = project(gradient, columns)
            else:
                each = columns.expand(self.matrix.count, -1, -1)
                part, _ = project_together([gradient], [each])
            total = part if total is None else total + part
        return total

    @property
    def has_room(self) -> bool:
        """Whether the accumulated gradient is where the linear has been given room for it."""
        return self.linear is not None and self.param.grad is None

    @property
    def has_gradient(self) -> bool:
        """Whether a backward has left one since the last step."""
        return self.param.grad is not None or (
            self.linear is not None and self.linear.pending is not None
        )

    # -- step -----------------------------------------------------------------------------------

    def _dense_state(self) -> DenseState:
        if self.dense is None:
            param = self.param
            dtype = dense_states_dtype(self.state_dtype, self.assigned.shape)
            self.dense = new_dense_state(tuple(param.shape), dtype, param.device)
        return self.dense

    def step_dense(self, step: Tensor | int, hyper: Mapping[str, Any]) -> None:
        """AdamW's step of a parameter without a matrix rule.

        Args:
            step: its number, which keys random rounding; 0-dim int64 on the device, or a number.
            hyper: lr, betas, eps, weight_decay.
        """
        weight, gradient = self.writable(), self.param.grad
        assert gradient is not None
        flat, base = (weight.view(-1), gradient.reshape(-1)), base_key(self.seed, self.name)
        dense_adamw_(*flat, self._dense_state(), base, step, **hyper)
        self.write_back(weight)

    def as_small(self) -> SmallParameter:
        """The parameter for a step with others."""
        weight, copy = self.writable().view(-1), None
        if self.has_master:
            copy = self.param.detach().contiguous().view(-1)
        gradient = None if self.param.grad is None else self.param.grad.reshape(-1)
        base = base_key(self.seed, self.name) if self.rounded else 0
        return SmallParameter(weight, gradient, self._dense_state(), copy, base)

    def writable(self) -> Tensor:
        """Contiguous target of the update: the weights themselves or an fp32 master."""
        if not self.has_master:
            return self.param.contiguous()
        if "master" not in self.state:
            self.state["master"] = self.param.detach().float().contiguous()
        return self.state["master"]

    def write_back(self, new: Tensor) -> None:
        """Give the parameter new values that are elsewhere: a master's, or those of a contiguous copy."""
        if new.data_ptr() != self.param.data_ptr():
            self.param.copy_(new.view(self.param.shape))

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
        settings, matrix = self.assigned.settings, self.matrix
        if settings is None or matrix is None:
            return self.assigned.reason
        wanted, stored = settings.lowered_from(*matrix.shape), matrix.state_dtype
        which = "rank" if len(matrix.candidates) == 1 else "largest rank"
        parts = [] if matrix.count == 1 else [self._of_experts(matrix)]
        parts += [] if wanted is None else [f"{which} lowered from {wanted}"]
        if stored != settings.rule.wanted_states(settings.state_dtype):
            parts.append(f"moments in {stored}, under {MIN_INT8_ELEMENTS} elements")
        return ", ".join(parts)

    def _of_experts(self, matrix: MatrixRule) -> str:
        """How the start table names several matrices: "experts 8 x 64 x 32, one basis of the inputs"."""
        said = "experts " + " x ".join(map(str, self.assigned.shape))
        if matrix.takes_bases and isinstance(matrix, ProjectedMatrix):
            side = "first" if matrix.transposed else "last"
            said += f", {'bases' if matrix.own_bases else 'one basis'} of the {side} dimension"
            said += " until a later gradient decides" if matrix.undecided else ""
            if self.linear is None and not matrix.settings.wants_whole:
                said += ", projected from whole gradients"
        return said

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
            other = self.matrix.undecided and saved["own_bases"]
            fits = saved["basis"].shape[-2] == self.matrix.shape[0 if other else 1]
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
