"""One low-rank matrix: its basis, its moments in the projected space, one step of its update.

The object holds the optimizer states of a range of rows of an m x n weight and never knows who holds
the others; whoever shards hands it the reduced projected gradient of those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.optim.basis import (
    Subspace,
    keyed_generator,
    keyed_seed,
    probe_columns,
    random_basis,
    range_finder,
    transfer_second_moment,
)
from hmt_deepspeed.optim.rank import legal_candidates, select_rank
from hmt_deepspeed.optim.rules import (
    adam_direction,
    estimated_square_norm,
    growth_factor,
    probe_residual,
)

__all__ = ["LowRankMatrix", "LowRankSettings"]

# Captured energy of one layer is a noisy estimate: it is read as a smoothed trend.
ENERGY_SMOOTHING = 0.9
MAX_RESIDUAL_SCALE = 8.0
_LEAST_EVIDENCE = 1e-8


@dataclass(frozen=True)
class LowRankSettings:
    """Plain values of ``hmt.optimizer`` for low-rank matrices; None stands for "auto".

    rank: fixed rank, or None to choose among ``rank_candidates`` by ``energy_threshold``.
    probes: probe columns per matrix. residual: whether they also make an update.
    residual_scale: c, up to the unbiased (n-r)/k. norm_growth_limit: limit on the residual's norm.
    """

    rank: int | None = None
    rank_candidates: tuple[int, ...] = (32, 64, 128, 256)
    energy_threshold: float = 0.95
    update_interval: int = 200
    residual: bool = True
    probes: int | None = None
    residual_scale: float | None = None
    scale: float = 0.25
    norm_growth_limit: float | None = 1.01
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range: field, value, legal range, what to do."""
        for field, (is_legal, legal, advice) in _LEGAL.items():
            value = getattr(self, field)
            if not is_legal(value):
                raise ValueError(
                    f"hmt.optimizer.{field} is {value!r}; legal: {legal}. To do: {advice}."
                )
        if self.residual and self.probes == 0:
            raise ValueError(
                "hmt.optimizer.probes is 0; legal: an integer >= 1 with a probe residual. "
                'To do: raise it, or set residual to "none".'
            )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any, above: float, most: float = inf) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and above < value <= most and value < inf


def _rising(ranks: Any) -> bool:
    whole = isinstance(ranks, tuple) and len(ranks) > 0 and all(_whole(r, 1) for r in ranks)
    return whole and all(a < b for a, b in pairwise(ranks))


# What each field may be: test, legal range in words, what to do.
_LEGAL: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "rank": (lambda v: v is None or _whole(v, 1), '"auto" or an integer >= 1', 'use "auto"'),
    "rank_candidates": (_rising, "strictly increasing integers >= 1", "sort the ranks"),
    "energy_threshold": (lambda v: _number(v, 0, 1), "above 0, at most 1", "0.95 is usual"),
    "update_interval": (lambda v: _whole(v, 1), "an integer >= 1", "200 is usual"),
    "probes": (lambda v: v is None or _whole(v, 0), '"auto" or an integer >= 0', 'use "auto"'),
    "residual_scale": (
        lambda v: v is None or _number(v, 0),
        '"auto" or a number > 0',
        'set residual to "none" to drop the residual',
    ),
    "scale": (lambda v: _number(v, 0), '"auto" or a number > 0', '"auto" is 0.25'),
    "norm_growth_limit": (
        lambda v: v is None or v == 1 or _number(v, 1),
        '"auto", None or a number >= 1',
        "None turns the limit off",
    ),
    "seed": (
        lambda v: _whole(v, 0) and v < 1 << 63,
        "an integer from 0 to 2^63 - 1",
        "choose another",
    ),
}


