"""What a run has left in its folder, read for a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmt_deepspeed.report.timeline import StepTrace, read_trace

__all__ = ["Run", "read_runs"]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of the folder; with parents where two folders have one name.
        records: lines of metrics.jsonl, in order of their steps.
        summary: summary.json; empty for a run that has not ended.
        trace: one traced step, where the run was traced.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    trace: StepTrace | None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the records that hold the number."""
        found = [(r["step"], r[name]) for r in self.records if isinstance(r.get(name), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def last(self, name: str) -> float | None:
        """The number in the last record that holds it."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def planned(self) -> Mapping[str, Mapping[str, Any]]:
        """By quantity: unit ("s" or "bytes"), predicted, measured, and why where that is None; empty where
        nothing was planned."""
        return self.summary.get("plan") or {}

    def per_matrix(self, name: str) -> tuple[list[int], list[str], list[list[float | None]]]:
        """(steps, matrices, values[matrix][step]) of a mapping by matrix."""
        records = [r for r in self.records if r.get(name)]
        matrices = list(dict.fromkeys(matrix for r in records for matrix in r[name]))
        values = [[r[name].get(matrix) for r in records] for matrix in matrices]
        return [r["step"] for r in records], matrices, values


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs in the order of their folders.

    Raises:
        ValueError: a folder that holds no metrics.jsonl, an empty one, or one that cannot be read.
    """
    paths = [Path(folder) for folder in folders]
    return [
        Run(name, _records(path / "metrics.jsonl"), _summary(path), read_trace(path / "trace.json"))
        for name, path in zip(_names(paths), paths, strict=True)
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{_repeated(map(str, paths))} is given twice; name each run once")


def _repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _records(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may still be being written."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no {path.name}; legal: the folder of a run of launch/run.py "
            "(--output_dir, by default below runs/)"
        )
    records: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is no metrics record ({error}); remove the line"
            ) from error
    if not records:
        raise ValueError(f"{path} has no step yet; wait for the run's first, or leave it out")
    return records


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error}); remove or restore it") from error
