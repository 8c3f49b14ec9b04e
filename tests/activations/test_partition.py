"""Partitioned checkpoints on real ranks: bytes held, gradients, the host variant, and inputs that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from held_inputs import checkpointed, make_layers
from torch import Tensor

from hmt_deepspeed.activations.codecs import Int8, Keep, SwapHost
from hmt_deepspeed.activations.contiguous import Contiguous
from hmt_deepspeed.activations.partition import Partitioned, TorchReplicas, fingerprint
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine

LAYERS, BATCH, TOKENS, WIDTH = 3, 2, 7, 16  # 14 tokens: even over 2 ranks, not over 3


def gradients(codec: Any, dtype: torch.dtype, x: Tensor, held: list[Any] | None = None) -> Any:
    layers = make_layers(LAYERS, WIDTH, dtype)
    x = x.detach().requires_grad_()
    y = x
    for layer in layers:
        y = checkpointed(layer, y, codec, held)
    y.square().sum().backward()
    return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(f, s) for f, s in zip(first, second, strict=True))


def inputs(dtype: torch.dtype) -> Tensor:
    """The same on all ranks."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7)).to(dtype)


# -- cases, run on every rank ------------------------------------------------------------------------


def bytes_and_gradients() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = inputs(dtype)
        for name, tensor in (
            ("plain", x),
            ("transposed", inputs(dtype).transpose(0, 1).contiguous().transpose(0, 1)),
        ):
            held: list[Any] = []
            codec = Partitioned(Keep(), TorchReplicas())
            same = equal(gradients(codec, dtype, tensor, held), gradients(None, dtype, tensor))
            # what is counted is what the storages hold
            storages = [h._held._tensor.untyped_storage().nbytes() for h in held]
            found[f"{name} {dtype}"] = (same, sum(h.nbytes for h in held), sum(storages), x.nbytes)
    return found


def on_the_host() -> dict[str, Any]:
    engine = TransferEngine("cpu", 1 << 20)
    store = HostStore(engine, 1 << 20)
    x, held = inputs(torch.float32), []
    codec = Partitioned(SwapHost(store), TorchReplicas())
    layers = make_layers(LAYERS, WIDTH)
    y = x.requires_grad_()
    for layer in layers:
        y = checkpointed(layer, y, codec, held)
    found = {
        "device": sum(h.nbytes for h in held),
        "out": engine.counters.bytes_out,
        "used": store.pool.used_bytes,
    }
    for h in held:
        h.prefetch()
    y.square().sum().backward()
    found["in"] = engine.counters.bytes_in
    found["same"] = equal(
        [p.grad for m in layers for p in m.parameters()], gradients(None, x.dtype, x)[1:]
    )
    return found


