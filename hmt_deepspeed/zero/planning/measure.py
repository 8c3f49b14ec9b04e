"""Measures the machine that a run is on, as the planner's :class:`~hmt_deepspeed.planner.hardware.Machine`.

Every rate is that of a real call through the code that training uses: matrix products of the model's own
shapes, copies by ``memory/``'s transfer engine through pinned memory, files by its file I/O, the update by
DeepSpeed's CPU Adam. A measurement repeats its call within its share of a time budget.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from deepspeed import comm
from torch import Tensor, nn

from hmt_deepspeed.activations.codecs import Codec
from hmt_deepspeed.memory.file_io import FileIO
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.planner.hardware import DTYPES, MACHINES, Machine, MatmulRates, Overheads
from hmt_deepspeed.zero.compat import symbol
from hmt_deepspeed.zero.planning.disk_rates import disk_fields
from hmt_deepspeed.zero.planning.timing import rate, rate_of_call

__all__ = [
    "LinkRates",
    "Probe",
    "link_rates",
    "matmul_rate",
    "measure_interconnect",
    "measure_machine",
    "peak_flops_of",
]

Product = tuple[int, int, int]  # tokens, inputs, outputs

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ASSUMED_ADAM_NS = 1.0  # of a desktop's memory, where nothing is updated on the CPU


@dataclass(frozen=True)
class Probe:
    """Inputs of the measurements.

    Attributes:
        products: matrix products whose mean FLOP/s is the machine's: those of a model's linears.
        matmul: their rates, where they are known already; nothing is multiplied then.
        seconds: budget of all measurements together; the first call of each comes on top.
        buffer_bytes: of a copy, of a file.
        adam_parameters: of an update; more than the processor's caches hold. 0 where nothing is updated on
            the CPU: its speed is then assumed.
        codec, activation: an 8-bit codec or None, and (tokens, channels, dtype) of what it encodes.
        file_io, folder: where states and activations would be swapped to; None for no SSD.
        adam: makes an optimizer of a list of tensors; None for DeepSpeed's CPU Adam, which compiles on first use.
    """

    products: Sequence[Product] = ((8192, 8192, 8192),)
    matmul: MatmulRates | None = None
    seconds: float = 3.0
    buffer_bytes: int = 2**26
    adam_parameters: int = 2**24
    file_io: FileIO | None = None
    folder: str | None = None
    adam: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    codec: Codec | None = None
    activation: tuple[int, int, torch.dtype] = (4096, 4096, torch.bfloat16)

    @property
    def num_measurements(self) -> int:
        """Over which the budget is divided: device memory, three ways of copying and what is asked for."""
        found = (
            4 + (3 if self.folder else 0) + (2 if self.codec else 0) + bool(self.adam_parameters)
        )
        return found + (len(DTYPES) if self.matmul is None else 0)

    def __post_init__(self) -> None:
        """Raise ValueError for what nothing can be measured with: field, value, legal range, what to do."""
        for field in ("seconds", "buffer_bytes"):
            if not getattr(self, field) > 0:
                raise ValueError(
                    f"Probe: {field} is {getattr(self, field)!r}; legal: above 0. Raise it."
                )
        if self.adam_parameters < 0:
            raise ValueError(
                f"Probe: adam_parameters is {self.adam_parameters!r}; legal: at least 0. Raise it."
            )
        if not self.products or any(size < 1 for product in self.products for size in product):
            raise ValueError(
                f"Probe: products is {self.products!r}; legal: at least one (tokens, inputs, outputs), all "
                ">= 1. Give those of the model's linears."
            )
        if (self.file_io is None) != (self.folder is None):
            raise ValueError(
                f"Probe: file_io is {self.file_io!r} and folder {self.folder!r}; legal: both, or neither to "
                "measure no SSD. Give the other one."
            )


def measure_machine(
    accelerator: Any, device: torch.device | str, probe: Probe, *, interconnect: float | None = None
) -> Machine:
    """This machine, measured by this process alone: the other ranks should wait meanwhile.

    Args:
        accelerator: DeepSpeed's (``get_accelerator()``). device: cuda or cpu.
        interconnect: bytes/s from :func:`measure_interconnect`; None with one rank, where it means nothing and
            is that of the host link.

    Raises:
        ValueError: the folder has no room for two files.
    """
    device = torch.device(device)
    seconds = probe.seconds / probe.num_measurements
    synchronize = accelerator.synchronize
    gpu_memory = _gpu_memory(accelerator, device)
    matmul = probe.matmul or MatmulRates(
        **{n: matmul_rate(probe.products, n, device, seconds, synchronize) for n in DTYPES}
    )
    memory_rate = _memory_rate(device, probe.buffer_bytes, seconds, synchronize)
    with closing(TransferEngine(device, 4 * probe.buffer_bytes)) as engine:
        link = link_rates(engine, probe.buffer_bytes, seconds, synchronize)
        disk: dict[str, Any] = {}
        if probe.file_io is not None and probe.folder is not None:
            disk = disk_fields(engine, probe.file_io, probe.folder, probe.buffer_bytes, seconds)
    name = _device_name(device)
    return Machine(
        name=name,
        peak_flops=max(peak_flops_of(name), matmul.bf16, matmul.fp16, matmul.fp32),
        matmul=matmul,
        gpu_memory=gpu_memory,
        gpu_bandwidth=memory_rate,
        device_to_host=link.down,
        host_to_device=link.up,
        both_directions=min(link.both, link.down + link.up),
        interconnect=link.down if interconnect is None else interconnect,
        cpu_adam_ns=_adam_ns(probe, seconds) if probe.adam_parameters else _ASSUMED_ADAM_NS,
        host_memory=int(psutil.virtual_memory().available),
        num_gpus=accelerator.device_count(),
        overheads=_codec_overheads(probe, device, memory_rate, seconds, synchronize),
        copies_beside=device.type != "cpu",
        **disk,
    )


def measure_interconnect(
    device: torch.device | str, nbytes: int = 2**26, num_calls: int = 10
) -> float:
    """Bytes/s that a rank sends in an all-gather over all ranks; every rank calls it and gets the slowest's.

    Args:
        device: of the tensors. nbytes: that all ranks gather together. num_calls: of which the median counts.

    Raises:
        ValueError: fewer than two ranks.
    """
    world = comm.get_world_size() if comm.is_initialized() else 1
    if world < 2:
        raise ValueError(
            f"the world size is {world}; legal: 2 or more, there is nothing to send. Leave it out."
        )
    own = torch.zeros(-(-nbytes // world), dtype=torch.uint8, device=device)
    whole = torch.empty(world * own.numel(), dtype=torch.uint8, device=device)

    def gather() -> int:
        comm.all_gather_into_tensor(whole, own)
        whole[:1].cpu()  # waits for the stream, and that for the collective
        return own.numel() * (world - 1)

    gather()
    slowest = torch.tensor([median(rate_of_call(gather) for _ in range(num_calls))], device=device)
    comm.all_reduce(slowest, op=comm.ReduceOp.MIN)
    return float(slowest)


# -- device -------------------------------------------------------------------------------------------


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} of {platform.node()}"


def peak_flops_of(name: str) -> float:
    """Datasheet bf16 FLOP/s of a device that is known by name; 0 of others, whose measured rate is used instead."""
    plain = name.lower().replace(" ", "")
    return max(
        (m.peak_flops for key, m in MACHINES.items() if key.split("-")[0] in plain), default=0.0
    )


def _gpu_memory(accelerator: Any, device: torch.device) -> int:
    """Bytes of the device that this process has or could have, also in the middle of a run."""
    if device.type != "cuda":
        return int(accelerator.available_memory())
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device) + free


def matmul_rate(
    products: Sequence[Product],
    dtype: str,
    device: torch.device,
    seconds: float,
    synchronize: Callable[[], Any],
) -> float:
    """FLOP/s of ``X W^T`` over all products.

    Args:
        products: (tokens, inputs, outputs) of each. dtype: by name, such as "bf16".
        seconds: to spend on calls. synchronize: waits for the device.
    """
    kind = _TORCH_DTYPES[dtype]
    factors = [
        (
            torch.ones(tokens, inputs, dtype=kind, device=device),
            torch.ones(outputs, inputs, dtype=kind, device=device),
        )
        for tokens, inputs, outputs in products
    ]
    flops = sum(2 * tokens * inputs * outputs for tokens, inputs, outputs in products)

    def work() -> int:
        for x, weight in factors:
            torch.mm(x, weight.t())
        return flops

    return rate(work, seconds, synchronize)


def _memory_rate(
    device: torch.device, nbytes: int, seconds: float, synchronize: Callable[[], Any]
) -> float:
    """Bytes/s of the device's memory, read and written by a copy."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def work() -> int:
        target.copy_(source)
        return 2 * nbytes

    return rate(work, seconds, synchronize)


