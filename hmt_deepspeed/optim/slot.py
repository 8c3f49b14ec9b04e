"""One trainable parameter of :class:`~hmt_deepspeed.optim.hmt.HMT`: its rule, states and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hmt_deepspeed.optim.apply import (
    apply_adamw_rounded_,
    apply_low_rank_,
    apply_low_rank_rounded_,
)
from hmt_deepspeed.optim.assign import DENSE, LOW_RANK, Assignment
from hmt_deepspeed.optim.basis import keyed_seed
from hmt_deepspeed.optim.linear import ProjectedSite
from hmt_deepspeed.optim.matrix import LowRankMatrix, LowRankSettings
from hmt_deepspeed.optim.rules import adamw_, estimated_square_norm

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
        settings: of low-rank matrices.
        rounded: bf16 weights have no fp32 master and are rounded stochastically.
        state: where dense moments and the master go, the optimizer's ``state[param]``.

    Attributes:
        matrix: the low-rank states, None for a dense parameter.
        site: source of projected gradients when the module is patched.
        due: the coming step refreshes the basis.
    """

    def __init__(
        self,
        param: nn.Parameter,
        assigned: Assignment,
        settings: LowRankSettings,
        rounded: bool,
        state: dict[str, Any],
    ) -> None:
        self.param, self.assigned, self.state = param, assigned, state
        self.seed = settings.seed
        self.rounded = rounded and param.dtype == torch.bfloat16
        self.matrix: LowRankMatrix | None = None
        self.site: ProjectedSite | None = None
        self.due = False
        if assigned.low_rank:
            shape = (param.shape[0], param.shape[1])
            self.matrix = LowRankMatrix(
                self.name, shape, (0, shape[0]), settings, param.dtype, param.device
            )

    @property
    def name(self) -> str:
        return self.assigned.name

    @property
    def full_gradient_bytes(self) -> int:
        return self.param.numel() * self.param.element_size()

    # -- gradient -------------------------------------------------------------------------------

    def prepare(self, step: int, due: bool) -> None:
        """Open the window of a step: what backward projects on, or nothing before a refresh."""
        assert self.matrix is not None
        self.due = due
        if not due:
            self.matrix.draw_probes(step)
        if self.site is not None:
            self.site.projection = None if due else self.matrix.projection

    def refresh(self, step: int) -> bool:
        """Take a new basis from the window's full gradient; False if it gave none."""
        gradient = self.param.grad
        assert self.matrix is not None
        assert gradient is not None
        basis = self.matrix.find_basis(gradient, step)
        if basis is not None:
            self.matrix.adopt(basis)
        self.matrix.draw_probes(step)
        self.due = False
        return basis is not None

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients themselves: projected by backward, and ``p.grad``."""
        pending = None if self.site is None else self.site.pending
        return [g for g in (pending, self.param.grad) if g is not None]

    def projected(self) -> Tensor | None:
        """``[A | S]`` of all that has been accumulated, m x (r + k) fp32; None without a gradient."""
        assert self.matrix is not None
        columns, gradient = self.matrix.projection, self.param.grad
        total = (
            None if self.site is None or self.site.pending is None else self.site.pending.float()
        )
        if gradient is not None:
            part = (gradient.to(columns.dtype) @ columns).float()
            total = part if total is None else total + part
        return total

    def square_norm(self) -> Tensor | None:
        """Squared norm of the gradient, estimated when low-rank; 0-dim fp32."""
        if self.matrix is None:
            gradient = self.param.grad
            return None if gradient is None else gradient.float().square().sum()
        projected = self.projected()
        if projected is None:
            return None
        own, probed = self.matrix.square_norms(projected)
        n, rank, num_probes = self.matrix.shape[1], self.matrix.rank, self.matrix.num_probes
        return estimated_square_norm(own, probed, n, rank, num_probes)

    # -- step -----------------------------------------------------------------------------------

    def step(self, group: Mapping[str, Any], step: int) -> None:
        """Update the weight; without a gradient nothing happens."""
        if self.matrix is not None:
            self._step_low_rank(self.matrix, group, step)
        elif self.param.grad is not None:
            self._step_dense(self.param.grad, group, step)

    def _step_low_rank(self, matrix: LowRankMatrix, group: Mapping[str, Any], step: int) -> None:
        projected = self.projected()
        if projected is None:
            return
        if self.site is not None:
            self.site.take()
        matrix.observe(matrix.square_norms(projected))
        update, residual_square = matrix.advance(projected, betas=group["betas"], eps=group["eps"])
        update = matrix.finish(update, residual_square.sum())
        lr, decay = float(group["lr"]), group["weight_decay"]
        weight = self._writable()
        if self.rounded:
            key = matrix.rounding_key(step)
            apply_low_rank_rounded_(weight, update, matrix.projection, lr, decay, key, 0)
        else:
            apply_low_rank_(weight, update, matrix.projection, lr, decay)
        self._write_back(weight)

    def _step_dense(self, gradient: Tensor, group: Mapping[str, Any], step: int) -> None:
        state = self.state
        like: dict[str, Any] = {"dtype": torch.float32, "device": self.param.device}
        if "step" not in state:
            state["step"] = torch.zeros((), **like)
            state["exp_avg"] = torch.zeros(self.param.shape, **like)
            state["exp_avg_sq"] = torch.zeros(self.param.shape, **like)
        moments = (state["exp_avg"], state["exp_avg_sq"], state["step"])
        hyper = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        hyper["lr"] = float(group["lr"])
        weight = self._writable()
        if self.rounded:
            key = keyed_seed(self.seed, self.name, "round", step)
            apply_adamw_rounded_(weight, gradient, *moments, key, **hyper)
        else:
            adamw_(weight, gradient.float(), *moments, **hyper)
        self._write_back(weight)

    def _writable(self) -> Tensor:
        """What the update is applied to: fp32 weights themselves, a master, or bf16 in one block."""
        if self.param.dtype == torch.float32:
            return self.param
        if self.rounded:
            return self.param.contiguous()
        if "master" not in self.state:
            self.state["master"] = self.param.detach().to(torch.float32, copy=True)
        return self.state["master"]

    def _write_back(self, weight: Tensor) -> None:
        if weight is not self.param:
            self.param.copy_(weight)

    # -- table and checkpoint -------------------------------------------------------------------

    def describe(self) -> ParameterRow:
        """Row of the start table; bytes include the master."""
        size = 8 * self.param.numel() if self.matrix is None else self.matrix.state_bytes()
        if self.param.dtype != torch.float32 and not self.rounded:
            size += 4 * self.param.numel()
        rank = None if self.matrix is None else self.matrix.rank
        return ParameterRow(self.name, self.assigned.rule, self.assigned.reason, rank, size)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore dense moments, the master and the matrix.

        Raises:
            ValueError: the states of another rule or shape.
        """
        rule = LOW_RANK if "basis" in saved else DENSE
        fits = tuple(saved["exp_avg"].shape) == self.assigned.shape
        if rule == LOW_RANK:
            fits = (len(saved["exp_avg"]), len(saved["basis"])) == self.assigned.shape
        if rule != self.assigned.rule or not fits:
            raise ValueError(
                f"{self.name}: the state dict has {rule} states of {tuple(saved['exp_avg'].shape)}, "
                f"this optimizer's rule is {self.assigned.rule} for {self.assigned.shape}: construct "
                "it with the options and the model of the saved run"
            )
        dense = ("exp_avg", "exp_avg_sq", "step") if self.matrix is None else ()
        for key in ("master", *dense):
            if key in saved:
                value = saved[key].to(device=self.param.device, dtype=torch.float32, copy=True)
                self.state[key] = value
        if self.matrix is not None:
            self.matrix.load_state_dict(saved)
