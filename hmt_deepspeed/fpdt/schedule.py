"""The order of chunks: when each pair is computed, which units are fetched before it and released after it.

FPDT's three roles (compute, fetch, release; 2408.16978, section 4) as plain data. A fetch is for the pair
that follows, so that it runs beside the computation of this one: two buffers of each kind, never more,
however many chunks there are.

Units that travel: ``kv`` is one chunk's keys and values; ``query`` is all that backward needs of one chunk
of queries: Q, O, dO, log-sum-exp and the sum of dQ so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Step", "Unit", "backward_steps", "forward_steps", "most_resident", "seen_by"]


class Unit(NamedTuple):
    kind: Literal["kv", "query"]
    chunk: int


@dataclass(frozen=True)
class Step:
    """One pair of chunks.

    Attributes:
        query, key: the chunks.
        needs: units on the device while it is computed.
        fetch: units whose copies to the device start before it is computed.
        release: units that leave the device after it.
        last: no further pair of the outer loop's chunk follows.
    """

    query: int
    key: int
    needs: tuple[Unit, ...]
    fetch: tuple[Unit, ...]
    release: tuple[Unit, ...]
    last: bool


def seen_by(num_chunks: int, sees: Callable[[int, int], bool]) -> list[list[int]]:
    """For each chunk of queries the earlier chunks with keys that it sees, ascending."""
    return [[key for key in range(query) if sees(query, key)] for query in range(num_chunks)]


def forward_steps(query: int, keys: Sequence[int]) -> list[Step]:
    """Pairs of one chunk of queries, whose own keys and values are on the device already.

    Its own pair comes first, so that the first fetch runs beside it.
    """
    order = [query, *keys]
    steps = []
    for place, key in enumerate(order):
        fetch = tuple(Unit("kv", chunk) for chunk in order[place + 1 : place + 2])
        unit = Unit("kv", key)
        steps.append(Step(query, key, (unit,), fetch, (unit,), last=key == order[-1]))
    return steps


def backward_steps(keys: Sequence[Sequence[int]]) -> tuple[tuple[Unit, ...], list[Step]]:
    """Pairs of the whole backward, chunks of keys outside, chunks of queries i >= j inside.

    The units of the first pair have to be fetched before it. After the last step of key chunk j, dK_j,
    dV_j and dQ_j are final. A unit that the next pair needs again stays.

    Args:
        keys: see :func:`seen_by`.
    """
    pairs = [
        (key, query)
        for key in range(len(keys))
        for query in range(key, len(keys))
        if query == key or key in keys[query]
    ]
    steps = []
    for place, (key, query) in enumerate(pairs):
        now = _backward_needs(key, query)
        after = _backward_needs(*pairs[place + 1]) if place + 1 < len(pairs) else ()
        last = place + 1 == len(pairs) or pairs[place + 1][0] != key
        fetch = tuple(unit for unit in after if unit not in now)
        release = tuple(unit for unit in now if unit not in after)
        steps.append(Step(query, key, now, fetch, release, last))
    return _backward_needs(*pairs[0]), steps


def _backward_needs(key: int, query: int) -> tuple[Unit, Unit]:
    return Unit("kv", key), Unit("query", query)


def most_resident(steps: Sequence[Step], first: Sequence[Unit] = ()) -> dict[str, int]:
    """The most units of each kind that are on the device, or on their way to it, at once.

    Raises:
        ValueError: a unit is fetched twice, computed without, or released without having been there.
    """
    resident = {*first}
    most = {"kv": 0, "query": 0}
    for step in steps:
        if resident & set(step.fetch):
            raise ValueError(f"{step} fetches what is there")
        resident |= set(step.fetch)
        if not set(step.needs) <= resident or not set(step.release) <= resident:
            raise ValueError(f"{step} uses what is not there")
        for kind in most:
            most[kind] = max(most[kind], sum(unit.kind == kind for unit in resident))
        resident -= set(step.release)
    return most
