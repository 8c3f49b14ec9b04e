"""HMTEngine: DeepSpeed's engine with HMT's ZeRO optimizer; stock when the config asks for no HMT."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils.timer import NoopTimer

from hmt_deepspeed.config import ActivationsConfig, HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.optim.hmt import HMT, MARK
from hmt_deepspeed.optim.int8_linear import release
from hmt_deepspeed.zero import checkpoint
from hmt_deepspeed.zero.activations import Activations
from hmt_deepspeed.zero.chunked_activations import ChunkedActivations
from hmt_deepspeed.zero.entries import CacheSettings, HostSettings, ZeroSettings
from hmt_deepspeed.zero.fpdt import install_fpdt, prepare_for_fpdt
from hmt_deepspeed.zero.fpdt_chunk import with_chunk_size
from hmt_deepspeed.zero.gradients import ReductionScale
from hmt_deepspeed.zero.metrics import StepMetrics
from hmt_deepspeed.zero.optimizer import HMTZeroOptimizer
from hmt_deepspeed.zero.plan_inputs import RunFacts, counted_bytes, run_facts
from hmt_deepspeed.zero.planning import RunPlanner
from hmt_deepspeed.zero.residency import prepare_for_ssd, resident
from hmt_deepspeed.zero.snapshot import Snapshots, SnapshotSettings
from hmt_deepspeed.zero.ssd import SsdSettings
from hmt_deepspeed.zero.support import (
    check_activations,
    check_engine,
    check_snapshot,
    check_supported,
    resolved_overlap,
)
from hmt_deepspeed.zero.swap import host_memory_share

__all__ = ["HMTEngine", "cache_settings", "hmt_options", "refusing"]

OPTIMIZER_NAME = "HMT"


def hmt_options(config: dict[str, Any], client_optimizer: Any) -> dict[str, Any] | None:
    """Validated fields of ``hmt.optimizer``, or None when neither the JSON nor the client asks for HMT.

    A block that holds only ``activations`` goes with any optimizer.

    Raises:
        ValueError: another block beside another optimizer, the HMT optimizer without a block, fields
            given both in the block and to a client's HMT object, or an HMT object that was replaced.
    """
    _check_not_replaced(client_optimizer)
    block = config.get("hmt")
    named = (config.get("optimizer") or {}).get("type")
    client_is_hmt = isinstance(client_optimizer, HMT)
    if block is None:
        if client_is_hmt:
            return dict(client_optimizer.options)
        if named == OPTIMIZER_NAME and client_optimizer is None:
            raise ValueError(
                'optimizer.type is "HMT", but the config has no "hmt" block. Add "hmt": {} for the '
                "defaults."
            )
        return None
    hmt = HMTConfig.from_block(block)
    fields = hmt.optimizer
    if client_is_hmt:
        if fields.model_fields_set:
            raise ValueError(
                f"hmt.optimizer gives {sorted(fields.model_fields_set)}, and the HMT object passed to "
                "initialize has options of its own. Give them in one place: empty the block, or let "
                'the JSON build the optimizer with "optimizer": {"type": "HMT"}.'
            )
        return dict(client_optimizer.options)
    if client_optimizer is not None or named != OPTIMIZER_NAME:
        ours = [name for name in ("optimizer", "basis_cache", "snapshot") if hmt.gives(name)]
        if hmt.gives("activations") and not ours and not hmt.fpdt.enabled:
            return None
        other = type(client_optimizer).__name__ if client_optimizer is not None else named
        raise ValueError(
            f'the config has an "hmt" block, but the optimizer is {other!r}. '
            f'Legal is "optimizer": {{"type": "HMT", ...}} or an HMT object. '
            'Change the optimizer, remove the "hmt" block, or leave only "activations" in it.'
        )
    return fields.model_dump()


def _check_not_replaced(client_optimizer: Any) -> None:
    """Accelerate builds ``DeepSpeedCPUAdam`` of an optimizer's groups where the JSON offloads states."""
    groups = getattr(client_optimizer, "param_groups", ())
    if type(client_optimizer).__name__ == "DeepSpeedCPUAdam" and any(MARK in g for g in groups):
        raise ValueError(
            "zero_force_ds_cpu_optimizer is true, its default, so the HMT object was replaced by "
            "DeepSpeedCPUAdam, because the config has offload_optimizer. Legal with an HMT object is "
            '"zero_force_ds_cpu_optimizer": false; HMT takes DeepSpeed\'s CPU Adam kernel itself. Add '
            'the key, or let the JSON build the optimizer with "optimizer": {"type": "HMT"}.'
        )


