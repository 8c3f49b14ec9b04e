"""Bytes of weights, gradients, masters and optimizer states on one rank.

They follow ZeRO (1910.02054, section 5): stage 1 divides masters and optimizer states over the ranks,
stage 2 gradients too, stage 3 weights too. HMT's states are those of ``optim``: what is divided are rows of
a matrix, so a rank holds every row that its flat part touches, and a row that two ranks touch is held by
both. Of experts a rank holds whole ones, or where it shares one with others some of its rows. The numbers are those of
the rank that holds most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from hmt_deepspeed.planner.model.shapes import ModelShape, Parameter, num_parameters, parameters
from hmt_deepspeed.planner.run.modes import REPLICATED, OptimizerMode, Sharding
from hmt_deepspeed.rules import (
    DENSE,
    STATE_BLOCK,
    State,
    dense_states_dtype,
    rule_of,
    stored_bytes,
)

__all__ = [
    "ModelStates",
    "borrowers",
    "communication_volume",
    "gradient_columns",
    "held_rows",
    "kept_bytes",
    "model_states",
    "most_rows",
    "parameters_by_mode",
    "projection_bytes",
    "states_by_parameter",
]

FP32 = 4


@dataclass(frozen=True)
class ModelStates:
    """Bytes of the model's states on the rank that holds most, between two steps.

    Attributes:
        weights: as computed with. gradients: accumulated over a window. masters: fp32 copies of 16-bit weights.
        moments: the optimizer's, with scales and evidence. bases: of low-rank matrices. probes: columns
            beside the bases, redrawn every step; and bases that experts may come to have.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    bases: int
    probes: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def optimizer(self) -> int:
        """Bytes that the optimizer reports: masters, moments and bases."""
        return self.masters + self.moments + self.bases


def model_states(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding = REPLICATED,
    *,
    itemsize: int = 2,
    gradient_itemsize: int | None = None,
) -> ModelStates:
    """Bytes of weights, gradients, masters and optimizer states on one rank.

    Args:
        itemsize: of the weights. gradient_itemsize: of accumulated gradients, None for that of the weights.

    Raises:
        ValueError: int8 weights at stage 3.
    """
    if mode.weight_dtype == "int8" and sharding.stage == 3:
        raise ValueError(
            "hmt.optimizer.weight_dtype is 'int8' at ZeRO stage 3; legal: stages 0, 1 and 2, since every "
            "rank holds all codes. Lower the stage, or use 'auto'."
        )
    sizes = dict.fromkeys((field.name for field in fields(ModelStates)), 0)
    for parameter, found in states_by_parameter(
        shape, mode, sharding, itemsize=itemsize, gradient_itemsize=gradient_itemsize
    ):
        for kind, nbytes in found.items():
            sizes[kind] += parameter.count * nbytes
    return ModelStates(**sizes)


def states_by_parameter(
    shape: ModelShape,
    mode: OptimizerMode,
    sharding: Sharding = REPLICATED,
    *,
    itemsize: int = 2,
    gradient_itemsize: int | None = None,
) -> Iterator[tuple[Parameter, dict[str, int]]]:
    """(parameter, its bytes by the names of :class:`ModelStates`), of one of its equal layers."""
    borrowing = borrowers(shape, mode)
    each = gradient_itemsize or itemsize
    for parameter, own in parameters_by_mode(shape, mode):
        borrows = parameter.name in borrowing
        sizes = dict.fromkeys((field.name for field in fields(ModelStates)), 0)
        yield parameter, sizes | dict(_states_of(parameter, own, sharding, itemsize, each, borrows))


def parameters_by_mode(
    shape: ModelShape, mode: OptimizerMode
) -> Iterator[tuple[Parameter, OptimizerMode]]:
    """Every parameter with the mode of its layers: more than once where layers have ranks of their own.

    Experts have no r x r core: with ``two_sided`` they are projected from one side.
    """
    layers = mode.by_layers(shape) if mode.ranks else []
    for parameter in parameters(shape):
        is_of_layers = bool(layers) and parameter.name.startswith(shape.names.layer)
        for own, count in layers if is_of_layers else [(mode, parameter.count)]:
            if parameter.experts is not None and own.rule.gradient == "core":
                own = replace(own, projection="right")
            yield replace(parameter, count=count), own


def borrowers(shape: ModelShape, mode: OptimizerMode) -> set[str]:
    """Names of the matrices that project on the basis of the first that reads their input."""
    names = shape.names
    sharing = (*names.qkv[1:], *names.up[1:]) if mode.share_basis else ()
    return {f"{names.layer}.{name}.weight" for name in sharing}


