"""The modes of the optimizer that the tests of stages, world sizes and checkpoints go through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from training import LOW_RANK as TRAINING
from training import VOCAB, ds_config, make_engine, matrix_ranks, tiny_llama, train, weights

LOW_RANK = {**TRAINING, "update_interval": 3}
APOLLO = {"method": "apollo", "update_interval": 3, "scale": 1.0}
MINI = {"method": "apollo_mini", "update_interval": 3, "scale": 16.0}
FIXED = {"rank": 8, "update_interval": 3, "scale": 1.0}
INT8 = {"rank": 32, "update_interval": 3, "scale": 1.0, "state_dtype": "int8"}
BY_BUDGET = {**LOW_RANK, "energy_threshold": 1.0}

# Fields of hmt.optimizer by name of the mode.
MODES: dict[str, dict[str, Any]] = {
    "right": LOW_RANK,
    "left": {**LOW_RANK, "projection": "left"},
    "auto": {**LOW_RANK, "projection": "auto"},
    "two_sided": {**LOW_RANK, "projection": "two_sided"},
    "full residual": {**LOW_RANK, "residual": "full"},
    "left, full residual": {**LOW_RANK, "projection": "left", "residual": "full"},
    "no residual": {**LOW_RANK, "residual": "none"},
    "share_basis": {**LOW_RANK, "share_basis": True},
    "share_basis, factored": {**LOW_RANK, "share_basis": True, "second_moment": "factored"},
    "rank_budget": {**BY_BUDGET, "rank_budget": 0.3},
    "out_of_sample": {**BY_BUDGET, "rank_budget": 0.3, "energy_estimate": "out_of_sample"},
    "out_of_sample, shared": {**LOW_RANK, "energy_estimate": "out_of_sample", "share_basis": True},
    "defaults": {"update_interval": 3, "max_full_gradient_bytes": 60_000},
    "full_rank_budget": {**LOW_RANK, "energy_threshold": 0.9, "full_rank_budget": 0.7},
    "factored": {**LOW_RANK, "projection": "auto", "second_moment": "factored"},
    "subspace": {**LOW_RANK, "range_finder": "subspace"},
    "svd": {**LOW_RANK, "range_finder": "svd"},
    "random": {**FIXED, "range_finder": "random"},
    "random, left": {**FIXED, "range_finder": "random", "projection": "left"},
    "random, two_sided": {**FIXED, "range_finder": "random", "projection": "two_sided"},
    "muon": {**LOW_RANK, "method": "muon", "scale": 0.3},
    "apollo": APOLLO,
    "apollo_mini": MINI,
    "all matrices": {  # with the preset's scale
        "update_interval": 3,
        "rank": 0.125,
        "target_modules": "all",
        "max_full_gradient_bytes": 60_000,
    },
    "module_rules": {
        **LOW_RANK,
        "module_rules": {
            "embed": {"method": "apollo", "lr_scale": 0.5},
            "lm_head": {"projection": "auto", "rank": 6},
            "o_proj": {"method": "adamw"},
            "down_proj": {"projection": "two_sided"},
            "norm|gate_proj": {"lr_scale": 2.0},
        },
    },
}

# Another layout rounds the moments anew: resumed on the same one only.
SAME_LAYOUT: dict[str, dict[str, Any]] = {
    "bf16 states": {**LOW_RANK, "projection": "auto", "state_dtype": "bf16"},
    "bf16 core": {**LOW_RANK, "projection": "two_sided", "state_dtype": "bf16"},
    "int8": INT8,
    "int8, factored": {**INT8, "projection": "auto", "second_moment": "factored"},
}


def wide_llama(seed: int = 0) -> nn.Module:
    """A Llama of one layer whose moments at rank 32 have the 4096 elements that int8 states want."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=140,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def model_of(name: str) -> nn.Module:
    """The smallest model that a mode works on."""
    return wide_llama(seed=7) if "int8" in name else tiny_llama(layers=1, seed=7)


def mode_engine(
    mode: dict[str, Any], stage: int, gas: int = 1, model: nn.Module | None = None, **changes: Any
) -> Any:
    """An engine with the fields of a mode; a Llama of one layer unless given a model."""
    model = tiny_llama(layers=1) if model is None else model
    return make_engine(ds_config(stage, mode, gas=gas, **changes), model)


def found_bases(engine: Any) -> dict[str, Tensor]:
    """Whole bases of the columns by name, of the matrices that have one."""
    found = {}
    for entry in engine.optimizer.zero.low_rank:
        with engine.optimizer.zero.bases.whole(entry):
            basis = getattr(entry.matrix, "basis", None)
            if basis is not None:
                found[entry.name] = basis.clone()
    return found


def outcome(engine: Any, losses: list[float], norms: list[float]) -> dict[str, Any]:
    """What must not depend on stage, world size, accumulation or a resumption."""
    return {
        "losses": losses,
        "norms": norms,
        "ranks": matrix_ranks(engine),
        "refreshes": list(engine.optimizer.zero.basis_groups.schedule.num_refreshes),
        "bases": found_bases(engine),
        "weights": weights(engine),
        "policy": engine.optimizer.zero.basis_groups.policy.state_dict(),
        "shared": sorted(map(sorted, engine.optimizer.zero.basis_groups.shared.groups())),
    }


def trained(engine: Any, steps: int, first: int = 0) -> dict[str, Any]:
    """:func:`outcome` of a few steps."""
    losses, norms = [], []
    for step in range(first, first + steps):
        losses += train(engine, 1, first=step)
        norms.append(float(engine.get_global_grad_norm()))
    return outcome(engine, losses, norms)
