"""One step of a profiler trace (Chrome's JSON, as torch writes it): who worked on what, and when."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Bar", "StepTrace", "read_trace"]

KINDS = ("matrix products", "attention", "collectives", "copies", "other")
_WORDS = {  # in a lower-case name of an operation or kernel, the first that occurs decides
    "matrix products": ("gemm", "cutlass", "::mm", "addmm", "bmm", "linear", "matmul"),
    "attention": ("attention", "flash", "fmha"),
    "collectives": ("nccl", "gloo", "c10d", "all_reduce", "all_gather", "reduce_scatter"),
    "copies": ("memcpy", "copy_", "_to_copy"),
}
_PHASES = ("forward", "backward", "optimizer")  # the training loop's own annotations
_RESOLUTION = 1000  # pieces of a step's time that are told apart


@dataclass(frozen=True)
class Bar:
    """Work of one kind without a gap, in seconds from the step's start."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepTrace:
    """rows: bars by what worked ("phase", a CPU thread, a GPU stream), phases first."""

    seconds: float
    rows: Mapping[str, list[Bar]]


def read_trace(path: Path) -> StepTrace | None:
    """The last whole step of a trace; None where there is none.

    Raises:
        ValueError: the file is no trace.
    """
    if not path.is_file():
        return None
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no profiler trace ({error}); remove it") from error
    steps = [e for e in spans if e.get("cat") == "user_annotation" and e["name"] == "step"]
    if not steps:
        return None
    step = max(steps, key=lambda e: e["ts"])
    begin, seconds = step["ts"], step["dur"] / 1e6
    inside = [e for e in spans if begin <= e["ts"] < begin + step["dur"]]
    phases = [e for e in inside if e.get("cat") == "user_annotation" and e["name"] in _PHASES]
    rows = {"phase": [_bar(e, begin, e["name"]) for e in sorted(phases, key=lambda e: e["ts"])]}
    for (row, _), own in _by_place(inside).items():
        bars = _merged((_bar(e, begin, _kind(e["name"])) for e in own), seconds / _RESOLUTION)
        if sum(bar.end - bar.begin for bar in bars) > seconds / _RESOLUTION:
            rows[row if row not in rows else f"{row} ({len(rows)})"] = bars
    return StepTrace(seconds, rows)


def _by_place(spans: Iterable[Mapping[str, Any]]) -> dict[tuple[str, Any], list[Mapping[str, Any]]]:
    """Outermost spans by row, in order of time; an operation's inner operations are left out."""
    names = {"cpu_op": "CPU thread", "kernel": "GPU stream"}
    names |= {"gpu_memcpy": "GPU stream", "gpu_memset": "GPU stream"}
    places: dict[tuple[str, Any], list[Mapping[str, Any]]] = {}
    ends: dict[tuple[str, Any], float] = {}
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        if span.get("cat") not in names:
            continue
        place = names[span["cat"]], (span.get("pid"), span.get("tid"))
        if span["ts"] >= ends.get(place, float("-inf")):
            places.setdefault(place, []).append(span)
            ends[place] = span["ts"] + span["dur"]
    return places


def _bar(span: Mapping[str, Any], begin: float, kind: str) -> Bar:
    start = (span["ts"] - begin) / 1e6  # microseconds
    return Bar(kind, start, start + span["dur"] / 1e6)


def _kind(name: str) -> str:
    lower = name.lower()
    for kind, words in _WORDS.items():
        if any(word in lower for word in words):
            return kind
    return "other"


def _merged(bars: Iterable[Bar], piece: float) -> list[Bar]:
    """Bars of at least a piece of time: what fills most of a piece is its kind, unless it is mostly idle."""
    filled: dict[int, Counter[str]] = defaultdict(Counter)
    for bar in bars:
        index, at = int(bar.begin / piece), bar.begin
        while at < bar.end:
            until = min((index + 1) * piece, bar.end)
            filled[index][bar.kind] += max(until - at, 0.0)  # type: ignore[assignment]
            index, at = index + 1, max(until, at + piece * 1e-9)
    merged: list[Bar] = []
    for index in sorted(filled):
        kind, _ = filled[index].most_common(1)[0]
        if sum(filled[index].values()) < piece / 2:
            continue
        begin, end = index * piece, (index + 1) * piece
        if merged and merged[-1].kind == kind and begin - merged[-1].end < piece / 2:
            merged[-1] = Bar(kind, merged[-1].begin, end)
        else:
            merged.append(Bar(kind, begin, end))
    return merged