@lru_cache(maxsize=4096)  # asked for again at every batch and length of a search
def _states_of(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    gradient_itemsize: int,
    borrows: bool,
) -> Mapping[str, int]:
    """Bytes by kind of one parameter."""
    encoded = mode.is_encoded(parameter)
    keeps = mode.host_is_ours if itemsize == FP32 else mode.master_weights == "fp32"
    masters = keeps and not encoded
    if not parameter.trained:
        return {"weights": _part(parameter.numel, sharding.ranks(3)) * itemsize}
    sizes = {
        "weights": _part(parameter.numel, sharding.ranks(3)) * itemsize,
        "masters": _part(parameter.numel, sharding.ranks(1)) * FP32 if masters else 0,
    }
    if encoded:
        rows, columns = parameter.shape[-2:]
        of_row = columns + -(-columns // STATE_BLOCK) * FP32
        sizes["weights"] = parameter.num_matrices * rows * of_row
    if mode.is_low_rank(parameter):
        given = (sharding, itemsize, gradient_itemsize)
        found = _matrix_states(parameter, mode, *given, borrows)
        if mode.basis_of(parameter) == "auto":
            found |= _fuller(parameter, mode, found, *given)
        return sizes | found
    dtype = dense_states_dtype(mode.state_dtype, parameter.shape)
    each = stored_bytes(_part(parameter.numel, sharding.ranks(1)), dtype)
    return sizes | {
        "gradients": _part(parameter.numel, sharding.ranks(2)) * gradient_itemsize,
        "moments": len(rule_of(DENSE).states) * each,
    }


def _part(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def most_rows(rows: int, columns: int, ranks: int) -> int:
    """Most rows that a rank's flat part of ``ceil(rows columns / ranks)`` elements touches."""
    part = _part(rows * columns, ranks)
    starts = range(0, rows * columns, part)
    ends = (min(start + part, rows * columns) for start in starts)
    return max(
        -(-end // columns) - start // columns for start, end in zip(starts, ends, strict=True)
    )


def held_rows(parameter: Parameter, mode: OptimizerMode, ranks: int) -> tuple[int, int]:
    """(matrices, rows of each) that the rank with most holds of a low-rank matrix, or of several."""
    rows, columns = mode.oriented(parameter)
    if parameter.num_matrices == 1:
        return 1, most_rows(rows, columns, ranks)
    sharing = max(1, ranks // parameter.num_matrices)
    return _part(parameter.num_matrices, ranks), _part(rows, sharing)


def _matrix_states(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    gradient_itemsize: int,
    borrows: bool,
) -> dict[str, int]:
    """Gradients, moments, bases and probes of one matrix.

    Args:
        borrows: it projects on the basis of another.
    """
    _, columns = gradient_columns(parameter, mode)
    matrices, rows = held_rows(parameter, mode, sharding.ranks(2))
    basis, probes = (0, 0) if borrows else projection_bytes(parameter, mode, sharding, itemsize)
    kept = kept_bytes(parameter, mode, sharding, itemsize)
    beside = sum(size for state, size in kept.items() if state.stored == "model")
    return {
        "gradients": matrices * rows * columns * gradient_itemsize,
        "moments": sum(kept.values()) - beside,
        "bases": basis + beside,
        "probes": probes,
    }


def _fuller(
    parameter: Parameter,
    mode: OptimizerMode,
    shared: Mapping[str, int],
    sharding: Sharding,
    itemsize: int,
    gradient_itemsize: int,
) -> dict[str, int]:
    """Gradients and probes of experts that have not decided what bases they have: now, with those proposed beside the shared
    one, or with these, whichever takes more. Moments and bases then take no more than now."""
    later = mode.with_own_bases(parameter, itemsize)
    own = _matrix_states(parameter, later, sharding, itemsize, gradient_itemsize, False)
    columns, rank = later.oriented(parameter)[1], later.rank_of(parameter)
    proposed = parameter.num_matrices * columns * rank * itemsize
    now = {"gradients": shared["gradients"], "probes": shared["probes"] + proposed}
    after = {kind: own[kind] for kind in now}
    return max(now, after, key=lambda sizes: sum(sizes.values()))


def kept_bytes(
    parameter: Parameter,
    mode: OptimizerMode,
    sharding: Sharding,
    itemsize: int,
    *,
    in_fp32: bool = False,
) -> dict[State, int]:
    """Bytes of a low-rank matrix's states, its basis not counted, on the rank that holds most.

    Args:
        itemsize: of the weights. in_fp32: states as they are saved, not as they are held.
    """
    columns = mode.oriented(parameter)[1]
    matrices, rows = held_rows(parameter, mode, sharding.ranks(1))
    rank, dtype = mode.rank_of(parameter), "fp32" if in_fp32 else mode.states_dtype(parameter)
    return {
        state: matrices * state.nbytes(rows, columns, rank, dtype, itemsize)
        for state in mode.rule.states
        if not (state.stored == "model" and mode.redrawn)
    }


def projection_bytes(
    parameter: Parameter, mode: OptimizerMode, sharding: Sharding, itemsize: int
) -> tuple[int, int]:
    """Bytes of a low-rank matrix's (basis of its columns, probes beside it) on one rank.

    Stage 3 shards the rows of both over ranks where backward is projected, but for those that backward itself
    needs and those of experts. None where nothing is stored: full rank, and bases drawn from a seed.
    """
    if not mode.finds_bases or mode.is_full(parameter):
        return 0, 0
    n, rank = mode.num_bases(parameter) * mode.oriented(parameter)[1], mode.rank_of(parameter)
    dealt = mode.is_projected(parameter) and not mode.is_transposed(parameter)
    probes = 0 if mode.residual == "full" else gradient_columns(parameter, mode)[1] - rank
    if sharding.stage == 3 and dealt and parameter.num_matrices == 1:
        n = _part(n, sharding.world_size)
    return n * rank * itemsize, n * probes * itemsize


def gradient_columns(parameter: Parameter, mode: OptimizerMode) -> tuple[int, int]:
    """(rows, columns) of the gradient that accumulates of a low-rank matrix; of experts, all their rows."""
    m, n = mode.oriented(parameter)
    rows = parameter.num_matrices * m
    if mode.updates_whole(parameter):
        return rows, n
    rank = mode.rank_of(parameter)
    return rows, rank + min(mode.probes_at(rank), n - rank)


def communication_volume(shape: ModelShape, sharding: Sharding) -> int:
    """Elements that a rank sends per step with AdamW (1910.02054, section 7), for many ranks.

    An all-reduce of the gradients, or a reduce-scatter of them and a gather of the weights: 2 Psi. Stage 3
    gathers the weights in forward and in backward: 3 Psi.
    """
    if sharding.world_size == 1:
        return 0
    return (3 if sharding.stage == 3 else 2) * num_parameters(shape)
