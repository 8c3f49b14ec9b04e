"""Builds each parameter's rule, shards, weights, states and gradient, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.memory.streams import streams_of
from hmt_deepspeed.optim.backward.experts import ExpertSite, expert_sites
from hmt_deepspeed.optim.backward.int8_linear import check_encodable, encoded_weights
from hmt_deepspeed.optim.backward.linear import can_project
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.dense import DenseState, new_dense_state
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.assign import (
    Assignment,
    ExpertKind,
    assign_rules,
    embedding_weights,
    head_weights,
    linear_weights,
    tied_weights,
)
from hmt_deepspeed.optim.settings.options import matrix_settings, module_rules
from hmt_deepspeed.rules import dense_states_dtype
from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.offload.adamw import HostAdamW
from hmt_deepspeed.zero.offload.states import MASTER, MOMENTS, HostMoment, RamStates, SsdStates
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.offload.worker import HostGradient, HostWorker
from hmt_deepspeed.zero.parameters.param_state import ParamState, Placed
from hmt_deepspeed.zero.settings import ZeroSettings
from hmt_deepspeed.zero.sharding.parallel_experts import ParallelExperts
from hmt_deepspeed.zero.sharding.shards import ExpertShards, RowShards, Shards, whole_shape
from hmt_deepspeed.zero.weights.host_parts import HostParts
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.weight import Weight

__all__ = ["build_param_states", "build_schedule", "weights_to_encode"]


def weights_to_encode(
    model: nn.Module,
    trained: Iterable[tuple[str, nn.Parameter]],
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> list[tuple[nn.Module, str]]:
    """Modules and the names in them of weights that become INT8; nothing is changed.

    Args:
        model: as it was given, not yet cast or placed.
        trained: every trainable parameter and its name. options: fields of ``hmt.optimizer``.
        dtype: what the weights are cast to before, None for none.

    Raises:
        ValueError: options that cannot be honoured for these parameters, or weights that INT8 cannot store.
    """
    if options["weight_dtype"] != "int8":
        return []
    modules, sites = linear_weights(model), expert_sites(model)
    names = []
    for assignment in _assignments(trained, options, model, ParallelExperts()):
        # tied ones are refused below
        if _linear(assignment, modules, sites, {}, options) is not None:
            names.append(assignment.name)
    check_encodable(model, {name: model.get_parameter(name) for name in names}, dtype)
    places = (name.rpartition(".") for name in names)
    return [(model.get_submodule(path), key) for path, _, key in places]


def build_param_states(
    placed: Sequence[Placed],
    options: Mapping[str, Any],
    settings: ZeroSettings,
    model: nn.Module,
    experts: ParallelExperts,
    worker: HostWorker | None = None,
) -> list[ParamState]:
    """One for each trainable parameter, in the order of the parameter groups.

    Args:
        placed: every trainable parameter. options: fields of ``hmt.optimizer``. settings: what the JSON says.
        model: with the weights of :func:`weights_to_encode` in INT8. experts: of it, whose names ``placed`` has.
        worker: of masters and dense states in host memory, None when all are on the device.

    Raises:
        ValueError: options that cannot be honoured for these parameters.
    """
    modules = {experts.name(name): module for name, module in linear_weights(model).items()}
    sites = {experts.name(name): site for name, site in expert_sites(model).items()}
    tied = tied_weights(model)
    assignments = _assignments([(name, p) for name, p, *_ in placed], options, model, experts)
    away: HostParts | None = None
    param_states = []
    for index, (assignment, (name, param, group, holders)) in enumerate(
        zip(assignments, placed, strict=True)
    ):
        world, rank = (holders.world, holders.rank) if settings.stage else (1, 0)
        shards: Shards
        shards = by_weight = RowShards(torch.Size(whole_shape(param)).numel(), 1, world)
        matrix: MatrixRule | None = None
        if assignment.settings is not None:
            (m, n), count = assignment.matrix_shape, assignment.count
            by_weight = RowShards(count * m, n, world)
            height, width = assignment.settings.oriented(m, n)
            if count > 1:
                of_experts = ExpertShards(count * height, width, world, count)
                rows, held = of_experts.rows_of_each(rank), of_experts.experts(rank)
                shards = of_experts
            else:
                shards = RowShards(height, width, world)
                rows, held = shards.rows(rank), (0, 1)
            how, on = assignment.settings, (settings.model_dtype, param.device)
            matrix = build_matrix(name, (m, n), rows, how, *on, count, how.own_bases, held)
        linear = _linear(assignment, modules, sites, tied, options)
        holder = modules.get(name) or (sites[name].module if name in sites else None)
        encoded = None
        if linear is not None and holder is not None:
            encoded = encoded_weights(holder).get(name.rpartition(".")[2])
        keep_master = options["master_weights"] == "fp32"
        gradient = Gradient(index, name, param, shards, holders, matrix, linear)
        state: DenseState | None = None
        host: HostAdamW | None = None
        if encoded is not None:
            weight: Weight = EncodedWeight(param, by_weight, rank, encoded)
        elif worker is not None and (matrix is None or keep_master):
            weight = _host_weight(
                name, param, by_weight, rank, matrix is None, keep_master, settings, worker
            )
        else:
            if settings.weights_on_host and away is None:
                away = HostParts(streams_of(param.device), param.device)
            weight = Weight(param, by_weight, rank, keep_master, away)
        if matrix is None and isinstance(weight, HostWeight):
            first, second = (HostMoment(weight.states, column) for column in MOMENTS)
            state = (first, second, torch.zeros(()))
            gradient.host = HostGradient(weight.worker, name, weight.num_elements)
            host = HostAdamW(weight, gradient.host, state[2])
        elif matrix is None:
            dtype = dense_states_dtype(options["state_dtype"], assignment.shape)
            state = new_dense_state((weight.num_elements,), dtype, weight.device)
        param_states.append(
            ParamState(assignment, group, gradient, weight, matrix, state, options["seed"], host)
        )
    return param_states


def _assignments(
    trained: Iterable[tuple[str, nn.Parameter]],
    options: Mapping[str, Any],
    model: nn.Module,
    experts: ParallelExperts,
) -> list[Assignment]:
    """Rules of parameters, chosen among all experts: so ranks accept and refuse the same patterns."""
    trained = list(trained)
    assigned = assign_rules(
        [(other, whole_shape(p)) for name, p in trained for other in experts.everywhere(name)],
        settings=matrix_settings(options),
        module_rules=module_rules(options),
        target_modules=options["target_modules"],
        linear_names={
            other
            for name in linear_weights(model)
            for other in experts.everywhere(experts.name(name))
        },
        head_names=head_weights(model),
        embedding_names=embedding_weights(model),
        expert_weights={
            other: ExpertKind(site.role, site.is_transposed, site.reason)
            for name, site in expert_sites(model).items()
            for other in experts.everywhere(experts.name(name))
        },
    )
    by_name = {assignment.name: assignment for assignment in assigned}
    return [by_name[name] for name, _ in trained]


def _host_weight(
    name: str,
    param: nn.Parameter,
    shards: RowShards,
    rank: int,
    dense: bool,
    keep_master: bool,
    settings: ZeroSettings,
    worker: HostWorker,
) -> HostWeight:
    """Weights updated on the host, with the states that are there: of a dense parameter AdamW's moments too."""
    has_master = keep_master or param.dtype == torch.float32
    columns = [MASTER] * has_master + list(MOMENTS) * dense
    begin, end = shards.flat(rank)
    if worker.ssd is None:
        undo = settings.undoes and dense and has_master
        ram = RamStates(worker, name, end - begin, columns, undo)
        return HostWeight(param, shards, rank, ram, worker, name)
    states, early = SsdStates(worker, name, end - begin, columns), settings.steps_early
    return HostWeight(param, shards, rank, states, worker, name, dense and has_master and early)


