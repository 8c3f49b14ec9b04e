"""Settings of one matrix's update rule, as plain values; `hmt_deepspeed.config` declares what is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hmt_deepspeed.optim.bases.rank import legal_candidates
from hmt_deepspeed.rules import Rule, rule_of

__all__ = ["MatrixSettings"]


@dataclass(frozen=True)
class MatrixSettings:
    """Plain values of ``hmt.optimizer`` for one matrix; None stands for "auto".

    method, projection, second_moment: name the :attr:`rule`, with the side that is projected where it is chosen:
    ``right``, ``left`` or ``auto``.
    rank: fixed rank, a share of the smaller side, "full", or None: what the rule has by itself, or a choice among
    ``rank_candidates`` (None: shares of the smaller side) by ``energy_threshold``. A matrix has it as far as
    :meth:`ranks` says.
    scale: factor on the update; None is the rule's.
    expert_basis: of experts: ``shared``, ``own``, or None where the first gradient is to decide.
    probes: probe columns per matrix. residual: ``none``, ``probe`` or ``full``.
    state_dtype: storage of the states, see :meth:`states_dtype`. written: keys of the values that a module rule
    gives, for messages.
    """

    method: str
    projection: str
    rank: int | float | str | None
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
    expert_basis: str | None = None
    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def key(self, name: str) -> str:
        """Full key of a field: of the module rule's where that gives the value."""
        return f"hmt.optimizer.{self.written.get(name, name)}"

    @cached_property
    def rule(self) -> Rule:
        """The row of the table."""
        return rule_of(self.method, vars(self))

    @property
    def wants_whole(self) -> str:
        """The setting that needs whole gradients, which no projected backward forms: ``key is 'value'``, or empty."""
        if self.rule.gradient == "whole":
            field, value = next(iter(self.rule.asked_by.items()))
            return f"{self.key(field)} is {value!r}"
        return f"{self.key('residual')} is 'full'" if self.residual == "full" else ""

    @property
    def beside_ratio(self) -> float:
        """Factor on the learning rate of heads and vectors beside the matrices."""
        return self.rule.beside_ratio if self.scale is None else 1.0

    @property
    def embedding_ratio(self) -> float:
        """The same of embeddings that are no heads too."""
        return self.rule.embedding_ratio if self.scale is None else 1.0

    @property
    def own_bases(self) -> bool:
        """Whether each of several experts has a basis of its own from the start."""
        return self.expert_basis == "own" and self.rule.bases != "none"

    @property
    def takes_projection(self) -> bool:
        """Whether the rule can be given projected gradients; the others need whole gradient rows."""
        return not self.wants_whole

    def is_linked(self, encodes: bool) -> bool:
        """Whether the modules of such matrices are patched: for projected gradients or, without bases, to decode weights.

        Args:
            encodes: ``hmt.optimizer.weight_dtype`` is "int8".
        """
        return self.takes_projection or (encodes and self.rule.bases == "none")

    def ranks(self, m: int, n: int) -> tuple[int, ...]:
        """Ranks that an m x n matrix may have, rising; those above its smaller side are lowered to it.

        A narrow matrix keeps method, side and scale, and with them a step like its neighbours' at their learning
        rate and a backward that saves ``X [Q | P]``. Where the smaller side is the projected one its basis spans
        everything, and AdamW, exact and without a basis, takes its place. Where it is the other one, a gradient
        has no more directions than the lowered rank, and moments and basis take ``2 r^2 + n r`` elements in
        place of AdamW's ``2 r n``.
        """
        if self.rank is None and self.rule.chooses_rank:
            return legal_candidates(self.rank_candidates, m, n)
        return (self.rule.rank_at(self.rank, m, n),)

    def lowered_from(self, m: int, n: int) -> int | None:
        """The rank, or the largest candidate, that an m x n matrix is too narrow for; None where it is not."""
        if self.rule.fixed_rank or not (
            self.rule.chooses_rank or isinstance(self.rank, int | float)
        ):
            return None
        largest = None if self.rank_candidates is None else self.rank_candidates[-1]
        wanted = self.rank if isinstance(self.rank, int) else largest
        return wanted if wanted is not None and wanted > min(m, n) else None

    def states_dtype(self, rows: int, columns: int) -> str:
        """Storage of a matrix's states in the whole run: fp32 where they are too small for 8 bits even at its
        largest rank.

        Args:
            rows, columns: of the whole weight, as :meth:`oriented`.
        """
        rank = self.ranks(rows, columns)[-1]
        return self.rule.states_dtype(self.state_dtype, rows, columns, rank)

    def drawn_rank(self, m: int, n: int) -> int | None:
        """Rank of bases that are drawn from a seed, which never changes in a run; None of other bases."""
        found = self.rule.bases == "found" and self.range_finder != "random"
        drawn = not found and self.rule.bases != "none"
        return self.ranks(m, n)[0] if drawn else None

    def transposes(self, m: int, n: int) -> bool:
        """Whether an m x n weight is projected from the left, see :meth:`Rule.transposes`."""
        return self.rule.transposes(self.projection, m, n)

    def oriented(self, m: int, n: int) -> tuple[int, int]:
        """Shape of the weight, or of its transpose where that is projected."""
        return (n, m) if self.transposes(m, n) else (m, n)
