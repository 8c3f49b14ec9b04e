"""Adam's two moments of a projected gradient: stored in a state dtype, carried across a basis change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.kernels.moment_update import moment_update_
from hmt_deepspeed.optim.basis import keyed_seed, transfer_second_moment
from hmt_deepspeed.optim.state import StateTensor

__all__ = ["Moments"]

_LEAST_EVIDENCE = 1e-8


class Moments:
    """Running means of ``A`` and ``A o A`` with the weight of evidence in each.

    Adam's bias correction ``1 - beta^t`` is the weight of evidence in a running mean. It is carried
    explicitly, per direction for the second moment, because a basis change removes evidence.

    Args:
        shape: rows x r of a one-sided projection (rows held here), r x r of a two-sided core.
        dtype: storage, see :class:`StateTensor`. device: where everything lives.
        name, seed: key the stochastic rounding.
        two_sided: evidence per entry of the core instead of per column.

    Attributes:
        exp_avg, exp_avg_sq: the stored means, uncorrected. evidence: of the second moment, (r,) or
        r x r fp32. first_evidence: of the first. steps: Adam steps taken.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        name: str,
        seed: int,
        two_sided: bool = False,
    ) -> None:
        self.dtype, self.device, self.name, self.seed = dtype, device, name, seed
        self.two_sided = two_sided
        self.steps = 0
        self.first_evidence = 0.0
        self._allocate(shape)

    def _allocate(self, shape: tuple[int, int]) -> None:
        self.exp_avg = StateTensor(shape, self.dtype, True, self.device)
        self.exp_avg_sq = StateTensor(shape, self.dtype, False, self.device)
        self.evidence = torch.zeros(shape if self.two_sided else shape[1:], device=self.device)

    def states(self) -> dict[str, StateTensor]:
        """The stored means by Adam's names."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def nbytes(self) -> int:
        """Bytes of moments and evidence."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes + self.evidence.nbytes

    def advance(self, projected: Tensor, *, betas: tuple[float, float], eps: float) -> Tensor:
        """One Adam step on ``projected`` (fp32, of the moments' shape); the direction ``U``."""
        self.steps += 1
        self.first_evidence += (1 - betas[0]) * (1 - self.first_evidence)
        self.evidence.lerp_(torch.ones_like(self.evidence), 1 - betas[1])
        mean, second = self.exp_avg.read(), self.exp_avg_sq.read()
        shape = (1, -1) if self.two_sided else projected.shape  # evidence is per column of a row
        direction = moment_update_(
            projected.view(shape),
            mean.view(shape),
            second.view(shape),
            self.evidence.view(-1),
            self.first_evidence,
            *betas,
            eps,
        )
        self._write(mean, second)
        return direction.view_as(projected)

    # -- change of basis ------------------------------------------------------------------------

    def rotate(self, overlap: Tensor, left_overlap: Tensor | None = None) -> None:
        """Carry the moments to a new basis: ``R = Q_old^T Q_new`` and, two-sided, ``R_P``."""
        mean, second = self.exp_avg.read(), self.exp_avg_sq.read()
        moved = transfer_second_moment(
            mean / self.first_evidence, second / self.evidence, overlap, left_overlap
        )
        # A new direction has the evidence of the old ones it came from: rho w when all had weight w.
        weight = self.evidence @ overlap.square()
        mean = mean @ overlap
        if left_overlap is not None:
            weight = left_overlap.square().t() @ weight
            mean = left_overlap.t() @ mean
        self._replace(mean, moved, weight)

    def keep(self, columns: int, rows: int | None = None) -> None:
        """Leave the moments as they are (GaLore); new directions of a larger rank start as new."""
        mean, second = self.exp_avg.read(), self.exp_avg_sq.read()
        rows = mean.shape[0] if rows is None else rows
        shape = (rows, columns)
        weight = _resized(self.evidence, shape if self.two_sided else shape[1:])
        corrected = _resized(second / self.evidence.clamp_min(_LEAST_EVIDENCE), shape)
        self._replace(_resized(mean, shape), corrected, weight)

    def reset(self, columns: int, rows: int | None = None) -> None:
        """Start anew at step zero."""
        rows = self.exp_avg.shape[0] if rows is None else rows
        self.steps, self.first_evidence = 0, 0.0
        self._allocate((rows, columns))

    def _replace(self, mean: Tensor, corrected_second: Tensor, weight: Tensor) -> None:
        weight = weight.clamp(_LEAST_EVIDENCE, 1.0)
        self._allocate((mean.shape[0], mean.shape[1]))
        self.evidence = weight
        self._write(mean, corrected_second * weight)

    def _write(self, mean: Tensor, second: Tensor) -> None:
        for state, value, which in ((self.exp_avg, mean, 0), (self.exp_avg_sq, second, 1)):
            state.write(value, keyed_seed(self.seed, self.name, "state", which, self.steps))

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain fp32 tensors and numbers."""
        return {
            "exp_avg": self.exp_avg.read(),
            "exp_avg_sq": self.exp_avg_sq.read(),
            "evidence": self.evidence,
            "steps": self.steps,
            "first_evidence": self.first_evidence,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore values of :meth:`state_dict`; values that were 8- or 16-bit come back exactly."""
        mean = torch.as_tensor(state["exp_avg"])
        self._allocate((mean.shape[0], mean.shape[1]))
        for key, target in self.states().items():
            value = torch.as_tensor(state[key]).to(device=self.device, dtype=torch.float32)
            target.write(value, None)
        evidence = torch.as_tensor(state["evidence"])
        self.evidence = evidence.to(device=self.device, dtype=torch.float32, copy=True)
        self.steps, self.first_evidence = int(state["steps"]), float(state["first_evidence"])


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The leading part of a tensor, padded with zeros where the shape is larger."""
    out = tensor.new_zeros(shape)
    part = tuple(slice(0, min(a, b)) for a, b in zip(tensor.shape, shape, strict=True))
    out[part] = tensor[part]
    return out
