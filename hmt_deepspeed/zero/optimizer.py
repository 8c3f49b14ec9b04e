"""HMT's ZeRO optimizer: composes rules, shards and reduction into DeepSpeed's optimizer interface.

One step, for all parameters (DESIGN: the mean over ranks commutes with the projection)::

    reduced gradients  ->  overflow verdict  ->  new bases of the matrices that refresh
                       ->  estimated global norm, clip factor
                       ->  Adam in each projected space, probe residual
                       ->  weights of this rank's rows  ->  gather  ->  next window
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import count_used_parameters_in_backward, is_optimized_parameter
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils.torch import register_grad_hook
from torch import Tensor, nn

from hmt_deepspeed.optim.assign import Assignment, assign_rules, linear_weights
from hmt_deepspeed.optim.basis import keyed_seed
from hmt_deepspeed.optim.hmt import HMT, low_rank_settings
from hmt_deepspeed.optim.linear import (
    ProjectedSite,
    SharedInputs,
    can_project,
    patch_linear,
    unpatch_linear,
)
from hmt_deepspeed.optim.matrix import LowRankMatrix
from hmt_deepspeed.optim.schedule import RefreshSchedule, default_full_gradient_bytes
from hmt_deepspeed.zero import checkpoint, state_access, statistics
from hmt_deepspeed.zero.collectives import Collectives
from hmt_deepspeed.zero.gradients import Gradient, GradientReducer, ReductionScale
from hmt_deepspeed.zero.shards import RowShards
from hmt_deepspeed.zero.weights import GatherPipeline, Weight

__all__ = ["HMTZeroOptimizer", "ZeroSettings"]


@dataclass(frozen=True)
class ZeroSettings:
    """Plain values the engine takes from the DeepSpeed JSON.

    stage: 0..3. model_dtype: of the weights. accumulate_dtype, comm_dtype: of gradients.
    clip: ``gradient_clipping``, 0 for none. micro_batches: accumulation steps of a window.
    check_overflow: look for inf and NaN and skip such steps. overlap: asynchronous collectives.
    reduce_elements, gather_elements: sizes of the buckets. scale: factors that make a sum a mean.
    """

    stage: int
    model_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    comm_dtype: torch.dtype
    clip: float
    micro_batches: int
    check_overflow: bool
    overlap: bool
    reduce_elements: int
    gather_elements: int
    scale: ReductionScale


@dataclass(eq=False)
class _Entry:
    """Everything of one parameter: rule, gradient, weights, and the states of its rule."""

    assignment: Assignment
    group: dict[str, Any]
    gradient: Gradient
    weight: Weight
    matrix: LowRankMatrix | None
    dense_state: tuple[Tensor, Tensor, Tensor] | None  # exp_avg, exp_avg_sq, step

    @property
    def name(self) -> str:
        return self.assignment.name

    def hyper(self) -> dict[str, Any]:
        keys = ("lr", "betas", "eps", "weight_decay")
        return {key: self.group[key] for key in keys}


class HMTZeroOptimizer(ZeROOptimizer):
    """ZeRO stages 0-3 for HMT, on DeepSpeed's optimizer interface.

    Args:
        optimizer: carries the parameter groups; DeepSpeed's and torch's schedulers change their lr.
        options: fields of ``hmt.optimizer``, validated.
        model: the module; its low-rank linears get the projected backward.
        param_names: name of every parameter of ``model``.
        group: data-parallel process group.
        settings: see :class:`ZeroSettings`.
        loss_scaler: DeepSpeed's; scale 1 without fp16.
        parameter_offload: DeepSpeed's ZeRO-3 coordinator, None below stage 3.

    Raises:
        ValueError: options that cannot be honoured for this model.
    """

    def __init__(
        self,
        optimizer: HMT,
        options: Mapping[str, Any],
        model: nn.Module,
        param_names: Mapping[nn.Parameter, str],
        group: Any,
        settings: ZeroSettings,
        loss_scaler: Any,
        parameter_offload: Any | None,
    ) -> None:
        super().__init__()
        self.optimizer, self.options, self.settings = optimizer, dict(options), settings
        self.module, self.param_names = model, param_names
        self.dp_process_group = group
        self.collectives = Collectives(group, settings.overlap)
        self.parameter_offload = parameter_offload
        self._set_engine_attributes(loss_scaler)
        self.step_count = 0
        self.reduction_enabled = True  # the engine turns it off inside no_sync
        self.communication_bytes = 0
        self.round_robin_bit16_groups = [
            [p for p in g["params"] if is_optimized_parameter(p)] for g in optimizer.param_groups
        ]
        self._modules = linear_weights(model)
        self.entries = self._build_entries()
        self.low_rank = [entry for entry in self.entries if entry.matrix is not None]
        self.schedule = self._build_schedule()
        sites = [e.gradient.site for e in self.low_rank if e.gradient.site is not None]
        self.shared = SharedInputs(sites)
        self._patch()
        self.reducer = GradientReducer(
            [entry.gradient for entry in self.entries],
            self.collectives,
            sharded=settings.stage > 0,
            bucket_elements=settings.reduce_elements,
            comm_dtype=settings.comm_dtype,
            accumulate_dtype=settings.accumulate_dtype,
            scale=settings.scale,
        )
        self._hooks = self._register_hooks()
        state_access.link(self)
        self._begin_window()

    def _set_engine_attributes(self, loss_scaler: Any) -> None:
        """What the engine, HF's Trainer and DeepSpeed's tools read of a ZeRO optimizer."""
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler.dynamic
        self.custom_loss_scaler = False
        self.external_loss_scale = None
        self.torch_autocast_gradscaler = None
        self.overflow = False
        self.clip_grad = self.settings.clip
        self.partition_gradients = self.settings.stage >= 2
        self._global_grad_norm: Tensor | float = 0.0
        self.mpu = None
        self.swap_optimizer = False

    # -- construction ---------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        return self.settings.stage > 0 and self.collectives.world > 1

    def _build_entries(self) -> list[_Entry]:
        low_rank = low_rank_settings(self.options)
        placed = [
            (self.param_names[p], p, g)
            for g, params in zip(
                self.optimizer.param_groups, self.round_robin_bit16_groups, strict=True
            )
            for p in params
        ]
        assignments = assign_rules(
            [(name, _shape(p)) for name, p, _ in placed],
            method=self.options["method"],
            target_modules=self.options["target_modules"],
            exclude_modules=self.options["exclude_modules"],
            linear_names=self._modules,
            rank=low_rank.rank,
        )
        world = self.collectives.world if self.settings.stage > 0 else 1
        rank = self.collectives.rank if self.settings.stage > 0 else 0
        self.shard_rank = rank
        entries = []
        for index, (assignment, (_, param, group)) in enumerate(
            zip(assignments, placed, strict=True)
        ):
            m, n = assignment.shape if assignment.low_rank else (param_numel(param), 1)
            shards = RowShards(m, n, world)
            weight = Weight(param, shards, rank, self.options["master_weights"] == "fp32")
            matrix, state = None, None
            if assignment.low_rank:
                rows, dtype = shards.rows(rank), self.settings.model_dtype
                matrix = LowRankMatrix(
                    assignment.name, (m, n), rows, low_rank, dtype, weight.device
                )
            else:
                moment = torch.zeros(weight.shard.numel(), device=weight.device)
                step = torch.zeros((), device=weight.device)
                state = (moment, torch.zeros_like(moment), step)
            gradient = Gradient(
                index, assignment.name, param, shards, matrix, self._site(assignment)
            )
            entries.append(_Entry(assignment, group, gradient, weight, matrix, state))
        return entries

    def _site(self, assignment: Assignment) -> ProjectedSite | None:
        """A site where the projected backward applies; refuses where it is insisted on and does not."""
        wanted = self.options["projected_backward"]
        if not assignment.low_rank or wanted is False:
            return None
        module = self._modules.get(assignment.name)
        if module is not None and can_project(module):
            return ProjectedSite(assignment.name)
        if wanted is True:
            raise ValueError(
                f"hmt.optimizer.projected_backward is true, but {assignment.name} belongs to a "
                f"{type(module).__name__}, whose forward is not that of nn.Linear. "
                'Use "auto", or add the module to exclude_modules.'
            )
        return None

    def _build_schedule(self) -> RefreshSchedule:
        size = torch.empty(0, dtype=self.settings.accumulate_dtype).element_size()
        nbytes = [size * e.matrix.shape[0] * e.matrix.shape[1] for e in self.low_rank]  # type: ignore[union-attr]
        budget = self.options["max_full_gradient_bytes"]
        if budget == "auto":
            budget = default_full_gradient_bytes(nbytes)
        elif nbytes and budget < max(nbytes):
            largest = self.low_rank[nbytes.index(max(nbytes))].name
            raise ValueError(
                f"hmt.optimizer.max_full_gradient_bytes is {budget}, but the full gradient of {largest} "
                f'takes {max(nbytes)} bytes. Give at least that, or "auto".'
            )
        return RefreshSchedule(nbytes, self.options["update_interval"], budget)

    def _patch(self) -> None:
        for entry in self.low_rank:
            if entry.gradient.site is not None:
                module = self._modules[entry.name]
                assert isinstance(module, nn.Linear)
                patch_linear(module, entry.gradient.site, self.shared)

    def _register_hooks(self) -> list[Any]:
        hooks = []
        params = [entry.gradient.param for entry in self.entries]
        for entry in self.entries:
            param: Any = entry.gradient.param
            if self.parameter_offload is not None:
                param.all_gather()  # the gradient accumulator must see the whole parameter
            hooks.append(register_grad_hook(param, self._gradient_hook(entry.gradient, params)))
            if self.parameter_offload is not None:
                param.partition()
        return hooks

    def _gradient_hook(self, gradient: Gradient, params: Sequence[nn.Parameter]) -> Any:
        """Also fires, with ``param.grad`` None, when a projected backward returned no gradient."""

        def hook(*_: object) -> None:
            # Order as in DeepSpeed's own hooks: the question must be asked before re-entering.
            refresh = self.should_refresh_expected_hook_count()
            self.reenter_backward_if_needed()
            reduce_now = self.partition_gradients or self.is_gradient_accumulation_boundary()
            self.reducer.arrive(gradient, reduce_now and self.reduction_enabled)
            expected = self._max_expected_hooks_seen
            if refresh:
                expected = count_used_parameters_in_backward(params)
            self.update_hook_state_and_maybe_run_epilogue(expected)

        return hook

    # -- a window: draw probes, choose who refreshes, lay out the projections ---------------------

    def _begin_window(self) -> None:
        due = set(self.schedule.due(self.step_count))
        for index, entry in enumerate(self.low_rank):
            matrix, gradient = entry.matrix, entry.gradient
            assert matrix is not None
            gradient.refreshing = index in due
            gradient.owner = index % self.collectives.world
            matrix.draw_probes(self.step_count)
            if gradient.site is not None:
                gradient.site.projection = None if gradient.refreshing else matrix.projection
        self.shared.lay_out()
        self.reducer.plan()

    # -- reduction, called by the engine ----------------------------------------------------------

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """End of every micro-batch's backward at stages 2 and 3."""
        self.reducer.flush()

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """End of the last micro-batch's backward at stages 0 and 1."""
        self.reducer.flush()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Unmanaged accumulation at stages 2 and 3: every backward has reduced already."""
        self.set_gradient_accumulation_boundary(True)

    # -- step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One optimizer step from what the window has accumulated.

        Raises:
            ValueError: when given a closure, which no ZeRO optimizer can evaluate.
        """
        if closure is not None:
            raise ValueError("HMT under ZeRO takes no closure; call engine.step()")
        if self.parameter_offload is not None:
            self.parameter_offload.partition_all_parameters()
        self.overflow = self.settings.check_overflow and self._found_overflow()
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self.reducer.reset()
        else:
            self._refresh_bases()
            factor = self._norm_and_clip_factor()
            self._update(factor)
            self.step_count += 1
            self._begin_window()
        if self.parameter_offload is not None:
            persistent = self.parameter_offload.persistent_parameters
            if persistent:
                persistent[0].all_gather(persistent)
        self.communication_bytes = self.collectives.reset_counter()

    def _found_overflow(self) -> bool:
        """Whether any rank holds a gradient that is not finite."""
        held = [e.gradient for e in self.entries]
        sums = [
            t.sum(dtype=torch.float32) for g in held for t in (g.reduced, g.full) if t is not None
        ]
        device = self.entries[0].weight.device
        bad = torch.zeros((), device=device)
        if sums:
            bad = (~torch.isfinite(torch.stack(sums))).any().float()
        self.collectives.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad.item())

    def _refresh_bases(self) -> None:
        """New bases from the mean full gradients: found once, at the owner, and broadcast."""
        refreshing = [(i, e) for i, e in enumerate(self.low_rank) if e.gradient.refreshing]
        found: dict[int, Tensor] = {}
        if not refreshing:
            return
        device = refreshing[0][1].weight.device
        ranks = torch.zeros(len(refreshing), dtype=torch.int64, device=device)
        for place, (_, entry) in enumerate(refreshing):
            full, matrix = entry.gradient.full, entry.matrix
            assert matrix is not None
            basis = None if full is None else matrix.find_basis(full, self.step_count)
            if basis is not None:
                found[place] = basis
                ranks[place] = basis.shape[1]
        self.collectives.all_reduce(ranks)
        for place, (index, entry) in enumerate(refreshing):
            rank = int(ranks[place])
            self._adopt(entry, rank, found.get(place))
            if rank:
                self.schedule.refreshed(index, self.step_count)

    def _adopt(self, entry: _Entry, rank: int, basis: Tensor | None) -> None:
        """Rotate to the broadcast basis (rank 0 keeps the old one) and project the full gradient."""
        matrix, gradient = entry.matrix, entry.gradient
        assert matrix is not None
        if rank:
            if basis is None:
                basis = torch.empty(matrix.shape[1], rank, dtype=matrix.dtype, device=matrix.device)
            basis = basis.contiguous()
            self.collectives.broadcast(basis, gradient.owner)
            matrix.adopt(basis)
            matrix.draw_probes(self.step_count)
        projected = torch.zeros(matrix.shape[0], matrix.width, device=matrix.device)
        if gradient.full is not None:
            torch.mm(gradient.full.float(), matrix.projection.float(), out=projected)
        self.collectives.broadcast(projected, gradient.owner)
        begin, end = matrix.rows
        gradient.reduced, gradient.full = projected[begin:end], None

    def _norm_and_clip_factor(self) -> Tensor:
        """Estimated ``||G||`` over all parameters; the factor that unscales and clips, 0-dim fp32."""
        device = self.entries[0].weight.device
        squares = torch.zeros(len(self.entries), 2, device=device)
        for place, entry in enumerate(self.entries):
            reduced = entry.gradient.reduced
            if reduced is None:
                continue
            own = reduced[entry.gradient.shards.counted(self.shard_rank)]
            if entry.matrix is not None:
                squares[place] = entry.matrix.square_norms(own)
            else:
                squares[place, 0] = torch.linalg.vector_norm(own, dtype=torch.float32).square()
        if self._sharded:
            self.collectives.all_reduce(squares)
        total = torch.zeros((), device=device)
        for place, entry in enumerate(self.entries):
            if entry.matrix is None:
                total = total + squares[place, 0]
            else:
                total = total + entry.matrix.observe(squares[place])
        scale = self.loss_scale
        norm = total.sqrt() / scale
        self._global_grad_norm = norm
        factor = torch.full((), 1.0 / scale, device=device)
        if self.settings.clip > 0:
            factor = factor / ((norm + 1e-6) / self.settings.clip).clamp(min=1.0)
        return factor

    def _update(self, factor: Tensor) -> None:
        updates = self._advance(factor)
        gather = GatherPipeline(self.collectives, self.settings.gather_elements)
        for place, entry in enumerate(self.entries):
            key = keyed_seed(self.options["seed"], entry.name, "round", self.step_count)
            if entry.matrix is not None:
                update = entry.matrix.finish(*updates.pop(place))
                self._apply_low_rank(entry, update, key, gather)
            else:
                gradient = self._dense_gradient(entry, factor)
                assert entry.dense_state is not None
                entry.weight.step_dense(gradient, entry.dense_state, key, **entry.hyper())
                self._gather_weight(entry, gather)
            entry.gradient.clear()
        gather.finish()

    def _advance(self, factor: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Adam in every projected space; (update, squared residual norm over all rows) by place."""
        updates: dict[int, tuple[Tensor, Tensor]] = {}
        for place, entry in enumerate(self.entries):
            matrix, reduced = entry.matrix, entry.gradient.reduced
            if matrix is None:
                continue
            if reduced is None:
                reduced = torch.zeros(matrix.num_rows, matrix.width, device=matrix.device)
            projected = reduced.float() * factor
            hyper = entry.hyper()
            update, squares = matrix.advance(projected, betas=hyper["betas"], eps=hyper["eps"])
            own = squares[entry.gradient.shards.counted(self.shard_rank)].sum()
            updates[place] = (update, own)
        if self._sharded and updates and low_rank_settings(self.options).norm_growth_limit:
            norms = torch.stack([square for _, square in updates.values()])
            self.collectives.all_reduce(norms)
            updates = {p: (u, norms[i]) for i, (p, (u, _)) in enumerate(updates.items())}
        return updates

    def _dense_gradient(self, entry: _Entry, factor: Tensor) -> Tensor:
        reduced = entry.gradient.reduced
        if reduced is None:  # unused in this window: DeepSpeed's ZeRO counts it as zero too
            return torch.zeros_like(entry.weight.shard, dtype=torch.float32)
        return reduced.reshape(-1).float() * factor

    def _apply_low_rank(
        self, entry: _Entry, update: Tensor, key: int, gather: GatherPipeline
    ) -> None:
        matrix, weight = entry.matrix, entry.weight
        assert matrix is not None
        lr, decay = entry.group["lr"], entry.group["weight_decay"]
        if weight.master is not None or weight.partitioned:
            weight.step_rows(update, matrix.projection, lr, decay, key)
            self._gather_weight(entry, gather)
        elif not self._sharded:
            weight.step_whole(update, matrix.projection, lr, decay, key)
        else:
            # The low-rank update travels, not the weights: every replica applies the same one.
            shards, width = entry.gradient.shards, matrix.width
            projection = matrix.projection

            def deliver(packed: Tensor) -> None:
                rows = packed.reshape(shards.world, shards.max_rows, width)
                whole = torch.empty(shards.m, width, dtype=packed.dtype, device=packed.device)
                shards.unpack(rows, whole)
                weight.step_whole(whole, projection, lr, decay, key)

            part = update.to(self.settings.comm_dtype).reshape(-1)
            gather.add(part, shards.max_rows * width, deliver)

    def _gather_weight(self, entry: _Entry, gather: GatherPipeline) -> None:
        if not self._sharded or entry.weight.partitioned:
            return
        shards, flat = entry.gradient.shards, entry.gradient.param.detach().view(-1)
        gather.add(
            entry.weight.shard, shards.partition, lambda packed: shards.unpack_flat(packed, flat)
        )

    # -- what else the engine asks for --------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """States held by this rank, by parameter."""
        return {e.gradient.param: state_access.local_state(e) for e in self.entries}

    @property
    def loss_scale(self) -> float:
        return float(self.loss_scaler.loss_scale)

    @property
    def cur_scale(self) -> float:
        return float(self.loss_scaler.cur_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, reduced or not."""
        self.reducer.reset()

    def refresh_fp32_params(self) -> None:
        """Take masters anew from the model's weights."""
        for entry in self.entries:
            entry.weight.refresh_master()

    _restore_from_bit16_weights = refresh_fp32_params

    def checkpoint_event_prologue(self) -> None:
        """Before saving or loading: parameters of stage 3 partitioned."""
        if self.parameter_offload is not None:
            self.parameter_offload.partition_all_parameters()

    def checkpoint_event_epilogue(self) -> None:
        """After saving or loading: persistent parameters of stage 3 whole again."""
        if self.parameter_offload is not None and self.parameter_offload.persistent_parameters:
            persistent = self.parameter_offload.persistent_parameters
            persistent[0].all_gather(persistent)

    def empty_partition_cache(self) -> None:
        """Release gathered parameters of stage 3."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def metrics(self) -> dict[str, Any]:
        """Numbers for monitors and the run's summary; see :mod:`hmt_deepspeed.zero.statistics`."""
        return statistics.metrics(self)

    def describe(self) -> str:
        """The start table: per group of parameters rule, rank, bytes, masters, shard."""
        return statistics.describe(self)

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move moments and masters to host memory between steps; :meth:`reload_states` brings them back.

        Raises:
            ValueError: for a selection of states; HMT moves moments and masters together.
        """
        if include is not None and set(include) != set(OffloadStateTypeEnum):
            raise ValueError(
                f"offload_states(include={include!r}): HMT moves moments and masters together; pass None"
            )
        state_access.move_states(self, "cpu", non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`."""
        state_access.move_states(self, self.entries[0].weight.device, non_blocking)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers; see :mod:`hmt_deepspeed.zero.checkpoint`."""
        return checkpoint.optimizer_state(self)

    def load_saved(self, saved: checkpoint.SavedState) -> None:
        """Restore states from a checkpoint of any world size and stage, then open the next window."""
        checkpoint.restore_optimizer(self, saved)
        self.reducer.reset()
        self._begin_window()

    def destroy(self) -> None:
        """Undo hooks and patches; the model is an ordinary one again."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        state_access.unlink(self)
        for entry in self.low_rank:
            if entry.gradient.site is not None:
                module = self._modules[entry.name]
                unpatch_linear(module, entry.gradient.site)  # type: ignore[arg-type]
        if self.parameter_offload is not None:
            self.parameter_offload.destroy()
        get_accelerator().empty_cache()


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def param_numel(param: nn.Parameter) -> int:
    """Elements of the whole parameter, partitioned or not."""
    return int(getattr(param, "ds_numel", param.numel()))
