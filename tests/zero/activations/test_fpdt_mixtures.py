"""A mixture under FPDT in the engine: the same run as without, alone and on ranks that share each sequence."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from test_zero_mixtures import OPTIONS, STEPS, assert_all_same, is_expert, mixture
from training import GLOBAL_BATCH, ds_config, global_batch, make_engine, model_weights


def run(stage: int, sharing: int | None) -> dict[str, Any]:
    """All rows on every rank, with the auxiliary loss of all of them; in chunks if ``sharing`` says by how many ranks."""
    model: Any = mixture("Mixtral")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    config = ds_config(stage, OPTIONS)
    if sharing is not None:
        config["hmt"]["fpdt"] = {"chunk_size": 5, "sequence_parallel_size": sharing}
        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH
        config["train_batch_size"] = GLOBAL_BATCH * sharing
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
    assert_all_same(ranks.run(run, world, stage, world), plain)
