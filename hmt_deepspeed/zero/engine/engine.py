"""HMTEngine: DeepSpeed's engine with HMT's ZeRO optimizer; stock when the config asks for no HMT."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.utils import groups
from torch import Tensor, nn

from hmt_deepspeed.config import ActivationsConfig, HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.fpdt.install import Installation
from hmt_deepspeed.memory.counters import in_background
from hmt_deepspeed.optim.backward.int8_linear import release
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.activations.chunked import ChunkedActivations
from hmt_deepspeed.zero.activations.fpdt import install_fpdt, prepare_for_fpdt
from hmt_deepspeed.zero.activations.install import Activations
from hmt_deepspeed.zero.engine.inference import (
    IGNORED,
    InferenceEngine,
    check_inference_stage,
    is_for_inference,
)
from hmt_deepspeed.zero.engine.metrics import StepMetrics, busy_resources
from hmt_deepspeed.zero.engine.resolve import (
    Resolved,
    aio_section,
    host_settings,
    loss_scaler,
    parameter_offload,
    zero_settings,
)
from hmt_deepspeed.zero.engine.selection import hmt_options, listed, trained_parameters
from hmt_deepspeed.zero.engine.support import (
    check_activations,
    check_engine,
    check_same_gpus,
    check_stock_dtypes,
    check_supported,
    check_whole,
)
from hmt_deepspeed.zero.engine.tenure import Tenure, hold_weakly, weakly
from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer
from hmt_deepspeed.zero.parameters.build import linears_to_encode
from hmt_deepspeed.zero.planning.facts import RunFacts, refreshing_columns, run_facts
from hmt_deepspeed.zero.planning.found_ranks import RankWatch
from hmt_deepspeed.zero.planning.fpdt_chunk import with_chunk_size
from hmt_deepspeed.zero.planning.memory import counted_bytes
from hmt_deepspeed.zero.planning.planner import RunPlanner
from hmt_deepspeed.zero.saving import checkpoint
from hmt_deepspeed.zero.saving.client_objects import storable
from hmt_deepspeed.zero.saving.durable import AtomicCheckpointEngine
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.saving.snapshot import Snapshots, SnapshotSettings
from hmt_deepspeed.zero.saving.universal import refusal_fields
from hmt_deepspeed.zero.weights.int8_weight import encode_placed, left_out_of_broadcast
from hmt_deepspeed.zero.weights.residency import let_go, resident

__all__ = ["HMTEngine"]


class HMTEngine(InferenceEngine):
    """Drop-in for ``deepspeed.DeepSpeedEngine``; constructed by ``deepspeed.initialize`` once registered.

    Built on parameters of an earlier engine or HMT optimizer it takes them over, see :mod:`hmt_deepspeed.ownership`;
    dropped without :meth:`destroy` it takes itself apart.

    Attributes:
        snapshot_client_state: called when a snapshot is taken, within :meth:`step`; what loading it returns.
    """

    _tenure: Tenure

    def __init__(self, args: Any, model: Any, *positional: Any, **keyword: Any) -> None:
        config: Any = keyword.get("config")
        config_class: Any = keyword.get("config_class")
        block = config.get("hmt") if isinstance(config, dict) else None
        hmt = HMTConfig() if block is None else HMTConfig.from_block(block)
        self._hmt: Resolved | None = None
        self.hmt_fpdt: Installation | None = None
        self.hmt_activations: Activations | ChunkedActivations | None = None
        self.hmt_planner: RunPlanner | None = None
        self.hmt_snapshots: Snapshots | None = None
        self.snapshot_client_state: Callable[[], Mapping[str, Any]] = dict
        self._for_inference = is_for_inference(config, keyword.get("optimizer"))
        if self._for_inference:
            check_inference_stage(config_class.zero_optimization_stage)
            hmt = HMTConfig()
        options = None
        if isinstance(config, dict) and config_class is not None:
            options = hmt_options(config, keyword.get("optimizer"))
        if options is not None:
            offload = hmt.offload.model_dump(exclude_unset=True)
            check_supported(config, config_class, options, offload)
            self._hmt = Resolved.of(hmt, options, config_class)
            if self._hmt.stage == 0:
                # The engine routes only ZeRO stages to a ZeRO optimizer; ours knows that it is 0.
                config_class.zero_config.stage = 1
                config_class.zero_optimization_stage = 1
                config_class.zero_enabled = True
        if isinstance(keyword.get("optimizer"), HMT):
            # the engine's optimizer patches and encodes the linears itself
            keyword["optimizer"].close()
        if hmt.gives("activations"):
            check_activations(config, hmt, options)
        keyword["model_parameters"] = listed(keyword.get("model_parameters"))
        trained = []
        if keyword.get("optimizer") is not None or (config or {}).get("optimizer"):
            given = (keyword["model_parameters"], keyword.get("optimizer"))
            trained = trained_parameters(model, *given)
        stage = config_class.zero_optimization_stage if self._hmt is None else self._hmt.stage
        check_whole(model, stage)
        self._tenure = Tenure(
            self, model, stage, trained, options is None and (block is None or self._for_inference)
        )
        self._tenure.begin()
        release(model)
        home = next((param.device for param in model.parameters()), None)
        try:
            if hmt.gives("fpdt"):
                prepare_for_fpdt(model, self._tenure.undo)
            self._to_encode: list[nn.Linear] = []
            if options is not None and options["weight_dtype"] == "int8":
                dtype = torch.bfloat16 if config_class.bfloat16_config.enabled else None
                linears = linears_to_encode(model, trained, options, dtype)
                self._to_encode = list(linears.values())
            super().__init__(args, model, *positional, **keyword)
            hold_weakly(self)
            self._add_parts(config, hmt)
        except BaseException:
            release(model, home)  # which has room for them, as the device may not have
            self._tenure.undo.close()
            hold_weakly(self)
            raise
        self._tenure.hold(self)

    def _add_parts(self, config: Any, hmt: HMTConfig) -> None:
        """What DeepSpeed's engine does not build."""
        if self.hmt_enabled and hmt.snapshot.path is not None:
            # before activations and the plan share out what is left of host memory
            settings = SnapshotSettings(**hmt.snapshot.model_dump())
            self.hmt_snapshots = Snapshots(weakref.ref(self), settings)
            self._tenure.undo.callback(self.hmt_snapshots.close)
        self._num_open_modules = len(FWD_MODULE_STACK)
        if hmt.gives("activations"):
            self.hmt_activations = self._activations(
                config, hmt.activations, in_chunks=hmt.gives("fpdt")
            )
        if hmt.activations.is_planned:
            self.hmt_planner = self._run_planner(config, hmt)
        if hmt.gives("fpdt"):
            self.hmt_fpdt = self._fpdt(hmt)
            self._tenure.undo.callback(self.hmt_fpdt.remove)
        self.hmt_metrics = StepMetrics(self)
        self._tenure.undo.callback(self.hmt_metrics.close)
        if self.global_rank == 0:
            if self._for_inference:
                print(IGNORED, flush=True)
            if preset := hmt.describe_preset():
                print(preset, flush=True)
            parts = [self.optimizer] if self.hmt_enabled else []
            parts += [self.hmt_activations] if self.hmt_activations is not None else []
            parts += [self.hmt_snapshots] if self.hmt_snapshots is not None else []
            for part in parts:
                print(part.describe(), flush=True)

    def _fpdt(self, hmt: HMTConfig) -> Installation:
        fpdt = hmt.fpdt
        if fpdt.chunk_size == "auto":
            fpdt = with_chunk_size(fpdt, self.run_facts(hmt), self)
        bases = self.optimizer.zero.bases if self.hmt_enabled else None
        held = self.hmt_activations
        holders = (
            (held.holders, held.attention_holders) if isinstance(held, ChunkedActivations) else ()
        )
        return install_fpdt(self.module, fpdt, bases, *holders)

    def _activations(
        self, config: dict[str, Any], settings: ActivationsConfig, in_chunks: bool = False
    ) -> Activations | ChunkedActivations:
        """After the model is placed: Hugging Face may have turned its own checkpointing on before."""
        this = weakref.ref(self)  # the model must not keep its engine alive
        given: dict[str, Any] = {
            "device": self.device,
            "aio": aio_section(self),
            "current_step": lambda: -1 if (engine := this()) is None else int(engine.global_steps),
        }
        found: Activations | ChunkedActivations
        if in_chunks:
            found = ChunkedActivations(self.module, settings, **given)
        else:
            keys = ActivationCheckpointing.from_section(config.get("activation_checkpointing"))
            found = Activations(self.module, settings, keys, mpu=self.mpu, **given)
        self._tenure.undo.callback(found.close)
        return found

    def run_facts(self, hmt: HMTConfig) -> RunFacts:
        """This run in the planner's words; see :func:`run_facts`."""
        resolved = self._hmt
        if resolved is None:
            return run_facts(self, hmt, None, int(self.zero_optimization_stage()), None)
        host = host_settings(self, resolved)
        return run_facts(self, hmt, resolved.options, resolved.stage, host, resolved.cache)

    def _run_planner(self, config: dict[str, Any], hmt: HMTConfig) -> RunPlanner:
        def adopt(settings: ActivationsConfig) -> None:
            assert self.hmt_activations is not None
            self.hmt_activations.close()
            self.hmt_activations = self._activations(config, settings)
            if self.global_rank == 0:
                print(self.hmt_activations.describe(), flush=True)

        facts = self.run_facts(hmt)
        given: dict[str, Any] = {}
        if self.hmt_enabled:
            layer = facts.shape.names.layer
            given["refreshing_columns"] = lambda: refreshing_columns(self.optimizer.zero, layer)
        if facts.rank_is_chosen:
            given["found_ranks"] = RankWatch(self.optimizer.zero, facts.shape.names.layer).news
        return RunPlanner(
            facts,
            hmt,
            get_accelerator(),
            self.device,
            adopt,
            lambda: self.hmt_activations,
            self._counted_bytes,
            lambda: busy_resources(self),
            **given,
        )

    def _counted_bytes(self) -> dict[tuple[str, str], float]:
        """Bytes on this rank by (memory, kind), as the planner names them; none of stock optimizers'."""
        if not self.hmt_enabled:
            return {}
        snapshots = self.hmt_snapshots
        return counted_bytes(self.optimizer, None if snapshots is None else snapshots.host_bytes)

    def destroy(self) -> None:
        """As in DeepSpeed; the model is an ordinary one again, with the weights of the last step. Idempotent.

        At stage 3 parameters stay in parts, as DeepSpeed leaves them.
        """
        self._tenure.end("was destroyed")
        try:
            self._tenure.undo.close()
        finally:
            super().destroy()

    def __del__(self) -> None:
        """Dropped: :meth:`destroy`. Unless updates are under way that ranks finish together; then that comes first.

        Garbage may be collected anywhere, so nothing here communicates, and no worker thread waits for itself.
        """
        if sys is None or sys.is_finalizing() or "_tenure" not in vars(self):
            return  # the process ends; or the engine was refused before anything was built
        overlap = getattr(vars(self).get("optimizer"), "overlap", None)
        if overlap is not None and overlap.finishes_later:
            overlap.before_next_use(self.destroy)
            self._tenure.hold(self, dropped=True)
        elif in_background():
            threading.Thread(target=super().__del__).start()
        else:
            super().__del__()

    @property
    def ranks_per_sequence(self) -> int:
        """Consecutive ranks that have to be given the same rows (``hmt.fpdt.sequence_parallel_size``)."""
        return 1 if self.hmt_fpdt is None else self.hmt_fpdt.sequence.size

    @property
    def hmt_enabled(self) -> bool:
        """Whether this engine runs HMT's optimizer."""
        return self._hmt is not None

    # -- what DeepSpeed puts on the model, which must not keep the engine alive, and goes with it ---------

    def _create_module_forward_pre_hook(self) -> Any:
        prologue = weakly(self._forward_prologue)
        hook = self.module.register_forward_pre_hook(
            lambda _, inputs, kwargs: prologue(inputs, kwargs), with_kwargs=True
        )
        return self._removed_with_me(hook)

    def _create_module_forward_post_hook(self) -> Any:
        epilogue = weakly(self._forward_epilogue)
        return self._removed_with_me(self.module.register_forward_hook(lambda *_: epilogue()))

    def _removed_with_me(self, hook: Any) -> Any:
        self._tenure.undo.callback(hook.remove)
        return hook

    # -- placing the model ------------------------------------------------------------------------

    def _configure_distributed_model(self, model: Any) -> None:
        linears, self._to_encode = self._to_encode, []
        if linears:
            if self.mpu is not None:
                groups.mpu = self.mpu  # as DeepSpeed will, before it asks for groups
            encode_placed(
                linears,
                torch.bfloat16 if self.bfloat16_enabled() else None,
                None if self.dont_change_device else self.device,
                self._broadcast_values,
            )
        super()._configure_distributed_model(model)

    def _broadcast_values(self, value: Tensor) -> None:
        """As :meth:`_broadcast_model` does with each parameter."""
        if self.dist_backend is not None:
            group = groups._get_sequence_data_parallel_group()
            comm.broadcast(value.view(torch.uint8), groups._get_broadcast_src_rank(), group=group)

    def _broadcast_model(self) -> None:
        with left_out_of_broadcast(self.module):
            super()._broadcast_model()

    # -- optimizer --------------------------------------------------------------------------------

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        if not self.hmt_enabled:
            check_stock_dtypes(self)
            return super()._do_optimizer_sanity_check(basic_optimizer)
        # Stock would send stage 1 with bf16 weights and fp32 accumulation to BF16_Optimizer.
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        resolved = self._hmt
        if resolved is None:
            stock = super()._configure_zero_optimizer(optimizer)
            if isinstance(stock, DeepSpeedZeRoOffload):  # for inference; its hooks gather, and stay
                self._tenure.undo.callback(let_go, stock)
            return stock
        check_engine(self)
        check_same_gpus(self.device)
        found = HMTZeroOptimizer(
            optimizer,
            resolved.options,
            self.module,
            self.param_names,
            self.seq_data_parallel_group,
            zero_settings(self, resolved),
            loss_scaler(self),
            parameter_offload(self) if resolved.stage == 3 else None,
            uneven_leaves=not resolved.in_chunks,
        )
        self._tenure.undo.callback(found.destroy)
        return found

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """False with HMT, which takes DeepSpeed's CPU Adam kernel itself."""
        return not self.hmt_enabled and bool(super().zero_force_ds_cpu_optimizer())

    # -- training loop ----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed; a run that plans its activations looks at its batches here.

        Raises:
            RuntimeError: another owner has taken the parameters over, and this would be for training.
        """
        trains = self.module.training and torch.is_grad_enabled()
        if trains:
            self._tenure.check("a forward for training")
        if self.hmt_enabled:
            self.optimizer.offloaded.require("forward()", ["lp_params"])
        if self.hmt_planner is None or not trains:
            return super().forward(*inputs, **kwargs)
        self.hmt_planner.begin_forward(inputs, kwargs)
        output = super().forward(*inputs, **kwargs)
        self.hmt_planner.end_forward()
        return output

    def _refine_include_states(self, include: Any) -> Any:
        """All that is asked for: ``offload_optimizer``, by which DeepSpeed takes some away, keeps low-rank states
        on the device."""
        return include if self.hmt_enabled else super()._refine_include_states(include)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed.

        Raises:
            RuntimeError: another owner has taken the parameters over.
        """
        self._tenure.check("backward()")
        return super().backward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Drop everything accumulated since the last step, reduced or not."""
        super().zero_grad()
        self._tenure.has_gradients = False
        if self.hmt_enabled:
            self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing; stages 0 and 1, as in DeepSpeed."""
        with super().no_sync():
            if not self.hmt_enabled:
                yield
                return
            self.optimizer._coalesce_grad_reduction = True
            try:
                yield
            finally:
                self.optimizer._coalesce_grad_reduction = False

    # The end of DeepSpeed's coalesce_grad_reduction, which reads the buckets of its own stages.

    def _flush_coalesced_reduction_zero12(self, optimizer: Any) -> None:
        if self.hmt_enabled:
            self._reduce_own()
        else:
            super()._flush_coalesced_reduction_zero12(optimizer)

    def _flush_coalesced_reduction_zero3(self, optimizer: Any) -> None:
        if self.hmt_enabled:
            self._reduce_own()
        else:
            super()._flush_coalesced_reduction_zero3(optimizer)

    def _reduce_own(self) -> None:
        self.hmt_metrics.phases.start("reduce")
        self.optimizer.reducer.flush_own()
        self.hmt_metrics.phases.stop("reduce")

    # -- what a step does, measured -----------------------------------------------------------------

    def _is_for_inputs(self) -> bool:
        """Whether the backward that runs now is an ``autograd.grad`` that accumulates nothing."""
        return self.hmt_enabled and not self.optimizer.is_asked_for_gradients()

    def _backward_prologue_per_tensor(self, grad: Tensor | None) -> Tensor | None:
        if self._is_for_inputs():
            return grad  # DeepSpeed would take it for one of several micro-batches
        scaled: Tensor | None = super()._backward_prologue_per_tensor(grad)
        return scaled

    def _backward_prologue(self) -> None:
        if self._is_for_inputs():
            return  # no end of a micro-batch follows
        if self.hmt_enabled:
            self.optimizer.offloaded.require("backward()", ["lp_params", "lp_grads"])
        self.hmt_metrics.phases.start("backward")
        super()._backward_prologue()
        self._tenure.has_gradients = True

    def _backward_epilogue(self) -> None:
        self._tenure.has_gradients = True  # of losses computed past the engine's forward, too
        super()._backward_epilogue()
        self.hmt_metrics.end_phase("backward")

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """As in DeepSpeed; the part of the reduction that backward did not hide."""
        self.hmt_metrics.phases.start("reduce")
        super().allreduce_gradients(*args, **kwargs)
        self.hmt_metrics.phases.stop("reduce")

    def step(self, lr_kwargs: Any = None) -> None:
        """As in DeepSpeed; after an optimizer step a snapshot may begin, and the monitors get the metrics.

        Raises:
            RuntimeError: an earlier snapshot could not be written, or another owner has taken the parameters over.
        """
        self._tenure.check("step()")
        before = self.global_steps
        if self.hmt_planner is not None:
            self.hmt_planner.begin_step()
        self.hmt_metrics.phases.start("optimizer")
        super().step(lr_kwargs)
        # Stage 3 notes here which forwards have begun. One that computes again until backward has what it needs
        # is broken off there, and would stay.
        del FWD_MODULE_STACK[self._num_open_modules :]
        self.hmt_metrics.end_phase("optimizer")
        has_stepped = self.global_steps > before
        self._tenure.has_gradients &= not has_stepped
        if self.hmt_planner is not None:
            self.hmt_planner.end_step(has_stepped)
        if self.hmt_snapshots is not None:
            self.hmt_snapshots.after_step()
        if has_stepped:
            self.hmt_metrics.end_step()

    # -- checkpoints ------------------------------------------------------------------------------

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if self.hmt_enabled:
            self.checkpoint_engine: Any = AtomicCheckpointEngine(self._config)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in DeepSpeed; every file whole or absent, and the tag committed by its manifest.

        Raises:
            RuntimeError: another owner has taken the parameters over, whose states these would not be.
        """
        self._tenure.check("save_checkpoint()")
        client_state = {} if client_state is None else client_state
        if not self.hmt_enabled:
            return super().save_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
        checkpoint.check_folder("save_dir", save_dir)
        client_state = {key: storable(value) for key, value in client_state.items()}
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._exclude_frozen = exclude_frozen_parameters
        checkpoint.prepare(self, save_dir, tag)
        super().save_checkpoint(
            save_dir, checkpoint.saving_tag(tag), client_state, False, exclude_frozen_parameters
        )
        saved = checkpoint.commit(self, save_dir, tag, save_latest)
        self.hmt_metrics.checkpoint_bytes = saved
        return True

    def _copy_recovery_script(self, save_path: str) -> None:
        if not self.hmt_enabled:
            super()._copy_recovery_script(save_path)
            return
        with self.checkpoint_engine.remembering(save_path):
            super()._copy_recovery_script(save_path)

    def _common_checkpoint_state(
        self, module_state_dict: Any, zero_optimizer_state: Any, save_frozen_param: bool
    ) -> dict[str, Any]:
        if not self.hmt_enabled:
            found: dict[str, Any] = super()._common_checkpoint_state(
                module_state_dict, zero_optimizer_state, save_frozen_param
            )
            return found
        # Stock leaves frozen weights out at stages 0 and 1, and zero_to_fp32.py then loses them.
        state = checkpoint.common_state(self, module_state_dict, not self._exclude_frozen)
        return state | refusal_fields(int(self.zero_optimization_stage()))

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        if not self.hmt_enabled:
            return list(super()._get_all_ckpt_names(checkpoints_path, tag))
        # whatever world size and stage have written it; one is enough, for only the weights differ
        return SavedState.model_paths(os.path.join(checkpoints_path, tag))[:1]

    def _get_param_fragment_func(self, param: Any) -> Any:
        if not self.hmt_enabled or not hasattr(param, "ds_tensor"):
            return super()._get_param_fragment_func(param)
        # Stock would save the one element that a frozen weight on an SSD leaves in memory.
        with resident(param) as part:
            return part.to("cpu", copy=True)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As in DeepSpeed, from any world size and ZeRO stage, verified against the manifest.

        Raises:
            RuntimeError: another owner has taken the parameters over.
        """
        self._tenure.check("load_checkpoint()")
        if not self.hmt_enabled:
            return super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is not supported with HMT: weights are loaded from the fp32 masters, "
                "shard by shard. Load them into the model before deepspeed.initialize."
            )
        checkpoint.check_folder("load_dir", load_dir)
        return checkpoint.load(
            self,
            load_dir,
            tag,
            optimizer_states=load_optimizer_states and not load_module_only,
            lr_scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
            strict=load_module_strict,
        )
