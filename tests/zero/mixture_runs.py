"""Small mixtures whose experts are 3-D weights, on the bare optimizer and on engines of any layout, and what both have alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from deepspeed.utils import set_z3_leaf_modules
from low_rank_adamw import LOW_RANK_ADAMW
from torch import nn
from training import (
    LOSS,
    NORM,
    WEIGHT,
    ds_config,
    furthest,
    global_batch,
    make_engine,
    model_weights,
    train_step,
)

from hmt_deepspeed.optim.hmt import HMT

EXPERTS = 6
WIDTHS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS,
    "use_cache": False,
}
# gpt-oss stores its experts transposed, and has biases
FAMILIES = {"Mixtral": {}, "GptOss": {"layer_types": ["full_attention"] * 2}}
OPTIONS: dict[str, Any] = {
    **LOW_RANK_ADAMW,
    "rank": 6,
    "update_interval": 2,
    "max_full_gradient_bytes": 10**7,
    "scale": 1.0,
    "expert_basis": "shared",
}
STEPS = 4  # the third refreshes all bases again, the last projects on them


def mixture(family: str, experts: int = EXPERTS, **widths: int) -> nn.Module:
    """In the first layer none but the first four experts are chosen, if there are more: two of them have a higher logit."""
    config = getattr(transformers, f"{family}Config")(
        **{**WIDTHS, **FAMILIES[family], "num_local_experts": experts, **widths}
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, param in model.named_parameters():
        if experts > 4 and "layers.0.mlp." in name and ("router" in name or "gate." in name):
            with torch.no_grad():
                param[1], param[3], param[4:] = -param[0], -param[2], 0.0
                param.requires_grad_(False)
    return model


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """None for those of OPTIONS that are not to be given."""
    return {key: value for key, value in {**OPTIONS, **options}.items() if value is not None}


def is_expert(name: str) -> bool:
    return "experts" in name and "bias" not in name


# -- one process ----------------------------------------------------------------------------------------


_known: dict[str, dict[str, Any]] = {}


def alone(family: str, experts: int = EXPERTS, **options: Any) -> dict[str, Any]:
    """The optimizer without an engine, on all sequences of a step at once; trained once a process."""
    key = repr((family, experts, options))
    if key not in _known:
        _known[key] = _alone(family, experts, with_defaults(options))
    return _known[key]


def _alone(family: str, experts: int, options: dict[str, Any]) -> dict[str, Any]:
    model = mixture(family, experts)
    optimizer = HMT(model, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, **options)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = global_batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    own = {name: m.own_bases for name, m in optimizer.matrices.items() if is_expert(name)}
    return {"losses": losses, "norms": norms, "weights": weights, "own": own}


# -- ranks ----------------------------------------------------------------------------------------------


def engine_of(
    family: str,
    stage: int,
    options: dict[str, Any],
    gas: int = 1,
    experts: int = EXPERTS,
    widths: dict[str, int] | None = None,
    block: dict[str, Any] | None = None,
    is_leaf: bool = False,
    **changes: Any,
) -> Any:
    """``block``: of ``hmt`` beside the optimizer's. ``is_leaf``: mixtures are leaf modules of ZeRO-3, as Mixtral's always
    are."""
    config = ds_config(stage, with_defaults(options), gas, **changes)
    config["hmt"] |= block or {}
    model: Any = mixture(family, experts, **(widths or {}))
    if is_leaf:
        set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    engine = make_engine(config, model)
    leaves = [p.name for p in engine.optimizer.zero.low_rank if p.gradient.leaf is not None]
    assert any(map(is_expert, leaves)) == (is_leaf or (stage == 3 and family == "Mixtral"))
    return engine


def train(engine: Any, steps: range) -> dict[str, Any]:
    losses, norms = [], []
    for step in steps:
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "weights": model_weights(engine)}


def unmoved(weights: dict[str, Any], family: str, experts: int = EXPERTS) -> list[Any]:
    """Weights of experts without tokens, and what they were before."""
    before = dict(mixture(family, experts).named_parameters())
    idle = [name for name in before if "layers.0" in name and is_expert(name)]
    return [(weights[name][4:], before[name].detach()[4:]) for name in idle]


def ran(family: str, stage: int, options: dict[str, Any], **keyword: Any) -> dict[str, Any]:
    engine = engine_of(family, stage, options, **keyword)
    found = train(engine, range(STEPS))
    states = [p for p in engine.optimizer.zero.param_states if is_expert(p.name)]
    found["states"] = {p.name: p.matrix.state_dict() for p in states}
    found["own"] = {p.name: p.matrix.own_bases for p in states}
    found["projected"] = [p.gradient.linear is not None for p in states]
    if "widths" not in keyword:
        found["idle"] = unmoved(found["weights"], family, keyword.get("experts", EXPERTS))
    engine.destroy()
    return found


# -- what they have alike -------------------------------------------------------------------------------


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(other["losses"], rel=LOSS)
    assert one["norms"] == pytest.approx(other["norms"], rel=NORM)
    assert furthest(one["weights"], other["weights"]) < WEIGHT


def assert_all_same(parts: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for part in parts:
        assert_same(part, one)
        assert furthest(part["weights"], parts[0]["weights"]) == 0
        for now, before in part.get("idle", ()):
            assert torch.equal(now, before)  # nor do they decay


def assert_equal(parts: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Of the same ranks, bit for bit."""
    for one, other in zip(parts, others, strict=True):
        assert not any(map(math.isnan, one["losses"]))
        assert one["losses"] == other["losses"]
        assert furthest(one["weights"], other["weights"]) == 0
