"""What travels between ranks, when, and how many bytes of it; who holds which rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import nn
from training import (
    LOW_RANK,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    tiny_llama,
    train,
)

from hmt_deepspeed.zero.optimizer.statistics import stock_communication_bytes
from hmt_deepspeed.zero.sharding.shards import RowShards, padded

# -- shards -------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (2, 7), (5, 3), (6, 4), (77, 40), (61, 1), (3, 100), (8, 8)]
WORLDS = [1, 2, 3, 4, 7, 16]
every_partition = pytest.mark.parametrize(
    "shards", [RowShards(m, n, w) for m, n in SHAPES for w in WORLDS], ids=str
)


@every_partition
def test_every_element_and_every_row_has_one_owner(shards: RowShards) -> None:
    elements = [e for r in range(shards.world) for e in range(*shards.flat(r))]
    rows = [e for r in range(shards.world) for e in range(*shards.owned(r))]
    assert elements == list(range(shards.m * shards.n))
    assert rows == list(range(shards.m))


@every_partition
def test_a_rank_holds_every_row_it_touches(shards: RowShards) -> None:
    for rank in range(shards.world):
        begin, end = shards.rows(rank)
        touched = {e // shards.n for e in range(*shards.flat(rank))}
        assert touched == set(range(begin, end))
        assert end - begin <= shards.max_rows
        held = list(range(begin, end))[shards.counted(rank)]
        assert held == list(range(*shards.owned(rank)))


@every_partition
def test_pack_and_unpack_are_inverse(shards: RowShards) -> None:
    matrix = torch.randn(shards.m, 5)
    packed = torch.full((shards.world, shards.max_rows, 5), torch.nan)
    shards.pack(matrix, packed)
    for rank in range(shards.world):
        begin, end = shards.rows(rank)
        assert torch.equal(packed[rank, : end - begin], matrix[begin:end])
    out = torch.full_like(matrix, torch.nan)
    shards.unpack(packed, out)
    assert torch.equal(out, matrix)


@every_partition
def test_flat_parts_make_the_whole(shards: RowShards) -> None:
    flat = torch.randn(shards.m * shards.n)
    parts = [shards.shard_of(flat, rank) for rank in range(shards.world)]
    packed = torch.stack([padded(part, shards.partition) for part in parts])
    out = torch.full_like(flat, torch.nan)
    shards.unpack_flat(packed, out)
    assert torch.equal(out, flat)


@every_partition
def test_rows_hold_the_flat_part(shards: RowShards) -> None:
    matrix = torch.randn(shards.m, shards.n)
    for rank in range(shards.world):
        rows = matrix[slice(*shards.rows(rank))].contiguous()
        expected = shards.shard_of(matrix.view(-1), rank)
        assert torch.equal(shards.rows_to_shard(rows, rank), expected)


# -- cases --------------------------------------------------------------------------------------------


def backward_events(stage: int, overlap: bool) -> dict[str, Any]:
    """Events of one backward without and one with refreshing matrices, buckets of 2000 elements."""
    zero = {"reduce_bucket_size": 2000, "overlap_comm": overlap}
    options = {**LOW_RANK, "update_interval": 3}
    engine = make_engine(ds_config(stage, options, zero_optimization=zero))
    train(engine, 4)
    reducer = engine.optimizer.reducer
    recorded = []
    for step in range(4, 6):
        reducer.events = []
        buckets = [[g.name for g in bucket.members] for bucket in reducer._buckets]
        engine.backward(loss_of(engine, micro_batches(engine, step)[0]))
        recorded.append((buckets, reducer.events))
        engine.step()
    return {"backwards": recorded}


def wide_model() -> nn.Module:
    """Every linear 256 wide; only its low-rank matrices are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        param.requires_grad = "_proj" in name
    return model


def sent_over_one_interval(interval: int) -> dict[str, int]:
    options = {"rank": 16, "update_interval": interval, "master_weights": "none"}
    config = ds_config(
        2, options, bf16={"enabled": True}, train_batch_size=2, train_micro_batch_size_per_gpu=1
    )
    engine = make_engine(config, wide_model())
    sent = 0
    for step in range(interval):
        tokens = micro_batches(engine, step)[0][:, :4]
        engine.backward(loss_of(engine, tokens))
        engine.step()
        sent += engine.optimizer.communication_bytes
    optimizer = engine.optimizer
    stock = interval * stock_communication_bytes(optimizer.zero, low_rank_only=True)
    return {
        "sent": sent,
        "stock": stock,
        "refreshes": min(optimizer.zero.basis_groups.schedule.num_refreshes),
    }


