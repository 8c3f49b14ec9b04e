"""Where the engine's weights are: offloaded and partitioned parameters, and gathers that wait for what was written."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_set_full_fp32_param,
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
    tiny_llama,
    train,
)

from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.weights.weight import Weight

STEPS = 4  # every matrix refreshes in one of the first three, none in the last


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
    threshold = {"none": 0, "some": 100, "all": 10**6, "in buckets": 10**6, "zero.Init": 100}[how]
    zero = {"stage3_param_persistence_threshold": threshold}
    if how == "in buckets":  # of two norms, or of less than a matrix
        zero["allgather_bucket_size"] = 2 * 64
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
        for how in ("none", "some", "all", "in buckets", "zero.Init")
    }
    counts = {how: run["persistent"] for how, run in found.items()}
    assert counts["none"] == 0 < counts["some"] < counts["all"]
    for how in ("some", "all", "in buckets", "zero.Init"):
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
        scale = torch.ones((), device="meta")
        weight.step_update(torch.ones(6, 4, device="meta"), scale, 0.1, 0.0, key=0)
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
