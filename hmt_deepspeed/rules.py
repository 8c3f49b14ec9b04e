"""The table of optimizer rules: what each keeps, takes and sums, as plain values. No torch.

A rule is one row of :data:`RULES` and one class that carries it out. Whoever has to know a rule without running it
(configuration, planner, checkpoint, start table, documents) asks its row; :func:`register_rule` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

__all__ = [
    "DEFAULT",
    "DENSE",
    "MIN_INT8_ELEMENTS",
    "MULTIPLE",
    "RULES",
    "STATE_BLOCK",
    "Rule",
    "Shape",
    "State",
    "Sum",
    "SumOf",
    "dense_states_dtype",
    "methods",
    "rank_at",
    "register_rule",
    "rule_of",
    "stored_bytes",
    "symmetric_blocks",
]

DEFAULT, DENSE = (
    "muon",
    "adamw",
)  # the default method, and that of all without a matrix rule
MIN_INT8_ELEMENTS = 4096  # below it, scales and rounding cost more than they save (torchao's bound)
STATE_BLOCK = 256  # elements of an int8 state that share an fp32 scale
MULTIPLE = 8  # of ranks that are shares of a side: what a kernel's tiles take
# Of a symmetric product, rows of a block at least: a GPU multiplies fewer in about the time of a launch, a CPU of a call.
_ROWS_OF_BLOCK = {"cpu": 128, "cuda": 512}
_MOST_BLOCKS = 8

Axis = Literal["rows", "columns", "rank", 1]
Shape = tuple[Axis, ...]
SumOf = Literal["gradient", "states", "update"]


def dense_states_dtype(wanted: str, shape: Sequence[int]) -> str:
    """Storage of AdamW's moments: fp32 by default, of what is too small for 8 bits, and of vectors, which step together.

    Args:
        wanted: ``hmt.optimizer.state_dtype``. shape: of the whole parameter.
    """
    fits = len(shape) > 1 and prod(shape) >= MIN_INT8_ELEMENTS
    return wanted if fits and wanted != "auto" else "fp32"


def stored_bytes(numel: int, dtype: str) -> int:
    """Bytes of a state of ``numel`` elements in ``fp32``, ``bf16`` or ``int8``, scales included."""
    if dtype == "int8":
        return numel + 4 * -(-numel // STATE_BLOCK)
    return {"fp32": 4, "bf16": 2}[dtype] * numel


def rank_at(rank: int | float, m: int, n: int) -> int:
    """r of an m x n matrix: an integer, or a share of its smaller side in multiples of 8, rounded up; lowered to that
    side."""
    wanted = rank if isinstance(rank, int) else MULTIPLE * ceil(rank * min(m, n) / MULTIPLE)
    return min(wanted, m, n)


def symmetric_blocks(size: int, device_type: str) -> int:
    """Into how many blocks of rows a product of ``size`` x ``size``, known to be symmetric, is cut.

    Those above the diagonal are copied: ``p`` blocks take ``(p + 1) / 2p`` of the FLOPs.
    """
    rows = _ROWS_OF_BLOCK.get(device_type, _ROWS_OF_BLOCK["cuda"])
    return min(_MOST_BLOCKS, max(1, size // rows))


def elements(shape: Shape, rows: int, columns: int, rank: int) -> int:
    """How many a tensor of that shape has."""
    sizes: Mapping[Axis, int] = {"rows": rows, "columns": columns, "rank": rank, 1: 1}
    return prod(sizes[axis] for axis in shape)


@dataclass(frozen=True)
class State:
    """One tensor that a rule keeps of a matrix between two steps.

    Attributes:
        name: its key in a checkpoint.
        shape: of "rows", "columns" and "rank" of the matrix as it is projected; "rows" are those of a ZeRO rank.
        stored: ``state``, in ``hmt.optimizer.state_dtype``; ``fp32``; or ``model``, in the weights' dtype, as bases are.
        in_budget: whether ``hmt.optimizer.rank_budget`` counts it.
        recalled: whether ``hmt.basis_cache.history`` keeps it with a basis that was left; of Adam's moments only.
    """

    name: str
    shape: Shape
    stored: Literal["state", "fp32", "model"] = "state"
    in_budget: bool = True
    recalled: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether each ZeRO rank has its own rows; other states are whole on every rank."""
        return "rows" in self.shape

    def nbytes(self, rows: int, columns: int, rank: int, dtype: str, itemsize: int = 4) -> int:
        """Bytes at a rank.

        Args:
            rows: that are held. dtype: of states, see :meth:`Rule.states_dtype`. itemsize: of the weights.
        """
        numel = elements(self.shape, rows, columns, rank)
        if self.stored == "model":
            return numel * itemsize
        return stored_bytes(numel, dtype if self.stored == "state" else "fp32")


