"""What a case found: measurements held against targets, kept as JSON and shown as Markdown."""

from __future__ import annotations

import json
import operator
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hmt_deepspeed.report.metrics import machine_info, write_summary

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEADERS = ("case", "measured", "value", "quartiles", "target", "reached")
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class Measurement:
    """One number and, where the issue names one, its target.

    label: what was compared, and at what size. unit: "x" (a ratio of times or speeds), "share",
    "bytes", "s", "error", "tokens/s", "steps", "launches". spread: quartiles over rounds. note: how
    to read it.
    """

    label: str
    value: float
    unit: str
    relation: str = ""
    target: float | None = None
    spread: tuple[float, float] | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return _RELATIONS[self.relation](self.value, self.target)

    def record(self, toy: bool) -> dict[str, Any]:
        """For the JSON. At toy sizes a target means nothing, so none is judged."""
        return {
            "label": self.label,
            "value": self.value,
            "unit": self.unit,
            "relation": self.relation,
            "target": self.target,
            "reached": None if toy else self.reached,
            "spread": self.spread,
            "note": self.note,
        }


@dataclass
class CaseResult:
    """Measurements, the settings that they hold for, and raw samples by contender.

    dtype: (name, reason) of a case that does not follow the suite's.
    """

    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    dtype: tuple[str, str] | None = None


def machine() -> dict[str, Any]:
    """`machine_info` and what decides how fast the arithmetic is."""
    cuda = torch.cuda.is_available()
    return {
        **machine_info(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }


def machine_slug(info: Mapping[str, Any]) -> str:
    """A folder name: "2-cores-intel-r-xeon-r-cpu-2-20ghz-bf16", or the GPU's name."""
    if info["gpus"]:
        name = f"{info['gpus']}x {info['device']}"
    else:
        name = f"{info['cpu_cores']} cores {info['cpu']} {'bf16' if info['cpu_bf16'] else ''}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def load_average() -> list[float]:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else []


def case_record(
    result: CaseResult,
    setting: Mapping[str, Any],
    seconds: float,
    load_before: list[float],
) -> dict[str, Any]:
    """One entry of `cases`: enough to judge and to repeat it without the rest of the file."""
    script = os.path.relpath(sys.argv[0])
    dtype, reason = result.dtype or (setting["dtype"], setting["dtype_reason"])
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run_seconds": seconds,
        "threads": torch.get_num_threads(),
        "load_average_before": load_before,
        "machine": machine(),
        **setting,
        "dtype": dtype,
        "dtype_reason": reason,
        "settings": result.settings,
        "measurements": [m.record(setting["toy"]) for m in result.measurements],
        "samples": result.samples,
    }


def add_case(folder: Path, suite: str, name: str, record: Mapping[str, Any]) -> Path:
    """Put a case into `folder/SUITE.json` in place of its last run, and write the table beside it."""
    path = folder / f"{suite}.json"
    report: dict[str, Any] = {"suite": suite, "cases": {}}
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    report["cases"][name] = record
    write_summary(path, report)
    text = f"# {suite}\n\n{markdown(json.loads(path.read_text(encoding='utf-8')))}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return path


def samples_of(folder: Path, suite: str, name: str) -> dict[str, Any]:
    """Samples of a case's last run; none where it has not run."""
    path = folder / f"{suite}.json"
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    return dict(cases[name]["samples"]) if name in cases else {}


# -- Markdown ---------------------------------------------------------------------------------------


def markdown(report: Mapping[str, Any]) -> str:
    """A report as text: where it was measured, how to repeat it, one line per measurement."""
    cases: dict[str, Any] = report["cases"]
    commands = sorted({case["command"] for case in cases.values()})
    lines = ["Measured on:", "", *_origins(cases), ""]
    lines += ["Commands:", "", *(f"- `{command}`" for command in commands), ""]
    lines += [_row(HEADERS), _row(["---"] * len(HEADERS))]
    notes: list[str] = []
    for name, case in cases.items():
        for measured in case["measurements"]:
            mark = ""
            if measured["note"]:
                if measured["note"] not in notes:
                    notes.append(measured["note"])
                mark = f" ({notes.index(measured['note']) + 1})"
            lines.append(_row([name, measured["label"] + mark, *_cells(measured)]))
    lines += ["", *(f"{i}. {note}" for i, note in enumerate(notes, 1))] if notes else []
    return "\n".join(lines)


def headlines(reports: Mapping[Path, Mapping[str, Any]]) -> str:
    """What has a target, of all reports in one table; the files beside the reports hold the rest."""
    origins: dict[str, list[str]] = {}
    rows = []
    for path, report in reports.items():
        for name, case in report["cases"].items():
            claims = [m for m in case["measurements"] if m["target"] is not None]
            rows += [_row([path.stem, name, m["label"], *_cells(m)]) for m in claims]
            if claims:
                origins.setdefault(_origin(case), []).append(name)
    lines = ["Measured on:", "", *_origin_lines(origins), ""]
    lines += [_row(["suite", *HEADERS]), _row(["---"] * (len(HEADERS) + 1)), *rows, ""]
    files = []
    for path in reports:
        page = os.path.relpath(path.with_suffix(".md"), RESULTS.parent)  # from launch/README.md
        files.append(f"[{path.parent.name} {path.stem}]({page})")
    lines.append(f"All rows, with notes and the commands that repeat them: {', '.join(files)}.")
    return "\n".join(lines)


def _origins(cases: Mapping[str, Any]) -> list[str]:
    """One line per machine, versions and dtype, with the cases that they hold for."""
    held: dict[str, list[str]] = {}
    for name, case in cases.items():
        held.setdefault(_origin(case), []).append(name)
    return _origin_lines(held)


def _origin_lines(held: Mapping[str, list[str]]) -> list[str]:
    return [f"- {origin}: {', '.join(names)}" for origin, names in held.items()]


def _origin(case: Mapping[str, Any]) -> str:
    info = case["machine"]
    cpu = f"{info['cpu']} ({info['cpu_cores']} cores, {info['cpu_capability']})"
    where = info["device"] if info["gpus"] else cpu
    versions = ", ".join(f"{name} {info[name]}" for name in ("torch", "deepspeed", "transformers"))
    return f"{where}; {versions}; {case['dtype']} ({case['dtype_reason']})"


def _cells(measured: Mapping[str, Any]) -> list[str]:
    unit, target = measured["unit"], measured["target"]
    between = measured["spread"]
    reached = {True: "yes", False: "no", None: ""}[measured["reached"]]
    return [
        _number(measured["value"], unit),
        "" if between is None else f"{_number(between[0], unit)} to {_number(between[1], unit)}",
        "" if target is None else f"{measured['relation']} {_number(target, unit)}",
        reached,
    ]


def _number(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.2f}×"
    if unit == "bytes":
        return f"{value:,.0f} B"
    if unit == "share":
        return f"{value:.4f}"
    return f"{value:.4g} {unit}".strip()


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
