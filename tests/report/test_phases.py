"""Where a step's time goes."""

from __future__ import annotations

from typing import Any

import pytest

from hmt_deepspeed.report import phases
from hmt_deepspeed.report.phases import PhaseTimer


class Device:
    """A clock of its own, as a GPU has: an event has passed once `done` has come to it."""

    def __init__(self) -> None:
        self.submitted, self.done = 0.0, 0.0

    def use_host_timers(self) -> bool:
        return False

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.submitted

            def query(self) -> bool:
                return self.at <= device.done

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        return Event()


def work(timer: PhaseTimer, device: Device, phase: str, seconds: float) -> None:
    timer.start(phase)
    device.submitted += seconds
    timer.stop(phase)


def test_micro_batches_are_summed_and_time_inside_another_phase_is_not_counted_twice() -> None:
    device = Device()
    timer = PhaseTimer(device)
    for _ in range(2):
        work(timer, device, "forward", 1.0)
        timer.start("backward")
        device.submitted += 2.0
        work(timer, device, "reduce", 0.5)
        device.submitted += 0.25
        timer.stop("backward")
    device.submitted += 10.0  # of nobody
    work(timer, device, "optimizer", 4.0)
    timer.end_step()
    device.done = device.submitted
    expected = {"forward": 2.0, "backward": 4.5, "reduce": 1.0, "optimizer": 4.0}
    assert timer.seconds() == pytest.approx(expected)


def test_reading_does_not_wait_for_the_device() -> None:
    device = Device()
    timer = PhaseTimer(device)
    work(timer, device, "forward", 1.0)
    timer.end_step()
    device.done = device.submitted
    work(timer, device, "forward", 3.0)
    timer.end_step()
    assert timer.seconds()["forward"] == 1.0, "of the newest step that is done"
    assert timer.seconds()["forward"] == 1.0, "as often as it is asked"
    device.done = device.submitted
    assert timer.seconds()["forward"] == 3.0, "reading too early has lost nothing"


def test_an_interrupted_phase_is_forgotten() -> None:
    device = Device()
    timer = PhaseTimer(device)
    timer.start("forward")
    device.submitted += 100.0  # and an exception
    work(timer, device, "forward", 1.0)
    timer.stop("backward")  # never started
    timer.end_step()
    device.done = device.submitted
    assert timer.seconds()["forward"] == 1.0
    assert timer.seconds()["backward"] == 0.0


def test_a_cpu_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu:
        def use_host_timers(self) -> bool:
            return True

    now = iter([1.0, 3.5])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(now))
    timer = PhaseTimer(Cpu())  # type: ignore[arg-type]
    timer.start("optimizer")
    timer.stop("optimizer")
    timer.end_step()
    assert timer.seconds()["optimizer"] == 2.5
