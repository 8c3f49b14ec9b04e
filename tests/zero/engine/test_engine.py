"""The rest of the engine's interface: schedulers, DeepSpeed's tools, Hugging Face, the end."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from harness import Ranks
from torch import Tensor
from training import (
    assert_same,
    ds_config,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    stock_config,
    tiny_llama,
    train,
)

import hmt_deepspeed

STEPS = 4  # every matrix refreshes in one of the first three, none in the last


# -- schedulers ---------------------------------------------------------------------------------------

SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4, "warmup_max_lr": 2e-3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "warmup_max_lr": 2e-3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 4},
}


def all_lrs() -> list[tuple[list[list[float]], list[list[float]]]]:
    """Of every schedule, ours and stock's."""
    return [(lrs(name, False), lrs(name, True)) for name in (*SCHEDULERS, "client")]


def lrs(name: str, stock: bool) -> list[list[float]]:
    """Learning rate and momentum of every step of a run with a scheduler."""
    changes: dict[str, Any] = {}
    keyword: dict[str, Any] = {}
    if name in SCHEDULERS:
        changes["scheduler"] = {"type": name, "params": SCHEDULERS[name]}
    else:

        def client(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

        keyword["lr_scheduler"] = client
    model = tiny_llama(layers=1)
    config = stock_config(2, **changes) if stock else ds_config(2, **changes)
    engine = make_engine(config, model, **keyword)
    found = []
    for step in range(8):
        group = engine.optimizer.param_groups[0]
        found.append([float(group["lr"]), float(group["betas"][0]), float(engine.get_lr()[0])])
        train(engine, 1, first=step)
    engine.destroy()
    return found


def test_schedules_are_stocks(ranks: Ranks) -> None:
    found = ranks.run(all_lrs, 1)[0]
    assert len(found) == 5
    for ours, stock in found:
        assert ours == stock
        assert len({lr for lr, *_ in ours}) > 2


# -- DeepSpeed's tools --------------------------------------------------------------------------------


def safe_tools(stage: int) -> dict[str, Any]:
    engine = make_engine(ds_config(stage, bf16={"enabled": True}))
    train(engine, 3)
    named = dict(engine.module.named_parameters())
    low, dense = "model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight"
    matrix = next(e.matrix for e in engine.optimizer.zero.low_rank if e.name == low)
    found: dict[str, Any] = {"rank": matrix.rank, "model": model_weights(engine)}
    for name in (low, dense):
        param = named[name]
        found[name] = {
            "param": safe_get_full_fp32_param(param),
            "moment": safe_get_full_optimizer_state(param, "exp_avg"),
            "local": safe_get_local_optimizer_state(param, "exp_avg_sq") if stage == 3 else None,
            "local param": safe_get_local_fp32_param(param) if stage == 3 else None,
        }
    engine.backward(loss_of(engine, micro_batches(engine, 3)[0]))
    found["gradients"] = {n: safe_get_full_grad(named[n]) for n in (low, dense)}
    found["norm before"] = found["gradients"][dense].norm()
    engine.step()
    for name in (low, dense):
        param = named[name]
        value = torch.full_like(safe_get_full_fp32_param(param), 0.123456)
        safe_set_full_fp32_param(param, value)
        moment = torch.full_like(safe_get_full_optimizer_state(param, "exp_avg"), 0.5)
        safe_set_full_optimizer_state(param, moment, "exp_avg")
        found[name]["set param"] = safe_get_full_fp32_param(param)
        found[name]["set moment"] = safe_get_full_optimizer_state(param, "exp_avg")
    found["set model"] = model_weights(engine)
    try:
        safe_get_full_optimizer_state(named[low], "momentum")
    except ValueError as error:
        found["unknown"] = str(error)
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_safe_get_and_set(ranks: Ranks, stage: int) -> None:
    low, dense = "model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight"
    one, two = ranks.run(safe_tools, 1, stage)[0], ranks.run(safe_tools, 2, stage)[0]
    for found in (one, two):
        for name in (low, dense):
            state = found[name]
            assert torch.equal(state["param"].bfloat16(), found["model"][name])
            assert not torch.equal(state["param"], found["model"][name].float())  # really fp32
            assert torch.equal(state["set param"], torch.full_like(state["param"], 0.123456))
            assert torch.equal(state["set moment"], torch.full_like(state["moment"], 0.5))
            wanted = torch.full_like(found["set model"][name], 0.123456)
            assert torch.equal(found["set model"][name], wanted)
        assert found[low]["moment"].shape == (77, found["rank"])
        assert found[dense]["moment"].shape == (61, 40)
        assert found["gradients"][low].shape == (77, 40)
        assert "exp_avg" in found["unknown"]
    for name in (low, dense):  # bf16 gradients: three digits
        difference = (one["gradients"][name] - two["gradients"][name]).norm()
        assert difference < 0.05 * one["gradients"][name].norm()
        assert torch.allclose(one[name]["param"], two[name]["param"], atol=1e-2)
    if stage == 3:
        assert two[low]["local param"].numel() < one[low]["local param"].numel()
        assert len(two[low]["local"]) < len(one[low]["local"]) == 77


# -- Hugging Face's checkpointing ----------------------------------------------------------------------


def checkpointed(stage: int, reentrant: bool | None) -> dict[str, Any]:
    model = tiny_llama()
    recomputed = []
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # what HF asks for with use_reentrant
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: recomputed.append(1))
    engine = make_engine(ds_config(stage, gas=2), model)
    engine.train()
    found = result(engine, train(engine, STEPS))
    return found | {"forwards": len(recomputed)}


