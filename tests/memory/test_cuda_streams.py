"""``CudaStreams`` itself: its order of operations on streams that are simulated, and on a GPU if there is one.

The simulated streams, the caller's own included, run nothing before somebody waits for it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from memory_cases import PAGE, assert_same, pattern, tensors

from hmt_deepspeed.memory.errors import TransferError
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.streams import CudaStreams
from hmt_deepspeed.memory.tiered import TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine

CPU = torch.device("cpu")


# A step that another thread is in the middle of has not run.
RUNNING = threading.RLock()


def ran():
    """Stands for a step that has run."""


class Stream:
    def __init__(self, device=None):
        self.work = []

    def wait_event(self, event):
        """For what is recorded now: the event may be recorded again."""
        self.work.append(partial(event.stream.run, event.position))

    def synchronize(self):
        self.run(len(self.work))

    def run(self, count):
        with RUNNING:
            for index in range(count):
                step, self.work[index] = self.work[index], ran
                step()


class Event:
    """Every step of a stream takes a millisecond."""

    def __init__(self, blocking=False, enable_timing=False):
        self.stream, self.is_timed = None, enable_timing

    def record(self, stream):
        self.stream, self.position = stream, len(stream.work)

    def query(self):
        with RUNNING:
            return all(step is ran for step in self.stream.work[: self.position])

    def synchronize(self):
        self.stream.run(self.position)

    def elapsed_time(self, end):
        assert self.is_timed
        assert end.is_timed
        assert self.query()
        assert end.query()
        return float(end.position - self.position)


class Cuda:
    """What ``CudaStreams`` asks of ``torch.cuda``, and the streams that tensors were recorded on."""

    def __init__(self, patch):
        self.compute = Stream()
        self.thread = threading.local()  # its device and its current stream, as torch has them
        self.recorded, self.locked = [], {}
        self.lockable, self.last_error = 2**40, 0
        copy, ones = torch.Tensor.copy_, torch.ones

        def copy_(target, source, non_blocking=False):
            if self.now is self.compute:
                return copy(target, source, non_blocking)
            assert non_blocking
            assert self.thread.device, "the device that a thread begins on may be another"
            self.now.work.append(lambda: copy(target, source))
            return target

        @contextmanager
        def device(device):
            before, self.thread.device = getattr(self.thread, "device", None), device
            yield
            self.thread.device = before

        @contextmanager
        def stream(side):
            before, self.thread.stream = self.now, side
            yield
            self.thread.stream = before

        def record_stream(tensor, side):
            self.recorded.append((tensor.data_ptr(), side))

        def launch(*args, **kwargs):
            code, self.last_error = self.last_error, 0
            if code:
                raise RuntimeError(f"CUDA error {code}")
            return ones(*args, **kwargs)

        patch.setattr(torch, "ones", launch)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.Tensor, "record_stream", record_stream)

    @property
    def now(self):
        return getattr(self.thread, "stream", self.compute)

    def cudaHostRegister(self, pointer, nbytes, flags):
        if sum(self.locked.values()) + nbytes > self.lockable:
            self.last_error = 2
            return 2
        self.locked[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer):
        del self.locked[pointer]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def engine(cuda):
    made = TransferEngine(CPU, 16 * PAGE, CudaStreams(CPU))
    yield made
    made.close()  # while there is a CUDA to ask


def late(cuda, size=10):
    """A tensor that the compute stream will fill with sevens."""
    tensor = torch.zeros(size)
    cuda.compute.work.append(lambda: tensor.fill_(7.0))
    return tensor


def test_the_copy_waits_for_the_producer(cuda, engine):
    handle = engine.put(late(cuda), "x")
    assert not handle.stored.done()
    assert engine.host_bytes(handle).view(torch.float32).eq(7).all()


def test_memory_is_not_freed_while_it_is_page_locked(cuda):
    """Neither by the owner's close nor without one, and not before its copies have ended."""
    for closes in (True, False):
        engine = TransferEngine(CPU, 16 * PAGE, CudaStreams(CPU))
        assert list(cuda.locked.values()) == [16 * PAGE]
        handle = engine.put(late(cuda), "x")
        stored = handle.stored
        if closes:
            engine.drop(handle)
            engine.close()
        del engine, handle
        gc.collect()
        assert not cuda.locked
        assert stored.done()


