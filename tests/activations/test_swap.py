"""Swapped activations: bytes that leave, come back and are dropped exactly once, and errors instead of
wrong tensors."""

import errno
import gc
import os
import random
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmt_deepspeed.activations.codecs import build_codec
from hmt_deepspeed.memory.errors import PoolFull, StoreError
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.pool import GRANULE as PAGE
from hmt_deepspeed.memory.tiered import TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine


class Stores:
    """A host store of some pages, and files behind it."""

    def __init__(self, folder, host_pages=16):
        self.engine = TransferEngine("cpu", 32 * PAGE)
        self.host = HostStore(self.engine, host_pages * PAGE)
        self.files = FileStore(self.engine, str(folder))
        self.tiered = TieredStore([self.host, self.files])
        self.swap_host = build_codec("swap_host", self.host)
        self.swap_ssd = build_codec("swap_ssd", self.tiered)

    def paths(self):
        self.files.flush()
        return list(Path(self.files.slots.path).glob("*.bin"))


@pytest.fixture
def stores(tmp_path):
    made = Stores(tmp_path)
    yield made
    made.tiered.close()
    made.engine.close()


@pytest.fixture
def to_files(tmp_path):
    """Stores whose host holds nothing of more than a page."""
    made = Stores(tmp_path, host_pages=1)
    yield made
    made.tiered.close()
    made.engine.close()