@dataclass(frozen=True)
class Sum:
    """What a rule adds up over all rows of a matrix, of which a ZeRO rank holds some; fp32.

    Attributes:
        shape: () for a number, ("rank",) for a vector, ("rank", "rank") for a matrix.
        of: ``gradient``, before it is clipped; ``states``, once they have taken it; ``update``, which the sums of states
            have made of them.
    """

    name: str
    shape: Shape = ()
    of: SumOf = "gradient"


@dataclass(frozen=True)
class Rule:
    """One update rule of a matrix.

    Attributes:
        name: of the row. method: value of ``hmt.optimizer.method`` that asks for it.
        where: fields of ``hmt.optimizer``, with their values, by which the method is this row and not its first.
        text: what it is, without a full stop. who: whom it serves, as measured.
        carried_out_by: "module:name" of the class, a :class:`hmt_deepspeed.optim.rules.matrix.MatrixRule`.
        gradient: what it takes: ``projected``, ``G [Q | P]``; ``core``, the same, of which ``P^T G Q`` is used;
            ``whole``, ``G``.
        bases: ``found`` in gradients, or drawn where ``range_finder`` says so, and kept; ``drawn`` from a seed and never
            kept; ``none``: then the rank is the smaller side.
        states, sums: see :class:`State` and :class:`Sum`.
        is_dense: it takes any parameter, in flat parts, and no rank.
        becomes_full: where a basis would span all columns there is none, and a step is that of the whole matrix: AdamW's,
            or Muon's.
        holds_experts: its class has the experts of a mixture, several matrices in one weight; else :data:`DENSE` has them.
        side: ``chosen`` by ``projection``, or the ``smaller`` one.
        note: what tells its states from those of the method's other rows, in checkpoints and tables.
        reads: the fields of ``hmt.optimizer`` that mean something to it, beside those of every rule; None for all.
        fixed_rank: the only rank. auto_share: share of the smaller side that ``"rank": "auto"`` is; with neither it
            is chosen among candidates.
        scale, full_scale: of ``"scale": "auto"``; the second where a basis would span all n columns, and of r of them
            the first, but at most n / r times the second. beside_ratio, embedding_ratio: with it, factors on the
            learning rate of heads and vectors beside the matrices, and of embeddings that are no heads too.
        usual_lr: a learning rate to start from. usual_states: of ``"state_dtype": "auto"``.
        products, symmetric_products: of a step in fp32, beside the update's own: how many of r x r matrices with rows,
            and how many with one another.
    """

    name: str
    method: str
    text: str
    carried_out_by: str
    gradient: Literal["projected", "core", "whole"]
    bases: Literal["found", "drawn", "none"]
    states: tuple[State, ...]
    sums: tuple[Sum, ...]
    where: tuple[tuple[str, object], ...] = ()
    who: str = ""
    is_dense: bool = False
    becomes_full: bool = False
    holds_experts: bool = False
    side: Literal["chosen", "smaller"] = "chosen"
    note: str = ""
    reads: frozenset[str] | None = None
    fixed_rank: int | None = None
    auto_share: float | None = None
    scale: float = 1.0
    full_scale: float = 1.0
    beside_ratio: float = 1.0
    embedding_ratio: float = 1.0
    usual_lr: float = 0.001
    usual_states: Literal["fp32", "int8"] = "fp32"
    products: tuple[int, int] = (0, 0)
    symmetric_products: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Raise ValueError where no class is named: field, value, what is legal and what to do."""
        if not all(self.carried_out_by.partition(":")):
            raise ValueError(
                f"carried_out_by of the rule {self.name!r} is {self.carried_out_by!r}; legal: 'module:class'. Name "
                "the class that carries it out."
            )

    # -- what it reads --------------------------------------------------------------------------

    @property
    def asked_by(self) -> dict[str, object]:
        """The fields of ``hmt.optimizer``, with their values, that ask for it: the method, unless others tell it from
        the method's first row."""
        return dict(self.where) or {"method": self.method}

    def reads_field(self, field: str) -> bool:
        """Whether a field of ``hmt.optimizer`` means something to it."""
        return self.reads is None or field in self.reads or field in _OF_EVERY_RULE

    @property
    def chooses_rank(self) -> bool:
        """Whether ``"rank": "auto"`` is a choice among candidates."""
        fixed = self.fixed_rank is not None or self.auto_share is not None
        return self.bases != "none" and not fixed

    def rank_at(self, rank: int | float | str | None, m: int, n: int) -> int:
        """r of an m x n matrix.

        Args:
            rank: a number, a share of the smaller side, "full", or None for "auto" of a rule that does not choose.
        """
        if self.fixed_rank is not None:
            return self.fixed_rank
        if isinstance(rank, str):
            return min(m, n)
        if rank is None:
            assert self.auto_share is not None
            return max(1, int(self.auto_share * min(m, n)))
        return rank_at(rank, m, n)

    def transposes(self, projection: str, m: int, n: int) -> bool:
        """Whether an m x n weight is projected from the left, i.e. its transpose from the right.

        ``auto`` is GaLore's rule: the smaller side is projected, and a square matrix from the right.
        """
        if self.side == "smaller" or projection == "auto":
            return m < n
        return projection == "left"

    # -- what it keeps and sums -----------------------------------------------------------------

    def layout(self, projection: str, drawn_rank: int | None) -> str:
        """What must agree for the states of a checkpoint to fit: method, projection where it is chosen, note.

        Args:
            drawn_rank: of bases that are drawn from a seed; None of others, whose rank may differ.
        """
        side = f" {projection}" if self.side == "chosen" else ""
        note = f", {self.note}" if self.note else ""
        drawn = "" if drawn_rank is None else f", random of rank {drawn_rank}"
        return f"{self.method}{side}{note}{drawn}"

    @property
    def row_states(self) -> tuple[str, ...]:
        """Names of the states of which each rank has its rows."""
        return tuple(state.name for state in self.states if state.by_rows)

    def wanted_states(self, wanted: str) -> str:
        """Storage that ``hmt.optimizer.state_dtype`` asks for."""
        return self.usual_states if wanted == "auto" else wanted

    def states_dtype(self, wanted: str, rows: int, columns: int, rank: int) -> str:
        """Storage of a matrix's states in the whole run: fp32 where all are too small for 8 bits.

        Args:
            wanted: ``hmt.optimizer.state_dtype``. rows, columns: of the whole matrix as it is projected, and rank: the
                largest that it may have, so that all ranks of a job decide alike.
        """
        stored = [state.shape for state in self.states if state.stored == "state"]
        largest = max((elements(shape, rows, columns, rank) for shape in stored), default=0)
        found = self.wanted_states(wanted)
        return "fp32" if found == "int8" and largest < MIN_INT8_ELEMENTS else found

    def sum_lengths(self, of: SumOf, rows: int, columns: int, rank: int) -> dict[str, int]:
        """How many numbers each sum has at a rank, by name, in order."""
        asked = (found for found in self.sums if found.of == of)
        return {found.name: elements(found.shape, rows, columns, rank) for found in asked}


