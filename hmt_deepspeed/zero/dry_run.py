"""Describes an engine without building it: no process group, no GPU, no weights.

The model and everything of its parameters are fake tensors, which have shapes, dtypes and bytes and no
memory. The checks are the engine's own, in its order, and the tables are those of the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.fpdt.install import install
from hmt_deepspeed.memory.alternate import Piece
from hmt_deepspeed.optim.backward.int8_linear import quantize
from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.zero.activations.fpdt import check_ranks
from hmt_deepspeed.zero.activations.install import Activations
from hmt_deepspeed.zero.bases.cache import check_cache
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.engine.engine import HMTEngine
from hmt_deepspeed.zero.engine.inference import IGNORED, check_inference_stage, is_for_inference
from hmt_deepspeed.zero.engine.resolve import Resolved, zero_settings
from hmt_deepspeed.zero.engine.selection import hmt_options
from hmt_deepspeed.zero.engine.support import (
    check_activations,
    check_engine,
    check_supported,
)
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.optimizer import start_table, statistics
from hmt_deepspeed.zero.parameters.build import (
    build_param_states,
    build_schedule,
    weights_to_encode,
)
from hmt_deepspeed.zero.registration import registered
from hmt_deepspeed.zero.settings import HostSettings
from hmt_deepspeed.zero.sharding.parallel_experts import ParallelExperts

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True)
class DryRun:
    """Description of a run that was not started.

    Attributes:
        is_hmt: HMT's optimizer, not DeepSpeed's own. infers: there is none, beside a block. stage: of ZeRO.
        dtype: of the weights.
        batches: sequences of a step over all ranks, of a rank's micro-batch, and micro-batches of a step.
        clip: ``gradient_clipping``, 0 for none.
        tables: of the start, as a run prints them. notes: what it does besides. warnings: what it warns of.
        held: bytes of trainable weights, states and masters on each rank, by place: device, host and, where
            something is there, ssd. Empty without HMT's optimizer.
    """

    is_hmt: bool
    infers: bool
    stage: int
    dtype: torch.dtype
    batches: tuple[int, int, int]
    clip: float
    tables: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    held: dict[str, int]


def dry_run(
    config: dict[str, Any], build: Callable[[torch.dtype], nn.Module], ranks: int
) -> DryRun:
    """Check a DeepSpeed JSON as a run would, for a model and a number of ranks.

    Args:
        config: without "auto" outside the block. build: the model in a dtype, on the meta device.

    Raises:
        ValueError, AssertionError: what a run would be refused with.
    """
    block = config.get("hmt")
    hmt = HMTConfig() if block is None else HMTConfig.from_block(block)
    parsed = _Config(config, ranks)
    options = hmt_options(config, None)
    notes: list[str] = []
    infers = is_for_inference(config, None)
    if infers:
        check_inference_stage(parsed.zero_optimization_stage)
        hmt = HMTConfig()
        notes.append(IGNORED)
    resolved = None
    if options is not None:
        check_supported(config, parsed, options, hmt.offload.model_dump(exclude_unset=True))
        resolved = Resolved.of(hmt, options, parsed)
    if hmt.gives("activations"):
        check_activations(config, hmt, options)
    with registered(), warnings.catch_warnings(), FakeTensorMode():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        engine = _Engine(parsed, resolved, build, ranks)
        engine._do_sanity_check()
        check_engine(engine)
        told = list[str]()
        tables = [preset] if (preset := hmt.describe_preset()) else []
        held: dict[str, int] = {}
        if resolved is not None:
            planned = _zero_state(engine, resolved, ranks)
            tables.append(start_table.describe(planned))
            told += [text] if (text := start_table.warning(planned)) else []
            held = _held_bytes(engine, planned)
        if hmt.gives("activations"):
            tables.append(_activations(config, hmt, engine.module))
        if hmt.gives("fpdt"):
            notes.append(_fpdt(hmt, engine.module, ranks))
    return DryRun(
        options is not None,
        infers,
        int(parsed.zero_optimization_stage),
        engine.get_data_types()[0],
        (
            parsed.train_batch_size,
            parsed.train_micro_batch_size_per_gpu,
            parsed.gradient_accumulation_steps,
        ),
        float(parsed.gradient_clipping),
        tuple(tables),
        tuple(notes),
        tuple(told),
        held,
    )


class _Config(DeepSpeedConfig):
    """Read for a number of ranks that are not there."""

    def __init__(self, config: dict[str, Any], ranks: int) -> None:
        self._ranks = ranks
        super().__init__(config)

    def _initialize_params(self, param_dict: dict[str, Any]) -> None:
        self.world_size = self._ranks
        super()._initialize_params(param_dict)


class _Engine(HMTEngine):
    """Answers what its config says; nothing is built, moved or compiled."""

    def __init__(
        self,
        parsed: DeepSpeedConfig,
        resolved: Resolved | None,
        build: Callable[[torch.dtype], nn.Module],
        ranks: int,
    ) -> None:
        nn.Module.__init__(self)
        self._config, self._hmt = parsed, resolved
        self.client_optimizer = self.client_lr_scheduler = None
        self.pipeline_parallelism = self.has_moe_layers = False
        self.mp_world_size = self.sequence_parallel_size = 1
        self.seq_dp_world_size, self.gradient_average = ranks, True
        with unset_fake_temporarily():
            model = build(self.get_data_types()[0])
        self.module = _fake(model)
        self.param_names = {param: name for name, param in self.module.named_parameters()}

    def destroy(self) -> None:
        """Also asked for when it goes: there is nothing to undo."""


def _fake(model: nn.Module) -> nn.Module:
    """Parameters and buffers as fake tensors in host memory, in place; what is shared stays so."""
    made: dict[Tensor, Any] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in made:
                empty = torch.empty(param.shape, dtype=param.dtype)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            module._parameters[name] = None if param is None else made[param]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


class _Files:
    """Counts what would be in files on an SSD."""

    def __init__(self) -> None:
        self._pieces: set[Piece] = set()

    def lease(self, piece: Piece, writes: bool = True) -> AbstractContextManager[Tensor]:
        self._pieces.add(piece)
        return nullcontext(torch.empty(piece.nbytes, dtype=torch.uint8))

    def describe(self) -> list[str]:
        """As :meth:`hmt_deepspeed.zero.offload.ssd.Ssd.describe`."""
        held = format_bytes(sum(piece.nbytes for piece in self._pieces))
        return [f"{held} of states in files", "twice that from the first step on"]


class _Host(HostWorker):
    """Counts what would be in host memory; its pools and its thread are never made."""

    def __init__(self, settings: HostSettings) -> None:
        self._pinned, self.nbytes = settings.pinned, 0
        self.ssd: Any = None if settings.ssd is None else _Files()

    def commit(self) -> None:
        """There is nothing to wait for."""

    def drain(self) -> None:
        """Nor here."""

    def zeros(self, numel: int, owner: str, dtype: torch.dtype = torch.float32) -> Tensor:
        self.nbytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype)


def _zero_state(engine: Any, resolved: Resolved, ranks: int) -> Any:
    """The part of a :class:`ZeroState` that :func:`start_table.describe` reads."""
    settings, model, options = zero_settings(engine, resolved), engine.module, resolved.options
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = HMT(trainable, **(engine._config.optimizer_params or {})).param_groups
    if settings.stage == 3:
        for param in model.parameters():
            _partition(param, ranks)
    host = None if settings.host is None else _Host(settings.host)
    collectives: Any = SimpleNamespace(world=ranks, rank=0, all_reduce=lambda tensor: None)
    placed = [
        (engine.param_names[p], p, group, collectives) for group in groups for p in group["params"]
    ]
    named = [(name, param) for name, param, *_ in placed]
    for module, name in weights_to_encode(model, named, options, None):
        quantize(module, name)
    param_states = build_param_states(placed, options, settings, model, ParallelExperts(), host)
    low_rank = [param_state for param_state in param_states if param_state.matrix is not None]
    build_schedule(low_rank, options, settings.accumulate_dtype)
    groups_of_one = [
        [param_state.matrix] for param_state in low_rank if param_state.matrix is not None
    ]
    if settings.cache is not None:
        check_cache(settings.cache, low_rank)
    bases = BasisStorage(collectives, settings.stage)
    bases.store(low_rank)
    return SimpleNamespace(
        param_states=param_states,
        param_groups=groups,
        options=options,
        settings=settings,
        collectives=collectives,
        host=host,
        bases=bases,
        low_rank=low_rank,
        all_basis_groups=[SimpleNamespace(policy=build_policy(groups_of_one, options))],
    )


def _partition(param: Any, ranks: int) -> None:
    """Add stage 3's attributes to a parameter, for rank 0. Where ``offload_param`` puts it changes no size."""
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_tensor = torch.empty(-(-param.numel() // ranks), dtype=param.dtype)
    param.ds_tensor.final_location = None


def _held_bytes(engine: Any, planned: Any) -> dict[str, int]:
    """Bytes by place; parameters under ``offload_param`` count whole there, also those that would persist."""
    held = {"device": 0, "host": 0 if planned.host is None else planned.host.nbytes}
    offload = engine.zero_offload_param()
    place = "device"
    if offload is not None and offload.device != OffloadDeviceEnum.none:
        place = "ssd" if offload.device == OffloadDeviceEnum.nvme else "host"
        held.setdefault(place, 0)
    for param_state in planned.param_states:
        held[place] += param_state.weight.weight_bytes()
        if not isinstance(param_state.weight, HostWeight):
            held["device"] += param_state.weight.master_bytes()
        if param_state.host is None:
            held["device"] += statistics.state_bytes(param_state)
    return held


def _activations(config: dict[str, Any], hmt: HMTConfig, model: nn.Module) -> str:
    backend = Activations(
        model,
        hmt.activations,
        ActivationCheckpointing.from_section(config.get("activation_checkpointing")),
        device=torch.device("cpu"),
        mpu=None,
        aio=None,
        current_step=lambda: -1,
    )
    try:
        return backend.describe()
    finally:
        backend.close()


def _fpdt(hmt: HMTConfig, model: nn.Module, ranks: int) -> str:
    settings = hmt.fpdt
    check_ranks(settings.sequence_parallel_size, ranks)
    size = settings.chunk_size
    # Any size shows whether the model can run in chunks; "auto" depends on what the device has left then.
    install(
        model, chunk_size=1 if size == "auto" else size, offload_kv=settings.offload_kv
    ).remove()
    place = "host memory" if settings.offload_kv else "device memory"
    chunks = "as many tokens as fit, chosen at start" if size == "auto" else f"{size:,} tokens"
    return (
        f"fpdt: decoder layers run in chunks of {chunks}, keys and values wait in "
        f"{place}; {settings.sequence_parallel_size} ranks share each sequence"
    )
