"""Measures an engine's last optimizer step: time, memory, bytes moved, and the metrics of its parts."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from hmt_deepspeed.memory.counters import Counters
from hmt_deepspeed.memory.numbers import ArrivingNumbers, Measured, measured_together
from hmt_deepspeed.planner.advise.compare import Busy
from hmt_deepspeed.planner.solve.cost import Resource
from hmt_deepspeed.report.metrics import (
    MATRIX_INTERVAL,
    device_memory,
    host_bytes,
    monitor_events,
    peak_host_bytes,
)
from hmt_deepspeed.report.phases import PhaseTimer
from hmt_deepspeed.zero.engine.computed_flops import computed_flops
from hmt_deepspeed.zero.interfaces import Engine
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.planning.facts import place_of

__all__ = ["StepMetrics", "busy_resources"]


class StepMetrics:
    """Measures an engine's steps, and tells DeepSpeed's monitors of each once the device has come so far.

    Stock engines are measured too, but tell the monitors nothing that stock would not.

    Attributes:
        phases: forward, backward, what backward did not hide of the reduction, optimizer.
        checkpoint_bytes: of the last checkpoint that was saved, all ranks; None before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._accelerator = get_accelerator()
        self.phases = PhaseTimer(self._accelerator)
        self.checkpoint_bytes: int | None = None
        self._samples: list[int] = []
        self._average_bytes: float | None = None
        self._moved_before: dict[str, float] = {}
        self._moved: dict[str, float] = {}
        self._reports: deque[_Report] = deque()
        module: nn.Module = engine.module
        self._hooks = [
            module.register_forward_pre_hook(self._begin_forward),
            module.register_forward_hook(self._end_forward),
        ]

    def close(self) -> None:
        """Stop watching the module, and tell the monitors what they have not been told. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._tell_monitors(wait=True)

    def _begin_forward(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self.phases.start("forward")

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self.end_phase("forward")

    def end_phase(self, phase: str) -> None:
        """Stop the clock of a phase and sample memory, which is fullest at such moments."""
        self.phases.stop(phase)
        self._samples.append(device_memory(self._accelerator).allocated)

    def end_step(self) -> None:
        """Close an optimizer step, skipped or not."""
        engine = self._engine()
        assert engine is not None
        self.phases.end_step()
        self._average_bytes = sum(self._samples) / len(self._samples)
        self._samples.clear()
        total = _moved_bytes(engine)
        self._moved = {k: max(n - self._moved_before.get(k, 0), 0) for k, n in total.items()}
        self._moved_before = total
        ours = engine.hmt_enabled or engine.hmt_activations is not None
        if ours and engine.monitor.enabled and engine.global_rank == 0:
            every_matrix = engine.global_steps == 1 or engine.global_steps % MATRIX_INTERVAL == 0
            measured = self._measure()
            arriving = ArrivingNumbers(measured.values)
            report = _Report(
                engine.monitor, engine.global_samples, every_matrix, measured, arriving
            )
            self._reports.append(report)
            self._tell_monitors(wait=False)

    def _tell_monitors(self, wait: bool) -> None:
        """Write the steps whose numbers have arrived on the host, each under its own samples; ``wait``: all of them."""
        while self._reports and (wait or self._reports[0].arriving.have_arrived()):
            report = self._reports.popleft()
            record = _chosen(report.measured.record(report.arriving.read()), report.every_matrix)
            report.monitor.write_events(monitor_events(record, report.samples))

    def computed_flops(self, micro_batch: int, seq_length: int) -> float | None:
        """FLOPs of the last step on this rank, see :func:`hmt_deepspeed.zero.engine.computed_flops.computed_flops`.

        Args:
            micro_batch: sequences of a micro-batch. seq_length: tokens of each.
        """
        engine = self._engine()
        assert engine is not None
        return computed_flops(engine, micro_batch, seq_length)

    def read(self, every_matrix: bool = True) -> dict[str, Any]:
        """Metrics of the last step on this rank; waits for the device, which has norm and captured energy.

        Seconds are of the newest step that the device is done with. ``bytes_to_host`` and
        ``bytes_from_host`` cross PCIe on CUDA. Parameters that DeepSpeed itself offloads are not counted.

        Args:
            every_matrix: with the values of every single matrix and layer.
        """
        return _chosen(self._measure().read(), every_matrix)

    def _measure(self) -> Measured:
        """All metrics; the device's are not waited for."""
        engine = self._engine()
        assert engine is not None
        memory, norm = device_memory(self._accelerator), engine.get_global_grad_norm()
        own: dict[str, Any] = {
            "lr": float(engine.get_lr()[0]),
            "grad_norm": None if norm is None or isinstance(norm, Tensor) else float(norm),
            "skipped_steps": int(engine.skipped_steps),
            "device": memory.device,
            "device_bytes": memory.allocated,
            "average_device_bytes": self._average_bytes,
            "peak_device_bytes": memory.peak,
            "host_bytes": host_bytes(),
            "peak_host_bytes": peak_host_bytes(),
            "checkpoint_bytes": self.checkpoint_bytes,
            **{f"{phase}_seconds": s for phase, s in self.phases.seconds().items()},
            **self._moved,
        }
        if engine.fp16_enabled():
            own["loss_scale"] = engine._get_optimizer_loss_scale()
        norms = norm.detach().view(1) if isinstance(norm, Tensor) else torch.zeros(0)
        found = [Measured(own, norms, lambda read: {"grad_norm": read[0]} if len(read) else {})]
        parts = (engine.optimizer, engine.hmt_activations, engine.hmt_planner, engine.hmt_snapshots)
        for part in parts:
            if callable(measure := getattr(part, "measure", None)):
                found.append(measure())
            elif callable(numbers := getattr(part, "metrics", None)):
                found.append(Measured(dict(numbers()), torch.zeros(0), lambda _: {}))
        return measured_together(found)