class LowRankMatrix:
    """States and step of one ``right``-projected matrix (GaLore, Fira and the HMT paper's mode A).

    Args:
        name: parameter name; seeds every random draw.
        shape: (m, n) of the whole weight.
        rows: half-open range of rows whose states live here.
        settings: see :class:`LowRankSettings`.
        dtype: of the basis and the probe columns (the model's compute dtype).
        device: where everything lives.

    Attributes:
        rank, num_probes: r and k in force.
        projection: n x (r + k), ``[Q | P]`` of the coming step; constant over an accumulation window.
        exp_avg, exp_avg_sq: (rows x r) fp32. evidence: (r,) fp32 weight of evidence of exp_avg_sq.
        steps: Adam steps taken. first_evidence: weight of evidence of exp_avg, ``1 - beta1^steps``.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    evidence: Tensor

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rows: tuple[int, int],
        settings: LowRankSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.shape, self.rows = name, shape, rows
        self.settings, self.dtype, self.device = settings, dtype, device
        self.candidates = (
            legal_candidates(settings.rank_candidates, *shape)
            if settings.rank is None
            else (settings.rank,)
        )
        self.measured = False
        self.steps = 0
        self.first_evidence = 0.0
        self.residual_norm = torch.zeros((), device=device)
        self.captured_energy = torch.zeros((), device=device)
        self.energy_weight = 0.0
        start = random_basis(
            shape[1], self.candidates[0], keyed_generator(device, settings.seed, name, "basis")
        )
        self._install(start)
        self._allocate_moments()

    # -- shapes ---------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns of the projected gradient: r + k."""
        return self.rank + self.num_probes

    def probes_for(self, rank: int) -> int:
        """k at a rank: a quarter of it and at least 8, never more than the complement has."""
        wanted = self.settings.probes
        if wanted is None:
            wanted = max(8, rank // 4)
        return min(wanted, self.shape[1] - rank)

    @property
    def residual_scale(self) -> float:
        """c of the probe residual; "auto" is the unbiased (n-r)/k, at most MAX_RESIDUAL_SCALE.

        The unbiased estimate's noise grows with (n-r)/k, hence the ceiling.
        """
        unbiased = (self.shape[1] - self.rank) / self.num_probes
        wanted = self.settings.residual_scale
        return min(unbiased, MAX_RESIDUAL_SCALE if wanted is None else wanted)

    def state_bytes(self) -> int:
        """Bytes of moments, evidence and basis held here."""
        tensors = (self.exp_avg, self.exp_avg_sq, self.evidence, self.basis)
        return sum(t.numel() * t.element_size() for t in tensors)

    # -- basis ----------------------------------------------------------------------------------

    @property
    def basis(self) -> Tensor:
        """Q, n x r: a view of the projection."""
        return self.projection[:, : self.rank]

    def draw_probes(self, step: int) -> None:
        """Redraw the probe columns of ``projection`` for the coming step, keyed by name and step."""
        if self.num_probes:
            generator = keyed_generator(self.device, self.settings.seed, self.name, "probes", step)
            probes = probe_columns(self.basis, self.num_probes, generator)
            self.projection[:, self.rank :].copy_(probes)

    def find_basis(self, gradient: Tensor, step: int) -> Tensor | None:
        """New basis from the mean full gradient (m x n), n x r' in the basis dtype.

        None when the gradient is not finite or is zero: the old basis stays and the matrix stays due.
        """
        generator = keyed_generator(self.device, self.settings.seed, self.name, "sketch", step)
        start = self.basis if self.measured else None
        if not torch.isfinite(gradient).all() or not gradient.any():
            return None
        found = range_finder(gradient, self.candidates[-1], generator, start)
        return found.basis[:, : self._choose_rank(found)].to(self.dtype)

    def adopt(self, basis: Tensor) -> None:
        """Replace the basis by ``basis`` (n x r') and carry the moments over to it."""
        overlap = self.basis.float().t() @ basis.float()
        if self.steps:
            self._transfer_moments(overlap)
            self._install(basis)
        else:
            self._install(basis)
            self._allocate_moments()
        self.measured = True

    def _choose_rank(self, found: Subspace) -> int:
        captured = found.captured().tolist()
        current = self.rank if self.measured else None
        return select_rank(captured, self.candidates, self.settings.energy_threshold, current)

    def _transfer_moments(self, overlap: Tensor) -> None:
        mean = self.exp_avg / self.first_evidence
        second = self.exp_avg_sq / self.evidence
        moved = transfer_second_moment(mean, second, overlap)
        # A new direction has the evidence of the old ones it came from: rho w when all had weight w.
        evidence = (self.evidence @ overlap.square()).clamp(_LEAST_EVIDENCE, 1.0)
        self.exp_avg = self.exp_avg @ overlap
        self.exp_avg_sq, self.evidence = moved * evidence, evidence

    def _install(self, basis: Tensor) -> None:
        self.rank = basis.shape[1]
        self.num_probes = self.probes_for(self.rank)
        n = self.shape[1]
        self.projection = torch.zeros(n, self.width, dtype=self.dtype, device=self.device)
        self.projection[:, : self.rank].copy_(basis)

    def _allocate_moments(self) -> None:
        self.exp_avg = torch.zeros(self.num_rows, self.rank, device=self.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.evidence = torch.zeros(self.rank, device=self.device)

    # -- step -----------------------------------------------------------------------------------

    def square_norms(self, projected: Tensor) -> Tensor:
        """Squared norms of ``A`` and ``S`` of some rows of ``[A | S]``, (2,) fp32."""
        projected = projected.float()
        return torch.stack(
            (projected[:, : self.rank].square().sum(), projected[:, self.rank :].square().sum())
        )

    def observe(self, square_norms: Tensor) -> Tensor:
        """Estimate ``||G||^2`` from the norms over all rows and follow the captured energy.

        Returns the 0-dim estimate. The smoothed captured energy is bias-corrected like a moment.
        """
        total = estimated_square_norm(
            square_norms[0], square_norms[1], self.shape[1], self.rank, self.num_probes
        )
        share = square_norms[0] / total.clamp_min(torch.finfo(torch.float32).tiny)
        self.captured_energy.lerp_(share, 1 - ENERGY_SMOOTHING)
        self.energy_weight += (1 - ENERGY_SMOOTHING) * (1 - self.energy_weight)
        return total

    def smoothed_energy(self) -> Tensor:
        """Captured energy E in [0, 1], an average over recent steps; 0-dim fp32."""
        return self.captured_energy / max(self.energy_weight, 1e-12)

    def advance(
        self, projected: Tensor, *, betas: tuple[float, float], eps: float
    ) -> tuple[Tensor, Tensor]:
        """Adam in the projected space and the probe residual of the rows held here.

        Args:
            projected: rows x (r + k) fp32, ``[A | S]``, reduced and clipped; columns r.. are overwritten.

        Returns:
            ``(update, residual_square)``: ``[U | c phi S]``, rows x (r + k), such that the change of
            the rows is ``-lr scale update projection^T`` once :meth:`finish` has limited the
            residual; and the squared norm of the residual part of each row, (rows,).
        """
        self.steps += 1
        self.first_evidence += (1 - betas[0]) * (1 - self.first_evidence)
        self.evidence.lerp_(torch.ones_like(self.evidence), 1 - betas[1])
        part = projected[:, : self.rank]
        direction = adam_direction(
            part,
            self.exp_avg,
            self.exp_avg_sq,
            (self.first_evidence, self.evidence),
            betas=betas,
            eps=eps,
        )
        probes = projected[:, self.rank :]
        if self.settings.residual and self.num_probes:
            residual = probe_residual(direction, part, probes, self.residual_scale)
        else:
            residual = torch.zeros_like(probes)
        return torch.cat((direction, residual), dim=1), residual.square().sum(dim=1)

    def finish(self, update: Tensor, residual_square: Tensor) -> Tensor:
        """Limit the residual's growth, given its squared norm over all rows, and apply ``scale``."""
        if self.settings.residual and self.num_probes and self.settings.norm_growth_limit:
            norm = residual_square.sqrt()
            factor = growth_factor(norm, self.residual_norm, self.settings.norm_growth_limit)
            update[:, self.rank :] *= factor
            self.residual_norm.copy_(norm * factor)
        return update.mul_(self.settings.scale)

    def rounding_key(self, step: int) -> int:
        """Seed of stochastic rounding of this matrix at a step."""
        return keyed_seed(self.settings.seed, self.name, "round", step)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor | int | float | bool]:
        """Plain tensors and numbers: moments of the rows held here, everything else whole."""
        return {
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "evidence": self.evidence,
            "basis": self.basis.clone(),
            "residual_norm": self.residual_norm,
            "captured_energy": self.captured_energy,
            "energy_weight": self.energy_weight,
            "steps": self.steps,
            "first_evidence": self.first_evidence,
            "measured": self.measured,
        }

    def load_state_dict(self, state: Mapping[str, Tensor | int | float | bool]) -> None:
        """Restore; ``exp_avg`` and ``exp_avg_sq`` hold the rows of this object."""
        self._install(torch.as_tensor(state["basis"]).to(self.device))
        for key in ("exp_avg", "exp_avg_sq", "evidence", "residual_norm", "captured_energy"):
            value = torch.as_tensor(state[key])
            setattr(self, key, value.to(device=self.device, dtype=torch.float32, copy=True))
        self.energy_weight = float(state["energy_weight"])
        self.steps, self.first_evidence = int(state["steps"]), float(state["first_evidence"])
        self.measured = bool(state["measured"])
