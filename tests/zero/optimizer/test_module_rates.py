"""Learning rates by module: a factor on all is another learning rate, wherever states are."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from training import (
    LENGTH,
    LOW_RANK,
    VOCAB,
    assert_same,
    ds_config,
    make_engine,
    result,
    tiny_llama,
    train,
    weights,
)
from transformers import GPT2Config, GPT2LMHeadModel

from hmt_deepspeed.rules import rule_of

FACTOR, RATE, DECAY = 4.0, 1e-3, 0.1
ON_HOST = {"offload_optimizer": {"device": "cpu"}}


def trained(stage: int, zero: dict[str, Any], factor: float, **options: Any) -> dict[str, Any]:
    """A warm-up over the first of six steps to ``factor`` times the rate, with the same decay a step."""
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": factor * RATE, "warmup_num_steps": 4}
    engine = make_engine(
        ds_config(
            stage,
            {**LOW_RANK, "update_interval": 3, **options},
            zero_optimization=zero,
            optimizer={"type": "HMT", "params": {"lr": RATE, "weight_decay": DECAY / factor}},
            scheduler={"type": "WarmupLR", "params": schedule},
        ),
        tiny_llama(layers=1),
    )
    found = result(engine, train(engine, 6))
    engine.destroy()
    return found


def both(stage: int, zero: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By module rules for two halves of the model, one of which also gives a method, and by the learning rate."""
    rules = {"o_proj": {"method": "adamw", "lr_scale": FACTOR}, ".": {"lr_scale": FACTOR}}
    same = {"o_proj": {"method": "adamw"}}
    return trained(stage, zero, 1.0, module_rules=rules), trained(
        stage, zero, FACTOR, module_rules=same
    )


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (3, {}), (2, ON_HOST)])
def test_a_factor_on_every_module_is_another_learning_rate(
    ranks: Ranks, stage: int, zero: dict[str, Any]
) -> None:
    by_rules, by_rate = ranks.run(both, 1, stage, zero)[0]
    assert_same(by_rules, by_rate)


def moved_positions(stage: int) -> float:
    """The furthest that a first step moves a position's embedding, in learning rates."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    adam = {"type": "HMT", "params": {"lr": RATE, "weight_decay": 0.0}}
    engine = make_engine(ds_config(stage, {"method": "muon"}, optimizer=adam), model)
    name = "transformer.wpe.weight"
    before = weights(engine)[name]
    train(engine, 1)
    moved = weights(engine)[name] - before
    engine.destroy()
    return float(moved.abs().max()) / RATE


@pytest.mark.parametrize("stage", [0, 3])
def test_an_embedding_has_its_rate_whatever_its_name(ranks: Ranks, stage: int) -> None:
    expected = rule_of("muon").embedding_ratio
    assert ranks.run(moved_positions, 1, stage)[0] == pytest.approx(expected, rel=1e-2)