class _Report(NamedTuple):
    """What a monitor is told of a step, once the device's numbers are on the host."""

    monitor: Any
    samples: int
    every_matrix: bool
    measured: Measured
    arriving: ArrivingNumbers


def _chosen(record: dict[str, Any], every_matrix: bool) -> dict[str, Any]:
    """Without the values of every single matrix and layer, unless they are wanted."""
    if every_matrix:
        return record
    many = ("_per_matrix", "_per_layer")
    return {name: value for name, value in record.items() if not name.endswith(many)}


def _moved_bytes(engine: Engine) -> dict[str, float]:
    """Bytes moved to and from host memory and SSDs since the start, by path in use."""
    found: dict[str, float] = {}
    for place, counters in _counters(engine):
        for name, number in (
            (f"bytes_to_{place}", counters.bytes_out),
            (f"bytes_from_{place}", counters.bytes_in),
            ("transfer_wait_seconds", counters.seconds_waited),
        ):
            found[name] = found.get(name, 0) + number
    return found


def busy_resources(engine: Engine) -> dict[Resource, Busy]:
    """Since the start: seconds and bytes of links and SSDs, seconds of updates on the CPU, by the planner's names.

    Links and SSDs are left out where DeepSpeed moves bytes of its own, which nobody counts. Two engines that
    move at once on one link count as if they took turns.
    """
    host = _host(engine)
    params, states = (
        place_of(config)
        for config in (engine.zero_offload_param(), engine.zero_offload_optimizer())
    )
    if params != "none" or (states != "none" and host is None):
        return {}
    sums = dict.fromkeys(_WAYS.values(), (0.0, 0.0))
    for place, counters in _counters(engine):
        ways = (
            ("out", counters.seconds_out, counters.bytes_out),
            ("in", counters.seconds_in, counters.bytes_in),
        )
        for way, seconds, nbytes in ways:
            before = sums[_WAYS[place, way]]
            sums[_WAYS[place, way]] = (before[0] + seconds, before[1] + nbytes)
    found = {resource: Busy(*both) for resource, both in sums.items()}
    if host is not None:
        found["cpu"] = Busy(host.adam.seconds + host.addition_seconds, 0.0)
    return found


def _host(engine: Engine) -> HostWorker | None:
    """The worker that updates states in host memory, if HMT's optimizer has some there."""
    return engine.optimizer.zero.host if engine.hmt_enabled else None


_WAYS: dict[tuple[str, str], Resource] = {
    ("host", "out"): "gpu_to_host",
    ("host", "in"): "host_to_gpu",
    ("ssd", "out"): "ssd_writing",
    ("ssd", "in"): "ssd_reading",
}


def _counters(engine: Engine) -> Iterator[tuple[str, Counters]]:
    """("host" or "ssd", what was moved there) of all that moves bytes in this engine."""
    if engine.hmt_activations is not None:
        yield from engine.hmt_activations.memory.counters()
    host = _host(engine)
    if host is not None:
        yield "host", host.engine.counters
    if host is not None and host.ssd is not None:
        yield "ssd", host.ssd.counters
    cache = engine.optimizer.zero.bases.cache if engine.hmt_enabled else None
    if cache is not None:
        yield "host", cache.engine.counters
    chunks = None if engine.hmt_fpdt is None else engine.hmt_fpdt.memory.engine
    if chunks is not None:
        yield "host", chunks.counters