def _linear(
    assignment: Assignment,
    modules: Mapping[str, nn.Module],
    sites: Mapping[str, ExpertSite],
    tied: Mapping[str, str],
    options: Mapping[str, Any],
) -> ProjectedLinear | None:
    """The link of a linear, or of experts, where the projected backward applies or INT8 weights are decoded, else None.

    Raises:
        ValueError: it is insisted on and does not apply.
    """
    settings, wanted = assignment.settings, options["projected_backward"]
    if settings is None or wanted is False:
        return None
    if wanted is True and not settings.takes_projection:
        raise ValueError(
            f"hmt.optimizer.projected_backward is true, but {settings.wants_whole}, which needs the whole "
            f'gradient of {assignment.name}. Use "auto", or give it another rule.'
        )
    if not settings.is_linked(options["weight_dtype"] == "int8"):
        return None
    module, site = modules.get(assignment.name), sites.get(assignment.name)
    other = tied.get(assignment.name)
    is_able = module is not None and other is None and can_project(module)
    if is_able or (site is not None and not site.reason):
        return ProjectedLinear(assignment.name, settings.transposes(*assignment.matrix_shape))
    if wanted is True:
        why = f"belongs to a {type(module).__name__}, whose weight others read than nn.Linear's forward"
        why = why if other is None else f"is also {other} (tied)"
        why = why if site is None else site.reason
        raise ValueError(
            f"hmt.optimizer.projected_backward is true, but {assignment.name} {why}. "
            'Use "auto", or leave the module to adamw in module_rules.'
        )
    return None


def build_schedule(
    low_rank: Sequence[ParamState], options: Mapping[str, Any], dtype: torch.dtype
) -> RefreshSchedule:
    """Build the schedule of the matrices' refreshes.

    Args:
        low_rank: parameters with a matrix. options: fields of ``hmt.optimizer``.
        dtype: of the accumulated full gradients, whose bytes are limited.

    Raises:
        ValueError: ``max_full_gradient_bytes`` below the largest matrix.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    nbytes = [
        0
        if p.matrix is None or not p.matrix.finds_bases
        else size * p.gradient.shards.m * p.gradient.shards.n
        for p in low_rank
    ]
    budget = options["max_full_gradient_bytes"]
    if budget == "auto":
        budget = auto_full_gradient_bytes(nbytes)
    elif nbytes and budget < max(nbytes):
        largest = low_rank[nbytes.index(max(nbytes))].name
        raise ValueError(
            f"hmt.optimizer.max_full_gradient_bytes is {budget}, but the full gradient of {largest} "
            f'takes {max(nbytes)} bytes. Give at least that, or "auto".'
        )
    return RefreshSchedule(nbytes, options["update_interval"], budget)
