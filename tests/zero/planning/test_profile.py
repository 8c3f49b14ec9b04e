"""Measuring the machine: each rate is that of the call it claims to be, at bounded cost."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.zero.planning import disk_rates, profile_files, timing
from hmt_deepspeed.zero.planning import measure as profile
from hmt_deepspeed.zero.planning.measure import Probe, measure_interconnect, measure_machine
from hmt_deepspeed.zero.planning.profile_files import cache_file, read_profile, write_profile

ACCELERATOR = SimpleNamespace(
    synchronize=lambda: None, available_memory=lambda: 8 * 2**30, device_count=lambda: 1
)
BUFFER = 2**20


class SlowIO(PositionalIO):
    """At most so many bytes/s each way, and a note of what was moved."""

    READ, WRITE = 100e6, 40e6

    def __init__(self):
        self.read_bytes = self.written_bytes = 0

    def read(self, path, memory):
        time.sleep(memory.numel() / self.READ)
        self.read_bytes += memory.numel()
        super().read(path, memory)

    def write(self, path, memory):
        time.sleep(memory.numel() / self.WRITE)
        self.written_bytes += memory.numel()
        super().write(path, memory)


class SlowAdam:
    """100 ns per parameter."""

    def __init__(self, tensors):
        (self.tensor,) = tensors

    def step(self):
        assert self.tensor.grad.shape == self.tensor.shape
        time.sleep(self.tensor.numel() * 100e-9)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ssd")
    probe = Probe(
        products=((64, 128, 128), (64, 128, 256)),
        seconds=0.5,
        buffer_bytes=BUFFER,
        adam_parameters=2**18,
        file_io=SlowIO(),
        folder=str(folder),
        adam=SlowAdam,
    )
    begin = time.process_time()
    machine = measure_machine(ACCELERATOR, "cpu", probe)
    io = probe.file_io
    seconds = time.process_time() - begin + io.read_bytes / io.READ + io.written_bytes / io.WRITE
    return SimpleNamespace(machine=machine, seconds=seconds, folder=folder, probe=probe)


def test_files_are_timed_all_the_way(measured):
    # sleeping is never shorter than asked, and this machine may be slower than that for any reason
    machine = measured.machine
    assert 0 < machine.ssd_read <= SlowIO.READ
    assert 0 < machine.ssd_write <= SlowIO.WRITE
    assert machine.num_ssds == 1
    assert machine.ssd_mixed <= machine.ssd_read + machine.ssd_write
    # a read and a write of the same size at once last as long as the write: twice its bytes per second
    assert machine.ssd_mixed <= 2 * SlowIO.WRITE
    assert measured.probe.file_io.read_bytes >= 3 * BUFFER  # not out of a cache of ours
    assert machine.ssd_capacity > 2 * BUFFER


def test_bytes_of_a_call_are_all_that_it_moves(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk_rates, "rate", lambda work, seconds: work())
    monkeypatch.setattr(disk_rates.os, "fsync", synced.append)
    with closing(TransferEngine("cpu", 4 * BUFFER)) as engine:
        disk = disk_rates.disk_fields(engine, PositionalIO(), str(tmp_path), BUFFER, 0.0)
    rates = [disk[key] for key in ("ssd_read", "ssd_write", "ssd_mixed")]
    assert rates == [BUFFER, BUFFER, 2 * BUFFER]
    assert len(synced) == 2 + 2  # both files as they are made; the write alone, and beside the read


def test_nothing_stays_in_the_folder(measured):
    assert not [path for path in measured.folder.iterdir() if not path.name.startswith(".")]


def test_adam_is_timed_per_parameter(measured):
    assert measured.machine.cpu_adam_ns >= 100


def test_the_rest_is_possible_and_of_this_machine(measured):
    machine = measured.machine  # Machine's own checks have refused anything that is not
    assert machine.gpu_memory == ACCELERATOR.available_memory()
    assert machine.peak_flops == max(machine.matmul.bf16, machine.matmul.fp16, machine.matmul.fp32)
    assert machine.gpu_bandwidth > 1e8
    assert machine.host_memory > 0
    assert machine.interconnect == machine.device_to_host


def test_costs_are_bounded(measured):
    # 11 measurements share half a second; three calls at least of each, the slowest of 26 ms
    assert (
        measured.seconds < 5
    )  # of this process and of its disk: other processes share the machine


def test_matmul_rate_is_flops_over_time(monkeypatch):
    spent = []

    def slow(x, weight):
        spent.append(2 * x.shape[0] * x.shape[1] * weight.shape[1])
        time.sleep(0.01)
        return x

    monkeypatch.setattr(torch, "mm", slow)
    products = ((8, 16, 32), (8, 32, 16))
    rate = profile.matmul_rate(products, "fp32", torch.device("cpu"), 0.05, lambda: None)
    assert set(spent) == {2 * 8 * 16 * 32}
    assert rate <= 2 * 2 * 8 * 16 * 32 / 0.02  # both products, 10 ms each


@pytest.fixture
def clock(monkeypatch):
    """The profile's clock: only what is added to ``now`` passes."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    return clock