def one_gather(stage: int) -> dict[str, int]:
    """Bytes of one step in which nothing refreshes, fp32."""
    options = {"rank": 4, "update_interval": 1000, "max_full_gradient_bytes": 10**9}
    engine = make_engine(ds_config(stage, options, gas=2))
    train(engine, 2)
    optimizer = engine.optimizer
    entries = [
        {
            "shards": entry.gradient.shards,
            "width": entry.gradient.width,
            "low_rank": entry.matrix is not None,
            "rank": 0 if entry.matrix is None else entry.matrix.rank,
        }
        for entry in optimizer.zero.param_states
    ]
    return {
        "sent": optimizer.communication_bytes,
        "stock": stock_communication_bytes(optimizer.zero),
        "entries": entries,
    }


def memory(stage: int, dtype: str) -> dict[str, Any]:
    options = {"rank": 4, "update_interval": 1000, "max_full_gradient_bytes": 10**9}
    changes = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    model = tiny_llama()
    for name, param in model.named_parameters():
        param.requires_grad = "_proj" in name
    zero = {"reduce_bucket_size": 2000}
    engine = make_engine(ds_config(stage, options, zero_optimization=zero, **changes), model)
    train(engine, 2)
    optimizer = engine.optimizer
    assert not any(entry.gradient.refreshing for entry in optimizer.zero.low_rank)
    optimizer.reducer.peak_bytes = 0
    engine.backward(loss_of(engine, micro_batches(engine, 2)[0]))
    kept = [
        (e.gradient.reduced.shape, e.gradient.reduced.dtype, e.gradient.param.grad, e.gradient.full)
        for e in optimizer.zero.low_rank
    ]
    engine.step()
    return {
        "metrics": optimizer.metrics(),
        "kept": kept,
        "matrices": [
            (e.gradient.shards, e.matrix.rank, e.matrix.width) for e in optimizer.zero.low_rank
        ],
        "held": [
            sum(t.nbytes for t in (m.exp_avg, m.exp_avg_sq, m.evidence, m.first_evidence))
            for m in (e.matrix.moments for e in optimizer.zero.low_rank)
        ],
    }


