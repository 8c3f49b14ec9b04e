"""Settings of one matrix's update rule: plain values with their legal ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from hmt_deepspeed.optim.rank import legal_candidates, share_of_side
from hmt_deepspeed.optim.state import MIN_INT8_ELEMENTS, STATE_DTYPES

__all__ = [
    "APOLLO",
    "APOLLO_MINI",
    "DENSE",
    "LOW_RANK",
    "METHODS",
    "SECOND_MOMENTS",
    "MatrixSettings",
]

LOW_RANK, APOLLO, APOLLO_MINI, DENSE = "lowrank_adamw", "apollo", "apollo_mini", "adamw"
METHODS = (LOW_RANK, APOLLO, APOLLO_MINI, DENSE)
SECOND_MOMENTS = ("full", "factored")


@dataclass(frozen=True)
class MatrixSettings:
    """Plain values of ``hmt.optimizer`` for one matrix; None stands for "auto".

    method: ``lowrank_adamw``, ``apollo`` or ``apollo_mini``. projection: ``right``, ``left``, ``auto``
    or ``two_sided``; APOLLO always projects the smaller side.
    rank: fixed rank, a share of the smaller side, or None to choose among ``rank_candidates`` (None: shares of the smaller side) by
    ``energy_threshold``; None is a quarter of the smaller side for ``apollo``, 1 for ``apollo_mini``. A matrix has
    it as far as :meth:`ranks` says.
    scale: factor on the update; None gives its part inside the basis the root mean square of AdamW's, at
    every rank, and is APOLLO's published one.
    probes: probe columns per matrix. residual: ``none``, ``probe`` or ``full``.
    state_dtype: storage of the moments, see :meth:`moments_dtype`. second_moment: ``full``, or
    ``factored`` as Adafactor's; APOLLO's is always full. written: keys of the values that a module rule
    gives, for messages.
    """

    method: str = LOW_RANK
    projection: str = "right"
    rank: int | float | None = None
    rank_candidates: tuple[int, ...] | None = None
    energy_threshold: float = 0.7
    update_interval: int = 200
    range_finder: str = "randomized"
    residual: str = "probe"
    probes: int | None = None
    scale: float | None = None
    state_dtype: str = "fp32"
    second_moment: str = "full"
    seed: int = 0
    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range: field, value, legal range, what to do."""
        for name, (is_legal, legal, advice) in _LEGAL.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise ValueError(f"{self.key(name)} is {value!r}; legal: {legal}. To do: {advice}.")
        if self.residual == "probe" and self.probes == 0:
            raise ValueError(
                f"{self.key('probes')} is 0 with {self.key('residual')} 'probe'; legal: an integer >= 1. "
                'To do: raise it, or set residual to "none".'
            )
        if self.projection == "two_sided" and self.residual == "full" and not self.is_apollo:
            raise ValueError(
                f"{self.key('residual')} is 'full' with {self.key('projection')} 'two_sided'; legal with a "
                "core: 'probe' (exact inside the span of the right basis) or 'none'. To do: choose one of them."
            )
        if self.is_factored and self.projection == "two_sided":
            raise ValueError(
                f"{self.key('second_moment')} is 'factored' with {self.key('projection')} 'two_sided'; legal "
                "with a core: 'full' (its r x r is small already). To do: use that, or project one side."
            )
        if self.range_finder == "random" and self.rank is None and self.method == LOW_RANK:
            raise ValueError(
                f"{self.key('range_finder')} is 'random' with {self.key('rank')} 'auto', but a basis that "
                "ignores the gradient has no spectrum to choose a rank by; legal: a fixed rank. To do: give one."
            )

    def key(self, name: str) -> str:
        """Full key of a field: of the module rule's where that gives the value."""
        return f"hmt.optimizer.{self.written.get(name, name)}"

    @property
    def is_apollo(self) -> bool:
        return self.method in (APOLLO, APOLLO_MINI)

    @property
    def wants_whole(self) -> str:
        """What asks for whole gradients, which a projected backward never forms: ``key is 'value'``, or nothing."""
        if self.is_apollo:
            return f"{self.key('method')} is {self.method!r}"
        return f"{self.key('residual')} is 'full'" if self.residual == "full" else ""

    @property
    def is_factored(self) -> bool:
        return self.second_moment == "factored" and not self.is_apollo

    @property
    def takes_projection(self) -> bool:
        """Whether the rule can be given projected gradients; the others need whole gradient rows."""
        return not self.wants_whole

    def ranks(self, m: int, n: int) -> tuple[int, ...]:
        """Ranks that an m x n matrix may have, rising; those above its smaller side are lowered to it.

        A narrow matrix keeps method, side and scale, and with them a step like its neighbours' at their learning
        rate and a backward that saves ``X [Q | P]``. Where the smaller side is the projected one its basis spans
        everything, and AdamW, exact and without a basis, takes its place. Where it is the other one, a gradient
        has no more directions than the lowered rank, and moments and basis take ``2 r^2 + n r`` elements in
        place of AdamW's ``2 r n``.
        """
        side = min(m, n)
        if self.method == APOLLO_MINI:
            return (1,)
        if isinstance(self.rank, float):
            return (share_of_side(self.rank, side),)
        if self.rank is not None:
            return (min(self.rank, side),)
        if self.method == APOLLO:
            return (max(1, side // 4),)  # the paper's
        return legal_candidates(self.rank_candidates, m, n)

    def lowered_from(self, m: int, n: int) -> int | None:
        """The rank, or the largest candidate, that an m x n matrix is too narrow for; None where it is not."""
        if self.method == APOLLO_MINI or (self.method == APOLLO and self.rank is None):
            return None
        largest = None if self.rank_candidates is None else self.rank_candidates[-1]
        wanted = self.rank if isinstance(self.rank, int) else largest
        return wanted if wanted is not None and wanted > min(m, n) else None

    def moments_dtype(self, rows: int, columns: int) -> str:
        """Storage of a matrix's moments in the whole run: fp32 where they are too small for 8 bits even at its
        largest rank.

        Args:
            rows, columns: of the whole weight, as :meth:`oriented`, so that all ranks of a job decide alike.
        """
        rank = self.ranks(rows, columns)[-1]
        core = self.projection == "two_sided" and not self.is_apollo
        small = (rank if core else rows) * rank < MIN_INT8_ELEMENTS
        return "fp32" if small and self.state_dtype == "int8" else self.state_dtype

    def drawn_rank(self, m: int, n: int) -> int | None:
        """Rank of bases that are drawn from a seed, which never changes in a run; None of other bases."""
        drawn = self.is_apollo or self.range_finder == "random"
        return self.ranks(m, n)[0] if drawn else None

    def transposes(self, m: int, n: int) -> bool:
        """Whether an m x n weight is projected from the left, i.e. its transpose from the right.

        ``auto`` is GaLore's rule: the smaller side is projected, and a square matrix from the right.
        """
        if self.is_apollo or self.projection == "auto":
            return m < n
        return self.projection == "left"

    def oriented(self, m: int, n: int) -> tuple[int, int]:
        """Shape of the weight, or of its transpose where that is projected."""
        return (n, m) if self.transposes(m, n) else (m, n)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any, above: float, most: float = inf) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and above < value <= most and value < inf


def _rising(ranks: Any) -> bool:
    whole = isinstance(ranks, tuple) and len(ranks) > 0 and all(_whole(r, 1) for r in ranks)
    return whole and all(a < b for a, b in pairwise(ranks))


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str, str]:
    return choices.__contains__, f"one of {choices}", "choose one of them"


