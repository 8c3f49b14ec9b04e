"""FPDT in the engine: the same run as without, at every stage, alone and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    assert_same,
    ds_config,
    make_engine,
    micro_batches,
    result,
    tiny_llama,
    train,
    train_step,
)

CHUNKS = {"chunk_size": 5}  # 16 tokens in four chunks


def config_with(stage: int, fpdt: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    config = ds_config(stage, **changes)
    if fpdt is not None:
        config["hmt"]["fpdt"] = fpdt
    return config


def runs(stage: int, gas: int, offload_param: bool) -> dict[str, Any]:
    """Five steps, with refreshes and steps without, under the plain model and under FPDT."""
    changes: dict[str, Any] = {}
    if offload_param:
        changes["zero_optimization"] = {"offload_param": {"device": "cpu"}}
    found = {}
    for name, fpdt in (("plain", None), ("fpdt", CHUNKS)):
        engine = make_engine(
            config_with(stage, fpdt, gas=gas, **changes), tiny_llama(use_cache=False)
        )
        found[name] = result(engine, train(engine, 5))
        engine.destroy()
        assert "forward" not in vars(engine.module.model.layers[0])
    return found


@pytest.mark.parametrize(
    ("world", "stage", "gas", "offload_param"),
    [(1, 0, 1, False), (2, 2, 2, False), (2, 3, 1, True)],
)
def test_the_same_run(ranks: Ranks, world: int, stage: int, gas: int, offload_param: bool) -> None:
    for found in ranks.run(runs, world, stage, gas, offload_param):
        assert_same(found["plain"], found["fpdt"])


def shared_sequences(stage: int, sharing: int) -> dict[str, Any]:
    """All ranks, in groups that share sequences; batches of the same global size whoever shares."""
    from training import dist, global_batch, mean_over_ranks

    config = config_with(stage, CHUNKS | {"sequence_parallel_size": sharing})
    groups = dist.get_world_size() // sharing
    rows = 12 // groups
    config |= {"train_micro_batch_size_per_gpu": rows, "train_batch_size": rows * groups * sharing}
    engine = make_engine(config, tiny_llama(use_cache=False))
    assert engine.ranks_per_sequence == sharing
    losses = []
    for number in range(4):
        tokens = global_batch(number).split(rows)[dist.get_rank() // sharing]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss.item()))
    found = result(engine, losses)
    engine.destroy()
    return found


def test_ranks_that_share_sequences_train_as_ranks_that_do_not(ranks: Ranks) -> None:
    alone = ranks.run(shared_sequences, 1, 2, 1)[0]
    for world, stage, sharing in ((2, 3, 2), (4, 2, 2)):
        for found in ranks.run(shared_sequences, world, stage, sharing):
            assert_same(alone, found)


def refused_sharing() -> str:
    try:
        make_engine(
            config_with(2, CHUNKS | {"sequence_parallel_size": 2}), tiny_llama(use_cache=False)
        )
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_cannot_be_grouped(ranks: Ranks) -> None:
    assert "it must divide them" in ranks.run(refused_sharing, 1)[0]


def gathered_elements(fpdt: dict[str, Any] | None) -> int:
    """Elements that ZeRO-3 gathers in one step."""
    from deepspeed.runtime.zero import partition_parameters

    engine = make_engine(config_with(3, fpdt), tiny_llama(use_cache=False))
    train(engine, 2)  # the coordinator learns the order
    gathered = []
    gather = partition_parameters._dist_allgather_fn

    def counting(part: torch.Tensor, whole: torch.Tensor, *args: Any) -> Any:
        gathered.append(whole.numel())
        return gather(part, whole, *args)

    partition_parameters._dist_allgather_fn = counting
    train_step(engine, 2)
    engine.destroy()
    return sum(gathered)


def both_gathers() -> tuple[int, int]:
    return gathered_elements(None), gathered_elements(CHUNKS)


def test_weights_are_gathered_once_per_pass_not_once_per_chunk(ranks: Ranks) -> None:
    plain, fpdt = ranks.run(both_gathers, 2)[0]
    assert plain > 0
    assert fpdt <= plain


def kept_in_chunks() -> list[tuple[int, ...]]:
    """Shapes of what projected linears keep of their inputs in the middle of a backward."""
    from hmt_deepspeed.optim.backward.linear_functions import ProjectedLinearFunction

    engine = make_engine(config_with(2, CHUNKS), tiny_llama(use_cache=False))
    shapes = []
    forward = ProjectedLinearFunction.forward

    def noting(ctx: Any, x: Any, weight: Any, bias: Any, product: Any, *rest: Any) -> Any:
        shapes.append((x.shape[0] * x.shape[1], product.shape[0], product.shape[1], x.shape[2]))
        return forward(ctx, x, weight, bias, product, *rest)

    ProjectedLinearFunction.forward = staticmethod(noting)
    tokens = micro_batches(engine, 0)[0]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.destroy()
    return shapes


def test_projected_backward_keeps_xq_of_a_piece_at_a_time(ranks: Ranks) -> None:
    shapes = ranks.run(kept_in_chunks, 1)[0]
    assert shapes
    for tokens, rows, width, channels in shapes:
        assert tokens == rows == 12  # a batch of 12 in pieces of one token, a quarter of a chunk
        assert width < channels


def refused() -> str:
    model = tiny_llama(use_cache=False, attention_dropout=0.1)
    try:
        make_engine(config_with(2, CHUNKS), model)
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_that_fpdt_cannot_run_is_refused_before_the_engine_is_built(ranks: Ranks) -> None:
    assert "attention_dropout is 0.1" in ranks.run(refused, 1)[0]


def reduction_excess(optimizer: dict[str, Any]) -> tuple[int, int]:
    """Bytes by which a reduction's peak exceeds the peak before it, and of a bucket."""
    from benchmarks import reduction_peak
    from benchmarks.setting import Shape

    shape = Shape(96, 2, 4, vocabulary=64, sequence=64, micro_batch=1)
    arguments = {"shape": vars(shape), "bucket": 8192, "optimizer": optimizer}
    found = reduction_peak.count(torch.distributed.get_rank(), arguments)
    assert len(found["stretches"]) > 20, "each parameter's arrival, and the end"
    return found["excess"], 8192 * 4


@pytest.mark.parametrize("optimizer", [{"method": "adamw"}, {"rank": 4, "update_interval": 100}])
def test_reducing_gradients_makes_no_spike(ranks: Ranks, optimizer: dict[str, Any]) -> None:
    """The limit that the paper names: within a bucket of what a layer's backward took before."""
    for excess, bucket in ranks.run(reduction_excess, 2, optimizer):
        assert excess <= bucket