def page(seed=0, pages=1):
    return torch.randn(pages * PAGE // 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("choice", ["swap_host", "swap_ssd"])
def test_what_comes_back(stores, choice):
    codec = getattr(stores, choice)
    assert (codec.choice, codec.lossy) == (choice, False)
    for tensor in (
        torch.randn(2, 5, 3),
        torch.randn(2, 3, 5, 4).transpose(1, 2).bfloat16(),
        torch.randn(7).half(),
        torch.randn(1, 6).expand(30, 6),
        torch.randn(9, 8)[:, 2:5],
        torch.randn(3, 3, requires_grad=True) * 2,
    ):
        held = codec.encode(tensor, (0, 1)[: tensor.dim()])
        assert held.nbytes == 0
        held.prefetch()
        for _ in range(2):
            out = held.decode()
            assert out.dtype == tensor.dtype
            assert torch.equal(out, tensor)
            assert not out.requires_grad
            out.zero_()  # a copy: the next one is whole
        if tensor.stride() == torch.empty_like(tensor).stride():  # no gaps or repetitions
            assert out.stride() == tensor.stride()


def test_bytes_leave_the_device_and_return_when_asked(stores):
    tensor = page(pages=4)
    storage = StorageWeakRef(tensor.untyped_storage())
    held = stores.swap_host.encode(tensor, name="up")
    counters = stores.engine.counters
    assert (counters.bytes_out, counters.bytes_in) == (4 * PAGE, 0)
    del tensor
    stores.engine.streams.drain()
    assert storage.expired()  # nothing of the holder keeps it
    held.prefetch()
    held.prefetch()
    assert counters.bytes_in == 4 * PAGE
    held.decode()
    assert counters.bytes_in == 4 * PAGE
    held.decode()
    assert counters.bytes_in == 8 * PAGE


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_in_8_bits_what_leaves_is_codes_and_scales(stores, form):
    """As the form itself rounds, to the bit; half of 16 bits moves, and nothing of it stays on the device."""
    tensor = torch.randn(2, 512, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    codec = build_codec(f"swap_host_{form}", stores.host)
    held = codec.encode(tensor, (0, 1), key=5, name="layers.0: layer_input")
    expected = build_codec(form).encode(tensor, (0, 1), key=5)
    counters = stores.engine.counters
    assert (held.nbytes, counters.bytes_out) == (0, expected.nbytes)
    assert not any(isinstance(part, torch.Tensor) for part in vars(held._blocks).values())
    original = StorageWeakRef(tensor.untyped_storage())
    strides = tensor.stride()
    tensor.zero_()  # what was encoded is a copy
    del tensor
    stores.engine.streams.drain()
    assert original.expired()
    held.prefetch()
    assert counters.bytes_in == expected.nbytes
    for _ in range(2):
        out = held.decode()
        assert torch.equal(out, expected.decode())
        assert (out.dtype, out.stride()) == (torch.bfloat16, strides)
    del held
    codec.encode(torch.ones(1))  # whose first use drops what the garbage held
    assert stores.host.pool.used_bytes == 2 * PAGE


def test_a_change_in_place_is_noticed(stores):
    """The copy leaves at a time of its own: it may hold the old values or the new ones."""
    tensor = page()
    held = stores.swap_host.encode(tensor, name="layers.0.up")
    tensor.relu_()
    with pytest.raises(RuntimeError, match=r"'layers\.0\.up #\d+' was changed by an in-place"):
        held.decode()


def test_host_first_then_files(tmp_path):
    stores = Stores(tmp_path, host_pages=2)
    tensors = [page(seed) for seed in range(6)]
    held = [stores.swap_ssd.encode(tensor) for tensor in tensors]
    assert len(stores.paths()) == 4
    for one in reversed(held):
        one.prefetch()
    for tensor, one in zip(tensors, held, strict=True):
        assert torch.equal(one.decode(), tensor)
    stores.tiered.close()


def test_a_full_host_says_so(stores):
    held = stores.swap_host.encode(page(pages=16))
    with pytest.raises(PoolFull, match=r"'up #\d+' needs"):
        stores.swap_host.encode(page(), name="up")
    del held
    stores.swap_host.encode(page(pages=16))  # what the garbage held is free again


# -- garbage --------------------------------------------------------------------------------------


class Counting:
    """A store that counts what is put and dropped."""

    def __init__(self, store):
        self.store, self.put_names, self.dropped = store, [], []
        self.prefetch, self.get = store.prefetch, store.get

    def put(self, name, tensor):
        self.store.put(name, tensor)
        self.put_names.append(name)

    def drop(self, name):
        self.dropped.append(name)
        self.store.drop(name)


@pytest.fixture
def counting(stores):
    store = Counting(stores.host)
    return store, build_codec("swap_host", store)


def test_each_entry_is_dropped_once_in_any_order(stores, counting):
    store, codec = counting
    held = [codec.encode(torch.ones(8), name="same name") for _ in range(16)]
    random.Random(0).shuffle(held)
    held[3].prefetch()  # under way when it becomes garbage
    while held:
        held.pop()
        codec.sweep()
        assert len(store.dropped) == 16 - len(held)
    codec.sweep()
    assert sorted(store.dropped) == sorted(store.put_names)
    assert len(set(store.put_names)) == 16
    stores.engine.streams.drain()
    stores.host.put("last", torch.ones(4))  # reclaims
    assert stores.host.pool.used_bytes == PAGE


def make_cycle(codec):
    cycle = [codec.encode(torch.ones(8))]
    cycle.append(cycle)


def test_cycles_collected_by_another_thread(counting):
    store, codec = counting
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            make_cycle(codec)
        codec.sweep()
        assert not store.dropped
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        codec.sweep()
    finally:
        gc.enable()
    assert sorted(store.dropped) == sorted(store.put_names)


def test_a_collection_inside_the_stores_locks_does_not_hang(tmp_path):
    """A collection may start at any allocation of a thread that holds them."""
    stores = Stores(tmp_path)  # not closed by a fixture, which would hang too
    codec = stores.swap_host

    def collect_under_lock():
        with stores.host._lock, stores.host.pool._changed, codec._sweeping:
            gc.collect()

    make_cycle(codec)
    thread = threading.Thread(target=collect_under_lock, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    codec.sweep()
    assert not stores.host._transfers
    stores.tiered.close()


def test_a_failed_put_leaves_nothing(stores, counting):
    store, codec = counting
    with pytest.raises(PoolFull):
        codec.encode(page(pages=17))
    gc.collect()
    codec.sweep()
    assert not store.dropped
    assert stores.host.pool.used_bytes == 0


def test_garbage_of_a_closed_store_is_no_error(stores, counting):
    store, codec = counting
    held = codec.encode(torch.ones(8))
    stores.host.close()
    del held
    codec.sweep()
    assert store.dropped == store.put_names  # asked of the store, which no longer knows it
    with pytest.raises(KeyError):
        stores.host.drop(store.put_names[0])


def test_only_floating_point(stores):
    with pytest.raises(ValueError, match=r"'mask' is torch\.bool; swap_host holds floating-point"):
        stores.swap_host.encode(torch.ones(4, dtype=torch.bool), name="mask")


# -- a failing SSD: an error that names the tensor, never a wrong tensor -------------------------------


def assert_error_names_the_tensor(held, text):
    for _ in range(2):  # and it stays one
        held.prefetch()
        with pytest.raises(StoreError, match=rf"'layers\.7\.mlp #\d+'.*{text}"):
            held.decode()


def swapped(stores):
    """A tensor that is in a file alone, if it could be written."""
    held = stores.swap_ssd.encode(page(pages=2), name="layers.7.mlp")
    with suppress(StoreError):  # raised again where the tensor is used
        stores.files.flush()
    return held


def test_full_disk(to_files, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_error_names_the_tensor(swapped(to_files), "No space left on device")
    monkeypatch.undo()
    held = swapped(to_files)  # with room again, the next one works
    assert torch.equal(held.decode(), page(pages=2))


def test_missing_folder(to_files):
    shutil.rmtree(to_files.files.slots.path)
    assert_error_names_the_tensor(swapped(to_files), "No such file or directory")


def test_short_write(to_files, monkeypatch):
    """What a crash, or a device that lies, leaves: the end of the file is missing."""
    held = swapped(to_files)
    (path,) = to_files.paths()
    os.truncate(path, PAGE)
    assert_error_names_the_tensor(held, f"expected a file of {2 * PAGE} bytes, found {PAGE}")


def test_short_write_of_the_call(to_files, monkeypatch):
    """pwrite that takes half of what it is given, and then nothing."""
    calls = []

    def half(descriptor, buffer, offset):
        calls.append(offset)
        return len(buffer) // 2 if len(calls) == 1 else 0

    monkeypatch.setattr(os, "pwrite", half)
    held = swapped(to_files)
    assert len(calls) == 2
    assert_error_names_the_tensor(held, "cannot write")


def test_corrupted_block(to_files):
    held = swapped(to_files)
    (path,) = to_files.paths()
    with open(path, "r+b") as file:
        file.seek(PAGE + 100)
        byte = file.read(1)
        file.seek(PAGE + 100)
        file.write(bytes([byte[0] ^ 1]))
    assert_error_names_the_tensor(held, "not what was written: expected checksum")


def test_removed_file(to_files):
    held = swapped(to_files)
    (path,) = to_files.paths()
    path.unlink()
    assert_error_names_the_tensor(held, "No such file or directory")
