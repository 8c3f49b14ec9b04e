"""The rest of the engine's interface: schedulers, DeepSpeed's tools, offload, Hugging Face, the end."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from harness import Ranks
from offloading import offloaded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    LOW_RANK,
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
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.weights.weight import Weight

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


# -- memory -------------------------------------------------------------------------------------------


def offloaded_parameters(device: str | None, variant: str) -> dict[str, Any]:
    offload = {} if device is None else {"offload_param": {"device": device, "pin_memory": False}}
    options = {**LOW_RANK, **({"master_weights": "none"} if variant == "no masters" else {})}
    changes = {} if variant == "fp32" else {"bf16": {"enabled": True}}
    config = ds_config(3, options, zero_optimization=offload, **changes)
    engine = make_engine(config, tiny_llama(layers=1))
    found = result(engine, train(engine, STEPS))
    found["status"] = {str(p.ds_tensor.device) for p in engine.module.parameters()}
    return found


@pytest.mark.parametrize("variant", ["fp32", "bf16", "no masters"])
def test_offload_param_changes_nothing(ranks: Ranks, variant: str) -> None:
    plain = ranks.run(offloaded_parameters, 2, None, variant)[0]
    offloaded = ranks.run(offloaded_parameters, 2, "cpu", variant)[0]
    assert plain["losses"] == offloaded["losses"]
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, offloaded["weights"][name]), name


def partitioned_from_the_start(how: str) -> dict[str, Any]:
    threshold = {"none": 0, "some": 100, "all": 10**6, "zero.Init": 100}[how]
    zero = {"stage3_param_persistence_threshold": threshold}
    config = ds_config(3, zero_optimization=zero)
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = tiny_llama(layers=1)
        partitioned = all(hasattr(p, "ds_tensor") for p in model.parameters())
        start = tiny_llama(
            layers=1
        ).state_dict()  # Init draws its own numbers; give both the same weights
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if dist.get_rank() == 0:
                    param.data.copy_(start[name])
        assert partitioned
    else:
        model = tiny_llama(layers=1)
    engine = make_engine(config, model)
    found = result(engine, train(engine, STEPS))
    found["persistent"] = len(engine.optimizer.parameter_offload.persistent_parameters)
    return found


def test_stage_3_parameters_persistent_or_not(ranks: Ranks) -> None:
    found = {
        how: ranks.run(partitioned_from_the_start, 2, how)[0]
        for how in ("none", "some", "all", "zero.Init")
    }
    counts = {how: run["persistent"] for how, run in found.items()}
    assert counts["none"] == 0 < counts["some"] < counts["all"]
    for how in ("some", "all", "zero.Init"):
        assert_same(found["none"], found[how])


class Conversions(TorchDispatchMode):
    """Finds copies to another device that convert; torch makes them on the host. A meta device is the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default
        target = args[0] if is_copy else func(*args, **(kwargs or {}))
        if is_copy or func is torch.ops.aten._to_copy.default:
            source = args[1] if is_copy else args[0]
            if source.device != target.device and source.dtype != target.dtype:
                self.found.append(f"{source.dtype} to {target.dtype}")
        return target


@pytest.mark.parametrize("keep_master", [True, False])
def test_a_step_on_offloaded_weights_converts_on_the_device(keep_master: bool) -> None:
    param: Any = torch.nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16, device="meta"))
    param.ds_tensor = torch.zeros(24, dtype=torch.bfloat16)
    param.ds_tensor.final_location = None
    weight = Weight(param, RowShards(6, 4, 1), 0, keep_master)
    assert weight.has_master == keep_master
    with Conversions() as conversions:
        weight.step_update(torch.ones(6, 4, device="meta"), 0.1, 0.0, key=0)
    assert not conversions.found


class GatherStream:
    """In the place of DeepSpeed's stream for all-gathers, which a CPU has not: what its next gather may read."""

    def __init__(self, engine: Any) -> None:
        self.params, self.num_waits = dict(engine.module.named_parameters()), 0
        self.visible = self._partitions()
        engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream = self

    def _partitions(self) -> dict[str, Tensor]:
        return {name: p.ds_tensor.detach().clone() for name, p in self.params.items()}

    def wait_stream(self, stream: object) -> None:
        self.num_waits += 1
        self.visible = self._partitions()

    def is_late(self) -> bool:
        return any(not torch.equal(now, self.visible[n]) for n, now in self._partitions().items())


def late_gathers(folder: str, overlap: str) -> dict[str, bool]:
    """After what a gather would not find the new weights."""
    config, late = ds_config(3), {}
    if overlap:
        config = offloaded(config)
        config["hmt"]["offload"] = {"overlap": overlap}
    engine = make_engine(config, tiny_llama())
    stream, param = GatherStream(engine), engine.module.lm_head.weight
    train(engine, 1)
    if overlap == "forward":
        model_weights(engine)
    late["step"] = stream.is_late()
    engine.save_checkpoint(folder, tag="one")
    train(engine, 2)
    safe_set_full_fp32_param(param, torch.ones(param.ds_shape))
    late["set"] = stream.is_late()
    safe_set_local_fp32_param(param, torch.zeros(param.ds_tensor.numel()))
    late["set local"] = stream.is_late()
    engine.load_checkpoint(folder, tag="one")
    late["load"] = stream.is_late()
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        param.data.fill_(2.0)
    with torch.no_grad():
        loss_of(engine, micro_batches(engine, 0)[0])
    late["gathered"] = stream.is_late()
    return late | {"waits": stream.num_waits > 0}


@pytest.mark.parametrize("overlap", ["", "forward"])
def test_stage_3_gathers_wait_for_what_was_written(
    ranks: Ranks, tmp_path: Any, overlap: str
) -> None:
    for found in ranks.run(late_gathers, 2, str(tmp_path), overlap):
        assert found.pop("waits")
        assert not any(found.values()), found


def test_a_rank_alone_waits_for_no_gathers(ranks: Ranks, tmp_path: Any) -> None:
    """Each would keep the host: there the weights are the partitions."""
    assert not ranks.run(late_gathers, 1, str(tmp_path), "")[0]["waits"]


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
