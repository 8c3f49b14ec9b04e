"""HMT's ZeRO optimizer: composes rules, shards and reduction into DeepSpeed's optimizer interface.

One step, for all parameters (DESIGN: the mean over ranks commutes with the projection)::

    reduced gradients  ->  overflow verdict  ->  new bases of the matrices that refresh
                       ->  estimated global norm, clip factor
                       ->  Adam in each projected space, probe residual
                       ->  weights of this rank's rows  ->  gather  ->  next window
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import logger
from torch import Tensor, nn

from hmt_deepspeed.optim.backward.linear import patch_linear, unpatch_linear
from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.decisions.sharing import regroup, share_bases
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.settings.assign import linear_weights
from hmt_deepspeed.zero.bases.cache import build_bases
from hmt_deepspeed.zero.bases.leaves import mark_leaves, shared_inputs
from hmt_deepspeed.zero.bases.refresh import BasisRefresh
from hmt_deepspeed.zero.gradients.hooks import goes_on_to_any, register_gradient_hooks
from hmt_deepspeed.zero.gradients.reducer import GradientReducer
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.optimizer import start_table, state_access, statistics
from hmt_deepspeed.zero.optimizer.interface import OptimizerInterface
from hmt_deepspeed.zero.optimizer.offloaded_states import OffloadedStates
from hmt_deepspeed.zero.optimizer.overlap import Overlap, order_of_use
from hmt_deepspeed.zero.optimizer.step import ZeroStep
from hmt_deepspeed.zero.parameters.build import build_param_states, build_schedule
from hmt_deepspeed.zero.parameters.param_state import Placed
from hmt_deepspeed.zero.saving import optimizer_state as checkpoint_state
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.settings import ZeroSettings
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.weights.residency import let_go, refuse_transforms, release_buffers

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
        self.options = dict(options)
        self.module, self.param_names = model, param_names
        self.dp_process_group = group
        self.collectives = Collectives(group, settings.overlap)
        self.parameter_offload = parameter_offload
        self.order_gathers = partial(_order_gathers, parameter_offload, self.collectives.world)
        self.step_count = 0
        self.communication_bytes = 0
        self.round_robin_bit16_groups = [
            [p for p in g["params"] if is_optimized_parameter(p)] for g in optimizer.param_groups
        ]
        self._modules = linear_weights(model)
        self._undo = ExitStack()
        try:
            self._build(uneven_leaves)
        except BaseException:
            self._undo.close()
            raise

    def _build(self, uneven_leaves: bool) -> None:
        """Each part, and with it how it is taken apart."""
        settings = self.settings
        if self.parameter_offload is not None:
            self._undo.callback(let_go, self.parameter_offload)
        self._place()
        uneven = uneven_leaves and self.parameter_offload is not None and self.collectives.world > 1
        leaves = mark_leaves(self.param_states) if uneven else []
        self.bases = build_bases(self.collectives, settings.stage, settings.cache, self.low_rank)
        self._undo.callback(self.bases.close)
        self.shared = shared_inputs(self.low_rank, self.bases)
        self._patch()
        self._compose(leaves)
        self.offloaded = OffloadedStates(self)
        state_access.link(self)
        self._undo.callback(state_access.unlink, self)
        self.form_groups()
        self._begin_window()

    # -- construction ---------------------------------------------------------------------------

    def _place(self) -> None:
        """Every parameter's rule, states and shard; when the matrices refresh."""
        settings = self.settings
        groups = zip(self.optimizer.param_groups, self.round_robin_bit16_groups, strict=True)
        placed: list[Placed] = [
            (self.param_names[p], p, group) for group, params in groups for p in params
        ]
        self.host: HostWorker | None = None
        if settings.host is not None:
            self.host = HostWorker(placed[0][1].device, settings.host.pinned, settings.host.ssd)
            self._undo.callback(self.host.close)
        whole = settings.stage == 0
        self.shard_rank = 0 if whole else self.collectives.rank
        shards = 1 if whole else self.collectives.world
        self.param_states = build_param_states(
            placed, self.options, settings, self.module, shards, self.shard_rank, self.host
        )
        self.low_rank = [
            param_state for param_state in self.param_states if param_state.matrix is not None
        ]
        self.schedule = build_schedule(self.low_rank, self.options, settings.accumulate_dtype)

    def _compose(self, leaves: list[nn.Module]) -> None:
        """What takes gradients to their shards, finds bases, steps, and hides the time that this takes."""
        settings, partitioned = self.settings, self.parameter_offload is not None
        self.reducer = GradientReducer(
            [param_state.gradient for param_state in self.param_states],
            self.collectives,
            sharded=settings.stage > 0,
            bucket_elements=settings.reduce_elements,
            comm_dtype=settings.comm_dtype,
            accumulate_dtype=settings.accumulate_dtype,
            scale=settings.scale,
        )
        self._step = ZeroStep(
            self.param_states,
            self.bases,
            self.collectives,
            settings,
            self.options,
            self.shard_rank,
            order_of_use(self.param_states, self.param_names),
            self.host,
        )
        self._step.written = self.order_gathers
        self._refresh = BasisRefresh(
            self.low_rank,
            self.schedule,
            self.bases,
            self.collectives,
            self._step.sharded,
            self.shard_rank,
        )
        for hook in register_gradient_hooks(self, self.reducer, leaves, partitioned):
            self._undo.callback(hook.remove)
        if partitioned:
            # for writes that are not ours: GatheredParameters
            before = self.module.register_forward_pre_hook(self.order_gathers, prepend=True)
            check = self.module.register_forward_pre_hook(refuse_transforms, prepend=True)
            self._undo.callback(before.remove)
            self._undo.callback(check.remove)
        this = weakref.ref(self)  # the model holds what follows
        self.overlap = Overlap(
            settings.host.overlap if settings.host is not None else "none",
            self.param_states,
            self._step,
            self.module,
            partitioned,
            lambda: 1.0 if (alive := this()) is None else alive.loss_scale,
        )
        self._undo.callback(self.overlap.close)

    def _patch(self) -> None:
        for param_state in self.low_rank:
            if param_state.gradient.site is not None:
                module = self._modules[param_state.name]
                assert isinstance(module, nn.Linear)
                patch_linear(module, param_state.gradient.site, self.shared)
                self._undo.callback(unpatch_linear, module, param_state.gradient.site)

    # -- a window: draw probes, choose who refreshes, lay out the projections ---------------------

    def form_groups(self) -> None:
        """Matrices that take one basis together, by place; each alone unless bases are shared."""
        matrices = [p.matrix for p in self.low_rank if p.matrix is not None]
        readers = self.shared.groups() if self.options["share_basis"] else []
        fixed = self.options["max_full_gradient_bytes"] != "auto"
        self.schedule = regroup(self.schedule, matrices, readers, fixed, self._warn)
        self._refresh.schedule = self.schedule
        self.groups = self.schedule.groups
        for index in {i for group in self.groups if len(group) > 1 for i in group}:
            self.bases.restore(self.low_rank[index])
        members = [[matrices[i] for i in group] for group in self.groups]
        share_bases(members)
        self.bases.keep_only(self.low_rank)
        self.policy = build_policy(members, self.options)

    def load_old_bases(self, saved: Mapping[str, Tensor]) -> None:
        """Those of the groups whose bases this rank finds."""
        own = (group[0] for number, group in enumerate(self.groups) if self._finds(number))
        self.bases.load_old_bases([self.low_rank[index] for index in own], saved)

    def load_history(self, saved: SavedState) -> None:
        """Moments of bases that were left."""
        groups = [[self.low_rank[index] for index in group] for group in self.groups]
        self.bases.history.load(
            [(group, self._finds(number)) for number, group in enumerate(groups)], saved
        )

    def _finds(self, group: int) -> bool:
        """Whether this rank finds the basis of a group."""
        return group % self.collectives.world == self.collectives.rank

    def _due(self) -> set[int]:
        """Matrices that refresh in the coming step."""
        if self.options["share_basis"] and not self.shared.settled:
            self.shared.settle()  # the first window only observes who reads the same input
            if not self.shared.settled:
                return set()
            groups = self.collectives.broadcast_object(self.shared.groups())
            self.shared.restore(groups, settled=True)
            self.form_groups()
        return set(self.schedule.due(self.step_count))

    def _begin_window(self) -> None:
        due = self._due()
        for number, group in enumerate(self.groups):
            for index in group:
                self.low_rank[index].gradient.owner = number % self.collectives.world
        self.bases.will_use(self.low_rank)
        for index, param_state in enumerate(self.low_rank):
            matrix, gradient = param_state.matrix, param_state.gradient
            assert matrix is not None
            with self.bases.whole(param_state):
                if index in due and matrix.redraws:
                    due.discard(index)
                    self._redraw(index)
                matrix.prepare(self.step_count)
            gradient.refreshing = index in due
            if gradient.site is not None:
                held = None if gradient.refreshing else self.bases.held(param_state)
                gradient.site.projection = held
        self.shared.lay_out()
        self.bases.will_use(None)
        self.reducer.plan()

    def _redraw(self, index: int) -> None:
        """The next basis of a rule that draws it from a seed: no gradient is needed."""
        matrix = self.low_rank[index].matrix
        assert matrix is not None
        number = self.schedule.num_refreshes[index]
        if isinstance(matrix, LowRankMatrix):
            basis = matrix.seeded_basis(matrix.rank, number).to(matrix.dtype)
            self._refresh.adopt([index], basis)
        matrix.draw = number  # only now: the old number gives the basis that moments come from
        self.schedule.refreshed(index, self.step_count)

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
        self.overlap.settle_copies()
        self._step.finish()  # what forward did not ask for
        self._step.commit()
        self._partition_parameters()
        self.overflow = self.settings.check_overflow and self._step.found_overflow()
        scale = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self._say_skipped(scale)
            self.zero_grad()
        else:
            self._refresh.run(self.groups, self.policy, self.step_count)
            # The scale that the losses were multiplied by: the next one may be larger.
            norm, factor = self._step.norm_and_clip_factor(scale)
            self._global_grad_norm = norm
            self._step.update(factor, self.step_count)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask
            self.overlap.end_step()
            self.step_count += 1
            self._begin_window()
        self._gather_persistent_parameters()
        self.communication_bytes = self.collectives.reset_counter()

    def _check_used(self) -> None:
        """``ignore_unused_parameters``: whether a parameter without a gradient ends the training."""
        if self.settings.ignore_unused:
            return
        unused = [p.name for p in self.param_states if p.gradient.index not in self.reducer.reached]
        if unused:
            raise RuntimeError(
                f"{', '.join(unused)} got no gradient, and zero_optimization.ignore_unused_parameters is false. Let "
                "every trained parameter take part in the loss, freeze these, or set the key to true, its default."
            )

    def _say_skipped(self, scale: float) -> None:
        scales = f"; loss scale {scale:g}, now {self.loss_scale:g}" if scale != 1.0 else ""
        self._warn(f"a gradient is not finite: this step is skipped{scales}")

    def _warn(self, text: str) -> None:
        if self.collectives.rank == 0:
            logger.warning(f"hmt: {text}")

    def _partition_parameters(self) -> None:
        """At stage 3 only the partitions are left, and no buffer waits for a use that will not come."""
        if self.parameter_offload is not None:
            self.parameter_offload.partition_all_parameters()
            release_buffers(self.module)

    def _gather_persistent_parameters(self) -> None:
        if self.parameter_offload is not None and self.parameter_offload.persistent_parameters:
            persistent = self.parameter_offload.persistent_parameters
            persistent[0].all_gather(persistent)

    # -- what else the engine asks for --------------------------------------------------------------

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """States held by this rank, by parameter."""
        self.settle()
        return {p.gradient.param: state_access.local_state(p) for p in self.param_states}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, reduced or not."""
        self.overlap.take_back("had its gradients dropped between backward and step")
        self.reducer.reset()

    def refresh_fp32_params(self) -> None:
        """Take masters anew from the model's weights."""
        self.settle()
        for param_state in self.param_states:
            param_state.weight.refresh_master()

    _restore_from_bit16_weights = refresh_fp32_params

    def checkpoint_event_prologue(self) -> None:
        """Before saving or loading: updates finished, parameters of stage 3 partitioned."""
        self.offloaded.require("a checkpoint", ["lp_params"])
        self.settle()
        self._partition_parameters()

    def checkpoint_event_epilogue(self) -> None:
        """After saving or loading: persistent parameters of stage 3 whole again."""
        self.order_gathers()
        self._gather_persistent_parameters()

    def empty_partition_cache(self) -> None:
        """Release gathered parameters of stage 3."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def metrics(self) -> dict[str, Any]:
        """Numbers for monitors and the run's summary; see :mod:`hmt_deepspeed.zero.optimizer.statistics`."""
        return statistics.metrics(self)

    def describe(self) -> str:
        """The start table: per group of parameters rule, rank, bytes, masters, shard."""
        return start_table.describe(self)

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
        self.settle()
        self.offloaded.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo :meth:`offload_states`."""
        self.offloaded.reload(non_blocking)

    def get_hp_param_device(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> torch.device | None:
        """Where this rank's master of a trained parameter is, or a state of it."""
        held = self.state_access.get_local_fp32_param(param, optim_state_key)
        return None if held is None else held.device

    def settle(self) -> None:
        """No update is under way, and no copy to the host."""
        self.overlap.settle()
        self.offloaded.settle()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers; see :mod:`hmt_deepspeed.zero.saving.checkpoint`."""
        self.settle()
        return checkpoint_state.optimizer_state(self)

    def load_saved(self, saved: SavedState) -> None:
        """Restore states from a checkpoint of any world size and stage, then open the next window."""
        self.offloaded.require("loading a checkpoint")
        self.settle()
        checkpoint_state.restore_optimizer(self, saved)
        self.reducer.reset()
        self._begin_window()

    def destroy(self) -> None:
        """Undo hooks and patches; the model is an ordinary one again, INT8 weights decoded. Idempotent.

        At stage 3 parameters stay in parts, as DeepSpeed leaves them.
        """
        self._undo.close()
        get_accelerator().empty_cache()


def _order_gathers(parameter_offload: Any, world: int, *_: object) -> None:
    """Gathers to come wait for what was written to the partitions of stage 3 until now.

    ZeRO-3's coordinator gathers on a stream of its own, which waits for nothing. A rank alone has nothing to
    gather, but DeepSpeed makes its host wait for that stream.
    """
    if parameter_offload is None or world == 1:
        return
    stream = parameter_offload._DeepSpeedZeRoOffload__allgather_stream
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())
