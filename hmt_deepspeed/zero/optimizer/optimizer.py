"""HMT's ZeRO optimizer: composes rules, shards and reduction into DeepSpeed's optimizer interface.

One step, for all parameters; the mean over ranks commutes with the projection::

    reduced gradients  ->  new bases of the matrices that refresh  ->  estimated global norm, verdict, clip factor
                       ->  Adam in each projected space, probe residual  ->  weights of this rank's rows
                       ->  gather  ->  next accumulation window
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor, nn

from hmt_deepspeed.memory.numbers import Measured
from hmt_deepspeed.optim.backward.experts import (
    expert_sites,
    patch_experts,
    unpatch_experts,
)
from hmt_deepspeed.optim.backward.linear import SharedInputs, patch_linear, unpatch_linear
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.settings.assign import linear_weights
from hmt_deepspeed.zero.bases.cache import build_bases
from hmt_deepspeed.zero.bases.groups import BasisGroups
from hmt_deepspeed.zero.bases.leaves import mark_leaves, shared_inputs
from hmt_deepspeed.zero.bases.refresh import BasisRefresh
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.gradients.hooks import goes_on_to_any, register_gradient_hooks
from hmt_deepspeed.zero.gradients.reducer import GradientReducer
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.optimizer import start_table, state_access, statistics
from hmt_deepspeed.zero.optimizer.interface import OptimizerInterface
from hmt_deepspeed.zero.optimizer.offloaded_states import OffloadedStates
from hmt_deepspeed.zero.optimizer.overlap import Overlap, order_of_use
from hmt_deepspeed.zero.optimizer.partitions import Partitions
from hmt_deepspeed.zero.optimizer.step import ZeroStep
from hmt_deepspeed.zero.optimizer.verdict import Verdict
from hmt_deepspeed.zero.parameters.build import build_param_states, build_schedule
from hmt_deepspeed.zero.parameters.param_state import ParamState, Placed
from hmt_deepspeed.zero.saving.optimizer_state import optimizer_state, restore_optimizer
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.settings import ZeroSettings
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.parallel_experts import ParallelExperts, expert_parallel_layers
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.residency import detach_coordinator, refuse_transforms

__all__ = ["HMTZeroOptimizer"]


class HMTZeroOptimizer(OptimizerInterface):
    """ZeRO stages 0-3 for HMT, on DeepSpeed's optimizer interface.

    Args:
        optimizer: carries the parameter groups; DeepSpeed's and torch's schedulers change their lr.
        options: fields of ``hmt.optimizer``, validated.
        model: the module, INT8 weights made; its low-rank linears get the projected backward.
        param_names: name of every parameter of ``model``.
        group: data-parallel process group.
        settings: see :class:`ZeroSettings`.
        loss_scaler: DeepSpeed's; scale 1 without fp16.
        parameter_offload: DeepSpeed's ZeRO-3 coordinator, None below stage 3.
        uneven_leaves: ranks may use different parts of ZeRO-3's leaf modules, see :mod:`hmt_deepspeed.zero.bases.leaves`.

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
        uneven_leaves: bool = True,
    ) -> None:
        super().__init__(optimizer, settings, loss_scaler)
        self.module, self._parallel_experts = model, ParallelExperts(expert_parallel_layers(model))
        self.param_names = {
            param: self._parallel_experts.name(name) for param, name in param_names.items()
        }
        self.dp_process_group = group
        self.collectives = Collectives(group, settings.overlap)
        self.parameter_offload = parameter_offload
        self.partitions = Partitions(
            parameter_offload, model, group, settings.overlap, settings.gather_elements
        )
        self.communication_bytes = 0
        self.round_robin_bit16_groups = [
            [p for p in g["params"] if is_optimized_parameter(p)] for g in optimizer.param_groups
        ]
        self._undo = ExitStack()
        try:
            self._build(dict(options), uneven_leaves)
        except BaseException:
            self._undo.close()
            raise

    # -- construction ---------------------------------------------------------------------------

    def _build(self, options: dict[str, Any], uneven_leaves: bool) -> None:
        """Build each part, and register how it is undone."""
        settings, collectives = self.settings, self.collectives
        if self.parameter_offload is not None:
            self._undo.callback(detach_coordinator, self.parameter_offload)
        host = self._host_worker()
        placed = self._placed()
        param_states = build_param_states(
            placed, options, settings, self.module, self._parallel_experts, host
        )
        low_rank = [p for p in param_states if p.matrix is not None]
        uneven = uneven_leaves and self.parameter_offload is not None and collectives.world > 1
        leaves = mark_leaves(param_states) if uneven else []
        bases = build_bases(collectives, settings.stage, settings.cache, low_rank)
        self._undo.callback(bases.close)
        apart = dict.fromkeys(holders for *_, holders in placed if holders is not collectives)
        groups, *of_experts = [
            self._basis_groups(
                [p for p in low_rank if p.gradient.holders is holders], holders, bases, options
            )
            for holders in (collectives, *apart)
        ]
        self.zero = ZeroState(
            self.optimizer,
            self.round_robin_bit16_groups,
            self.param_names,
            param_states,
            options,
            settings,
            collectives,
            host,
            bases,
            groups,
            self.loss_scaler,
            self._parallel_experts,
            of_experts,
        )
        self._compose(leaves)
        self.offloaded = OffloadedStates(self)
        state_access.link(self)
        self._undo.callback(state_access.unlink, self)
        self._begin_window()
        if text := start_table.warning(self.zero):
            self._warn(text)

    def _placed(self) -> list[Placed]:
        """Every trained parameter with its name, its group and its holders."""
        groups = zip(self.optimizer.param_groups, self.round_robin_bit16_groups, strict=True)
        of_experts = self._parallel_experts.holders(self.collectives)
        return [
            (self.param_names[p], p, group, of_experts.get(p, self.collectives))
            for group, params in groups
            for p in params
        ]

    def _host_worker(self) -> HostWorker | None:
        """The worker that updates states in host memory or on an SSD, where there are some."""
        host = self.settings.host
        if host is None:
            return None
        device = next(p.device for params in self.round_robin_bit16_groups for p in params)
        worker = HostWorker(device, host.pinned, host.ssd)
        self._undo.callback(worker.close)
        return worker

    def _basis_groups(
        self,
        low_rank: list[ParamState],
        holders: Collectives,
        bases: BasisStorage,
        options: dict[str, Any],
    ) -> BasisGroups:
        """Groups of the matrices that some ranks hold, which refresh among themselves."""
        schedule = build_schedule(low_rank, options, self.settings.accumulate_dtype)
        shared = shared_inputs(low_rank, bases)
        self._patch(low_rank, shared)
        refresh = BasisRefresh(low_rank, bases, holders, self.settings.accumulate_dtype)
        return BasisGroups(low_rank, schedule, bases, shared, refresh, holders, options, self._warn)

    def _patch(self, low_rank: list[ParamState], shared: SharedInputs) -> None:
        """Give the model's low-rank linears and experts the projected backward."""
        name = self._parallel_experts.name
        modules = {name(key): module for key, module in linear_weights(self.module).items()}
        sites = {name(key): site for key, site in expert_sites(self.module).items()}
        grouped = []
        for param_state in low_rank:
            link = param_state.gradient.linear
            if link is None:
                continue
            module, site = modules.get(param_state.name), sites.get(param_state.name)
            if site is not None:
                grouped.append((site, link))
                self._undo.callback(unpatch_experts, site.module, link)
                continue
            assert isinstance(module, nn.Linear)
            patch_linear(module, link, shared)
            self._undo.callback(unpatch_linear, module, link)
        patch_experts(grouped)

    def _compose(self, leaves: list[nn.Module]) -> None:
        """Build reduction, step and overlap."""
        zero, settings, partitioned = self.zero, self.settings, self.parameter_offload is not None
        self.reducer = GradientReducer(
            [p.gradient for p in zero.param_states],
            self.collectives,
            sharded=settings.stage > 0,
            bucket_elements=settings.reduce_elements,
            comm_dtype=settings.comm_dtype,
            accumulate_dtype=settings.accumulate_dtype,
            scale=settings.scale,
        )
        self._step = ZeroStep(zero, order_of_use(zero.param_states, self.param_names))
        self._step.written = self.partitions.order_gathers
        for hook in register_gradient_hooks(self, self.reducer, leaves, partitioned):
            self._undo.callback(hook.remove)
        if partitioned:
            # for writes that are not ours: GatheredParameters
            before = self.module.register_forward_pre_hook(
                self.partitions.order_gathers, prepend=True
            )
            check = self.module.register_forward_pre_hook(refuse_transforms, prepend=True)
            self._undo.callback(before.remove)
            self._undo.callback(check.remove)
        this = weakref.ref(self)  # the model holds what follows
        self.overlap = Overlap(
            settings.host.overlap if settings.host is not None else "none",
            zero.param_states,
            self._step,
            self.module,
            partitioned,
            lambda: 1.0 if (alive := this()) is None else alive.loss_scale,
        )
        self._undo.callback(self.overlap.close)

    def _begin_window(self) -> None:
        """Open the accumulation window of the coming step."""
        for groups in self.zero.all_basis_groups:
            groups.begin_window(self.zero.step_count)
        self._step.make_room()
        self.reducer.plan()

    # -- backward, called by the engine -----------------------------------------------------------

    def backward_epilogue(self, **_: Any) -> None:
        """Release what ZeRO-3 gathered for modules whose backward has no end to be seen at: those whose inputs
        want no gradient."""
        if self.parameter_offload is not None:
            self.parameter_offload.release_backward_leftovers()

    def is_asked_for_gradients(self) -> bool:
        """Whether the backward that runs now is for parameters, not for inputs alone (``autograd.grad(loss, x)``)."""
        return goes_on_to_any(gradient.param for gradient in self.reducer.gradients)

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
            RuntimeError: states are away, or a parameter has got no gradient where none may be unused.
        """
        if closure is not None:
            raise ValueError("HMT under ZeRO takes no closure; call engine.step()")
        self.offloaded.require("step()")
        self._check_used()
        self.settle()
        self.overlap.synchronize_copies()
        self._step.finish()  # what forward did not ask for
        self._step.commit()
        self.partitions.partition()
        scale, checked, overflow = self.loss_scale, self.settings.check_overflow, None
        if checked and self._needs_the_host():
            checked, overflow = False, self._step.clipping.overflow()
        if self._refresh(overflow):
            self._take(scale, checked)
            self.reducer.reset()
        else:
            self._conclude(True, scale)
            self.zero_grad()
        self.zero.step_count += 1
        self._begin_window()
        self._gather_persistent()
        self.communication_bytes = sum(c.reset_counter() for c in self.zero.holders)

    def _gather_persistent(self) -> None:
        self.overlap.finish_for(self.partitions.persistent)
        self.partitions.gather_persistent()

    def _refresh(self, overflow: Tensor | None) -> bool:
        """Find the bases that are due, if ``overflow`` is 0 or None; whether the step is taken."""
        for groups in self.zero.all_basis_groups:
            if not groups.refresh(self.zero.step_count, overflow):
                return False
            overflow = None  # the first have read it
        return True

    def _needs_the_host(self) -> bool:
        """Whether the host must know that a step is taken: it is to find bases, or updates states of its own. With experts
        always: their bases are found when the ranks that hold them see fit."""
        states = self.zero.param_states
        return bool(self.zero.expert_groups) or any(
            p.gradient.refreshing or isinstance(p.weight, HostWeight) for p in states
        )

    def _take(self, scale: float, checked: bool) -> None:
        """A step, which the device skips where gradients, whose losses had the scale, are ``checked`` and not finite."""
        parts = self._step.parts()
        norm, factor, taken = self._step.clipping.decide(parts, scale, checked)
        self._global_grad_norm = norm
        self._step.update(parts, factor, taken, self.zero.step_count)
        if taken is None:
            self._conclude(False, scale)
        else:
            self._verdict = Verdict(taken, scale)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask
        self.overlap.end_step()

    def _check_used(self) -> None:
        """``ignore_unused_parameters``: whether a parameter without a gradient ends the training."""
        if self.settings.ignore_unused:
            return
        unused = [
            p.name for p in self.zero.param_states if p.gradient.index not in self.reducer.reached
        ]
        if unused:
            raise RuntimeError(
                f"{', '.join(unused)} got no gradient, and zero_optimization.ignore_unused_parameters is false. Let "
                "every trained parameter take part in the loss, freeze these, or set the key to true, its default."
            )

    # -- what else the engine asks for --------------------------------------------------------------

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """States held by this rank."""
        self.synchronize()
        return {p.gradient.param: state_access.local_state(p) for p in self.zero.param_states}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, reduced or not."""
        self.overlap.undo("had its gradients dropped between backward and step")
        self.reducer.reset()

    def refresh_fp32_params(self) -> None:
        """Take masters anew from the model's weights."""
        self.synchronize()
        for param_state in self.zero.param_states:
            param_state.weight.refresh_master()

    _restore_from_bit16_weights = refresh_fp32_params

    def checkpoint_event_prologue(self) -> None:
        """Before saving or loading: updates finished, parameters of stage 3 partitioned."""
        self.offloaded.require("a checkpoint", ["lp_params"])
        self.synchronize()
        self.partitions.partition()

    def checkpoint_event_epilogue(self) -> None:
        """After saving or loading: persistent parameters of stage 3 whole again."""
        self.partitions.order_gathers()
        self._gather_persistent()

    def forget_moved(self) -> None:
        """Give back the memory of states and bases that have moved elsewhere."""
        self._step.forget_states()
        for groups in self.zero.all_basis_groups:
            groups.forget_columns()

    def empty_partition_cache(self) -> None:
        """Release gathered parameters of stage 3."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def measure(self) -> Measured:
        """Numbers for monitors and the run's summary; see :mod:`hmt_deepspeed.zero.optimizer.statistics`."""
        return statistics.measure(self.zero, self.reducer.peak_bytes, self.communication_bytes)

    def metrics(self) -> dict[str, Any]:
        """What :meth:`measure` gives, with the device's numbers, for which it waits."""
        return self.measure().read()

    def describe(self) -> str:
        """The start table: per group of parameters rule, rank, bytes, masters, shard."""
        return start_table.describe(self.zero)

    def offload_states(
        self,
        include: Any = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, those of :class:`OffloadedStates`; :meth:`reload_states` brings them back.

        Args:
            include: names of DeepSpeed's ``OffloadStateTypeEnum``; None for all.
            non_blocking: returns while copies are under way; who reads a state here waits for them.

        Raises:
            ValueError: another name, or another device than the host.
        """
        self.synchronize()
        self.offloaded.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`."""
        self.offloaded.reload(non_blocking)

    def get_hp_param_device(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> torch.device | None:
        """Device of this rank's master of a trained parameter, or of a state of it."""
        found = self.state_access.get_local_fp32_param(param, optim_state_key)
        return None if found is None else found.device

    def synchronize(self) -> None:
        """Finish updates and copies to the host that are under way, and read the verdict over the last step."""
        self.settle()
        self.overlap.synchronize()
        self.offloaded.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers; see :mod:`hmt_deepspeed.zero.saving.checkpoint`."""
        self.synchronize()
        return optimizer_state(self.zero)

    def load_saved(self, saved: SavedState) -> None:
        """Restore states from a checkpoint of any world size and stage, then open the next window."""
        self.offloaded.require("loading a checkpoint")
        self.synchronize()
        restore_optimizer(self.zero, saved)
        self.reducer.reset()
        self._begin_window()

    def destroy(self) -> None:
        """Undo hooks and patches; the model is an ordinary one again, INT8 weights decoded. Idempotent.

        At stage 3 parameters stay in parts, as DeepSpeed leaves them.
        """
        self._undo.close()
        get_accelerator().empty_cache()