class HMTEngine(DeepSpeedEngine):
    """Drop-in for ``deepspeed.DeepSpeedEngine``; constructed by ``deepspeed.initialize`` once registered.

    Attributes:
        snapshot_client_state: called when a snapshot is taken, within :meth:`step`; what loading it returns.
    """

    def __init__(self, args: Any, model: Any, *positional: Any, **keyword: Any) -> None:
        config: Any = keyword.get("config")
        config_class: Any = keyword.get("config_class")
        block = config.get("hmt") if isinstance(config, dict) else None
        hmt = HMTConfig() if block is None else HMTConfig.from_block(block)
        self._hmt_options: dict[str, Any] | None = None
        self.hmt_activations: Activations | ChunkedActivations | None = None
        self.hmt_planner: RunPlanner | None = None
        self.hmt_snapshots: Snapshots | None = None
        self.snapshot_client_state: Callable[[], Mapping[str, Any]] = dict
        if isinstance(config, dict) and config_class is not None:
            self._hmt_options = hmt_options(config, keyword.get("optimizer"))
        if self._hmt_options is not None:
            offload = hmt.offload.model_dump(exclude_unset=True)
            check_supported(config, config_class, self._hmt_options, offload)
            check_snapshot(hmt.snapshot, config_class)
            self._hmt_cache = cache_settings(hmt)
            self._hmt_overlap = resolved_overlap(config_class, offload)
            self._hmt_schedule = hmt.offload.schedule
            self._hmt_stage = int(config_class.zero_optimization_stage)
            if self._hmt_stage == 0:
                # The engine routes only ZeRO stages to a ZeRO optimizer; ours knows that it is 0.
                config_class.zero_config.stage = 1
                config_class.zero_optimization_stage = 1
                config_class.zero_enabled = True
        if isinstance(keyword.get("optimizer"), HMT):
            keyword[
                "optimizer"
            ].close()  # the engine's optimizer patches and encodes the linears itself
        release(model)
        if hmt.gives("activations"):
            check_activations(config, hmt, self._hmt_options)
        prepare_for_fpdt(model, hmt.fpdt)
        super().__init__(args, model, *positional, **keyword)
        if hmt.gives("activations"):
            self.hmt_activations = self._activations(
                config, hmt.activations, in_chunks=hmt.fpdt.enabled
            )
        if hmt.activations.is_planned:
            self.hmt_planner = self._run_planner(config, hmt)
        fpdt = hmt.fpdt
        if fpdt.enabled and fpdt.chunk_size == "auto":
            fpdt = with_chunk_size(fpdt, self._run_facts(hmt), self)
        holders = getattr(self.hmt_activations, "holders", None)
        self.hmt_fpdt = install_fpdt(self.module, fpdt, self.optimizer, holders)
        self.hmt_metrics = StepMetrics(self)
        if self._hmt_options is not None and hmt.snapshot.path is not None:
            this = weakref.ref(self)
            settings = SnapshotSettings(**hmt.snapshot.model_dump())
            self.hmt_snapshots = Snapshots(this, settings)
        if self.global_rank == 0:
            parts = [self.optimizer] if self._hmt_options is not None else []
            parts += [self.hmt_activations] if self.hmt_activations is not None else []
            for part in parts:
                print(part.describe(), flush=True)

    def _activations(
        self, config: dict[str, Any], settings: ActivationsConfig, in_chunks: bool = False
    ) -> Activations | ChunkedActivations:
        """After the model is placed: Hugging Face may have turned its own checkpointing on before."""
        this = weakref.ref(self)  # the model must not keep its engine alive
        given: dict[str, Any] = {
            "device": self.device,
            "aio": self._aio_section(),
            "current_step": lambda: -1 if (engine := this()) is None else int(engine.global_steps),
        }
        if in_chunks:
            return ChunkedActivations(self.module, settings, **given)
        keys = ActivationCheckpointing.from_section(config.get("activation_checkpointing"))
        return Activations(self.module, settings, keys, mpu=self.mpu, **given)

    def _run_facts(self, hmt: HMTConfig) -> RunFacts:
        ours = self._hmt_options is not None
        stage = self._hmt_stage if ours else int(self.zero_optimization_stage())
        overlap: Any = self._hmt_overlap if ours and self._host_settings() is not None else "none"
        return run_facts(self, hmt, self._hmt_options, stage, overlap)

    def _run_planner(self, config: dict[str, Any], hmt: HMTConfig) -> RunPlanner:
        def adopt(settings: ActivationsConfig) -> None:
            assert self.hmt_activations is not None
            self.hmt_activations.close()
            self.hmt_activations = self._activations(config, settings)
            if self.global_rank == 0:
                print(self.hmt_activations.describe(), flush=True)

        return RunPlanner(
            self._run_facts(hmt),
            hmt,
            get_accelerator(),
            self.device,
            adopt,
            lambda: self.hmt_activations,
            lambda: {} if self._hmt_options is None else counted_bytes(self.optimizer),
        )

    def destroy(self) -> None:
        """As in DeepSpeed; the model is an ordinary one again."""
        self.hmt_metrics.close()
        if self.hmt_snapshots is not None:
            self.hmt_snapshots.close()
        if self.hmt_activations is not None:
            self.hmt_activations.close()
        if self.hmt_fpdt is not None:
            self.hmt_fpdt.remove()
        super().destroy()

    @property
    def ranks_per_sequence(self) -> int:
        """Consecutive ranks that have to be given the same rows (``hmt.fpdt.sequence_parallel_size``)."""
        return 1 if self.hmt_fpdt is None else self.hmt_fpdt.sequence.size

    @property
    def hmt_enabled(self) -> bool:
        """Whether this engine runs HMT's optimizer."""
        return self._hmt_options is not None

    # -- optimizer --------------------------------------------------------------------------------

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        if self._hmt_options is None:
            return super()._do_optimizer_sanity_check(basic_optimizer)
        # Stock would send stage 1 with bf16 weights and fp32 accumulation to BF16_Optimizer.
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        if self._hmt_options is None:
            return super()._configure_zero_optimizer(optimizer)
        check_engine(self)
        return HMTZeroOptimizer(
            optimizer,
            self._hmt_options,
            self.module,
            self.param_names,
            self.seq_data_parallel_group,
            self._zero_settings(),
            self._loss_scaler(),
            self._parameter_offload() if self._hmt_stage == 3 else None,
        )

    def _zero_settings(self) -> ZeroSettings:
        model_dtype, accumulate_dtype = self.get_data_types()
        overflow = self.fp16_enabled() or (
            self.bfloat16_enabled() and self._config.bfloat16_config.check_grad_overflow
        )
        return ZeroSettings(
            stage=self._hmt_stage,
            model_dtype=model_dtype,
            accumulate_dtype=accumulate_dtype,
            comm_dtype=self.communication_data_type,
            clip=float(self.gradient_clipping()),
            micro_batches=self.gradient_accumulation_steps(),
            check_overflow=bool(overflow),
            overlap=bool(self.zero_overlap_comm()),
            reduce_elements=int(self.zero_reduce_bucket_size()),
            gather_elements=int(self.zero_allgather_bucket_size()),
            scale=self._reduction_scale(),
            host=self._host_settings(),
            cache=self._hmt_cache,
        )

    def _host_settings(self) -> HostSettings | None:
        config = self.zero_offload_optimizer()
        if config is None or config.device == OffloadDeviceEnum.none:
            return None
        pinned, overlap = bool(config.pin_memory), self._hmt_overlap
        if config.device == OffloadDeviceEnum.cpu:
            return HostSettings(pinned, overlap)
        pipelined = self._hmt_schedule == "optimised"
        return HostSettings(
            pinned,
            overlap,
            SsdSettings(
                path=str(config.nvme_path),
                num_buffers=config.buffer_count,
                read_ahead=pipelined and _unless_off(config, "pipeline_read"),
                write_behind=pipelined and _unless_off(config, "pipeline_write"),
                aio=self._aio_section(),
            ),
        )

    def _aio_section(self) -> dict[str, Any] | None:
        """DeepSpeed's ``aio`` where the JSON has it, with its defaults."""
        return self._config.aio_config if "aio" in self.config else None

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """False with HMT, which takes DeepSpeed's CPU Adam kernel itself."""
        return self._hmt_options is None and bool(super().zero_force_ds_cpu_optimizer())

    def _reduction_scale(self) -> ReductionScale:
        """Mean over ranks, divided where ``prescale_gradients`` and its factor say."""
        if self.seq_dp_world_size == 1:
            return ReductionScale(1.0, 1.0)  # nothing is reduced, so nothing is divided
        world = self.seq_dp_world_size if self.gradient_average else 1
        if not self.postscale_gradients():
            return ReductionScale(1.0 / world, 1.0)
        before = float(self.gradient_predivide_factor())
        return ReductionScale(1.0 / before, before / world)

    def _loss_scaler(self) -> Any:
        return CreateLossScaler(
            dtype=self.get_data_types()[0],
            static_loss_scale=self.loss_scale(),
            dynamic_scaling=self.dynamic_loss_scale(),
            dynamic_loss_args=self.dynamic_loss_scale_args(),
        )

    def _parameter_offload(self) -> Any:
        """DeepSpeed's own coordinator gathers and partitions the parameters of stage 3."""
        config, zero = self.zero_offload_param(), self._config.zero_config
        on_nvme = config is not None and config.device == OffloadDeviceEnum.nvme
        reuse_distance = self.zero_max_reuse_distance()
        if on_nvme and "max_reuse_distance" not in zero.model_fields_set:
            reuse_distance = 0  # what waits for reuse keeps its swap buffer, and there are five
        offload = DeepSpeedZeRoOffload(
            self.module,
            timers=self.timers if self.wall_clock_breakdown() else NoopTimer(),
            ds_config=self.config,
            overlap_comm=self.zero_overlap_comm(),
            prefetch_bucket_size=self.zero_prefetch_bucket_size(),
            max_reuse_distance=reuse_distance,
            max_live_parameters=self.zero_max_live_parameters(),
            param_persistence_threshold=self.zero_param_persistence_threshold(),
            model_persistence_threshold=self.zero_model_persistence_threshold(),
            dp_process_group=self.seq_data_parallel_group,
            offload_param_config=config,
            mpu=self.mpu,
            zero_module_granularity_threshold=self.zero_module_granularity_threshold(),
            log_trace_cache_warnings=self.zero_log_trace_cache_warnings(),
        )
        if on_nvme:
            prepare_for_ssd(offload, config.max_in_cpu, config.pin_memory)
        return offload

    # -- training loop ----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DeepSpeed; a run that plans its activations looks at its batches here."""
        if self.hmt_planner is None or not (self.module.training and torch.is_grad_enabled()):
            return super().forward(*inputs, **kwargs)
        self.hmt_planner.begin_forward(inputs, kwargs)
        output = super().forward(*inputs, **kwargs)
        self.hmt_planner.end_forward()
        return output

    def zero_grad(self) -> None:
        """Drop everything accumulated since the last step, reduced or not."""
        super().zero_grad()
        if self._hmt_options is not None:
            self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing; stages 0 and 1, as in DeepSpeed."""
        with super().no_sync():
            if self._hmt_options is None:
                yield
                return
            self.optimizer.reduction_enabled = False
            try:
                yield
            finally:
                self.optimizer.reduction_enabled = True

    # -- what a step does, measured -----------------------------------------------------------------

    def _backward_prologue(self) -> None:
        self.hmt_metrics.phases.start("backward")
        super()._backward_prologue()

    def _backward_epilogue(self) -> None:
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
            RuntimeError: an earlier snapshot could not be written.
        """
        before = self.global_steps
        if self.hmt_planner is not None:
            self.hmt_planner.begin_step()
        self.hmt_metrics.phases.start("optimizer")
        super().step(lr_kwargs)
        self.hmt_metrics.end_phase("optimizer")
        has_stepped = self.global_steps > before
        if self.hmt_planner is not None:
            self.hmt_planner.end_step(has_stepped)
        if self.hmt_snapshots is not None:
            self.hmt_snapshots.after_step()
        if has_stepped:
            self.hmt_metrics.end_step()

    # -- checkpoints ------------------------------------------------------------------------------

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if self._hmt_options is not None:
            self.checkpoint_engine: Any = checkpoint.atomic_engine(
                self.checkpoint_engine, self._config
            )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in DeepSpeed; every file whole or absent, and the tag committed by its manifest."""
        client_state = {} if client_state is None else client_state
        if self._hmt_options is None:
            return super().save_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
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
        if self._hmt_options is None:
            super()._copy_recovery_script(save_path)
            return
        with self.checkpoint_engine.remembering(save_path):
            super()._copy_recovery_script(save_path)

    def _common_checkpoint_state(
        self, module_state_dict: Any, zero_optimizer_state: Any, save_frozen_param: bool
    ) -> dict[str, Any]:
        if self._hmt_options is not None:
            # Stock leaves them out at stages 0 and 1, and zero_to_fp32.py then loses them.
            save_frozen_param = not self._exclude_frozen
        state: dict[str, Any] = super()._common_checkpoint_state(
            module_state_dict, zero_optimizer_state, save_frozen_param
        )
        return state

    def _get_param_fragment_func(self, param: Any) -> Any:
        if self._hmt_options is None or not hasattr(param, "ds_tensor"):
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
        """As in DeepSpeed, from any world size and ZeRO stage, verified against the manifest."""
        if self._hmt_options is None:
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
        return checkpoint.load(
            self,
            load_dir,
            tag,
            optimizer_states=load_optimizer_states and not load_module_only,
            lr_scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
            strict=load_module_strict,
        )


def _unless_off(config: Any, key: str) -> bool:
    """A key of ``offload_optimizer`` that is true where the JSON does not say otherwise."""
    return key not in config.model_fields_set or bool(getattr(config, key))


def cache_settings(hmt: HMTConfig) -> CacheSettings | None:
    """What ``hmt.basis_cache`` asks for, None without the section."""
    if not hmt.gives("basis_cache"):
        return None
    values = hmt.basis_cache.model_dump()
    if values["max_bytes"] == "auto":
        values["max_bytes"] = host_memory_share()
    return CacheSettings(**values)


def refusing(engine_class: type[DeepSpeedEngine], remedy: str) -> type[DeepSpeedEngine]:
    """A subclass of one of DeepSpeed's other engines that refuses configs which ask for HMT."""

    class RefusingEngine(engine_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            config = kwargs.get("config")
            if isinstance(config, dict) and (
                config.get("hmt") is not None or hmt_options(config, kwargs.get("optimizer"))
            ):
                raise ValueError(
                    f'the "hmt" block does not work with {engine_class.__name__}. {remedy}'
                )
            super().__init__(*args, **kwargs)

    RefusingEngine.__name__ = RefusingEngine.__qualname__ = engine_class.__name__
    return RefusingEngine
