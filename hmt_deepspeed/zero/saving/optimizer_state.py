"""Optimizer state dict, by parameter name: save and restore.

The fp32 weights are where ``zero_to_fp32.py`` looks for them (and nowhere else: loading reads them from there
too) and everything of ours is under ``"hmt"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.zero.bases.groups import BasisGroups
from hmt_deepspeed.zero.offload.states import MOMENTS
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.saving.client_objects import original, plain_numbers, storable
from hmt_deepspeed.zero.saving.fp32_groups import stage3_groups, stage12_groups
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.saving.ssd_files import describe_files
from hmt_deepspeed.zero.sharding.shards import whole_shape
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight

__all__ = ["FORMAT", "hmt_state", "optimizer_state", "restore_optimizer"]

FORMAT = 1


def optimizer_state(zero: ZeroState) -> dict[str, Any]:
    """State dict of this rank's ``*_optim_states.pt``: plain tensors, numbers and strings only.

    Args:
        zero: states of the optimizer.
    """
    stage, world = max(zero.settings.stage, 1), zero.collectives.world
    state: dict[str, Any] = {"zero_stage": stage, "partition_count": world}
    if stage == 3:
        state["fp32_flat_groups"] = stage3_groups(zero)
    else:
        state["single_partition_of_fp32_groups"] = stage12_groups(zero)
        if zero.expert_groups:
            state["masters"] = _masters_of_experts(zero)
    state["hmt"] = hmt_state(zero, _to_cpu, describe_files(zero))
    return state


def _masters_of_experts(zero: ZeroState) -> dict[str, dict[str, Any]]:
    """Flat fp32 values held here of experts that not all ranks hold, for which ``zero_to_fp32.py`` has no place."""
    return {
        p.name: {
            "flat": list(p.weight.shards.flat(p.weight.rank)),
            "values": _to_cpu(p.weight.master_values()),
        }
        for p in filter(zero.saves_states_of, zero.param_states)
        if p.gradient.holders is not zero.collectives
    }


def hmt_state(
    zero: ZeroState, take: Callable[[Any], Any], elsewhere: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Everything of ours but the weights.

    Args:
        zero: states of the optimizer.
        take: is given each value that may be a tensor of the device.
        elsewhere: what stands for moments that somebody else saves, by name of the parameter.
    """
    return {
        "format": FORMAT,
        "stage": zero.settings.stage,
        "world": zero.collectives.world,
        "groups": _group_names(zero),
        "shapes": {p.name: list(whole_shape(p.gradient.param)) for p in zero.param_states},
        "step_count": zero.step_count,
        "schedule": _schedule_state(zero),
        "shared_inputs": [g for groups in zero.all_basis_groups for g in groups.shared.groups()],
        "settled": all(groups.shared.observed for groups in zero.all_basis_groups),
        "rules": {p.name: p.assignment.layout for p in zero.param_states},
        "policy": _policy_state(zero),
        "matrices": _matrix_states(zero, take),
        "old_bases": zero.bases.old.state(),
        "left_moments": zero.bases.history.state(
            zero.low_rank, take, zero.settings.stage > 0 or zero.collectives.rank == 0
        ),
        "dense": _dense_states(zero, take, elsewhere),
        "int8_weights": _int8_weights(zero, take),
        "param_groups": [
            {
                k: storable(plain_numbers(v))
                for k, v in g.items()
                if k not in ("params", "param_names")
            }
            for g in zero.param_groups
        ],
        "loss_scaler": _scaler_state(zero.loss_scaler),
        "rng": _rng_state(),
    }


def _group_names(zero: ZeroState, everywhere: bool = False) -> list[list[str]]:
    """Names of each group's parameters, of experts those of this rank, or those ``everywhere``."""
    names = [[zero.param_names[p] for p in g] for g in zero.trained]
    return (
        [[n for name in g for n in zero.parallel_experts.everywhere(name)] for g in names]
        if everywhere
        else names
    )


def _matrix_states(zero: ZeroState, take: Callable[[Any], Any]) -> dict[str, Any]:
    states = {}
    saved = list(filter(zero.saves_states_of, zero.low_rank))
    zero.bases.will_use([[p] for p in saved])
    for param_state in saved:
        assert param_state.matrix is not None
        with zero.bases.whole(param_state):
            state = param_state.matrix.state_dict()
        matrix, shards = param_state.matrix, param_state.gradient.shards
        by_rows = [k for k in matrix.settings.rule.row_states if k in state]
        held = matrix.held_states
        if param_state.gradient.holders.rank > 0:  # the same on every rank: the first one saves it
            state = {k: state[k] for k in (*by_rows, *held)}
        if matrix.count > 1:  # one below the other
            state |= {k: state[k].flatten(0, 1) for k in by_rows}
        state = {k: take(v) for k, v in state.items()}
        layout = {"rows": list(shards.rows(param_state.weight.rank)), "row_states": by_rows}
        if held:
            of_experts = [matrix.held.start, matrix.held.stop]
            layout |= {"experts": of_experts, "held_states": held, "count": matrix.count}
        states[param_state.name] = {**layout, "height": shards.m, **state}
    zero.bases.will_use(None)
    return states


