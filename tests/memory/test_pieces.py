"""Tensors larger than all the pinned memory there is: they move in pieces, and come back whole or not at all."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, assert_same, pattern
from ssd_io import make_io

from hmt_deepspeed.memory.errors import StoreError, TransferError
from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.streams import Direction, TwinStreams
from hmt_deepspeed.memory.transfer import TransferEngine

POOL = 8 * PAGE
SIZE = 5 * POOL + 100  # bytes: five times the pool, and a piece of its own for the rest


@pytest.fixture
def make(tmp_path):
    stores = []

    def factory(io=None, streams=None, **options):
        engine = TransferEngine("cpu", POOL, streams)
        stores.append(FileStore(engine, str(tmp_path), io, **options))
        return stores[-1]

    yield factory
    for store in stores:
        store.close()


@pytest.fixture(params=["positional", "async_io"])
def store(request, make):
    return make(make_io(request.param))


def large(seed=0):
    return pattern(SIZE, dtype=torch.uint8, seed=seed)


def pieces(store):
    """Files of the one tensor, in its order: they are made as it is written."""
    return sorted(Path(store.slots.path).glob("*.bin"))


def test_a_tensor_of_several_times_the_pool(store):
    tensor = large()
    store.put("x", tensor)
    tensor_before = tensor.clone()
    store.flush()
    assert len(pieces(store)) == 21  # a quarter of the pool each
    assert store.piece_bytes == POOL // 4
    for _ in range(2):
        store.prefetch("x")
        assert_same(store.get("x"), tensor_before)
    assert store.engine.pool.peak_bytes <= POOL
    assert store.engine.counters.bytes_out == SIZE
    assert store.engine.counters.bytes_in == 2 * SIZE
    assert (store.counters.num_out, store.counters.num_in) == (21, 42)
    store.drop("x")
    store.put("y", large(1))  # its files are used again
    assert_same(store.get("y"), large(1))
    store.flush()
    assert len(pieces(store)) == 21


@pytest.mark.parametrize("kind", ["transposed", "expanded", "slice", "bf16"])
def test_every_kind_in_pieces(make, kind):
    tensor = {
        "transposed": pattern(300, 70).t(),
        "expanded": pattern(1, 21000).expand(5, 21000),
        "slice": pattern(300, 140)[:, ::2],
        "bf16": pattern(3, 14001, dtype=torch.bfloat16),
    }[kind]
    store = make()
    store.put("x", tensor)
    assert_same(store.get("x"), tensor)
    store.flush()
    assert_same(store.get("x"), tensor)
    assert store.engine.pool.peak_bytes <= POOL


def test_reading_ahead_while_another_is_used(make):
    """What a backward does: the next layer's tensor is on its way while this one's is read."""
    store = make()
    for layer in range(4):
        store.put(str(layer), large(layer))
    store.prefetch("3")
    for layer in reversed(range(4)):
        if layer:
            store.prefetch(str(layer - 1))
        assert_same(store.get(str(layer)), large(layer))
        store.drop(str(layer))
    assert store.engine.pool.peak_bytes <= POOL
    assert_nothing_held(store)


def test_some_pieces_still_in_memory_and_some_on_file(make):
    class Last(PositionalIO):
        """The file of the last piece waits until it is let through."""

        def write(self, path, memory):
            if memory.numel() < POOL // 4:
                assert gate.wait(120)
            super().write(path, memory)

    gate = threading.Event()
    store = make(Last(), num_threads=1)
    store.put("x", large())
    entry = store._entries["x"]
    for piece in entry.pieces[:-1]:
        piece.write.result()
    assert_same(store.get("x"), large())
    assert [piece.read is None for piece in entry.pieces] == [False] * 20 + [True]
    gate.set()
    store.flush()
    assert_same(store.get("x"), large())


def test_dropped_while_it_is_read(make):
    store = make()
    store.put("x", large())
    store.flush()
    store.prefetch("x")
    store.drop("x")
    for seed in range(3):
        store.put("x", large(seed))
        assert_same(store.get("x"), large(seed))
        store.drop("x")


def assert_nothing_held(store):
    pool = store.engine.pool
    pool.release(pool.take(POOL, "all"))


def test_an_abandoned_prefetch_keeps_its_memory_until_every_copy_is_done(make):
    store = make()
    store.put(
        "x", pattern(POOL // 2, dtype=torch.uint8)
    )  # two pieces, whose copies wait in the twin
    store.flush()
    store.prefetch("x")
    for piece in store._entries["x"].pieces:
        piece.read.result()
    copies = list(store.engine.streams.pending[Direction.TO_DEVICE])
    assert len(copies) == 2
    store.drop("x")
    store.engine.streams.drain()
    assert [copy.event.error for copy in copies] == [None, None]


# -- errors: never a tensor with a wrong piece ---------------------------------------------------------


def assert_refused(store, words):
    for _ in range(2):  # and it stays so
        store.prefetch("x")
        with pytest.raises(StoreError, match=rf"^'x': /.*{words}"):
            store.get("x")
    store.drop("x")
    assert_nothing_held(store)


@pytest.mark.parametrize("number", [0, 7, 20])
def test_a_corrupted_block_of_any_piece(store, number):
    store.put("x", large())
    store.flush()
    path = pieces(store)[number]
    data = bytearray(path.read_bytes())
    data[42] ^= 1
    path.write_bytes(data)
    assert_refused(store, "expected checksum .* found")


def test_exchanged_pieces(make):
    store = make()
    store.put("x", large())
    store.flush()
    first, second, *_ = pieces(store)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert_refused(store, "expected checksum .* found")


def test_a_disk_that_is_full_half_way(store, monkeypatch):
    reserve, made = os.posix_fallocate, []

    def limited(descriptor, offset, nbytes):
        made.append(nbytes)
        if len(made) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    store.put("x", large())
    with pytest.raises(StoreError, match="No space left"):
        store.flush()
    assert_refused(store, "cannot write .*No space left")
    monkeypatch.undo()
    store.put("x", large())
    assert_same(store.get("x"), large())


def test_a_missing_folder(make):
    store = make()
    shutil.rmtree(store.slots.path)
    store.put("x", large())
    with pytest.raises(StoreError, match="No such file"):
        store.flush()
    assert_refused(store, "cannot write .*No such file")


def test_a_piece_that_ends_early(store):
    store.put("x", large())
    store.flush()
    os.truncate(pieces(store)[11], 100)
    assert_refused(store, f"expected a file of {POOL // 4} bytes, found 100")


def test_a_write_that_moves_only_a_part(make, monkeypatch):
    write, calls = os.pwrite, []

    def short(descriptor, data, offset):
        calls.append(offset)
        if len(calls) == 5:
            return 0
        return write(descriptor, data[: PAGE // 2], offset)

    monkeypatch.setattr(os, "pwrite", short)
    store = make(num_threads=1)
    store.put("x", large())
    with pytest.raises(StoreError, match="then no more"):
        store.flush()
    assert_refused(store, "cannot write")


@pytest.mark.parametrize("broken", Direction)
def test_a_copy_of_a_piece_that_fails(make, broken):
    class Faulty(TwinStreams):
        """The fifth copy in one direction."""

        count = 0

        def copy(self, direction, *args):
            with self._lock:
                event = super().copy(direction, *args)
                self.count += direction is broken
                if direction is broken and self.count == 5:

                    def fail():
                        raise RuntimeError("the cable is out")

                    self.pending[direction][-1].run = fail
                return event

    store = make(streams=Faulty())
    store.put("x", large())
    with pytest.raises(TransferError, match=r"'x'.*the cable is out"):
        store.get("x")
    if broken is Direction.TO_HOST:  # and it stays so
        with pytest.raises(TransferError, match=r"'x'.*the cable is out"):
            store.get("x")
    else:
        assert_same(store.get("x"), large())
    store.drop("x")
    assert_nothing_held(store)


def test_a_put_that_cannot_be_finished_leaves_nothing(make, monkeypatch):
    store = make()
    put, calls = store.engine.put, []

    def third_fails(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise TransferError("no more")
        return put(*args, **options)

    monkeypatch.setattr(store.engine, "put", third_fails)
    with pytest.raises(TransferError, match="no more"):
        store.put("x", large())
    monkeypatch.undo()
    assert "x" not in store
    store.put("x", large())
    assert_same(store.get("x"), large())
    store.drop("x")
    assert_nothing_held(store)
