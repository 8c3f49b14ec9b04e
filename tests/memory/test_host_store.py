"""The host store: what is put comes back, within a constant number of bytes."""

import weakref

import pytest
import torch
from memory_cases import PAGE, assert_same, pattern, tensors

from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine


@pytest.fixture
def engine():
    return TransferEngine("cpu", 4 * PAGE)


def test_every_kind_at_once(engine):
    store = HostStore(engine, 100 * PAGE)
    for kind, tensor in tensors().items():
        store.put(kind, tensor)
    for kind in reversed(tensors()):
        store.prefetch(kind)
    for kind, tensor in tensors().items():
        assert_same(store.get(kind), tensor)
        assert_same(store.get(kind), tensor)
        store.drop(kind)
        assert kind not in store
    assert store.pool.peak_bytes <= 100 * PAGE


def test_limit(engine):
    store = HostStore(engine, 2 * PAGE)
    store.put("a", pattern(1024))
    store.put("b", pattern(1024))
    with pytest.raises(
        PoolFull, match=rf"'c' needs {PAGE} bytes, the host store of {2 * PAGE} bytes"
    ):
        store.put("c", pattern(1))
    assert "c" not in store
    store.drop("a")
    store.put("c", pattern(1))
    assert_same(store.get("b"), pattern(1024))
    assert_same(store.get("c"), pattern(1))


def test_names(engine):
    store = HostStore(engine, 4 * PAGE)
    store.put("a", pattern(4))
    with pytest.raises(ValueError, match="'a' is already in the host store"):
        store.put("a", pattern(4))
    for verb in (store.get, store.prefetch, store.drop):
        with pytest.raises(KeyError, match="'b' is not in the host store"):
            verb("b")
    store.drop("a")
    with pytest.raises(KeyError, match="'a'"):
        store.get("a")
    assert store.pool.used_bytes <= PAGE


def test_stores_share_the_engine_and_not_the_memory(engine):
    stores = [HostStore(engine, PAGE) for _ in range(2)]
    for seed, store in enumerate(stores):
        store.put("x", pattern(9, seed=seed))
    for seed, store in enumerate(stores):
        assert_same(store.get("x"), pattern(9, seed=seed))
    assert engine.counters.num_out == 2
    assert engine.pool.used_bytes == 0


def test_close(engine):
    store = HostStore(engine, PAGE)
    store.put("x", pattern(9))
    memory = weakref.ref(store.pool._memory)
    store.close()
    store.close()
    assert memory() is None
    assert "x" not in store
    with pytest.raises(RuntimeError, match="host store is closed"):
        store.put("y", torch.ones(1))
