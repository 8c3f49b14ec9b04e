"""Every store against a dict, over long random runs; and host first, SSD after."""

import random

import pytest
import torch
from memory_cases import PAGE, assert_same, pattern
from ssd_io import make_io

from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.tiered import TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]


def random_tensor(rng, seed):
    shape = (rng.choice([0, 1, 3, 70]), rng.choice([1, 64, 129]))
    tensor = pattern(*shape, dtype=rng.choice(DTYPES), seed=seed)
    return rng.choice([tensor, tensor.t(), tensor[:, ::2], tensor[:, :1].expand(-1, 7)])


def run(store, rng, num_steps, full=()):
    """Puts, prefetches, gets and drops at random; what is got equals what a dict holds."""
    held = {}
    num_full = 0
    for step in range(num_steps):
        verb = rng.choice(["put", "put", "prefetch", "get", "get", "drop"])
        name = rng.choice(list(held)) if held else ""
        if verb == "put":
            tensor = random_tensor(rng, step)
            try:
                store.put(str(step), tensor)
            except full:
                num_full += 1
            else:
                held[str(step)] = tensor.clone()
        elif name and verb == "get":
            found = store.get(name)
            assert torch.equal(found, held[name])
            assert found.dtype == held[name].dtype
        elif name and verb == "prefetch":
            store.prefetch(name)
        if held and (verb == "drop" or len(held) > 24):
            name = next(iter(held)) if verb == "put" else name
            store.drop(name)
            del held[name]
    for name, tensor in held.items():
        assert torch.equal(store.get(name), tensor)
        store.drop(name)
    return num_full


@pytest.fixture
def engine():
    made = TransferEngine("cpu", 24 * PAGE)
    yield made
    made.close()


def test_host(engine):
    store = HostStore(engine, 30 * PAGE)
    num_full = run(store, random.Random(1), 3000, PoolFull)
    assert num_full > 10  # the limit was reached
    assert store.pool.peak_bytes <= 30 * PAGE
    assert store.pool.take(30 * PAGE, "all").memory.numel() == 30 * PAGE


@pytest.mark.parametrize("kind", ["positional", "async_io"])
def test_ssd(engine, tmp_path, kind):
    store = FileStore(engine, str(tmp_path), make_io(kind))
    run(store, random.Random(2), 1000)
    size = store.slots.file_bytes
    run(store, random.Random(2), 1000)
    assert store.slots.file_bytes <= size * 1.5  # a slot given back late costs a file or two
    assert engine.pool.peak_bytes <= engine.pool.nbytes
    store.close()
    assert engine.pool.take(24 * PAGE, "all")


# -- tiers -------------------------------------------------------------------------------------------


@pytest.fixture
def tiers(engine, tmp_path):
    made = TieredStore([HostStore(engine, 20 * PAGE), FileStore(engine, str(tmp_path))])
    yield made
    made.close()


def test_random_workload_over_tiers(tiers):
    run(tiers, random.Random(3), 1500)
    host, ssd = tiers.tiers
    assert host.pool.peak_bytes == 20 * PAGE
    assert ssd.counters.num_out > 50


def test_host_first_and_ssd_for_what_it_cannot_hold(engine, tmp_path):
    """A host limit of a few MB loses nothing."""
    host = HostStore(engine, 4 << 20)
    tiers = TieredStore([host, FileStore(TransferEngine("cpu", 3 << 20), str(tmp_path))])
    layers = [pattern(1 << 18, seed=layer) for layer in range(10)]  # 1 MiB each
    for layer, tensor in enumerate(layers):
        tiers.put(f"layer {layer}", tensor)
    ssd = tiers.tiers[1]
    assert [f"layer {layer}" in host for layer in range(10)] == [True] * 4 + [False] * 6
    ssd.flush()
    assert ssd.counters.bytes_out == 6 << 20
    tiers.prefetch("layer 9")
    for layer in reversed(range(10)):  # one layer ahead
        tiers.prefetch(f"layer {max(layer - 1, 0)}")
        assert_same(tiers.get(f"layer {layer}"), layers[layer])
        tiers.drop(f"layer {layer}")
    assert host.pool.peak_bytes == 4 << 20
    assert ssd.engine.pool.peak_bytes <= 3 << 20
    tiers.close()


def test_larger_than_the_host_goes_to_the_ssd(tiers):
    tensor = torch.zeros(21 * PAGE, dtype=torch.int8)
    tiers.put("x", tensor)
    assert "x" in tiers.tiers[1]
    assert_same(tiers.get("x"), tensor)


def test_no_tier_has_room(tiers):
    tiers.tiers[0].engine.put(torch.zeros(24 * PAGE, dtype=torch.int8), "in the way")
    with pytest.raises(PoolFull, match="transfer pool"):
        tiers.put("x", torch.zeros(25 * PAGE, dtype=torch.int8))
    with pytest.raises(KeyError, match="'x' is not in any tier"):
        tiers.get("x")


def test_names_over_tiers(tiers):
    tiers.put("a", pattern(4))
    with pytest.raises(ValueError, match="'a' is already stored"):
        tiers.put("a", pattern(4))
    tiers.drop("a")
    for verb in (tiers.get, tiers.prefetch, tiers.drop):
        with pytest.raises(KeyError, match="'a' is not in any tier"):
            verb("a")


def test_at_least_one_tier():
    with pytest.raises(ValueError, match="at least one tier"):
        TieredStore([])
