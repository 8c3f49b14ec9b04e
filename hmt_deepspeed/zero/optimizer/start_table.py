"""The start table: rule, rank, bytes and storage of every parameter.

Parameters that are treated alike and have one shape are a row. Rows that are treated alike stand under one heading;
what is said of all of them is said once, above the table. 80 columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.settings.assign import left_dense
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.rules import MIN_INT8_ELEMENTS
from hmt_deepspeed.zero.bases.cache import describe_bases
from hmt_deepspeed.zero.offload.states import RamStates
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.optimizer.statistics import state_bytes
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["StartRow", "describe", "start_rows", "warning"]

_WIDTH = 80
_COLUMNS = ("shape", "tensors", "rank", "weights", "states", "masters")
_WIDTHS = (-23, 7, 11, 10, 10, 10)  # of the columns; negative: to the left


@dataclass(frozen=True)
class StartRow:
    """Parameters of one shape that are treated alike.

    Attributes:
        treatment: what is said of them, rule and reason first. shape: as it is written, "any" of dense ones that do not
            have three dimensions.
        rank: as it is written: one, or the first and last candidate. num_tensors: how many there are.
        weight_bytes, state_bytes, master_bytes: of all of them on this rank.
    """

    treatment: tuple[str, ...]
    shape: str
    rank: str
    num_tensors: int = 0
    weight_bytes: int = 0
    state_bytes: int = 0
    master_bytes: int = 0


def start_rows(zero: ZeroState) -> list[StartRow]:
    """Rows in the order of the parameters. Every parameter is in one: nothing is silently dense."""
    alike: dict[StartRow, list[ParamState]] = defaultdict(list)
    numbers = {id(group): index for index, group in enumerate(zero.param_groups)}
    for param_state in zero.param_states:
        group = [f"group {numbers[id(param_state.group)]}"] if len(numbers) > 1 else []
        treatment = (*_rule(param_state), *group, *_storage(zero, param_state))
        alike[StartRow(treatment, _shape(param_state), _rank(param_state))].append(param_state)
    return [
        replace(
            row,
            num_tensors=len(param_states),
            weight_bytes=sum(param_state.weight.weight_bytes() for param_state in param_states),
            state_bytes=sum(map(state_bytes, param_states)),
            master_bytes=sum(param_state.weight.master_bytes() for param_state in param_states),
        )
        for row, param_states in alike.items()
    ]


def describe(zero: ZeroState) -> str:
    """The table, and a line each for a budget of ranks, states off the device and bases in host memory.

    Args:
        zero: states of the optimizer.
    """
    rows = start_rows(zero)
    common = (
        [w for w in rows[0].treatment if all(w in row.treatment for row in rows)] if rows else []
    )
    settings, world = zero.settings, zero.collectives.world
    ranks = f"{world} rank" + "s" * (world > 1)
    told = [f"hmt: ZeRO stage {settings.stage}, {ranks}, bytes per rank", *common]
    lines = [_wrapped(told), _line(_COLUMNS)]

    def heading(row: StartRow) -> tuple[str, ...]:
        return tuple(words for words in row.treatment if words not in common)

    order = {words: index for index, words in enumerate(dict.fromkeys(map(heading, rows)))}
    rows.sort(key=lambda row: order[heading(row)])
    for words, treated_alike in groupby(rows, heading):
        lines += [_wrapped(words)] if words else []
        lines += [_line(_cells(row)) for row in treated_alike]
    if len(rows) > 1:
        lines += ["all", _line(_cells(_sum(rows)))]
    lines += _budget(zero)
    if zero.host is not None:
        assert settings.host is not None
        overlap = f"offload_optimizer, overlap {settings.host.overlap}"
        lines.append(_wrapped([overlap, *zero.host.describe()]))
    if zero.bases.cache is not None:
        lines.append(_wrapped(describe_bases(zero.bases, zero.low_rank)))
    return "\n".join(lines)


def _budget(zero: ZeroState) -> list[str]:
    """Bytes that the ranks may take together and those that they take; on all ranks of the job, as the rule counts."""
    found = []
    for number, groups in enumerate(zero.all_basis_groups):
        budget = groups.policy.rank_budget
        if budget is not None:
            whose = " of experts" if number else ""
            most, now = format_bytes(budget), format_bytes(groups.policy.taken_bytes())
            found.append(
                f"rank_budget: moments and bases{whose} may take {most} on all ranks, {now} now"
            )
    return found


def _wrapped(words: Iterable[str]) -> str:
    """In lines that end between words, where they fit a line at all."""
    first, *others = words
    lines = [first]
    for word in others:
        is_full = len(lines[-1]) + len("; ") + len(word) >= _WIDTH  # another may follow
        lines[-1] += ";" if is_full else f"; {word}"
        lines += [f"    {word}"] * is_full
    return "\n".join(lines)


def _sum(rows: Sequence[StartRow]) -> StartRow:
    return StartRow(
        (),
        "any",
        "-",
        sum(row.num_tensors for row in rows),
        sum(row.weight_bytes for row in rows),
        sum(row.state_bytes for row in rows),
        sum(row.master_bytes for row in rows),
    )


def _cells(row: StartRow) -> tuple[str, ...]:
    held = (row.weight_bytes, row.state_bytes, row.master_bytes)
    sizes = (format_bytes(count) if count else "-" for count in held)
    return row.shape, f"{row.num_tensors:,}", row.rank, *sizes


def _line(cells: tuple[str, ...]) -> str:
    padded = (
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, width in zip(cells, _WIDTHS, strict=True)
    )
    return "  " + " ".join(padded)


def _rule(param_state: ParamState) -> list[str]:
    """The rule and why; of a matrix the projected side and what its backward makes."""
    reason = param_state.assignment.reason
    told = [f"{param_state.assignment.rule}: {reason}" if reason else param_state.assignment.rule]
    matrix, settings = param_state.matrix, param_state.assignment.settings
    rate = param_state.assignment.lr_scale
    if matrix is not None and settings is not None and settings.beside_ratio != 1:
        rate *= matrix.scale
    told += [] if rate == 1 else [f"learning rate x {rate:g}"]
    if matrix is None or settings is None:
        return told
    if settings.rule.gradient == "core":
        told.append("projection two-sided")
    elif matrix.takes_bases:
        told.append(f"projection {'left' if matrix.transposed else 'right'}")
    told += ["random basis"] * matrix.redraws
    if matrix.count > 1 and matrix.takes_bases and isinstance(matrix, ProjectedMatrix):
        kind = "a basis of each expert" if matrix.own_bases else "one basis of all experts"
        told.append(kind + " until a gradient decides" * matrix.undecided)
    wanted = settings.lowered_from(*matrix.shape)
    told += [] if wanted is None else [f"rank lowered from {wanted}"]
    projected = settings.takes_projection and param_state.gradient.linear is not None
    return [*told, "projected backward" if projected else "full gradient"]


def _shape(param_state: ParamState) -> str:
    shape = param_state.assignment.shape
    written = "x".join(map(str, shape))
    if param_state.matrix is None:
        return written if len(shape) == 3 else "any"
    return f"experts {written}" if len(shape) == 3 else written


def warning(zero: ZeroState) -> str:
    """See :func:`~hmt_deepspeed.optim.settings.assign.left_dense`."""
    return left_dense([param_state.assignment for param_state in zero.param_states])


def _rank(param_state: ParamState) -> str:
    """The rank, or the first and the last candidate that it is chosen from."""
    if param_state.matrix is None:
        return "-"
    first, last = param_state.matrix.candidates[0], param_state.matrix.candidates[-1]
    return f"{first}..{last}" if first < last else str(first)


def _storage(zero: ZeroState, param_state: ParamState) -> list[str]:
    """Dtypes of weights, states and masters, and where they are."""
    masters = "" if param_state.weight.has_master else ", no masters"
    weights = f"{param_state.weight.kind} weights{masters}"
    return [
        weights,
        _states(param_state, zero.options["state_dtype"]),
        _placement(param_state),
    ]


def _states(param_state: ParamState, wanted: str) -> str:
    """Storage of the moments; small tensors stay in fp32, and the table says so."""
    if param_state.matrix is not None:
        stored = param_state.matrix.state_dtype
    else:
        assert param_state.dense_state is not None
        stored = str(param_state.dense_state[0].dtype)
    settings = param_state.assignment.settings
    told = f"{stored} states"
    told += f", {settings.rule.note}" if settings is not None and settings.rule.note else ""
    if stored == (
        settings.rule.wanted_states(wanted) if settings else wanted.replace("auto", "fp32")
    ):
        return told
    is_vector = len(param_state.assignment.shape) == 1
    return f"{told} ({'a vector' if is_vector else f'under {MIN_INT8_ELEMENTS} elements'})"


def _placement(param_state: ParamState) -> str:
    world = param_state.gradient.shards.world
    part = "whole" if world == 1 else f"1/{world} of rows"
    if not isinstance(param_state.weight, HostWeight):
        return part
    home = "host" if isinstance(param_state.weight.states, RamStates) else "SSD"
    return f"{part}, on {home}" if param_state.matrix is None else f"{part}, masters on {home}"
