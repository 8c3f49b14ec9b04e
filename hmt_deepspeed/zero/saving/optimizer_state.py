"""What of an optimizer a checkpoint holds, by parameter name, and how it is taken back.

The fp32 weights are where ``zero_to_fp32.py`` looks for them (and nowhere else: loading reads them from there
too) and everything of ours is under ``"hmt"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from hmt_deepspeed.zero.offload.states import MOMENTS
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.saving.client_objects import original, plain_numbers, storable
from hmt_deepspeed.zero.saving.fp32_groups import stage3_groups, stage12_groups
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.saving.ssd_files import describe_files
from hmt_deepspeed.zero.sharding.shards import whole_shape
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight

if TYPE_CHECKING:
    from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer

__all__ = ["FORMAT", "hmt_state", "optimizer_state", "restore_optimizer"]

FORMAT = 1


def optimizer_state(optimizer: HMTZeroOptimizer) -> dict[str, Any]:
    """What goes into this rank's ``*_optim_states.pt``; plain tensors, numbers and strings only."""
    stage, world = max(optimizer.settings.stage, 1), optimizer.collectives.world
    state: dict[str, Any] = {"zero_stage": stage, "partition_count": world}
    if stage == 3:
        state["fp32_flat_groups"] = stage3_groups(optimizer)
    else:
        state["single_partition_of_fp32_groups"] = stage12_groups(optimizer)
    state["hmt"] = hmt_state(optimizer, _to_cpu, describe_files(optimizer))
    return state