def test_where_no_more_can_be_page_locked_tensors_go_to_the_next_tier(
    cuda, engine, tmp_path, recwarn
):
    cuda.lockable = 18 * PAGE
    host = GrowingHostStore(engine, 8 * PAGE, "hmt.limit", slab_bytes=2 * PAGE)
    store = TieredStore([host, FileStore(engine, str(tmp_path))])
    for index in range(4):
        store.put(str(index), torch.full((PAGE // 4,), float(index)))
        assert torch.ones(1).item() == 1  # what failed is no later kernel's error
    found = [store.get(str(index)) for index in range(4)]
    cuda.compute.synchronize()
    assert [value[0].item() for value in found] == list(range(4))
    assert host.pinned_bytes == 2 * PAGE
    (told,) = recwarn
    assert str(told.message).startswith(f"hmt.limit comes to {2 * PAGE} bytes only: cannot page-")
    store.close()
    with pytest.raises(RuntimeError, match="cannot page-lock"):  # at the start nothing replaces it
        GrowingHostStore(engine, 8 * PAGE, "hmt.limit", slab_bytes=4 * PAGE)


def test_the_consumer_waits_for_the_fetch_and_the_host_does_not(cuda, engine):
    handle = engine.put(late(cuda), "x")
    out, result = torch.zeros(10), engine.get(handle)
    cuda.compute.work.append(lambda: out.copy_(result))
    assert not handle.stored.done()  # nothing has run: get did not block
    cuda.compute.synchronize()
    assert out.eq(7).all()


def test_copies_are_timed_without_what_they_wait_for_and_nobody_waits_to_know(cuda, engine):
    first, second = engine.put(late(cuda), "x"), engine.put(late(cuda), "y")
    engine.get(first)
    assert engine.counters.seconds_out == engine.counters.seconds_in == 0  # nothing has run
    engine.host_bytes(first)
    assert engine.counters.seconds_out == pytest.approx(1e-3)
    engine.host_bytes(second)
    assert engine.counters.seconds_out == pytest.approx(2e-3)
    assert engine.counters.seconds_in == 0
    cuda.compute.synchronize()
    assert engine.counters.seconds_in == pytest.approx(1e-3)


def test_events_are_made_once_and_taken_again(cuda, engine, monkeypatch):
    made = []

    class Counted(Event):
        def __init__(self, **keyword):
            super().__init__(**keyword)
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Counted)
    numbers = []
    for value in range(12):
        handle = engine.put(torch.full((10,), float(value)), "x")
        result = engine.get(handle)
        engine.drop(handle)
        cuda.compute.synchronize()
        assert result.eq(value).all()
        del handle
        numbers.append(len(made))
    assert numbers[-1] == numbers[2] <= 12


def test_the_fetch_waits_until_its_memory_may_be_written(cuda, engine):
    handle = engine.put(torch.ones(10), "x")
    engine.host_bytes(handle)
    arrival = engine.expect(handle.layout, "x")
    # as if the allocator had handed out memory that the compute stream is still reading
    arrival.tensor.fill_(5.0)
    old = []
    cuda.compute.work.append(lambda: old.append(arrival.tensor.clone()))
    arrival.ready = engine.streams.mark()
    engine._send(arrival, handle.buffer.memory, []).wait()
    assert old[0].eq(5).all()
    assert arrival.tensor.eq(1).all()


def test_memory_is_recorded_where_it_could_be_reused_too_early(cuda, engine):
    tensor = torch.ones(10)
    handle = engine.put(tensor, "x")
    outward, inward = engine.streams._side.values()
    assert cuda.recorded == [(tensor.data_ptr(), outward)]
    engine.get(handle)
    assert len(cuda.recorded) == 1  # allocated and used on the same stream
    engine.prefetch(handle)
    pointer = handle.arrival.tensor.data_ptr()
    with torch.cuda.stream(Stream()):
        elsewhere = cuda.now
        engine.get(handle)
    assert cuda.recorded[1:] == [(pointer, elsewhere)]
    engine.prefetch(handle)
    pointer = handle.arrival.tensor.data_ptr()
    engine.drop(handle)
    assert cuda.recorded[2:] == [(pointer, inward)]


def test_a_buffer_is_reused_when_its_copies_are_done(cuda):
    engine = TransferEngine(CPU, PAGE, CudaStreams(CPU))
    handle = engine.put(late(cuda), "x")
    result = engine.get(handle)
    engine.drop(handle)
    engine.put(torch.ones(10), "y")  # no room: the host waits for x's copies, and they for x
    assert result.eq(7).all()


def test_pools_are_page_locked_exactly(cuda, engine):
    store = HostStore(engine, 5 * PAGE)
    assert sorted(cuda.locked.values()) == [5 * PAGE, 16 * PAGE]
    store.close()
    engine.close()
    assert not cuda.locked


def test_page_locking_refused(cuda):
    cuda.cudaHostRegister = lambda *_: 2
    with pytest.raises(RuntimeError, match=r"cannot page-lock 4096 bytes.*CUDA error 2"):
        TransferEngine(CPU, PAGE, CudaStreams(CPU))


# -- on a GPU ----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def on_gpu():
    engine = TransferEngine("cuda", 64 << 20)
    yield engine
    engine.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", tensors())
def test_round_trip_on_a_gpu(kind, on_gpu, tmp_path):
    moved = tensors()[kind].detach().to("cuda")
    expected = moved.cpu()
    for store in (HostStore(on_gpu, 64 << 20), FileStore(on_gpu, str(tmp_path))):
        store.put("x", moved)
        store.prefetch("x")
        found = store.get("x")
        assert found.device == on_gpu.device
        assert_same(found.cpu(), expected)
        store.close()


@pytest.mark.gpu
@needs_gpu
def test_busy_gpu(on_gpu):
    """A slow producer, sources freed at once and their memory reused, a consumer right behind."""
    store = HostStore(on_gpu, 256 << 20)
    for step in range(32):
        torch.cuda._sleep(20_000_000)
        store.put(str(step), torch.full((1 << 20,), float(step), device="cuda"))
        torch.full((1 << 20,), -1.0, device="cuda")  # may get the memory just freed
    sums = []
    for step in reversed(range(32)):
        store.prefetch(str(max(step - 1, 0)))
        sums.append(store.get(str(step)).sum())
        store.drop(str(step))
    assert [s.item() for s in sums] == [step * float(1 << 20) for step in reversed(range(32))]
    store.close()


@pytest.mark.gpu
@needs_gpu
def test_calls_do_not_block_the_host(on_gpu):
    store = HostStore(on_gpu, 64 << 20)
    tensor = torch.ones(8 << 20, device="cuda")
    store.put("warm", tensor)
    store.get("warm")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    start = time.perf_counter()
    store.put("x", tensor)
    store.prefetch("x")
    result = store.get("x")
    assert time.perf_counter() - start < 0.2
    assert not torch.cuda.current_stream().query()
    assert result.sum().item() == 8 << 20
    store.close()


@pytest.mark.gpu
@needs_gpu
def test_pools_are_pinned(on_gpu):
    memory = on_gpu.pool._memory  # a piece of a storage, and torch asks about the beginning of that
    whole = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
    assert torch.frombuffer(whole, dtype=torch.uint8).is_pinned()


@pytest.mark.gpu
@needs_gpu
def test_no_device_memory(on_gpu):
    handle = on_gpu.put(pattern(100).cuda(), "x")
    big = on_gpu.put(torch.zeros(48 << 20, dtype=torch.uint8, device="cuda"), "big")
    on_gpu.host_bytes(big)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(TransferError, match=r"'big'.*out of memory"):
            on_gpu.get(big)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert on_gpu.get(big).eq(0).all()
    assert_same(on_gpu.get(handle).cpu(), pattern(100))
