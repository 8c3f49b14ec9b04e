"""Host memory is taken as needed, kept, and never beyond its limit."""

import pytest
import torch
from memory_cases import PAGE

from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.tiered import TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine


def pages(count, value=1.0):
    return torch.full((count * PAGE // 4,), float(value))


@pytest.fixture
def store():
    engine = TransferEngine("cpu", 32 * PAGE)
    store = GrowingHostStore(engine, 10 * PAGE, "hmt.limit", slab_bytes=4 * PAGE)
    yield store
    store.close()


def test_it_takes_what_is_needed_and_keeps_it(store):
    for _ in range(3):
        for index in range(6):
            store.put(f"t{index}", pages(1, index))
        assert [store.get(f"t{index}")[0].item() for index in range(6)] == list(range(6))
        assert (store.pinned_bytes, store.peak_bytes) == (8 * PAGE, 6 * PAGE)
        for index in range(6):
            store.drop(f"t{index}")


def test_a_tensor_larger_than_a_slab_gets_one_of_its_own(store):
    store.put("large", pages(6, 3.0))
    assert torch.equal(store.get("large"), pages(6, 3.0))
    assert store.pinned_bytes == 10 * PAGE


def test_the_limit_holds_and_the_message_names_it(store):
    store.put("a", pages(4))
    store.put("b", pages(4))
    with pytest.raises(PoolFull, match=rf"'c' needs {3 * PAGE} bytes .* hmt.limit is {10 * PAGE}"):
        store.put("c", pages(3))
    store.put("d", pages(2))  # the last slab is what is left
    assert store.pinned_bytes == 10 * PAGE
    store.drop("a")
    store.put("e", pages(4))


def test_what_does_not_fit_goes_to_the_next_tier(store, tmp_path):
    tiered = TieredStore([store, FileStore(store.engine, str(tmp_path))])
    for index in range(14):
        tiered.put(f"t{index}", pages(1, index))
    assert [tiered.get(f"t{index}")[0].item() for index in range(14)] == list(range(14))
    assert store.pinned_bytes == 10 * PAGE
    tiered.tiers[1].flush()  # gets may have come before writes
    assert tiered.tiers[1].counters.num_out == 4
    tiered.close()