def test_gradient_checkpointing(ranks: Ranks) -> None:
    plain = ranks.run(checkpointed, 1, 0, None)[0]
    for stage, world, reentrant in ((0, 1, False), (2, 2, True), (3, 2, False), (3, 2, True)):
        found = ranks.run(checkpointed, world, stage, reentrant)[0]
        assert found["forwards"] == 2 * 2 * STEPS  # each forward ran twice
        assert_same(plain, found)


# -- the end ------------------------------------------------------------------------------------------


def destroyed(stage: int) -> dict[str, Any]:
    model = tiny_llama(layers=1)
    linear = model.model.layers[0].mlp.up_proj
    engine = make_engine(ds_config(stage), model)
    patched = "forward" in vars(linear)
    train(engine, 2)
    engine.destroy()
    found = {"patched": patched, "after": "forward" in vars(linear)}
    names = ("_z3_optimizer", "_hp_mapping", "get_full_hp_param", "set_full_hp_grad")
    found["left"] = [n for p in model.parameters() for n in names if vars(p).get(n) is not None]
    if stage < 3:
        model.zero_grad()
        tokens = torch.randint(0, 61, (2, 8))
        loss_of(model, tokens).backward()
        found["gradient"] = tuple(linear.weight.grad.shape)
        second = make_engine(ds_config(2), model)  # the model can be given to a new engine
        found["losses"] = train(second, 2)
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_destroy_gives_the_model_back(ranks: Ranks, stage: int) -> None:
    found = ranks.run(destroyed, 1, stage)[0]
    assert found["patched"]
    assert not found["after"]
    assert found["left"] == []
    if stage < 3:
        assert found["gradient"] == (77, 40)


def registered_and_not() -> dict[str, Any]:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    names = ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedHybridEngine")

    def snapshot() -> list[Any]:
        classes = [getattr(deepspeed, name) for name in names]
        return [*classes, getattr(torch.optim, "HMT", None), list(ZERO_SUPPORTED_OPTIMIZERS)]

    before = snapshot()
    hmt_deepspeed.register()
    during = snapshot()
    hmt_deepspeed.register()
    twice = snapshot() == during
    model = tiny_llama(layers=1)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(2)
    )
    hmt_deepspeed.unregister()
    after = snapshot()
    hmt_deepspeed.unregister()
    return {
        "changed": [a != b for a, b in zip(before, during, strict=True)],
        "twice": twice,
        "restored": before == after == snapshot(),
        "returned": optimizer is engine.optimizer,
        "losses": train(engine, 2),
    }


def test_register_is_idempotent_and_undone(ranks: Ranks) -> None:
    found = ranks.run(registered_and_not, 1)[0]
    assert all(found["changed"])
    assert found["twice"]
    assert found["restored"]
    assert found["returned"]
    assert len(found["losses"]) == 2


def stock_through(engine_kind: str, folder: str) -> dict[str, Any]:
    """A config without HMT, through DeepSpeed's engine or ours."""
    model = tiny_llama(layers=1)
    config, parameters = stock_config(2, gas=2), list(model.parameters())
    if engine_kind == "ours":
        engine = make_engine(config, model)
        assert type(engine).__name__ == "HMTEngine"
        assert not engine.hmt_enabled
    else:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        assert type(engine).__name__ == "DeepSpeedEngine"
    losses = train(engine, 2)
    engine.save_checkpoint(folder, tag="a")
    losses += train(engine, 1, first=2)
    engine.load_checkpoint(folder, tag="a")
    losses += train(engine, 1, first=2)
    engine.zero_grad()
    found: dict[str, Tensor] = model_weights(engine)
    return {"losses": losses, "weights": found, "type": type(engine.optimizer).__name__}


def test_stock_configs_behave_as_stock(ranks: Ranks, tmp_path: Any) -> None:
    ours = ranks.run(stock_through, 2, "ours", str(tmp_path / "ours"))[0]
    stock = ranks.run(stock_through, 2, "stock", str(tmp_path / "stock"))[0]
    assert ours["type"] == stock["type"] == "DeepSpeedZeroOptimizer"
    assert ours["losses"] == stock["losses"]
    for name, weight in stock["weights"].items():
        assert torch.equal(weight, ours["weights"][name]), name