def _dense_states(
    zero: ZeroState, take: Callable[[Any], Any], elsewhere: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    states = {}
    for param_state in filter(zero.saves_states_of, zero.param_states):
        if param_state.dense_state is None:
            continue
        first, second, step = param_state.dense_state
        if param_state.name in elsewhere:
            moments = elsewhere[param_state.name]
        else:
            moments = {"exp_avg": take(first.read()), "exp_avg_sq": take(second.read())}
        flat = list(param_state.weight.shards.flat(param_state.weight.rank))
        states[param_state.name] = {"flat": flat, "step": take(step), **moments}
    return states


def _int8_weights(zero: ZeroState, take: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """Codes of the INT8 weights, the same on every rank: the first one saves them."""
    if zero.collectives.rank > 0:
        return {}
    weights = {p.name: p.weight for p in zero.param_states}
    encoded = {n: w.state_dict() for n, w in weights.items() if isinstance(w, EncodedWeight)}
    return {n: {k: take(v) for k, v in state.items()} for n, state in encoded.items()}


def _schedule_state(zero: ZeroState) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for groups in zero.all_basis_groups:
        schedule = groups.schedule
        times = zip(schedule.next_refresh, schedule.num_refreshes, strict=True)
        found |= {p.name: list(t) for p, t in zip(groups.low_rank, times, strict=True)}
    return found


def _policy_state(zero: ZeroState) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for groups in zero.all_basis_groups:
        for key, by_name in groups.policy.state_dict().items():
            found.setdefault(key, {}).update(by_name)
    return found


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


def restore_optimizer(zero: ZeroState, saved: SavedState) -> None:
    """States, schedule, hyperparameters, loss scale and random numbers.

    Args:
        zero: states of the optimizer, overwritten. saved: a checkpoint of any world size and stage.

    Raises:
        ValueError: when a parameter had another rule, or the groups were others.
    """
    hmt = saved.hmt
    saved.check_same_rules({p.name: p.assignment.layout for p in zero.param_states})
    saved.check_same_groups(_group_names(zero, everywhere=True))
    zero.step_count = hmt["step_count"]
    for groups in zero.all_basis_groups:
        groups.shared.restore(hmt["shared_inputs"], hmt["settled"])
    for param_state in zero.param_states:
        zero.bases.forget(param_state)
    for group, values in zip(zero.param_groups, hmt["param_groups"], strict=True):
        name = (
            {"name": group["name"]} if group.get("moe") else {}
        )  # of these ranks' group of experts
        group.update({key: original(value) for key, value in values.items()} | name)
    for groups in zero.all_basis_groups:
        _restore_groups(groups, saved)
    for param_state in zero.param_states:
        if param_state.dense_state is not None:
            flat = param_state.weight.shards.flat(param_state.weight.rank)
            first, second, step = saved.dense(param_state.name, flat)
            if isinstance(param_state.weight, HostWeight):
                param_state.weight.states.write(dict(zip(MOMENTS, (first, second), strict=True)))
            else:
                for state, value in zip(param_state.dense_state[:2], (first, second), strict=True):
                    state.write(value.to(state.data.device, copy=True), None)
            param_state.dense_state[2].copy_(step)
    if zero.loss_scaler.dynamic and hmt["loss_scaler"]["dynamic"]:
        # A static scale is the config's; so is the start of a dynamic one after bf16 or fp32.
        vars(zero.loss_scaler).update(hmt["loss_scaler"])
    if hmt["world"] == zero.collectives.world:
        rng = saved.rng(zero.collectives.rank)
        torch.set_rng_state(rng["cpu"])
        if "device" in rng:
            get_accelerator().set_rng_state(rng["device"])


def _restore_groups(groups: BasisGroups, saved: SavedState) -> None:
    """States of the matrices of some groups, when they refresh, and their ranks so far."""
    for place, param_state in enumerate(groups.low_rank):
        assert param_state.matrix is not None
        matrix, shards = param_state.matrix, param_state.gradient.shards
        of_saved = saved.hmt["matrices"][param_state.name]
        if isinstance(matrix, ProjectedMatrix) and matrix.count > 1:
            if of_saved["own_bases"] and not matrix.own_bases:
                param_state.have_own_bases()
            elif matrix.own_bases and not of_saved["own_bases"]:
                raise ValueError(
                    f"{param_state.name}: the checkpoint is of one basis of all experts, and this engine has given each its "
                    "own since: load it into a new engine."
                )
            matrix.undecided, matrix.proposed = bool(of_saved["undecided"]), None
            shards = param_state.gradient.shards
        rows, experts = shards.rows(param_state.weight.rank), (matrix.held.start, matrix.held.stop)
        state = saved.matrix(param_state.name, rows, experts)
        if matrix.count > 1:
            by_rows = [key for key in matrix.settings.rule.row_states if key in state]
            shape = matrix.num_held, matrix.num_rows
            state |= {key: state[key].unflatten(0, shape) for key in by_rows}
        matrix.load_state_dict(state)
        times = saved.hmt["schedule"][param_state.name]
        groups.schedule.next_refresh[place], groups.schedule.num_refreshes[place] = times
    groups.form()  # this config's: moments of bases that it shares are rotated into the leader's
    groups.policy.load_state_dict(saved.hmt["policy"])
    groups.load_old_bases(saved.old_bases())
    groups.load_history(saved)
