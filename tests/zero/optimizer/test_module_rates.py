"""Learning rates by module: a factor on all is another learning rate, wherever states are."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from training import LOW_RANK, assert_same, ds_config, make_engine, result, tiny_llama, train

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
