"""Base class of matrix rules: one matrix between its steps, which it takes in a :class:`~hmt_deepspeed.optim.rules.stack.Stack`.

A rule holds the optimizer states of a range of rows of an m x n matrix and never knows who holds the
others. Its row of :mod:`hmt_deepspeed.rules` says which states it keeps and what is summed over all rows.

A weight that is projected from the left is handed over as its transpose (``transposed``): every rule
works on rows, with bases of the columns.

The experts of a mixture are E matrices alike in one parameter, and one rule holds them (``count``): every state has a
leading dimension E, without which ordinary matrices do. What is said of one matrix here holds of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor
from hmt_deepspeed.optim.settings.matrix import MatrixSettings

__all__ = ["MatrixRule"]

# Captured energy of one layer is a noisy estimate: it is read as a smoothed trend.
ENERGY_SMOOTHING = 0.9
# Weight of the gradient that made the basis, which fits it better than those that follow: it stands in for them
# until the first is there. A power of two, so that an average of nothing else can be told.
OWN_WEIGHT = 2.0**-20
_ENERGIES = ("captured_energy", "mean_square_norm", "energy_weight")  # their names in checkpoints
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
        count: E, of matrices that one parameter holds. own_bases: each of them has a basis of its own, where they have
            any, instead of one for all. held: half-open range of those whose states live here; None for all.

    Attributes:
        rank: in force. candidates: legal ranks. draw: number of a seeded basis. measured: the basis, if any, is no
            random one that waits for a gradient. moments: states of the rows held here. state_dtype: how they are
            stored. energy: (3,) fp32, smoothed: captured energy, squared norm of the gradient, weight in both.
            Of experts it is E x 3, whoever holds them. limited_norm: 0-dim fp32, of the last residual.
        made_basis: this window's gradient made the basis.
        num_held: matrices whose states live here, the ``held`` ones of all.
        several: (num_held,) of experts, () of a matrix: the leading dimension of states.
        projection: n x width columns that backward projects on, constant over an accumulation window;
            None when the rule takes whole gradient rows. A rule that redraws makes it anew each time.
    """

    rank: int
    energy: Tensor
    limited_norm: Tensor
    candidates: tuple[int, ...]
    draw: int
    moments: KeptStates
    measured = True
    STACK: ClassVar[type[Any]]  # takes the steps of such matrices

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        rows: tuple[int, int],
        settings: MatrixSettings,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
        count: int = 1,
        own_bases: bool = False,
        held: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.shape, self.rows = name, shape, rows
        self.settings, self.dtype, self.device = settings, dtype, device
        self.transposed, self.count = transposed, count
        self.own_bases = own_bases and count > 1
        self.held = slice(*(held or (0, count)))
        self.num_held = self.held.stop - self.held.start
        self.several: tuple[int, ...] = () if count == 1 else (self.num_held,)
        self.state_dtype = settings.states_dtype(*shape)
        self.energy = torch.zeros(*((count,) if count > 1 else ()), len(_ENERGIES), device=device)
        self.limited_norm = torch.zeros(self.several, device=device)
        self.made_basis = False
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Candidates, first basis and empty moments."""

    @cached_property
    def names(self) -> list[str]:
        """Of each matrix, which seed what is random in its steps, so that no other matrix changes it; also of those that
        are held elsewhere."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}[{place}]" for place in range(self.count)]

    @property
    def held_names(self) -> list[str]:
        """Of the matrices whose states live here."""
        return self.names[self.held]

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
    def takes_bases(self) -> bool:
        """Whether it has a basis, and takes another one from time to time."""
        return self.settings.rule.bases != "none"

    @property
    def redraws(self) -> bool:
        """Whether a new basis is drawn from its seed, without a gradient."""
        return False

    @property
    def finds_bases(self) -> bool:
        """Whether a new basis is found in a whole gradient."""
        return self.takes_bases and not self.redraws

    def is_full_at(self, rank: int) -> bool:
        """Whether a basis of that rank would span everything, so that there is none."""
        return self.settings.rule.becomes_full and rank == self.shape[1]

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

    def paths(self) -> dict[str, str]:
        """Where this matrix has what its steps change: by name the dotted path of attributes to each tensor."""
        found = {}
        for name, attribute in self.moments.STATES.items():
            found[f"{name}.data"] = f"moments.{attribute}.data"
            if getattr(self.moments, attribute).scales is not None:
                found[f"{name}.scales"] = f"moments.{attribute}.scales"
        found |= {name: f"moments.{name}" for name in self.moments.EVIDENCE}
        return {**found, "energy": "energy", "limited_norm": "limited_norm"}

    @cached_property
    def alike(self) -> Hashable:
        """Equal for matrices that can be in one stack; :meth:`_resized` says that it is another."""
        return (
            type(self), id(self.settings), self.shape, self.rows, self.rank, self.width, self.takes_whole,
            self.transposed, self.count, self.held.start, self.num_held, self.own_bases, self.dtype, self.device,
            self.state_dtype,
        )  # fmt: skip

    def _resized(self) -> None:
        """To be called where the rank or the width has changed."""
        vars(self).pop("alike", None)

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self.moments.steps

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of states and bases held here."""

    # -- a window -------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, step: Tensor | int, refreshed: bool = False) -> None:
        """Draw what is random for the coming step, keyed by name and step.

        Args:
            step: its number, or where it is on the device. refreshed: the gradient of this very step has made the basis.
        """

    # -- energy ---------------------------------------------------------------------------------

    def forget_energy(self) -> None:
        """Start the averages anew: what an old basis captured says nothing of a new one."""
        self.energy.zero_()

    @property
    def captured_energy(self) -> Tensor:
        """Of each matrix, not yet divided by the weight: 0-dim or (E,), fp32."""
        return self.energy[..., 0]

    @property
    def mean_square_norm(self) -> Tensor:
        """Not yet divided by the weight, of all matrices together: 0-dim fp32, as the next."""
        return self.energy[1] if self.count == 1 else self.energy[:, 1].sum()

    @property
    def energy_weight(self) -> Tensor:
        """The most that any of the matrices has."""
        return self.energy[2] if self.count == 1 else self.energy[:, 2].max()

    def smoothed_energy(self) -> Tensor:
        """Captured energy E in [0, 1] of all matrices together, an average over recent steps; 0-dim fp32."""
        shares = self.captured_energy / self.energy[..., 2].clamp_min(1e-12)
        if self.count == 1:
            return shares
        squares = self.energy[:, 1]
        return (shares * squares).sum() / squares.sum().clamp_min(_TINY)

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: moments of the rows held here, everything else whole; of experts also
        :attr:`held_states` of those held here."""
        return {
            **self.moments.state_dict(),
            "rank": self.rank,
            "limited_norm": self.limited_norm,
            **dict(zip(_ENERGIES, self.energy.unbind(-1), strict=True)),
        }

    @property
    def held_states(self) -> list[str]:
        """What there is in :meth:`state_dict` of each expert held here beside its rows; nothing of a matrix."""
        if self.count == 1:
            return []
        rows = self.settings.rule.row_states
        own = (key for key, value in self.moments.state_dict().items() if isinstance(value, Tensor))
        return [*(key for key in own if key not in rows), "limited_norm"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; states by rows hold those of this object."""
        self.moments.load_state_dict(state)
        self.rank = int(state["rank"])
        self._resized()
        self.limited_norm = self._number(state["limited_norm"])
        self.energy = torch.stack([self._number(state[key]) for key in _ENERGIES], dim=-1)

    def _number(self, value: Any) -> Tensor:
        return torch.as_tensor(value).to(device=self.device, dtype=torch.float32, copy=True)
