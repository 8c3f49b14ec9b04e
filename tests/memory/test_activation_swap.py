"""What the stores are for: saved activations that leave the device and come back one layer ahead."""

from pathlib import Path

import pytest
import torch
from memory_cases import PAGE
from torch import nn

from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.nvme import FileStore
from hmt_deepspeed.memory.streams import TwinStreams
from hmt_deepspeed.memory.tiered import TieredStore
from hmt_deepspeed.memory.transfer import TransferEngine

LAYERS, WIDTH, TOKENS = 8, 64, 128


def make_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers), torch.randn(TOKENS, WIDTH)


class Swap:
    """Saved tensors that are no parameters go to a store; the one needed next is fetched ahead."""

    def __init__(self, store, parameters):
        self.store = store
        self.own = {p.untyped_storage().data_ptr() for p in parameters}
        self.num_put = 0

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.own:
            return tensor
        name, self.num_put = f"saved {self.num_put}", self.num_put + 1
        self.store.put(name, tensor)
        return name

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        number = int(packed.split()[1])
        self.store.prefetch(packed)
        if number:
            self.store.prefetch(f"saved {number - 1}")
        tensor = self.store.get(packed)
        self.store.drop(packed)
        return tensor


def gradients(model, x, store=None, between=None):
    model.zero_grad()
    if store is None:
        model(x).square().mean().backward()
    else:
        swap = Swap(store, model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(swap.pack, swap.unpack):
            loss = model(x).square().mean()
        if between is not None:
            between()
        loss.backward()
        assert swap.num_put == 2 * LAYERS + 1
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("host_pages", [200, 60, 9])
def test_gradients_are_bit_equal(tmp_path, host_pages):
    model, x = make_model()
    expected = gradients(model, x)
    engine = TransferEngine("cpu", 32 * PAGE)
    store = TieredStore([HostStore(engine, host_pages * PAGE), FileStore(engine, str(tmp_path))])
    for _ in range(3):
        found = gradients(model, x, store)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    host, ssd = store.tiers
    assert (ssd.counters.num_out > 0) is (host_pages < 200)
    assert host.pool.peak_bytes <= host_pages * PAGE
    store.close()


def test_a_missing_wait_is_no_small_error():
    class Forgetful(TwinStreams):
        def use(self, tensor, event, home):
            pass

    model, x = make_model()
    engine = TransferEngine("cpu", 32 * PAGE, Forgetful())
    found = gradients(model, x, HostStore(engine, 200 * PAGE))
    assert any(f.isnan().any() for f in found)


def test_an_altered_file_gives_an_error_and_no_gradient(tmp_path):
    model, x = make_model()
    store = FileStore(TransferEngine("cpu", 32 * PAGE), str(tmp_path))

    def damage():
        store.flush()
        for path in Path(store.slots.path).glob("*.bin"):
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)

    with pytest.raises(StoreError, match=r"'saved \d+': .*expected checksum"):
        gradients(model, x, store, damage)
    assert all(p.grad is None for p in model.parameters())
    store.close()