# -- codecs -------------------------------------------------------------------------------------------


def _codec_overheads(
    probe: Probe,
    device: torch.device,
    memory_rate: float,
    seconds: float,
    synchronize: Callable[[], Any],
) -> Overheads:
    """Time of encoding and of decoding over that of moving their bytes through the device's memory."""
    codec = probe.codec
    if codec is None:
        return Overheads()
    tokens, channels, dtype = probe.activation
    tensor = torch.ones(tokens, channels, dtype=dtype, device=device)
    held = codec.encode(tensor, name="profile")
    moved = tensor.nbytes + held.nbytes

    def encode() -> int:
        codec.encode(tensor, 0, 1, "profile")
        return moved

    def decode() -> int:
        held.decode()
        return moved

    factors = [memory_rate / rate(work, seconds, synchronize) for work in (encode, decode)]
    return Overheads(encode=factors[0], decode=factors[1])


# -- link ---------------------------------------------------------------------------------------------


class LinkRates(NamedTuple):
    """Bytes/s: to the host alone, to the device alone, both together."""

    down: float
    up: float
    both: float


def link_rates(
    engine: TransferEngine, nbytes: int, seconds: float, synchronize: Callable[[], Any]
) -> LinkRates:
    """Bytes/s of copies between device and pinned host memory.

    Args:
        nbytes: of one copy. seconds: to spend on each direction. synchronize: waits for the device.
    """
    source = torch.zeros(nbytes, dtype=torch.uint8, device=engine.device)
    held = engine.put(source, "profile, held")
    engine.host_bytes(held)

    def down() -> int:
        transfer = engine.put(source, "profile, down")
        engine.host_bytes(transfer)
        engine.drop(transfer)
        return nbytes

    def up() -> int:
        engine.get(held)
        synchronize()
        return nbytes

    def both() -> int:
        transfer = engine.put(source, "profile, down")
        arrival = engine.fetch(held)
        engine.host_bytes(transfer)
        engine.receive(arrival)
        synchronize()
        engine.drop(transfer)
        return 2 * nbytes

    return LinkRates(*(rate(way, seconds) for way in (down, up, both)))


# -- CPU Adam -----------------------------------------------------------------------------------------


def _adam_ns(probe: Probe, seconds: float) -> float:
    """Nanoseconds per parameter of an optimizer step in host memory."""
    make = probe.adam or symbol("deepspeed.ops.adam", "DeepSpeedCPUAdam")
    parameter = nn.Parameter(torch.zeros(probe.adam_parameters))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make([parameter])

    def step() -> int:
        optimizer.step()
        return probe.adam_parameters

    return 1e9 / rate(step, seconds)
