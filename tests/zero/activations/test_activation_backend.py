"""The activation backend where ZeRO deals weights, gradients and bases over ranks."""

import pytest
import torch
from training import ds_config, make_engine, model_weights, tiny_llama, train

STEPS = 4  # full gradients, projected ones, a refresh


def run(stage, policy, gas=1, dtype=None):
    """Losses, weights and the last step's report."""
    from backends import host_store, make_backend

    none_stays = {"stage3_param_persistence_threshold": 0}  # not even norms
    half = {dtype: {"enabled": True}} if dtype else {}
    config = ds_config(stage, gas=gas, zero_optimization=none_stays, **half)
    engine = make_engine(config, tiny_llama(layers=3))
    engine.train()
    if policy is None:
        return train(engine, STEPS), model_weights(engine), None
    store = host_store()
    backend = make_backend(engine.module, policy, store=store)
    backend.install()
    losses = []
    for step in range(STEPS):
        backend.begin_step()
        losses += train(engine, 1, first=step)
    assert backend.held_bytes == 0
    report = backend.report()
    seen = {
        "rerun": dict(report.rerun),
        "unread": dict(report.unread),
        "missed": report.missed,
        "labels": set(report.bytes_by_label),
    }
    return losses, model_weights(engine), seen


def compare(stage, names, gas=1, dtype=None):
    from backends import KEEP, PAPER_KEPT, RECOMPUTE, SWAP

    policies = {"paper": PAPER_KEPT, "keep": KEEP, "recompute": RECOMPUTE, "swap": SWAP}
    losses, weights, _ = run(stage, None, gas, dtype)
    reports = {}
    for name in names:
        policy = policies[name] | {"projected_inputs": "project"}
        found, found_weights, reports[name] = run(stage, policy, gas, dtype)
        assert found == losses
        different = [n for n in weights if not torch.equal(found_weights[n], weights[n])]
        assert not different
    return reports


RERUN = {  # of 3 layers
    "paper": {"attention_qkv": 9},
    "swap": {},
    "recompute": {"attention_qkv": 9, "attention_output": 3, "residual": 3, "mlp_intermediate": 6},
}


@pytest.mark.parametrize(("world", "policies"), [(1, ["swap"]), (2, ["paper", "recompute"])])
def test_stage_3(ranks, world, policies):
    """Weights are gathered by module hooks when a replay runs; training is the same to the bit."""
    for reports in ranks.run(compare, world, 3, policies):
        for name, report in reports.items():
            assert report["rerun"] == RERUN[name]
            assert (report["unread"], report["missed"]) == ({}, ())
            assert "projected_inputs" in report["labels"]


def test_a_lower_stage_and_accumulation(ranks):
    for reports in ranks.run(compare, 1, 2, ["paper"], gas=2):
        assert reports["paper"]["rerun"] == {"attention_qkv": 18}


def test_half_precision_at_stage_3(ranks):
    ranks.run(compare, 1, 3, ["paper"], dtype="bf16")
