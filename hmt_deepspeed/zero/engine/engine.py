"""HMTEngine: DeepSpeed's engine with HMT's ZeRO optimizer; stock when the config asks for no HMT."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.utils import groups
from torch import Tensor, nn

from hmt_deepspeed.config import ActivationsConfig, HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.fpdt.installation import Installation
from hmt_deepspeed.memory.counters import in_background
from hmt_deepspeed.memory.streams import Streams, streams_of
from hmt_deepspeed.optim.backward.int8_linear import release
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.activations.chunked import ChunkedActivations
from hmt_deepspeed.zero.activations.fpdt import install_fpdt, prepare_for_fpdt
from hmt_deepspeed.zero.activations.install import Activations
from hmt_deepspeed.zero.engine.accumulation import VerticalOrder, what_vertical_saves
from hmt_deepspeed.zero.engine.inference import (
    IGNORED,
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
    check_moe_layers,
    check_stock_dtypes,
    check_supported,
    check_vertical,
    check_whole,
)
from hmt_deepspeed.zero.engine.tenure import Tenure, hold_weakly, weakly
from hmt_deepspeed.zero.engine.training import TrainingEngine
from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer
from hmt_deepspeed.zero.parameters.build import weights_to_encode
from hmt_deepspeed.zero.planning.facts import RunFacts, refreshing_columns, run_facts
from hmt_deepspeed.zero.planning.found_ranks import RankWatch
from hmt_deepspeed.zero.planning.fpdt_chunk import with_chunk_size
from hmt_deepspeed.zero.planning.memory import counted_bytes
from hmt_deepspeed.zero.planning.planner import RunPlanner
from hmt_deepspeed.zero.saving.snapshot import Snapshots, SnapshotSettings
from hmt_deepspeed.zero.weights.int8_weight import encode_placed, left_out_of_broadcast
from hmt_deepspeed.zero.weights.residency import detach_coordinator

__all__ = ["HMTEngine"]


class HMTEngine(TrainingEngine):
    """Drop-in for ``deepspeed.DeepSpeedEngine``; constructed by ``deepspeed.initialize`` once registered.

    Built on parameters of an earlier engine or HMT optimizer it takes them over, see :mod:`hmt_deepspeed.ownership`;
    dropped without :meth:`destroy` it takes itself apart.

    Attributes:
        snapshot_client_state: called when a snapshot is taken, within :meth:`step`; loading it returns the result.
    """

    def __init__(self, args: Any, model: Any, *positional: Any, **keyword: Any) -> None:
        config: Any = keyword.get("config")
        parsed: Any = keyword.get("config_class")
        self.hmt_fpdt: Installation | None = None
        self.hmt_activations: Activations | ChunkedActivations | None = None
        self.hmt_planner = None
        self.hmt_snapshots = None
        self.hmt_vertical = None
        self.snapshot_client_state: Callable[[], Mapping[str, Any]] = dict
        hmt = self._read(config, parsed, keyword.get("optimizer"))
        if isinstance(keyword.get("optimizer"), HMT):
            # the engine's optimizer patches and encodes the linears itself
            keyword["optimizer"].close()
        if self._hmt is not None:
            check_moe_layers(model, hmt, self._hmt.options, self._hmt.stage)
        if hmt.gives("activations"):
            check_activations(config, hmt, None if self._hmt is None else self._hmt.options)
        keyword["model_parameters"] = listed(keyword.get("model_parameters"))
        trained = []
        if keyword.get("optimizer") is not None or (config or {}).get("optimizer"):
            given = (keyword["model_parameters"], keyword.get("optimizer"))
            trained = trained_parameters(model, *given)
        self._begin_tenure(model, parsed, trained, _block(config) is None)
        home = next((param.device for param in model.parameters()), None)
        try:
            if hmt.gives("fpdt"):
                prepare_for_fpdt(model, self._tenure.undo)
            self._to_encode = self._weights_to_encode(model, parsed, trained)
            super().__init__(args, model, *positional, **keyword)
            hold_weakly(self)
            self._add_parts(config, hmt)
        except BaseException:
            release(model, home)  # which has room for them, as the device may not have
            self._tenure.undo.close()
            hold_weakly(self)
            raise
        self._tenure.hold(self)

    # -- before DeepSpeed's engine is built ---------------------------------------------------------

    def _read(self, config: Any, parsed: Any, client_optimizer: Any) -> HMTConfig:
        """The block; refuses what cannot be honoured, before anything is built.

        Args:
            config: the DeepSpeed JSON. parsed: its ``DeepSpeedConfig``.
        """
        block = _block(config)
        hmt = HMTConfig() if block is None else HMTConfig.from_block(block)
        self._for_inference = is_for_inference(config, client_optimizer)
        if self._for_inference:
            check_inference_stage(parsed.zero_optimization_stage)
            hmt = HMTConfig()
        options = None
        if isinstance(config, dict) and parsed is not None:
            options = hmt_options(config, client_optimizer)
        if options is not None:
            check_supported(config, parsed, options, hmt.offload.model_dump(exclude_unset=True))
            self._hmt = Resolved.of(hmt, options, parsed)
            if self._hmt.stage == 0:
                # The engine routes only ZeRO stages to a ZeRO optimizer; ours knows that it is 0.
                parsed.zero_config.stage = 1
                parsed.zero_optimization_stage = 1
                parsed.zero_enabled = True
        return hmt

    def _begin_tenure(
        self, model: Any, parsed: Any, trained: list[tuple[str, nn.Parameter]], is_stock: bool
    ) -> None:
        """Take the model over from earlier owners, its INT8 weights decoded."""
        stage = parsed.zero_optimization_stage if self._hmt is None else self._hmt.stage
        check_whole(model, stage)
        is_plain = self._hmt is None and (is_stock or self._for_inference)
        self._tenure = Tenure(self, model, stage, trained, is_plain)
        self._tenure.begin()
        release(model)

    def _weights_to_encode(
        self, model: Any, parsed: Any, trained: list[tuple[str, nn.Parameter]]
    ) -> list[tuple[nn.Module, str]]:
        """Modules and the names of their weights that become INT8 as the model is placed."""
        if self._hmt is None or self._hmt.options["weight_dtype"] != "int8":
            return []
        dtype = torch.bfloat16 if parsed.bfloat16_config.enabled else None
        return weights_to_encode(model, trained, self._hmt.options, dtype)

    # -- what DeepSpeed's engine does not build -----------------------------------------------------

    def _add_parts(self, config: Any, hmt: HMTConfig) -> None:
        """Snapshots, activations, the plan, FPDT and metrics; the first rank prints what they are."""
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
        if hmt.accumulation == "vertical":
            check_vertical(self)
            self.hmt_vertical = VerticalOrder(
                self.module,
                self.optimizer.parameter_offload,
                self._weight_streams(),
                self.hmt_fpdt is not None,
                self.optimizer.zero.bases.gathered_once,
            )
            self._tenure.undo.callback(self.hmt_vertical.close)
        self.hmt_metrics = StepMetrics(self)
        self._tenure.undo.callback(self.hmt_metrics.close)
        if self.global_rank == 0:
            self._print_start(hmt)

    def _weights_are_away(self) -> bool:
        """Whether weights wait in host memory or on an SSD."""
        offload = self.zero_offload_param()
        return offload is not None and offload.device != OffloadDeviceEnum.none

    def _weight_streams(self) -> Streams | None:
        """For copies of weights that this rank alone holds, in host memory."""
        alone = comm.get_world_size() == 1
        return streams_of(self.device) if alone and self._weights_are_away() else None

    def _print_start(self, hmt: HMTConfig) -> None:
        """The tables of the start."""
        if self._for_inference:
            print(IGNORED, flush=True)
        if preset := hmt.describe_preset():
            print(preset, flush=True)
        parts: list[Any] = [self.optimizer] if self.hmt_enabled else []
        parts += [self.hmt_activations] if self.hmt_activations is not None else []
        parts += [self.hmt_snapshots] if self.hmt_snapshots is not None else []
        parts += [self.hmt_vertical] if self.hmt_vertical is not None else []
        for part in parts:
            print(part.describe(), flush=True)
        if self.hmt_enabled and self.hmt_vertical is None and self.zero_optimization_stage() == 3:
            travels = self._weights_are_away() or comm.get_world_size() > 1
            if line := what_vertical_saves(int(self.gradient_accumulation_steps()), travels):
                print(line, flush=True)

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
        """This run as the planner describes it; see :func:`run_facts`."""
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
            given["refreshing_columns"] = lambda: refreshing_columns(
                self.optimizer.zero, facts.shape
            )
        if facts.is_chosen:
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
        """Number of consecutive ranks that must get the same rows (``hmt.fpdt.sequence_parallel_size``)."""
        return 1 if self.hmt_fpdt is None else self.hmt_fpdt.sequence.size

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
        weights, self._to_encode = self._to_encode, []
        if weights:
            if self.mpu is not None:
                groups.mpu = self.mpu  # as DeepSpeed will, before it asks for groups
            encode_placed(
                weights,
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
                self._tenure.undo.callback(detach_coordinator, stock)
            return stock
        check_engine(self)
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


def _block(config: Any) -> Any:
    """The ``"hmt"`` block of a DeepSpeed JSON, None where there is none."""
    return config.get("hmt") if isinstance(config, dict) else None