class Vocabulary(nn.Module):
    """An embedding of 20000 elements beside linears of 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(625, 32)
        self.linears = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for linear in self.linears:
            hidden = torch.tanh(linear(hidden))
        return (hidden - 1).square().mean()


def beside_an_embedding(stage: int, bucket: int) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"rank": 4, "update_interval": 3, "scale": 1.0}
    zero = {"reduce_bucket_size": bucket}
    engine = make_engine(ds_config(stage, options, zero_optimization=zero), Vocabulary())
    reducer = engine.optimizer.reducer
    pooled, larger = [], []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 625, (12, 8), generator=generator)
        loss = engine(tokens.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        pooled.append(sum(buffer.numel() for buffer in reducer._pool))
        sizes = [b.chunk * dist.get_world_size() for b in reducer._buckets]
        larger.append(max(sizes) > bucket)
        engine.step()
    return {"weights": model_weights(engine), "pooled": pooled, "larger": larger}


# -- tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (2, True), (3, True), (0, True)])
def test_reduction_overlaps_backward(ranks: Ranks, stage: int, overlap: bool) -> None:
    for _, events in ranks.run(backward_events, 2, stage, overlap)[0]["backwards"]:
        kinds = [kind for kind, _ in events]
        last_arrival = len(kinds) - 1 - kinds[::-1].index("arrive")
        launched = kinds[:last_arrival].count("launch")
        assert launched >= kinds.count("launch") / 2  # not all at the end
        # A bucket stays in flight while backward goes on: gradients arrive between launch and wait.
        launch = {number: i for i, (kind, number) in enumerate(events) if kind == "launch"}
        wait = {number: i for i, (kind, number) in enumerate(events) if kind == "wait"}
        assert launch.keys() == wait.keys()
        assert any("arrive" in kinds[launch[n] : wait[n]] for n in launch)


@pytest.mark.parametrize("stage", [2, 3])
def test_all_ranks_fill_the_same_buckets_in_the_same_order(ranks: Ranks, stage: int) -> None:
    first, second, third = ranks.run(backward_events, 3, stage, True)
    for one, two, three in zip(*(r["backwards"] for r in (first, second, third)), strict=True):
        assert one[0] == two[0] == three[0]
        orders = [[n for kind, n in events if kind == "launch"] for _, events in (one, two, three)]
        assert orders[0] == orders[1] == orders[2] == sorted(orders[0])
        assert len(one[0]) > 5


def test_low_rank_sends_an_eighth_of_stock(ranks: Ranks) -> None:
    """r = d/16, refreshes of one whole interval included, as issue 2 asks of 200 steps; fewer share them less."""
    result = ranks.run(sent_over_one_interval, 2, 60)[0]
    assert result["refreshes"] >= 1
    assert 0 < result["sent"] <= result["stock"] / 8


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_bytes_sent_are_the_formula(ranks: Ranks, stage: int, world: int) -> None:
    """Gradients m (r + k) instead of m n; weights gathered as in ZeRO; nothing else but norms.

    At stage 3 also the sharded bases n (r + k), in every forward and in the update, and what new probes sum, k (r + k).
    """
    gas = 2
    result = ranks.run(one_gather, world, stage)[0]
    gradients = weights = numel = bases = drawn = 0
    for entry in result["entries"]:
        shards, width = entry["shards"], entry["width"]
        rows = shards.max_rows * world if stage else shards.m
        gradients += rows * width * 4
        numel += shards.m * shards.n
        weights += shards.partition * world * 4
        if entry["low_rank"]:
            bases += -(-shards.n // world) * world * width * 4
            drawn += 2 * (width - entry["rank"]) * width * 4
    ring = (world - 1) / world
    if stage == 0:
        expected, stock = 2 * gradients, 2 * numel * 4
    else:
        rounds = gas if stage >= 2 else 1
        expected = rounds * gradients + (weights if stage < 3 else (gas + 1) * bases + drawn)
        stock = rounds * numel * 4 + (numel * 4 if stage < 3 else 0)
    # Norms travel too: 2 + 1 numbers a parameter; rounding to whole bytes costs one per collective.
    allowance = 2 * 3 * 4 * len(result["entries"]) + 200
    assert ring * expected - 200 <= result["sent"] <= ring * expected + allowance
    assert result["stock"] == pytest.approx(ring * stock, abs=2 * gas + 2)


@pytest.mark.parametrize(
    ("stage", "world", "dtype"), [(2, 1, "fp32"), (1, 1, "bf16"), (3, 2, "fp32")]
)
def test_gradients_and_states_weigh_what_the_formula_says(
    ranks: Ranks, stage: int, world: int, dtype: str
) -> None:
    size = 2 if dtype == "bf16" else 4
    for rank, result in enumerate(ranks.run(memory, world, stage, dtype)):
        gradient = state = full = 0
        for (shards, r, width), kept, held in zip(
            result["matrices"], result["kept"], result["held"], strict=True
        ):
            begin, end = shards.rows(rank)
            shape, kind, grad, whole = kept
            assert tuple(shape) == (end - begin, width)
            assert grad is None
            assert whole is None
            gradient += (end - begin) * width * kind.itemsize
            full += shards.m * shards.n * kind.itemsize
            moments = 2 * (end - begin) * r * 4 + (r + 1) * 4
            assert held == moments
            basis_rows = -(-shards.n // world) if stage == 3 else shards.n
            state += moments + basis_rows * r * size
        metrics = result["metrics"]
        assert metrics["low_rank_state_bytes"] == state
        if world == 1:  # no buckets: what is accumulated is all there is
            assert metrics["gradient_buffer_bytes"] == gradient
            assert gradient < full / 2
        else:  # three buckets of at most the largest matrix, and matrices waiting for theirs
            bucket = max(s.max_rows * w * world for s, _, w in result["matrices"]) * size
            bucket = max(bucket, 2000 * size)
            assert gradient <= metrics["gradient_buffer_bytes"] <= gradient + 4 * bucket


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_above_the_bucket_size_leaves_no_buffer(ranks: Ranks, stage: int) -> None:
    """``reduce_bucket_size`` bounds what stays between backwards: 5000 elements, three buffers at most."""
    small, large = (ranks.run(beside_an_embedding, 2, stage, size)[0] for size in (5000, 10**6))
    assert all(small["larger"])
    assert not any(large["larger"])
    assert all(0 < pooled <= 3 * 5000 for pooled in small["pooled"])
    assert furthest(small["weights"], large["weights"]) == 0


def test_state_is_under_a_third_of_adamws_at_an_eighth(ranks: Ranks) -> None:
    result = ranks.run(state_at_an_eighth, 1)[0]
    assert result["low_rank"] <= 0.3 * result["adamw"]


def state_at_an_eighth() -> dict[str, int]:
    engine = make_engine(ds_config(2, {"rank": 32}, bf16={"enabled": True}), wide_model())
    numel = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    return {
        "low_rank": engine.optimizer.metrics()["low_rank_state_bytes"],
        "adamw": 2 * 4 * numel,
    }
