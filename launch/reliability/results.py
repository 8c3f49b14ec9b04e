"""What a case counted and what failed, as JSON, and as a table."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import machine
from hmt_deepspeed.report.metrics import write_summary

__all__ = ["HEADERS", "CaseReport", "markdown", "write_case"]

HEADERS = ("case", "what was tried", "found", "failed")


@dataclass
class CaseReport:
    """What a case found.

    Attributes:
        tried: in words, with sizes. counts: how often what happened, in words. failures: what must not
            have happened, with what is needed to repeat it. details: further numbers, for the JSON only.
    """

    tried: str
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def write_case(folder: Path, name: str, report: CaseReport, seconds: float, seed: int) -> Path:
    """``folder/NAME.json``: the report, the command, the machine."""
    path = folder / f"{name}.json"
    record = {
        "case": name,
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run_seconds": seconds,
        "seed": seed,
        "machine": machine(),
        "tried": report.tried,
        "counts": report.counts,
        "failures": report.failures,
        "details": report.details,
    }
    write_summary(path, record)
    return path


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a case."""
    lines = ["| " + " | ".join(HEADERS) + " |", "| " + " | ".join(["---"] * len(HEADERS)) + " |"]
    for record in records:
        found = "; ".join(f"{times} {what}" for what, times in record["counts"].items())
        cells = [record["case"], record["tried"], found, str(len(record["failures"]))]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All cases below the machines' folders, by name."""
    paths = sorted(folder.glob("*/stress/*.json"), key=lambda path: path.name)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