def round_trips() -> dict[str, Any]:
    """Layouts, token dimensions and sizes, and which of them are held whole."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    cases = {
        "rows": (random(5, 4), 0),
        "transposed": (random(4, 6).t(), 0),
        "gaps": (random(4, 12)[:, ::2], 0),
        "expanded": (random(6, 1).expand(6, 8), 0),
        "tokens last": (random(4, 6), 1),
        "heads": (random(2, 3, 5, 4), (0, 2)),
        "negative": (random(3, 4, 5), (0, -2)),
        "one token": (random(1, 4), 0),
        "no token": (random(0, 4), 0),
        "scalar": (random(()), ()),
    }
    found = {}
    for name, (tensor, token_dims) in cases.items():
        codec = Partitioned(Keep(), TorchReplicas())
        held = codec.encode(tensor, token_dims)
        for _ in range(2):  # any number of times
            back = held.decode()
            assert torch.equal(back, tensor), name
            assert back.stride() == torch.empty_like(tensor).stride() or tensor.numel() < 2, name
        found[name] = held.nbytes
    return found


def eight_bits() -> dict[str, Any]:
    """Codes with a scale of its own in each block come back exactly, which no other blocks allow."""
    codes = torch.randint(-126, 127, (64, 8), generator=torch.Generator().manual_seed(5))
    codes[::16] = 127
    x = codes * 2.0 ** (torch.arange(64) // 16)[:, None]
    part = Partitioned(Int8(16), TorchReplicas()).encode(x)
    whole = Int8(16).encode(x)
    noise = Partitioned(Int8(16), TorchReplicas())
    constant = torch.full((64, 8), 0.3)
    constant[::16] = 1.0
    return {
        "nbytes": (part.nbytes, whole.nbytes),
        "same": torch.equal(part.decode(), x) and torch.equal(whole.decode(), x),
        "decoded": noise.encode(x.sqrt().nan_to_num(), key=1).decode(),
        "noise": noise.encode(constant, key=1).decode(),
    }


def differing(kind: str) -> dict[str, Any]:
    """Rank 1 has another input; all must say so, and none may wait for another."""
    rank, x = dist.get_rank(), inputs(torch.float32)
    if rank == 1:
        x = {
            "one bit": lambda: x.index_put(
                (torch.tensor(1), torch.tensor(3), torch.tensor(5)),
                x[1, 3, 5].nextafter(torch.tensor(9.0)),
            ),
            "rows exchanged": lambda: x.flip(0),
            "columns exchanged": lambda: x.flip(2),
            "shape": lambda: x[:, :-1],
            "dtype": lambda: x.half(),
        }[kind]()
    error = ""
    try:
        gradients(Partitioned(Keep(), TorchReplicas()), x.dtype, x)
    except ValueError as refused:
        error = str(refused)
    dist.barrier()
    return {"error": error}


def compared_in_the_first_forward_only() -> list[int]:
    class Counting(TorchReplicas):
        num = 0

        def all_gather(self, packed: Tensor, part: Tensor) -> None:
            self.num += 1
            super().all_gather(packed, part)

    replicas = Counting()
    codec = Partitioned(Keep(), replicas)
    found = []
    for _ in range(2):
        gradients(codec, torch.float32, inputs(torch.float32))
        found.append(replicas.num)
    return found


def in_slots() -> dict[str, Any]:
    slots = Contiguous(LAYERS)
    codec = Partitioned(slots, TorchReplicas())
    x, held = inputs(torch.float32), []
    same = equal(gradients(codec, x.dtype, x, held), gradients(None, x.dtype, x))
    addresses = [h._held.memory.data_ptr() for h in held]
    held.clear()
    assert slots.slots is not None
    first, stride = slots.slots.data_ptr(), slots.slots.shape[1]
    return {
        "same": same,
        "stride": stride,
        "one by one": addresses == [first + i * stride for i in range(LAYERS)],
        "free": len(slots._free),
    }


# -- tests -----------------------------------------------------------------------------------------


def test_half_the_bytes_and_the_same_gradients(ranks):
    for found in ranks.run(bytes_and_gradients, 2):
        for name, (same, counted, stored, whole) in found.items():
            assert same, name
            assert counted == stored == LAYERS * whole // 2, name


def test_on_the_host_nothing_is_left_on_the_device(ranks):
    part = LAYERS * BATCH * TOKENS * WIDTH * 4 // 2
    for found in ranks.run(on_the_host, 2):
        assert found["device"] == 0
        assert found["out"] == found["in"] == part
        assert found["used"] == LAYERS * 4096  # a page each
        assert found["same"]


def test_every_layout_comes_back_on_three_ranks(ranks):
    for found in ranks.run(round_trips, 3):
        assert found == {
            "rows": 2 * 4 * 4,  # of 5 rows, filled up to 6
            "transposed": 2 * 4 * 4,
            "gaps": 2 * 6 * 4,
            "expanded": 2 * 8 * 4,
            "tokens last": 2 * 4 * 4,
            "heads": 4 * 12 * 4,  # of 10 tokens
            "negative": 4 * 5 * 4,  # of 12
            "one token": 4 * 4,  # whole
            "no token": 0,
            "scalar": 4,
        }


def test_eight_bits_keep_their_blocks(ranks):
    first, second = ranks.run(eight_bits, 2)
    for found in (first, second):
        part, whole = found["nbytes"]
        assert part * 2 == whole  # 64 tokens are 4 blocks of 16: 2 each
        assert found["same"]
    assert torch.equal(first["decoded"], second["decoded"])
    # the ranks' parts are alike, their rounding must not be
    upper, lower = first["noise"].chunk(2)
    assert not torch.equal(upper, lower)


@pytest.mark.parametrize(
    "kind", ["one bit", "rows exchanged", "columns exchanged", "shape", "dtype"]
)
def test_inputs_that_differ_are_refused_on_all_ranks(ranks, kind):
    for found in ranks.run(differing, 2, kind):
        assert "partition_activations is true" in found["error"]
        assert "ranks [1] hold something else than rank 0" in found["error"]


def test_inputs_are_compared_in_the_first_forward_only(ranks):
    for found in ranks.run(compared_in_the_first_forward_only, 2):
        assert found == [2 * LAYERS, 3 * LAYERS]


def test_partitioned_into_slots(ranks):
    part = BATCH * TOKENS * WIDTH * 4 // 2
    for found in ranks.run(in_slots, 2):
        assert found == {
            "same": True,
            "stride": -(-part // 512) * 512,
            "one by one": True,
            "free": LAYERS,
        }


def test_fingerprints_see_every_bit():
    x = torch.randn(64, 32)
    own = fingerprint(x, x.shape)
    assert torch.equal(own, fingerprint(x.clone(), x.shape))
    changed = x.clone()
    changed.view(torch.int32)[17, 3] ^= 1
    assert not torch.equal(own, fingerprint(changed, x.shape))
    # nan and the two zeros are bits as others are
    assert torch.equal(fingerprint(x * torch.nan, x.shape), fingerprint(x * torch.nan, x.shape))
    zeros = torch.zeros(4, 4)
    assert not torch.equal(fingerprint(zeros, (4, 4)), fingerprint(-zeros, (4, 4)))