_OF_EVERY_RULE = frozenset(
    {"method", "master_weights", "state_dtype", "module_rules", "lr_scale", "seed"}
)
_OF_BASES = frozenset(
    {
        *("projection", "rank", "rank_candidates", "energy_threshold", "energy_estimate"),
        *("rank_budget", "update_interval", "range_finder", "residual", "share_basis"),
        *("expert_basis", "probes", "projected_backward", "scale", "max_full_gradient_bytes"),
        *("weight_dtype", "target_modules"),
    }
)
_OF_WHOLE = frozenset({"rank", "scale", "projected_backward", "target_modules"})
_OF_APOLLO = _OF_WHOLE | {"update_interval"}
_EVIDENCE = (
    State("evidence", ("rank",), "fp32", in_budget=False),
    State("first_evidence", (), "fp32", in_budget=False),
)
_OF_ADAM = (State("exp_avg", ("rows", "rank")), State("exp_avg_sq", ("rows", "rank")))
_ENERGIES = (Sum("inside"), Sum("outside"))  # squared norms of A, and of S or the rest of G
_RESIDUAL = Sum("residual", of="states")  # its squared norm
_OF_ROWS = tuple(Sum(name, of="states") for name in ("moved", "seen", "update"))
_RULES = "hmt_deepspeed.optim.rules"
# At AdamW's learning rate: GaLore's and Fira's 0.25 at ten times it for matrices, half of those ten for the others.
_SCALE, _BESIDE = 2.5, 5.0
# Of directions whose entries have mean square 1, where Adam's are smaller; what 5M tokens want (``launch/results/compare/findings.md``).
_MUONS_SCALE, _MUONS_FULL_SCALE, _MUONS_EMBEDDINGS = 1.0, 0.5, 40.0
# What the inverse root turns, and its own; its Gram matrix, and symmetric ones of its own (``optim/rules/inverse_root.py``).
_MUONS_PRODUCTS, _MUONS_SYMMETRIC = (1, 3), (1, 10)

