"""Numbers of a run: memory, utilisation, `metrics.jsonl`, `summary.json`, plain tables."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import psutil

MATRIX_INTERVAL = 10  # steps between records that also carry the values of every single matrix


class Accelerator(Protocol):
    """The part of a DeepSpeed-like accelerator object that memory readings need."""

    def device_name(self, device_index: int | None = None) -> str: ...
    def memory_allocated(self, device_index: int | None = None) -> int: ...
    def max_memory_allocated(self, device_index: int | None = None) -> int: ...


class DeviceMemory(NamedTuple):
    """Bytes of training memory; `device` says what was read ("cuda:0", or "cpu (process RSS)")."""

    device: str
    allocated: int
    peak: int


def host_bytes() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_host_bytes() -> int:
    """Highest resident bytes of this process.

    Linux keeps it per address space as VmHWM; `ru_maxrss` would also count what the launcher
    that forked us had resident, so it is only the way out where /proc is missing.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory(accelerator: Accelerator | None = None) -> DeviceMemory:
    """Bytes on the accelerator; on a CPU (or without one) the process's resident bytes."""
    if accelerator is None or accelerator.device_name() == "cpu":
        return DeviceMemory("cpu (process RSS)", host_bytes(), peak_host_bytes())
    return DeviceMemory(
        accelerator.device_name(),
        int(accelerator.memory_allocated()),
        int(accelerator.max_memory_allocated()),
    )


def model_flops_per_token(
    num_parameters: int, num_layers: int, attention_width: int, seq_length: int
) -> float:
    """FLOPs of ordinary training per token: 6 N + 12 L H Q T (PaLM, 2204.02311, appendix B).

    Attention counts all pairs of tokens, masked or not; nothing counts twice for being computed again.

    Args:
        num_parameters: N, without tables that tokens are only looked up in.
        attention_width: H Q, heads times the channels of one.
    """
    return 6.0 * num_parameters + 12.0 * num_layers * attention_width * seq_length


def flops_utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Part of a device's peak (FLOP/s) that `flops` in `seconds` are.

    MFU for the FLOPs of ordinary training, which may be more than were computed: a projected backward and a
    causal kernel leave some out. HFU for those computed, never above 1 on a device with that peak.
    """
    if not peak_flops > 0:
        raise ValueError(f"peak_flops is {peak_flops}; give the device's peak FLOP/s, above 0")
    return flops / seconds / peak_flops


def machine_info() -> dict[str, Any]:
    """Processor, cores, memory and the versions that decide how fast and how exact a run is."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "deepspeed", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **versions,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class MetricsWriter:
    """`metrics.jsonl`: one JSON object a line, one line a step, on disk as soon as it is written.

    A new run starts an empty file. With `resume_step` the lines up to and including that step
    stay and the rest (steps that the interrupted run did after its checkpoint, or a line it did
    not finish) are dropped, so the file reads as if the run had never stopped.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else _lines_up_to(self.path, resume_step)
        _write_atomic(self.path, "".join(kept))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`, which must hold an integer "step"."""
        if not isinstance(record.get("step"), int):
            raise ValueError(
                f"a metrics record needs an integer 'step', got {record.get('step')!r}"
            )
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not line.endswith("\n") or record["step"] > step:
            break
        kept.append(line)
    return kept


def monitor_events(record: Mapping[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Events (name, value, samples) for DeepSpeed's monitors: every number of a metrics record.

    Numbers of a mapping, such as one per matrix, get its name and their own: "HMT/rank_per_matrix/NAME".
    """
    events = []
    for name, value in record.items():
        values = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, number in values:
            if isinstance(number, (int, float)) and name not in ("step", "samples"):
                label = f"HMT/{name}/{part}" if part else f"HMT/{name}"
                events.append((label, float(number), samples))
    return events


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tensor and numpy scalars as numbers, nan and inf as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
        return plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write `summary` as indented JSON: the whole file or none of it."""
    _write_atomic(Path(path), json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")


def _write_atomic(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def format_bytes(count: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """A plain-text table: columns padded, numbers (whole columns of them) to the right.

    Floats show four significant digits, None shows as "-".
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {list(row)!r} has {len(row)} cells for {len(headers)} headers")
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(headers))
    ]
    widths = [max([len(headers[i]), *(len(row[i]) for row in cells)]) for i in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