def test_the_median_call_withstands_a_stall(clock):
    calls = iter(
        [5.0, 0.01, 0.01, 0.2]
    )  # the first, whatever it compiles, is not timed; one stalls

    def work():
        clock.now += next(calls, 0.01)
        return 1

    assert timing.rate(work, 0.3) == pytest.approx(100)
    assert clock.now == pytest.approx(5.0 + 0.3, abs=0.02)  # and ends when its time is up


def test_a_slow_call_is_made_three_times_and_no_more(clock):
    calls = []

    def work():
        calls.append(1)
        clock.now += 10.0
        return 1

    assert timing.rate(work, 0.3) == pytest.approx(0.1)
    assert len(calls) == 1 + 3


def test_both_ways_move_both(monkeypatch):
    moved = []

    def once(work, seconds):
        before = engine.counters.bytes_out, engine.counters.bytes_in
        units = work()
        moved.append((engine.counters.bytes_out - before[0], engine.counters.bytes_in - before[1]))
        return units

    monkeypatch.setattr(profile, "rate", once)
    with closing(TransferEngine("cpu", 4 * BUFFER)) as engine:
        rates = profile.link_rates(engine, BUFFER, 0.0, lambda: None)
    assert rates == (BUFFER, BUFFER, 2 * BUFFER)
    assert moved == [(BUFFER, 0), (0, BUFFER), (BUFFER, BUFFER)]


def test_both_ways_are_never_faster_than_their_sum(monkeypatch):
    """Noise must not make a machine that is refused."""
    monkeypatch.setattr(profile, "link_rates", lambda *_: profile.LinkRates(10.0, 20.0, 31.0))
    probe = Probe(products=((1, 1, 1),), seconds=0.01, adam_parameters=1, adam=SlowAdam)
    assert measure_machine(ACCELERATOR, "cpu", probe).both_directions == 30.0


def test_known_devices_have_their_datasheet_peak():
    assert profile.peak_flops_of("NVIDIA H200") == named_machine("h200").peak_flops
    assert profile.peak_flops_of("NVIDIA GeForce RTX 4090") == named_machine("rtx4090").peak_flops
    assert profile.peak_flops_of("NVIDIA A100-SXM4-80GB") == named_machine("a100-80g").peak_flops
    assert profile.peak_flops_of("cpu of a node") == 0


def test_interconnect_needs_ranks():
    with pytest.raises(ValueError, match="world size is 1; legal"):
        measure_interconnect("cpu")


def interconnect():
    return measure_interconnect("cpu", nbytes=2**16, num_calls=3)


def test_interconnect_is_that_of_the_slowest_rank(ranks):
    rates = ranks.run(interconnect, 2)
    assert rates[0] == rates[1] > 0


# -- files --------------------------------------------------------------------------------------------


def test_the_cache_is_in_the_users_folder_by_machine_and_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = cache_file("one model")
    assert file.parent == tmp_path / "hmt_deepspeed" / "profiles"
    assert file == cache_file("one model") != cache_file("another model")
    assert cache_file("one model", tmp_path).parent == tmp_path
    monkeypatch.setattr(profile_files.platform, "node", lambda: "another machine")
    assert file != cache_file("one model")


def test_profile_file_there_and_back(tmp_path):
    machine = replace(named_machine("rtx3090"), name="measured")
    write_profile(machine, tmp_path / "new" / "machine.json")
    assert read_profile(tmp_path / "new" / "machine.json") == machine


def test_bad_profiles(tmp_path):
    (tmp_path / "torn.json").write_text('{"name": "x"')
    with pytest.raises(ValueError, match=r"profile .*torn.json.*no JSON.*Remove the file"):
        read_profile(tmp_path / "torn.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0; legal"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0; legal"),
        ({"products": ()}, r"products is \(\); legal"),
        ({"products": ((1, 0, 1),)}, "products is .*legal"),
        ({"folder": "/tmp"}, "file_io is None and folder '/tmp'; legal"),
    ],
)
def test_probe_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        Probe(**changes)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_rates.shutil, "disk_usage", lambda _: SimpleNamespace(free=BUFFER))
    probe = Probe(
        products=((1, 1, 1),),
        seconds=0.01,
        buffer_bytes=BUFFER,
        file_io=SlowIO(),
        folder=str(tmp_path),
    )
    with pytest.raises(ValueError, match=r"bytes free; legal: at least"):
        measure_machine(ACCELERATOR, "cpu", probe)