RULES: dict[str, Rule] = {}


def register_rule(rule: Rule) -> None:
    """Add a rule to the table: its method is legal in ``hmt.optimizer`` and in ``hmt-plan`` from now on.

    Raises:
        ValueError: the name is taken, or the method's first row says when it is asked for.
    """
    if rule.name in RULES:
        raise ValueError(f"the rule {rule.name!r} is in the table; legal: a new name. Rename it.")
    if rule.where and rule.method not in methods():
        raise ValueError(
            f"the rule {rule.name!r} is the first of the method {rule.method!r}, but where is {rule.where!r}; legal: "
            "() for what the method is by default. Register that one first."
        )
    RULES[rule.name] = rule


def methods() -> tuple[str, ...]:
    """Legal values of ``hmt.optimizer.method``, in the table's order."""
    return tuple(dict.fromkeys(rule.method for rule in RULES.values()))


def rule_of(method: str, fields: Mapping[str, object] | None = None) -> Rule:
    """The row of a method, by the other fields of ``hmt.optimizer``; of none of them its first."""
    rows = [rule for rule in RULES.values() if rule.method == method]
    given = fields or {}
    return next((r for r in rows if r.where and _is_met(r, given)), rows[0])


def _is_met(rule: Rule, given: Mapping[str, object]) -> bool:
    return all(given.get(field) == value for field, value in rule.where)