# What each field may be: test, legal range in words, what to do.
_LEGAL: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "method": _one_of(*METHODS),
    "projection": _one_of("right", "left", "auto", "two_sided"),
    "rank": (
        lambda v: v is None or _whole(v, 1) or (isinstance(v, float) and 0 < v < 1),
        '"auto", an integer >= 1 or a number above 0 and below 1',
        'use "auto"',
    ),
    "rank_candidates": (
        lambda v: v is None or _rising(v),
        '"auto" or strictly increasing integers >= 1',
        "sort the ranks",
    ),
    "energy_threshold": (lambda v: _number(v, 0, 1), "above 0, at most 1", "0.7 is usual"),
    "update_interval": (lambda v: _whole(v, 1), "an integer >= 1", "200 is usual"),
    "range_finder": _one_of("randomized", "subspace", "svd", "random"),
    "residual": _one_of("none", "probe", "full"),
    "probes": (lambda v: v is None or _whole(v, 0), '"auto" or an integer >= 0', 'use "auto"'),
    "scale": (
        lambda v: v is None or _number(v, 0),
        '"auto" or a number > 0',
        'use "auto"',
    ),
    "state_dtype": _one_of(*STATE_DTYPES),
    "second_moment": _one_of(*SECOND_MOMENTS),
    "seed": (
        lambda v: _whole(v, 0) and v < 1 << 63,
        "an integer from 0 to 2^63 - 1",
        "choose another",
    ),
}