def hmt_state(
    optimizer: HMTZeroOptimizer, take: Callable[[Any], Any], elsewhere: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Everything of ours but the weights.

    Args:
        take: is given each value that may be a tensor of the device.
        elsewhere: what stands for moments that somebody else saves, by name of the parameter.
    """
    return {
        "format": FORMAT,
        "stage": optimizer.settings.stage,
        "world": optimizer.collectives.world,
        "groups": _group_names(optimizer),
        "shapes": {p.name: list(whole_shape(p.gradient.param)) for p in optimizer.param_states},
        "step_count": optimizer.step_count,
        "schedule": _schedule_state(optimizer),
        "shared_inputs": optimizer.shared.groups(),
        "settled": optimizer.shared.settled,
        "rules": {p.name: p.assignment.layout for p in optimizer.param_states},
        "policy": optimizer.policy.state_dict(),
        "matrices": _matrix_states(optimizer, take),
        "old_bases": optimizer.bases.old_bases(),
        "left_moments": optimizer.bases.history.state(
            optimizer.low_rank, take, _holds_states(optimizer)
        ),
        "dense": _dense_states(optimizer, take, elsewhere),
        "int8_weights": _int8_weights(optimizer, take),
        "param_groups": [
            {
                k: storable(plain_numbers(v))
                for k, v in g.items()
                if k not in ("params", "param_names")
            }
            for g in optimizer.param_groups
        ],
        "loss_scaler": _scaler_state(optimizer.loss_scaler),
        "rng": _rng_state(),
    }


def _group_names(optimizer: HMTZeroOptimizer) -> list[list[str]]:
    return [[optimizer.param_names[p] for p in g] for g in optimizer.round_robin_bit16_groups]


def _holds_states(optimizer: HMTZeroOptimizer) -> bool:
    """Stage 0 keeps the same states everywhere; its first rank saves them."""
    return optimizer.settings.stage > 0 or optimizer.collectives.rank == 0


def _matrix_states(optimizer: HMTZeroOptimizer, take: Callable[[Any], Any]) -> dict[str, Any]:
    if not _holds_states(optimizer):
        return {}
    states = {}
    optimizer.bases.will_use(optimizer.low_rank)
    for param_state in optimizer.low_rank:
        assert param_state.matrix is not None
        with optimizer.bases.whole(param_state):
            state = param_state.matrix.state_dict()
        by_rows = [k for k in param_state.matrix.ROW_STATES if k in state]
        if optimizer.collectives.rank > 0:  # the same on every rank: the first one saves it
            state = {k: state[k] for k in by_rows}
        state = {k: take(v) for k, v in state.items()}
        layout = {"rows": list(param_state.matrix.rows), "row_states": by_rows}
        states[param_state.name] = {**layout, "height": param_state.matrix.shape[0], **state}
    optimizer.bases.will_use(None)
    return states


def _dense_states(
    optimizer: HMTZeroOptimizer, take: Callable[[Any], Any], elsewhere: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    if not _holds_states(optimizer):
        return {}
    states = {}
    for param_state in optimizer.param_states:
        if param_state.dense_state is None:
            continue
        first, second, step = param_state.dense_state
        if param_state.name in elsewhere:
            moments = elsewhere[param_state.name]
        else:
            moments = {"exp_avg": take(first.read()), "exp_avg_sq": take(second.read())}
        flat = list(param_state.gradient.shards.flat(optimizer.shard_rank))
        states[param_state.name] = {"flat": flat, "step": take(step), **moments}
    return states


def _int8_weights(
    optimizer: HMTZeroOptimizer, take: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Codes of the INT8 weights, the same on every rank: the first one saves them."""
    if optimizer.collectives.rank > 0:
        return {}
    weights = {p.name: p.weight for p in optimizer.param_states}
    encoded = {n: w.state_dict() for n, w in weights.items() if isinstance(w, EncodedWeight)}
    return {n: {k: take(v) for k, v in state.items()} for n, state in encoded.items()}


def _schedule_state(optimizer: HMTZeroOptimizer) -> dict[str, list[int]]:
    schedule = optimizer.schedule
    times = zip(schedule.next_refresh, schedule.num_refreshes, strict=True)
    return {p.name: list(t) for p, t in zip(optimizer.low_rank, times, strict=True)}


def _scaler_state(scaler: Any) -> dict[str, Any]:
    numbers = {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
    return {k: plain_numbers(v) for k, v in numbers.items()}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state().cpu()
    return state


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def restore_optimizer(optimizer: HMTZeroOptimizer, saved: SavedState) -> None:
    """States, schedule, hyperparameters, loss scale and random numbers.

    Raises:
        ValueError: when a parameter had another rule, or the groups were others.
    """
    hmt = saved.hmt
    saved.check_same_rules({p.name: p.assignment.layout for p in optimizer.param_states})
    saved.check_same_groups(_group_names(optimizer))
    optimizer.step_count = hmt["step_count"]
    optimizer.shared.restore(hmt["shared_inputs"], hmt["settled"])
    for param_state in optimizer.param_states:
        optimizer.bases.forget(param_state)
    for group, values in zip(optimizer.param_groups, hmt["param_groups"], strict=True):
        group.update({key: original(value) for key, value in values.items()})
    for place, param_state in enumerate(optimizer.low_rank):
        assert param_state.matrix is not None
        param_state.matrix.load_state_dict(saved.matrix(param_state.name, param_state.matrix.rows))
        times = hmt["schedule"][param_state.name]
        optimizer.schedule.next_refresh[place], optimizer.schedule.num_refreshes[place] = times
    optimizer.form_groups()  # this config's: moments of bases that it shares are rotated into the leader's
    optimizer.policy.load_state_dict(hmt["policy"])
    optimizer.load_old_bases(saved.old_bases())
    optimizer.load_history(saved)
    for param_state in optimizer.param_states:
        if param_state.dense_state is not None:
            flat = param_state.gradient.shards.flat(optimizer.shard_rank)
            first, second, step = saved.dense(param_state.name, flat)
            if isinstance(param_state.weight, HostWeight):
                param_state.weight.states.write(dict(zip(MOMENTS, (first, second), strict=True)))
            else:
                for state, value in zip(param_state.dense_state[:2], (first, second), strict=True):
                    state.write(value.to(state.data.device, copy=True), None)
            param_state.dense_state[2].copy_(step)
    if optimizer.dynamic_loss_scale and hmt["loss_scaler"]["dynamic"]:
        # A static scale is the config's; so is the start of a dynamic one after bf16 or fp32.
        vars(optimizer.loss_scaler).update(hmt["loss_scaler"])
    if hmt["world"] == optimizer.collectives.world:
        rng = saved.rng(optimizer.collectives.rank)
        torch.set_rng_state(rng["cpu"])
        if "device" in rng:
            get_accelerator().set_rng_state(rng["device"])