for _rule in (
    Rule(
        name="lowrank_adamw",
        method="lowrank_adamw",
        text="AdamW in a low-rank space, with a residual outside it",
        carried_out_by=f"{_RULES}.low_rank:LowRankMatrix",
        gradient="projected",
        bases="found",
        states=tuple(replace(state, recalled=True) for state in (*_OF_ADAM, *_EVIDENCE)),
        sums=(*_ENERGIES, _RESIDUAL),
        becomes_full=True,
        holds_experts=True,
        scale=_SCALE,
        beside_ratio=_BESIDE,
        embedding_ratio=_BESIDE,
    ),
    Rule(
        name="lowrank_adamw, two-sided",
        method="lowrank_adamw",
        where=(("projection", "two_sided"),),
        text="AdamW in the HMT paper's r x r core",
        carried_out_by=f"{_RULES}.two_sided:TwoSidedMatrix",
        gradient="core",
        bases="found",
        # Nothing is recalled: a core's evidence is of pairs of directions, and ranks have rows of the left ones.
        states=(
            State("exp_avg", ("rank", "rank")),
            State("exp_avg_sq", ("rank", "rank")),
            State("evidence", ("rank", "rank"), "fp32", in_budget=False),
            _EVIDENCE[1],
            State("left_basis", ("rows", "rank"), "model"),
        ),
        sums=(*_ENERGIES, Sum("core", ("rank", "rank")), _RESIDUAL),
        scale=_SCALE,
        beside_ratio=_BESIDE,
        embedding_ratio=_BESIDE,
    ),
    Rule(
        name="lowrank_adamw, factored",
        method="lowrank_adamw",
        where=(("second_moment", "factored"),),
        text="AdamW in a low-rank space, whose second moment is kept as its row and column means (Adafactor)",
        carried_out_by=f"{_RULES}.factored:FactoredMatrix",
        gradient="projected",
        bases="found",
        states=(
            State("exp_avg", ("rows", "rank")),
            State("exp_avg_sq_row", ("rows", 1), "fp32"),
            State("exp_avg_sq_col", (1, "rank"), "fp32", recalled=True),
            State("exp_avg_sq_mean", (), "fp32"),
            *(replace(state, recalled=True) for state in _EVIDENCE),
        ),
        sums=(*_ENERGIES, Sum("columns", ("rank",)), _RESIDUAL),
        becomes_full=True,
        holds_experts=True,
        note="factored",
        scale=_SCALE,
        beside_ratio=_BESIDE,
        embedding_ratio=_BESIDE,
    ),
    Rule(
        name="muon",
        method="muon",
        text="Muon in a low-rank space, its momentum orthogonalised and its rows normalised",
        carried_out_by=f"{_RULES}.muon:MuonMatrix",
        gradient="projected",
        bases="found",
        states=(State("momentum", ("rows", "rank")), State("row_mean_square", ("rows", 1), "fp32")),
        sums=(
            *_ENERGIES,
            Sum("gram", ("rank", "rank"), of="states"),
            *(Sum(name, of="update") for name in ("direction", "normalised", "residual")),
        ),
        becomes_full=True,
        holds_experts=True,
        reads=_OF_BASES,
        scale=_MUONS_SCALE,
        full_scale=_MUONS_FULL_SCALE,
        beside_ratio=_BESIDE,
        embedding_ratio=_MUONS_EMBEDDINGS,
        usual_states="int8",
        products=_MUONS_PRODUCTS,
        symmetric_products=_MUONS_SYMMETRIC,
    ),
    Rule(
        name="muon, full",
        method="muon",
        where=(("rank", "full"),),
        text="Muon of whole matrices, as torch.optim.Muon but for the polar factor's four polynomials",
        carried_out_by=f"{_RULES}.full_muon:FullMuonMatrix",
        gradient="whole",
        bases="none",
        states=(State("momentum", ("rows", "columns")),),
        sums=(*_ENERGIES, Sum("gram", ("columns", "columns"), of="states")),
        becomes_full=True,
        holds_experts=True,
        side="smaller",
        note="full rank",
        reads=_OF_WHOLE | {"weight_dtype"},
        full_scale=_MUONS_FULL_SCALE,
        beside_ratio=_BESIDE,
        embedding_ratio=_MUONS_EMBEDDINGS,
        usual_states="int8",
        products=_MUONS_PRODUCTS,
        symmetric_products=_MUONS_SYMMETRIC,
    ),
    Rule(
        name="apollo",
        method="apollo",
        text="APOLLO, a scale per channel of the whole gradient",
        carried_out_by=f"{_RULES}.apollo:ApolloMatrix",
        gradient="whole",
        bases="drawn",
        states=(*_OF_ADAM, *_EVIDENCE),
        sums=(Sum("gradient"), *_OF_ROWS),
        holds_experts=True,
        side="smaller",
        reads=_OF_APOLLO,
        auto_share=0.25,  # the paper's
        usual_lr=0.01,
    ),
    Rule(
        name="apollo_mini",
        method="apollo_mini",
        text="APOLLO-Mini, a scale per matrix",
        who="the least state, 0.4 % of AdamW's moments; its loss ended 5 to 17 % above",
        carried_out_by=f"{_RULES}.apollo:ApolloMiniMatrix",
        gradient="whole",
        bases="drawn",
        states=(*_OF_ADAM, *_EVIDENCE),
        sums=(Sum("gradient"), *_OF_ROWS),
        holds_experts=True,
        side="smaller",
        reads=_OF_APOLLO,
        fixed_rank=1,
        scale=128.0,  # the paper's
        usual_lr=0.01,
    ),
    Rule(
        name="adamw",
        method="adamw",
        text="plain AdamW",
        who="whoever offloads every state, or compares",
        carried_out_by=f"{_RULES}.dense:dense_adamw_",
        gradient="whole",
        bases="none",
        states=(State("exp_avg", ("rows", "columns")), State("exp_avg_sq", ("rows", "columns"))),
        sums=(Sum("gradient"),),
        is_dense=True,
        reads=frozenset(),
    ),
):
    register_rule(_rule)
