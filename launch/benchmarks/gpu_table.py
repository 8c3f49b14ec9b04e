"""What the contenders of the GPU suite reached, as a table of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import peak_flops, utilization

__all__ = ["gpu_table"]

_HEADER = (
    "model",
    "contender",
    "sequences x tokens",
    "tokens/s",
    "refreshes",
    "peak memory",
    "MFU",
)


def gpu_table(folder: Path) -> str:
    """Every result of the suite below a folder, a part for each GPU. Refreshes are shares of a mean step."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    for path in sorted(folder.glob("*/gpu.json")):
        for size, case in json.loads(path.read_text(encoding="utf-8"))["cases"].items():
            for key, found in case["samples"].items():
                rows.setdefault(found["gpu"], []).append((size, *_cells(key, found)))
    lines: list[str] = []
    for gpu, own in rows.items():
        lines += [f"On one {gpu}:", "", f"| {' | '.join(_HEADER)} |", "|---" * len(_HEADER) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in own] + [""]
    return "\n".join(lines).strip()


def _cells(key: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield key.partition(", micro-batch")[0]
    if "seconds" not in found:
        yield from ("", found.get("skipped") or "out of memory", "", "", "")
        return
    yield f"{found['micro_batch']} x {found['sequence']}"
    yield f"{found['tokens_per_second']:,.0f}"
    yield f"{found['refresh_seconds'] / (found['seconds'] + found['refresh_seconds']):.1%}"
    yield f"{found['device_bytes'] / 2**30:.1f} GiB"
    peak = peak_flops(found["gpu"])
    yield "" if peak is None else f"{utilization(found, peak):.0%}"
