"""Base class of matrix rules: reduced gradient rows in, update out.

A rule holds the optimizer states of a range of rows of an m x n matrix and never knows who holds the
others. Sums over all rows go through the caller, in two places: :meth:`MatrixRule.measure` before
clipping and the sums that :meth:`MatrixRule.advance` returns before :meth:`MatrixRule.finish`. Its row of
:mod:`hmt_deepspeed.rules` says which they are, and which states it keeps.

A weight that is projected from the left is handed over as its transpose (``transposed``): every rule
works on rows, with bases of the columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.optim.bases.basis import keyed_seed
from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor
from hmt_deepspeed.optim.settings.matrix import MatrixSettings

__all__ = ["MatrixRule"]

# Captured energy of one layer is a noisy estimate: it is read as a smoothed trend.
ENERGY_SMOOTHING = 0.9
# Weight of the gradient that made the basis, which fits it better than those that follow: it stands in for them
# until the first is there. A power of two, so that an average of nothing else can be told.
OWN_WEIGHT = 2.0**-20
_TINY = torch.finfo(torch.float32).tiny


class MatrixRule(ABC):
    """States and step of one matrix.

    Args:
        name: parameter name; seeds every random draw.
        shape: (m, n) of the weight, or of its transpose when ``transposed``.
        rows: half-open range of rows whose states live here.
        settings: see :class:`MatrixSettings`.
        dtype: of the basis (the model's compute dtype). device: where everything lives.
        transposed: the gradient handed in and the update handed out are those of the transpose.

    Attributes:
        rank: in force. candidates: legal ranks. draw: number of a seeded basis. measured: the basis, if any, is no
            random one that waits for a gradient. moments: states of the rows held here. state_dtype: how they are
            stored.
        projection: n x width columns that backward projects on, constant over an accumulation window;
            None when the rule takes whole gradient rows. A rule that redraws makes it anew each time.
    """

    rank: int
    candidates: tuple[int, ...]
    draw: int
    moments: KeptStates
    measured = True

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rows: tuple[int, int],
        settings: MatrixSettings,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
    ) -> None:
        self.name, self.shape, self.rows = name, shape, rows
        self.settings, self.dtype, self.device = settings, dtype, device
        self.transposed = transposed
        self.state_dtype = settings.states_dtype(*shape)
        self.captured_energy = torch.zeros((), device=device)
        self.mean_square_norm = torch.zeros((), device=device)
        self.energy_weight = torch.zeros((), device=device)
        self._made_basis = False  # whether this window's gradient did
        self.limited_norm = torch.zeros((), device=device)
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Candidates, first basis and empty moments."""

    # -- shapes ---------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns of the gradient rows handed in."""
        return self.shape[1]

    @property
    @abstractmethod
    def takes_whole(self) -> bool:
        """Whether the rule takes whole gradient rows, and gives a whole update."""

    @property
    def redraws(self) -> bool:
        """Whether a new basis is drawn from its seed, without a gradient."""
        return False

    def is_full_at(self, rank: int) -> bool:
        """Whether a basis of that rank would span everything, so that plain AdamW takes its place."""
        return self.settings.rule.becomes_dense and rank == self.shape[1]

    @property
    @abstractmethod
    def projection(self) -> Tensor | None: ...

    @property
    @abstractmethod
    def scale(self) -> float:
        """Factor on the update."""

    def states(self) -> dict[str, StateTensor]:
        """Stored states by their names in the table."""
        return self.moments.states()

    def move_states(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for each stored state: the same elsewhere. Bases are none."""
        for state in self.states().values():
            state.move(place)

    @property
    def limits(self) -> bool:
        """Whether :meth:`finish` needs the sums over all rows."""
        return any(not one.early for one in self.settings.rule.sums)

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self.moments.steps

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of states and bases held here."""

    # -- a window -------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, step: int, refreshed: bool = False) -> None:
        """Draw what is random for the coming step, keyed by name and step.

        Args:
            refreshed: the gradient of this very step has made the basis.
        """

    @abstractmethod
    def seeded_basis(self, rank: int, number: int) -> Tensor:
        """Random basis ``number``, fp32: of a matrix before its first refresh, or of one that redraws."""

    # -- step -----------------------------------------------------------------------------------

    @abstractmethod
    def measure(self, gradient: Tensor, counted: slice) -> Tensor:
        """Terms to be summed over all rows before clipping: a flat fp32 vector of fixed length.

        Args:
            gradient: rows x width, reduced, not yet clipped. counted: the rows that no other holder
                of states counts.
        """

    @abstractmethod
    def square_norm(self, sums: Tensor) -> Tensor:
        """The (estimated) ``||G||_F^2`` from the sums of :meth:`measure`, 0-dim fp32."""

    @abstractmethod
    def observe(self, sums: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """Take the sums of :meth:`measure` over all rows.

        Args:
            scale: what the gradient they measured has been multiplied by: a loss scale, a clipping.

        Returns:
            The (estimated) ``||G||_F^2`` of that gradient, the scale still in it, 0-dim fp32.
        """

    @abstractmethod
    def advance(
        self,
        gradient: Tensor,
        factor: Tensor | float,
        *,
        betas: tuple[float, float],
        eps: float,
        counted: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Let the states of the rows held here take the gradient.

        Args:
            gradient: rows x width, reduced; used up. factor: unscales and clips it. counted: as in :meth:`measure`.

        Returns:
            ``(update, sums)``: the update before :meth:`finish`, rows x width fp32; and what is to be
            summed over all holders, a flat fp32 vector of fixed length.
        """

    @abstractmethod
    def finish(self, update: Tensor, sums: Tensor) -> Tensor:
        """Limiter and scale, given the sums over all rows.

        The change of the rows is ``-lr update projection^T``, or ``-lr update`` without projection.
        """

    def rounding_key(self, step: int) -> int:
        """Seed of stochastic rounding of this matrix's weights at a step."""
        return keyed_seed(self.settings.seed, self.name, "round", step)

    def named(self, sums: Tensor, *, early: bool) -> dict[str, Tensor]:
        """The sums of :meth:`measure` (``early``) or of :meth:`advance`, each flat, by their names in the table."""
        lengths = self.settings.rule.sum_lengths(early, *self.shape, self.rank)
        return dict(zip(lengths, sums.split(list(lengths.values())), strict=True))

    # -- energy ---------------------------------------------------------------------------------

    def follow(self, inside: Tensor, total: Tensor, scale: Tensor | float) -> None:
        """Smooth ``||G||^2`` without the scale and the share of it inside the basis; bias-corrected like a
        moment. A window without a gradient says nothing of either, that of a refresh next to nothing."""
        share = inside / total.clamp_min(_TINY)
        weight = (OWN_WEIGHT if self._made_basis else 1 - ENERGY_SMOOTHING) * (total > 0)
        self.captured_energy.lerp_(share, weight)
        self.mean_square_norm.lerp_(total / scale**2, weight)
        self.energy_weight.lerp_(torch.ones_like(weight), weight)

    def forget_energy(self) -> None:
        """Start the averages anew: what an old basis captured says nothing of a new one."""
        self.energy_weight.zero_()
        self.captured_energy.zero_()
        self.mean_square_norm.zero_()

    def smoothed_energy(self) -> Tensor:
        """Captured energy E in [0, 1], an average over recent steps; 0-dim fp32."""
        return self.captured_energy / self.energy_weight.clamp_min(1e-12)

    def log_norm(self) -> float:
        """Logarithm of the smoothed ``||G||``; reading it waits for the device."""
        square = float(self.mean_square_norm / self.energy_weight.clamp_min(1e-12))
        return 0.5 * log(max(square, _TINY))

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: moments of the rows held here, everything else whole."""
        return {
            **self.moments.state_dict(),
            "rank": self.rank,
            "limited_norm": self.limited_norm,
            "captured_energy": self.captured_energy,
            "mean_square_norm": self.mean_square_norm,
            "energy_weight": self.energy_weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; states by rows hold those of this object."""
        self.moments.load_state_dict(state)
        self.rank = int(state["rank"])
        for key in ("limited_norm", "captured_energy", "mean_square_norm", "energy_weight"):
            value = torch.as_tensor(state[key])
            setattr(self, key, value.to(device=self.device, dtype=torch.float32, copy=True))
