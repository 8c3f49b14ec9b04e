"""The SSD store: same promises as the host store, through pinned memory of constant size."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, assert_same, entered, pattern, tensors
from ssd_io import Gated, make_io

from hmt_deepspeed.memory import transfer as transfer_module
from hmt_deepspeed.memory.errors import PoolFull, StoreError, TransferError
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.pool import whole_pages
from hmt_deepspeed.memory.streams import Direction, TwinStreams
from hmt_deepspeed.memory.transfer import TransferEngine


@pytest.fixture
def make(tmp_path):
    stores = []

    def factory(io=None, pages=8, streams=None, **options):
        engine = TransferEngine("cpu", pages * PAGE, streams)
        stores.append(FileStore(engine, str(tmp_path), io, **options))
        return stores[-1]

    yield factory
    for store in stores:
        if isinstance(store.slots.io, Gated):
            store.slots.io.writes.set()
        store.close()


@pytest.fixture(params=["positional", "async_io"])
def store(request, make):
    return make(make_io(request.param))


def files(store):
    return list(Path(store.slots.path).glob("*.bin"))


# -- what is put comes back --------------------------------------------------------------------------


def test_every_kind(store):
    for kind, tensor in tensors().items():
        store.put(kind, tensor)
    store.flush()
    for kind, tensor in tensors().items():
        store.prefetch(kind)
        assert_same(store.get(kind), tensor)
        assert_same(store.get(kind), tensor)
        store.drop(kind)
        assert kind not in store


def test_counters_are_exact(store):
    sizes = [1, PAGE, 3 * PAGE + 1]
    for nbytes in sizes:
        store.put(str(nbytes), pattern(nbytes, dtype=torch.uint8))
    store.flush()
    for nbytes in sizes * 2:
        store.get(str(nbytes))
    pages = sum(whole_pages(n) for n in sizes)
    assert (store.counters.bytes_out, store.counters.num_out) == (pages, 4)  # one of two pieces
    assert (store.counters.bytes_in, store.counters.num_in) == (2 * pages, 8)
    assert store.engine.counters.bytes_out == sum(sizes)
    assert store.engine.counters.bytes_in == 2 * sum(sizes)
    assert store.engine.pool.peak_bytes <= 8 * PAGE


def test_file_space_and_pinned_memory_do_not_grow(store):
    seen = set()
    for step in range(12):
        for index, pages in enumerate((1, 2, 2, 5)):
            store.put(str(index), pattern(pages * PAGE, dtype=torch.uint8, seed=step))
        store.flush()
        for index, pages in reversed(list(enumerate((1, 2, 2, 5)))):
            expected = pattern(pages * PAGE, dtype=torch.uint8, seed=step)
            assert_same(store.get(str(index)), expected)
            store.drop(str(index))
        seen.add(store.slots.file_bytes)
    assert seen == {10 * PAGE}
    assert sum(f.stat().st_size for f in files(store)) == 10 * PAGE
    assert store.engine.pool.peak_bytes <= 8 * PAGE
    assert store.engine.pool.take(8 * PAGE, "all").memory.numel() == 8 * PAGE


def test_put_returns_before_the_write_and_what_is_in_memory_is_not_read(make):
    io = Gated()
    store = make(io)
    store.put("x", pattern(100))
    assert_same(store.get("x"), pattern(100))
    store.prefetch("x")
    io.writes.set()
    store.flush()
    assert_same(store.get("x"), pattern(100))
    assert store.counters.num_in == 0
    assert_same(store.get("x"), pattern(100))
    assert store.counters.num_in == 1


def test_what_is_dropped_before_its_write_began_is_never_written(make):
    io = Gated()
    store = make(io, num_threads=1)
    for index in range(4):
        store.put(str(index), pattern(100, seed=index))
    for index in (1, 2):
        assert_same(store.get(str(index)), pattern(100, seed=index))
        store.drop(str(index))
    io.writes.set()
    store.flush()
    assert store.counters.num_out == 2
    assert len(files(store)) == 2


def test_put_waits_while_the_pool_is_full_of_what_is_not_yet_written(make):
    io = Gated()
    store = make(io, pages=2)
    for name in "ab":
        store.put(name, pattern(100))
    thread = threading.Thread(target=store.put, args=("c", pattern(100, seed=1)))
    waits = entered(store.engine.counters)
    thread.start()
    assert waits.wait(120)
    io.writes.set()
    thread.join(120)
    assert_same(store.get("c"), pattern(100, seed=1))
    assert store.engine.counters.seconds_waited > 0
    assert store.engine.pool.peak_bytes == 2 * PAGE


def test_prefetch_reads_ahead_and_get_waits_only_for_the_rest(make):
    io = Gated()
    io.writes.set()
    store = make(io)
    store.put("x", pattern(100))
    store.flush()
    waited, waits = store.counters.seconds_waited, entered(store.counters)
    io.reads.clear()
    store.prefetch("x")
    store.prefetch("x")
    threading.Thread(target=lambda: (waits.wait(120), io.reads.set())).start()
    assert_same(store.get("x"), pattern(100))
    assert store.counters.seconds_waited > waited
    assert store.counters.num_in == 1
    store.prefetch("x")
    store._entries["x"].pieces[0].read.result()
    io.reads.clear()  # none is needed
    assert_same(store.get("x"), pattern(100))
    assert store.counters.num_in == 2


def test_a_slot_dropped_while_read_is_not_overwritten(make):
    io = Gated()
    io.writes.set()
    store = make(io)
    store.put("x", pattern(100))
    store.flush()
    io.reads.clear()
    store.prefetch("x")
    reading, given_back = store._entries["x"].pieces[0].read, threading.Event()
    store.drop("x")
    reading.add_done_callback(lambda _: given_back.set())  # after the store's own
    store.put("y", pattern(100, seed=1))
    store.flush()
    assert len(files(store)) == 2
    io.reads.set()
    reading.result()  # verified its checksum
    assert given_back.wait(120)
    store.put("z", pattern(100, seed=2))
    store.flush()
    assert len(files(store)) == 2


@pytest.mark.parametrize("on_file", [False, True])
def test_an_abandoned_prefetch_keeps_its_memory_until_the_copy_is_done(make, on_file):
    io = Gated()
    store = make(io)
    store.put("x", pattern(100))
    if on_file:
        io.writes.set()
        store.flush()
    store.prefetch("x")
    if on_file:
        store._entries["x"].pieces[0].read.result()
    streams = store.engine.streams
    (copy,) = streams.pending[Direction.TO_DEVICE]
    target = copy.device
    store.drop("x")
    io.writes.set()
    store._writers.shutdown()
    store._readers.shutdown()
    assert target() is not None
    streams.drain()
    assert copy.event.error is None
    del copy
    assert target() is None


def test_what_a_reader_waits_for_is_not_counted_as_a_caller_s(make):
    store = make(pages=1)
    store.put("x", pattern(100))
    store.flush()
    counters = store.engine.counters
    buffer = store.engine.pool.take(1, "in the way", lent=True)
    waited = counters.seconds_waited
    store.prefetch("x")
    time.sleep(0.1)  # the reader has no buffer
    store.engine.pool.release(buffer)
    store._entries["x"].pieces[0].read.result()
    assert counters.seconds_waited == waited
    assert_same(store.get("x"), pattern(100))


def test_a_write_that_does_not_wait_for_the_device_writes_poison(make):
    class Forgetful(TwinStreams):
        def copy(self, direction, *args):
            event = super().copy(direction, *args)
            if direction is Direction.TO_HOST:
                event.wait = lambda: None
            return event

    store = make(streams=Forgetful())
    store.put("x", pattern(100))
    store.flush()
    assert store.get("x").isnan().all()


# -- errors, raised at the user with names --------------------------------------------------------------


def test_a_full_disk_is_raised_at_the_user_of_the_tensor(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put("good", pattern(1000))
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        store.put("bad", pattern(2000))
        with pytest.raises(StoreError, match="No space left"):
            store.flush()
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"^'bad': /.*/hmt-swap-.*: cannot write .*No space left"
        ):
            store.get("bad")
    assert_same(store.get("good"), pattern(1000))
    store.drop("bad")
    store.put("bad", pattern(2000))
    store.flush()
    assert_same(store.get("bad"), pattern(2000))


def test_an_altered_file_is_raised_at_the_user_of_the_tensor(store):
    store.put("layer 7", pattern(1000))
    store.flush()
    (path,) = files(store)
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    store.prefetch("layer 7")
    with pytest.raises(StoreError, match=r"^'layer 7': .*expected checksum .* found"):
        store.get("layer 7")
    assert store.engine.pool.used_bytes <= 8 * PAGE
    store.drop("layer 7")
    assert store.engine.pool.take(8 * PAGE, "all")


def test_a_missing_folder(store):
    store.put("x", pattern(9))
    store.flush()
    for path in Path(store.slots.path).iterdir():
        path.unlink()
    Path(store.slots.path).rmdir()
    with pytest.raises(StoreError, match=r"^'x': .*No such file"):
        store.get("x")
    store.put("y", pattern(9))
    with pytest.raises(StoreError, match=r"^'y': .*cannot write"):
        store.flush()


def test_a_failed_copy_is_raised_at_the_user_of_the_tensor(make):
    class Faulty(TwinStreams):
        def copy(self, direction, *args):
            event = super().copy(direction, *args)
            if direction is Direction.TO_HOST:

                def fail():
                    raise RuntimeError("the cable is out")

                self.pending[direction][-1].run = fail
            return event

    store = make(streams=Faulty())
    store.put("x", pattern(9))
    with pytest.raises(TransferError, match=r"'x'.*the cable is out"):
        store.flush()
    with pytest.raises(TransferError, match=r"'x'.*the cable is out"):
        store.get("x")


def test_no_device_memory_in_prefetch_is_tried_again_in_get(make, monkeypatch):
    store = make()
    store.put("x", pattern(9))
    store.flush()
    with monkeypatch.context() as patch:

        def no_memory(layout, device):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(transfer_module, "new_like", no_memory)
        store.prefetch("x")
        with pytest.raises(TransferError, match=r"'x' \(36 bytes\).*out of memory"):
            store.get("x")
    assert_same(store.get("x"), pattern(9))


def test_a_pool_that_others_fill_says_so(make):
    store = make()
    other = store.engine.put(torch.zeros(8 * PAGE, dtype=torch.uint8), "other")
    with pytest.raises(PoolFull, match=rf"'x' needs {PAGE} bytes.*holds {8 * PAGE}"):
        store.put("x", pattern(9))
    store.engine.drop(other)
    store.put("x", pattern(9))
    assert_same(store.get("x"), pattern(9))


def test_names(make):
    store = make()
    store.put("a", pattern(4))
    with pytest.raises(ValueError, match="'a' is already in the SSD store"):
        store.put("a", pattern(4))
    for verb in (store.get, store.prefetch, store.drop):
        with pytest.raises(KeyError, match="'b' is not in the SSD store"):
            verb("b")


def test_num_threads(make):
    with pytest.raises(ValueError, match="num_threads is at least 1, got 0"):
        make(num_threads=0)


def test_close(make):
    store = make()
    for index in range(6):
        store.put(str(index), pattern(100))
    store.flush()
    store.prefetch("3")
    store.close()
    store.close()
    assert not os.path.exists(store.slots.path)
    assert store.engine.pool.take(8 * PAGE, "all")
    with pytest.raises(RuntimeError, match="closed"):
        store.put("y", pattern(1))


def test_threads(store):
    failures = []

    def work(seed):
        try:
            for step in range(15):
                name, tensor = f"{seed}.{step}", pattern(1500, seed=seed * 100 + step)
                store.put(name, tensor)
                if step % 3 == 0:
                    store.flush()
                store.prefetch(name)
                assert_same(store.get(name), tensor)
                store.drop(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert store.engine.pool.peak_bytes <= 8 * PAGE
