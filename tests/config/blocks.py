"""Blocks of the config and what is said of bad ones."""

import pytest

from hmt_deepspeed.config import HMTConfig

DEFAULTS = {
    "method": "muon",
    "projection": "right",
    "rank": "auto",
    "rank_candidates": "auto",
    "energy_threshold": 0.8,
    "energy_estimate": "out_of_sample",
    "rank_budget": "auto",
    "full_rank_budget": 0.0,
    "update_interval": 200,
    "range_finder": "randomized",
    "residual": "probe",
    "share_basis": False,
    "expert_basis": "auto",
    "probes": "auto",
    "projected_backward": "auto",
    "scale": "auto",
    "max_full_gradient_bytes": "auto",
    "state_dtype": "auto",
    "second_moment": "full",
    "master_weights": "fp32",
    "weight_dtype": "auto",
    "target_modules": None,
    "module_rules": {},
    "seed": 0,
}
POLICY = {
    "layer_input": "keep",
    "attention_qkv": "recompute",
    "attention_output": "int8",
    "mlp_intermediate": "int8",
    "experts": "int8",
    "residual": "keep",
    "projected_inputs": "recompute",
    "lm_head": "keep",
}
ACTIVATIONS = {
    "policy": POLICY,
    "overrides": {},
    "components": {},
    "host_memory": "auto",
    "nvme_path": None,
}
KEPT_BY_ADAMW = {"method", "master_weights", "state_dtype", "module_rules", "seed"}
KEPT_BY_APOLLO = KEPT_BY_ADAMW | {
    "rank",
    "update_interval",
    "scale",
    "projected_backward",
    "target_modules",
}
KEPT_BY_WHOLE = KEPT_BY_APOLLO - {"update_interval"} | {"weight_dtype"}  # by "rank": "full"


def problems_of(block: object) -> dict[str, str]:
    """The lines of the one ValueError that `block` raises, by key."""
    with pytest.raises(ValueError) as caught:
        HMTConfig.from_block(block)
    assert type(caught.value) is ValueError
    first, *lines = str(caught.value).splitlines()
    assert first.startswith('The "hmt" block of the DeepSpeed config has ')
    assert f" {len(lines)} problem" in first
    assert all(line.startswith("  - hmt.") for line in lines)
    return dict(line.removeprefix("  - ").split(": ", 1) for line in lines)


def problem_of_field(section: str = "optimizer", **fields: object) -> tuple[str, str]:
    problems = problems_of({section: fields})
    assert len(problems) == 1, problems
    return next(iter(problems.items()))
