"""The optimizer and how ZeRO divides its states, as far as bytes and FLOPs depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar, cast, get_args

from hmt_deepspeed.config.optimizer import (
    ExpertBasis,
    Projection,
    Residual,
    SecondMoment,
    StateDtype,
)
from hmt_deepspeed.config.own_rank import own_rank
from hmt_deepspeed.planner.model.flops import (
    Projected,
    check_probes,
    check_rank,
    on_inputs,
    probes_at,
)
from hmt_deepspeed.planner.model.shapes import (
    ModelShape,
    Parameter,
    by_layer,
    is_selected,
)
from hmt_deepspeed.rules import DEFAULT, Rule, methods, rule_of

__all__ = ["REPLICATED", "OptimizerMode", "Sharding", "StateDtype"]

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """Sharding of model states: ZeRO's stage over ``world_size`` ranks."""

    stage: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for another stage or no ranks: field, value, legal range, what to do."""
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"ZeRO stage is {self.stage!r}; legal: 0, 1, 2 or 3. Choose one of them."
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"world_size is {self.world_size!r}; legal: an integer >= 1. Give the number of ranks."
            )

    def ranks(self, stage: int) -> int:
        """Over how many ranks is divided what ZeRO divides from ``stage`` on."""
        return self.world_size if self.stage >= stage else 1


REPLICATED = Sharding()


@dataclass(frozen=True)
class OptimizerMode:
    """``hmt.optimizer`` as far as bytes depend on it; the defaults are its own.

    Attributes:
        method, projection, second_moment: name the :attr:`rule`.
        rank: r of every matrix, or the one assumed for ``"auto"``; a float is a share of the smaller side,
            in multiples of 8; "full"; None: "auto" of a rule that does not choose.
        probes: k, None for "auto".
        ranks: (name, r) of the matrices that have another; ``*`` for a layer's number, or the number of one
            whose matrix has its own.
        target_modules, adamw_modules: regular expressions searched in a parameter's name, see
            :func:`~hmt_deepspeed.planner.model.shapes.is_selected`.
        projected_backward: of linears that can have it. redrawn: bases are redrawn from a seed, not stored.
        share_basis: one basis for the linears that read one input.
        expert_basis: of a mixture's experts; of "auto" see :meth:`basis_of`.
        decided: (name, what was decided) of the weights of experts that have chosen; names as in ``ranks``.
        max_full_gradient_bytes: None for "auto".
        on_gpu: the device is a GPU, where "auto" probes are as many as its tensor cores want.
        host_is_ours: HMT's engine keeps what ``offload_optimizer`` takes (``offloaded.py``); fp32 weights then
            have masters too.
    """

    method: str = DEFAULT
    projection: Projection = "right"
    rank: int | float | str | None = 128
    probes: int | None = None
    residual: Residual = "probe"
    state_dtype: StateDtype = "auto"
    second_moment: SecondMoment = "full"
    master_weights: Literal["fp32", "none"] = "fp32"
    weight_dtype: Literal["auto", "int8"] = "auto"
    target_modules: tuple[str, ...] | Literal["all"] | None = None
    adamw_modules: tuple[str, ...] = ()
    projected_backward: bool = True
    redrawn: bool = False
    share_basis: bool = False
    expert_basis: ExpertBasis = "auto"
    decided: tuple[tuple[str, ExpertBasis], ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    max_full_gradient_bytes: int | None = None
    on_gpu: bool = True
    host_is_ours: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an illegal value: field, value, legal values, what to do."""
        for field, legal in {"method": methods(), **_LEGAL}.items():
            if getattr(self, field) not in legal:
                raise ValueError(
                    f"hmt.optimizer.{field} is {getattr(self, field)!r}; legal: {legal}. Choose one of them."
                )
        if self.rule.bases != "none" and (self.rank is not None or self.rule.chooses_rank):
            check_rank("hmt.optimizer.", self.rank)
        check_probes("hmt.optimizer.", self.probes)

    @cached_property
    def rule(self) -> Rule:
        """The row of the table."""
        return rule_of(self.method, vars(self))

    def is_low_rank(self, parameter: Parameter) -> bool:
        """Whether a parameter has a matrix rule."""
        if not parameter.trained:
            return False
        if self.rule.is_dense or parameter.kind == "vector":
            return False
        # with a core's settings they are projected from one side
        holds_experts = self.rule.holds_experts or self.rule.gradient == "core"
        if parameter.kind == "experts" and not holds_experts:
            return False
        if parameter.kind in ("embedding", "head") and self.target_modules != "all":
            return False
        return is_selected(parameter.name, self.target_modules, self.adamw_modules)

    def is_projected(self, parameter: Parameter) -> bool:
        """Whether its backward forms the projected gradient only."""
        return self._takes_projection and self._is_patched(parameter)

    def is_encoded(self, parameter: Parameter) -> bool:
        """Whether its weights are held in INT8."""
        able = self._takes_projection or self.rule.bases == "none"
        return self.weight_dtype == "int8" and able and self._is_patched(parameter)

    def _is_patched(self, parameter: Parameter) -> bool:
        patched = parameter.kind not in ("formed", "embedding") and self.projected_backward
        return patched and self.is_low_rank(parameter)

    @property
    def _takes_projection(self) -> bool:
        """Whether the rule takes projected gradients and gives updates in two factors."""
        return self.rule.gradient != "whole" and self.residual != "full"

    def is_transposed(self, parameter: Parameter) -> bool:
        """Whether a low-rank matrix is projected from the left: of experts by the side of their bases."""
        m, n = parameter.shape[-2:]
        experts = parameter.experts
        if experts is not None and self.rule.side == "chosen":
            return on_inputs(experts, self.basis_of(parameter)) == experts.is_transposed
        return self.rule.transposes(self.projection, m, n)

    def oriented(self, parameter: Parameter) -> tuple[int, int]:
        """(m, n) of a matrix, or of one of its matrices, as its rule sees it."""
        m, n = parameter.shape[-2:]
        return (n, m) if self.is_transposed(parameter) else (m, n)

    @property
    def is_lossy(self) -> bool:
        """Whether weights or states are held with fewer bits than the method's own default."""
        exact = self.state_dtype in ("auto", "fp32") and self.second_moment == "full"
        return not exact or (self.master_weights, self.weight_dtype) != ("fp32", "auto")

    @property
    def finds_bases(self) -> bool:
        """Whether bases are found in gradients and kept."""
        return self.rule.bases == "found" and not self.redrawn

    @property
    def can_be_full(self) -> bool:
        """Whether there are no bases that stay although they span everything: a core, or drawn from a seed."""
        return self.rule.becomes_full and not self.redrawn

    def basis_of(self, parameter: Parameter) -> ExpertBasis:
        """Bases of a weight's matrices: of experts ``auto`` until down projections, which alone have a choice, have chosen."""
        experts = parameter.experts
        if experts is None:
            return "shared"
        if self.expert_basis != "auto":
            return self.expert_basis
        if experts.role == "up" or self.rule.side != "chosen" or not self.finds_bases:
            return "shared"
        return dict(self.decided).get(parameter.name, "auto")

    def with_own_bases(self, parameter: Parameter, itemsize: int) -> OptimizerMode:
        """The mode of experts that share a basis, once they have decided for bases of their own.

        Args:
            itemsize: bytes of an element of bases.
        """
        rank, dtype = self.rank_of(parameter), self.states_dtype(parameter)
        sizes = (*self.oriented(parameter), parameter.num_matrices)
        own = own_rank(self.rule, rank, *sizes, dtype, itemsize)
        return replace(self, expert_basis="own", ranks=((parameter.name, own),))

    def num_bases(self, parameter: Parameter) -> int:
        """Bases of a low-rank matrix: of experts one, or one of each."""
        return parameter.num_matrices if self.basis_of(parameter) == "own" else 1

    def is_full(self, parameter: Parameter) -> bool:
        """Whether a low-rank matrix's basis would span everything: once it is found, there is none any more."""
        return self.can_be_full and self.rank_of(parameter) == self.oriented(parameter)[1]

    def updates_whole(self, parameter: Parameter) -> bool:
        """Whether the update of a low-rank matrix is formed whole instead of as two factors."""
        return not self._takes_projection or self.is_full(parameter)

    def backward(self) -> Projected | None:
        """Projected backward of the layers' linears, None without it."""
        if not self._takes_projection or not self.projected_backward:
            return None
        if self.rank is None or isinstance(self.rank, str):
            return None
        return Projected(
            self.rank,
            self.probes,
            cast(Literal["none", "probe"], self.residual),
            self.on_gpu,
            side="right" if self.projection == "two_sided" else self.projection,
            shared=self.share_basis,
            whole_at_full=self.can_be_full,
            expert_basis=self.expert_basis,
            own=tuple(name for name, basis in self.decided if basis == "own"),
            target_modules=self.target_modules,
            adamw_modules=self.adamw_modules,
            others=tuple((name, rank, self.probes_at(rank)) for name, rank in self.ranks),
        )

    def by_layers(self, shape: ModelShape) -> list[tuple[OptimizerMode, int]]:
        """Modes whose ``ranks`` have no layer's number in a name, and how many layers are of each."""
        ranks, decided = dict(self.ranks), dict(self.decided)
        own = by_layer(shape.names.layer, ranks | decided)
        if not own:
            return [(self, shape.layers)]
        numbered = {name for names in own.values() for name in names.values()}

        def of(names: Mapping[str, str]) -> OptimizerMode:
            """The mode of one layer, given its own names by those with ``*``."""
            return replace(
                self,
                ranks=_of_layer(ranks, names, numbered),
                decided=_of_layer(decided, names, numbered),
            )

        others = shape.layers - len(own)
        return [(of({}), others)] * bool(others) + [(of(names), 1) for names in own.values()]

    def rank_of(self, parameter: Parameter) -> int:
        """r of a low-rank matrix: its own, or that of all as far as the smaller side has it."""
        own = dict(self.ranks).get(parameter.name)
        return self._lowered(parameter) if own is None else own

    def _lowered(self, parameter: Parameter) -> int:
        m, n = parameter.shape[-2:]
        return self.rule.rank_at(self.rank, m, n)

    def states_dtype(self, parameter: Parameter) -> str:
        """Storage of a low-rank matrix's states, by the rank that is the largest candidate's where it is chosen."""
        rows, columns = self.oriented(parameter)
        return self.rule.states_dtype(self.state_dtype, rows, columns, self._lowered(parameter))

    def probes_at(self, rank: int) -> int:
        """See :func:`~hmt_deepspeed.planner.model.flops.probes_at`."""
        return probes_at(rank, self.probes, self.residual, self.on_gpu)


def _of_layer(
    given: Mapping[str, T], names: Mapping[str, str], numbered: Set[str]
) -> tuple[tuple[str, T], ...]:
    """What is given by name, as one layer has it: its own under names with ``*``, and what no other layer has alone."""
    kept = {name: value for name, value in given.items() if name not in numbered}
    own = {starred: given[name] for starred, name in names.items() if name in given}
    return tuple((kept | own).items())


_LEGAL: dict[str, tuple[object, ...]] = {
    "expert_basis": get_args(ExpertBasis),
    "projection": get_args(Projection),
    "residual": get_args(Residual),
    "state_dtype": get_args(StateDtype),
    "second_moment": get_args(SecondMoment),
    "master_weights": ("fp32", "none"),
    "weight_dtype": ("auto", "int8"),
}
