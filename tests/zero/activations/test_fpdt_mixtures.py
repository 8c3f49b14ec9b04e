"""A mixture under FPDT in the engine: the same run as without, alone and on ranks that share each sequence."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from mixture_runs import OPTIONS, STEPS, assert_all_same, is_expert, mixture
from training import GLOBAL_BATCH, ds_config, global_batch, make_engine, model_weights

SWAPPED = {"layer_input": "swap_host", "attention_output": "swap_host"}


def run(stage: int, sharing: int | None, policy: dict[str, str] | None = None) -> dict[str, Any]:
    """All rows on every rank, with the auxiliary loss of all of them; in chunks if ``sharing`` says by how many ranks."""
    model: Any = mixture("Mixtral")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    config = ds_config(stage, OPTIONS)
    if sharing is not None:
        config["hmt"]["fpdt"] = {"chunk_size": 5, "sequence_parallel_size": sharing}
        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH
        config["train_batch_size"] = GLOBAL_BATCH * sharing
    if policy is not None:
        config["hmt"]["activations"] = {"policy": policy}
    engine = make_engine(config, model)
    experts = [p for p in engine.optimizer.zero.low_rank if is_expert(p.name)]
    assert len(experts) == 4
    assert all(p.gradient.linear is not None for p in experts)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = global_batch(step)
        outputs = engine(input_ids=tokens, labels=tokens)
        engine.backward(outputs.loss)
        engine.step()
        losses.append((outputs.loss.item(), outputs.aux_loss.item()))
        norms.append(float(engine.get_global_grad_norm()))
    weights = model_weights(engine)
    engine.destroy()
    return {"losses": sum(losses, ()), "norms": norms, "weights": weights}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[str, Any]:
    (one,) = ranks.run(run, 1, 0, None)
    return one


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_the_same_run(ranks: Ranks, plain: dict[str, Any], stage: int, world: int) -> None:
    policy = SWAPPED if stage == 3 else None
    assert_all_same(ranks.run(run, world, stage, world, policy), plain)


def refused() -> dict[str, str]:
    """By component that is rounded."""
    found = {}
    for component in ("layer_input", "attention_output", "lm_head"):
        config = ds_config(0, OPTIONS)
        config["hmt"]["fpdt"] = {"chunk_size": 5}
        config["hmt"]["activations"] = {"policy": {component: "int8"}}
        try:
            make_engine(config, mixture("Mixtral")).destroy()
        except ValueError as error:
            found[component] = str(error)
    return found


def test_what_a_router_reads_is_not_rounded(ranks: Ranks) -> None:
    """Backward computes it again, and tokens would go to other experts."""
    (said,) = ranks.run(refused, 1)
    assert said.keys() == {"layer_input", "attention_output"}
    for component, message in said.items():
        assert f"{component} of model.layers." in message
        assert "is 'int8'" in message
        assert '"swap_host"' in message
