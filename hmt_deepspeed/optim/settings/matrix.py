"""Settings of one matrix's update rule, as plain values; what is legal is declared in `hmt_deepspeed.config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt_deepspeed.optim.bases.rank import legal_candidates, share_of_side
from hmt_deepspeed.optim.rules.state import MIN_INT8_ELEMENTS

__all__ = [
    "APOLLO",
    "APOLLO_MINI",
    "DENSE",
    "LR_RATIO",
    "PUBLISHED_SCALE",
    "MatrixSettings",
]

APOLLO, APOLLO_MINI, DENSE = "apollo", "apollo_mini", "adamw"
# GaLore, Fira and APOLLO train at ten times AdamW's learning rate, embeddings, head and norms too, and multiply the
# update of the matrices by a quarter. Where no scale is given the rate is AdamW's, and both factors are taken here.
LR_RATIO, PUBLISHED_SCALE = 10.0, 0.25


@dataclass(frozen=True)
class MatrixSettings:
    """Plain values of ``hmt.optimizer`` for one matrix; None stands for "auto".

    method: ``lowrank_adamw``, ``apollo`` or ``apollo_mini``. projection: ``right``, ``left``, ``auto``
    or ``two_sided``; APOLLO always projects the smaller side.
    rank: fixed rank, a share of the smaller side, or None to choose among ``rank_candidates`` (None: shares of
    the smaller side) by ``energy_threshold``; None is a quarter of the smaller side for ``apollo``, 1 for
    ``apollo_mini``. A matrix has it as far as :meth:`ranks` says.
    scale: factor on the update; None is the published one, of low-rank AdamW at :data:`LR_RATIO` times the rate.
    probes: probe columns per matrix. residual: ``none``, ``probe`` or ``full``.
    state_dtype: storage of the moments, see :meth:`moments_dtype`. second_moment: ``full``, or
    ``factored`` as Adafactor's; APOLLO's is always full. written: keys of the values that a module rule
    gives, for messages.
    """

    method: str
    projection: str
    rank: int | float | None
    rank_candidates: tuple[int, ...] | None
    energy_threshold: float
    update_interval: int
    range_finder: str
    residual: str
    probes: int | None
    scale: float | None
    state_dtype: str
    second_moment: str
    seed: int
    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

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
    def lr_scale(self) -> float:
        """Factor on the learning rate."""
        return LR_RATIO if self.scale is None and not self.is_apollo else 1.0

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
