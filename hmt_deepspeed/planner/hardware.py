"""A machine as numbers: rates, links and capacities, given by name, by JSON or by measurement.

Bytes, seconds and FLOPs throughout; GB/s in comments are 10^9 bytes. Measuring lives in ``zero/planning/measure.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

__all__ = [
    "DTYPES",
    "MACHINES",
    "Machine",
    "MatmulRates",
    "Overheads",
    "machine_from_json",
    "named_machine",
]

DTYPES = ("bf16", "fp16", "fp32")
GB = 10**9
GIB = 2**30
TERA = 10**12


def _illegal(field: str, value: object, legal: str) -> ValueError:
    return ValueError(f"machine: {field} is {value!r}; legal: {legal}. Correct the field.")


def _check_positive(field: str, value: object, unit: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and isfinite(value) and value > 0):  # type: ignore[arg-type, operator]
        raise _illegal(field, value, f"a finite number above 0 ({unit})")


def _check_whole(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _illegal(field, value, f"an integer >= {least}")


@dataclass(frozen=True)
class MatmulRates:
    """FLOP/s that large matrix products reach, by dtype of the factors."""

    bf16: float
    fp16: float
    fp32: float

    def __post_init__(self) -> None:
        """Raise ValueError for a rate that is not above 0."""
        for field in fields(self):
            _check_positive(f"matmul.{field.name}", getattr(self, field.name), "FLOP/s")


@dataclass(frozen=True)
class Overheads:
    """Factors by which work on the device takes longer than products and memory traffic at their rates.

    1 where nothing was measured. A profiled run measures them with its own model (`calibrate.py`,
    ``zero/planning/measure.py``): launches, small products, reductions in fp32, whatever the rates do not know.

    Attributes:
        forward, backward: of the model itself, whatever is chosen for its activations.
        update: of the optimizer's pass on the device.
        attention: of the attention op when it is run again, over products of as many FLOPs.
        encode, decode: of an 8-bit codec, over the bytes that it reads and writes.
    """

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0
    attention: float = 1.0
    encode: float = 1.0
    decode: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for a factor that is not above 0."""
        for factor in fields(self):
            _check_positive(f"overheads.{factor.name}", getattr(self, factor.name), "a factor")


@dataclass(frozen=True)
class Machine:
    """One node.

    Attributes:
        name: of the machine or of what was measured.
        peak_flops: datasheet bf16 FLOP/s of one GPU, dense: what MFU and HFU refer to.
        matmul: FLOP/s that products reach on one GPU.
        gpu_memory: bytes of one GPU that a process can use.
        gpu_bandwidth: bytes/s of its own memory, reads and writes together.
        device_to_host, host_to_device: bytes/s of one GPU's link through pinned memory, one way alone.
        both_directions: bytes/s of both ways together when both are busy.
        gpus_per_link: GPUs that share one such link to the host.
        interconnect: bytes/s that one GPU sends in a collective among the node's GPUs.
        num_gpus: GPUs of the node; they share host memory, CPU and SSDs.
        cpu_adam_ns: CPU Adam's nanoseconds per parameter, all cores of the node together.
        host_memory: bytes that training may use.
        num_ssds, ssd_capacity: SSDs striped over, and bytes of one; 0 SSDs for none.
        ssd_read, ssd_write: bytes/s of one SSD, one way alone. ssd_mixed: of both together when both are busy.
        ssd_array_limit: bytes/s that all of them together never exceed; None where nothing limits but their sum.
        ssd_endurance: bytes that one SSD may be written; None if not known.
        price_per_hour: of the node, in any currency; None if not known.
        overheads: of the model that the machine was measured with.
        copies_beside: whether the device computes while its link is busy; not where the device is the
            processor itself.
    """

    name: str
    peak_flops: float
    matmul: MatmulRates
    gpu_memory: int
    gpu_bandwidth: float
    device_to_host: float
    host_to_device: float
    both_directions: float
    interconnect: float
    cpu_adam_ns: float
    host_memory: int
    num_gpus: int = 1
    gpus_per_link: int = 1
    num_ssds: int = 0
    ssd_capacity: int = 0
    ssd_read: float = 0.0
    ssd_write: float = 0.0
    ssd_mixed: float = 0.0
    ssd_array_limit: float | None = None
    ssd_endurance: float | None = None
    price_per_hour: float | None = None
    overheads: Overheads = Overheads()
    copies_beside: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for what no machine can be: field, value, legal range, what to do."""
        for field, unit in _POSITIVE.items():
            _check_positive(field, getattr(self, field), unit)
        for field, least in (("num_gpus", 1), ("gpus_per_link", 1), ("num_ssds", 0)):
            _check_whole(field, getattr(self, field), least)
        if self.num_ssds:
            for field, unit in _OF_SSDS.items():
                _check_positive(field, getattr(self, field), unit)
        for field in ("ssd_array_limit", "ssd_endurance", "price_per_hour"):
            if getattr(self, field) is not None:
                _check_positive(field, getattr(self, field), "or null")
        self._check_limits()

    def _check_limits(self) -> None:
        if self.gpus_per_link > self.num_gpus:
            raise _illegal("gpus_per_link", self.gpus_per_link, f"1..{self.num_gpus}, num_gpus")
        one_way = self.device_to_host + self.host_to_device
        if self.both_directions > one_way * (1 + 1e-9):
            legal = f"at most {one_way:g}, the sum of device_to_host and host_to_device"
            raise _illegal("both_directions", self.both_directions, legal)
        if self.num_ssds and self.ssd_mixed > (self.ssd_read + self.ssd_write) * (1 + 1e-9):
            total = self.ssd_read + self.ssd_write
            legal = f"at most {total:g}, the sum of ssd_read and ssd_write"
            raise _illegal("ssd_mixed", self.ssd_mixed, legal)

    # -- of all SSDs together -------------------------------------------------------------------

    def _array(self, each: float) -> float:
        together = each * self.num_ssds
        return together if self.ssd_array_limit is None else min(together, self.ssd_array_limit)

    @property
    def total_ssd_read(self) -> float:
        """bytes/s of all SSDs, reading alone."""
        return self._array(self.ssd_read)

    @property
    def total_ssd_write(self) -> float:
        """bytes/s of all SSDs, writing alone."""
        return self._array(self.ssd_write)

    @property
    def total_ssd_mixed(self) -> float:
        """bytes/s of all SSDs, reads and writes together."""
        return self._array(self.ssd_mixed)

    @property
    def ssd_memory(self) -> int:
        """Bytes of all SSDs."""
        return self.num_ssds * self.ssd_capacity

    def to_json(self) -> str:
        """All fields as a JSON object; :func:`machine_from_json` reads it."""
        return json.dumps(asdict(self), indent=2)


_POSITIVE = {
    "peak_flops": "FLOP/s",
    "gpu_memory": "bytes",
    "gpu_bandwidth": "bytes/s",
    "device_to_host": "bytes/s",
    "host_to_device": "bytes/s",
    "both_directions": "bytes/s",
    "interconnect": "bytes/s",
    "cpu_adam_ns": "nanoseconds",
    "host_memory": "bytes",
}
_OF_SSDS = {
    "ssd_capacity": "bytes",
    "ssd_read": "bytes/s",
    "ssd_write": "bytes/s",
    "ssd_mixed": "bytes/s",
}


def machine_from_json(text: str) -> Machine:
    """The machine that :meth:`Machine.to_json` wrote.

    Raises:
        ValueError: no JSON object, a key that is missing or unknown, or an illegal value.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the machine is no JSON: {error}. Give the profile.json of a run whose hmt.activations.policy is plan."
        ) from error
    given = dict(_checked_keys(found, Machine, "the machine"))
    rates = _checked_keys(given["matmul"], MatmulRates, "the machine's matmul")
    factors = _checked_keys(given.get("overheads", {}), Overheads, "the machine's overheads")
    return Machine(**{**given, "matmul": MatmulRates(**rates), "overheads": Overheads(**factors)})


def _checked_keys(found: Any, kind: Callable[..., Any], what: str) -> Mapping[str, Any]:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {found!r}; legal: a JSON object with {sorted(known)}.")
    required = {name for name, field in known.items() if field.default is MISSING}
    missing, unknown = sorted(required - set(found)), sorted(set(found) - set(known))
    if missing or unknown:
        raise ValueError(
            f"{what} lacks {missing} and has unknown {unknown}; legal keys: {sorted(known)}. Add the "
            "missing and remove the unknown ones."
        )
    return found


# A data-centre SSD on PCIe 4.0 x4, TLC, 3.84 TB, of the class that a server like LoHan's holds twelve of: 6.5
# GB/s sequential read, 3.4 GB/s write, one drive write per day for five years are typical datasheet figures.
# Mixed: reads and writes take turns, 2 / (1/6.5 + 1/3.4).
_SSD = {
    "num_ssds": 1,
    "ssd_capacity": 3840 * GB,
    "ssd_read": 6.5 * GB,
    "ssd_write": 3.4 * GB,
    "ssd_mixed": 4.46 * GB,
    "ssd_endurance": 3840.0 * GB * 365 * 5,
}

# PCIe 4.0 x16: 31.5 GB/s each way by its signalling rate, of which about 25 arrive through pinned memory
# (nvbandwidth reports 24.8 on an A100); LoHan's 4090 server has 21 (213 GB of activations in 10 s). Both ways
# at once: 1.6 times one way is assumed; servers differ widely.
_PCIE4 = {"device_to_host": 25.0 * GB, "host_to_device": 25.0 * GB, "both_directions": 40.0 * GB}
# PCIe 5.0 x16: twice the signalling rate; 55 GB/s each way is usual of an H100.
_PCIE5 = {"device_to_host": 55.0 * GB, "host_to_device": 55.0 * GB, "both_directions": 88.0 * GB}

# DeepSpeed's CPU Adam is limited by DRAM: 28 bytes per parameter (fp32 moments and master in and out, gradient
# in, weight out). About 0.26 ns is what ZeRO-Offload (2101.06840) reports of a two-socket server, some 110 GB/s;
# a desktop has two channels of DRAM, about a quarter of that: 1 ns assumed.
_SERVER_ADAM, _DESKTOP_ADAM = 0.26, 1.0


def _consumer(name: str, peak: float, fp32: float, memory_gib: int, bandwidth: float) -> Machine:
    """A consumer card in a PCIe 4.0 slot without peer-to-peer: collectives go through the host."""
    # LoHan reaches 155.8 of the 4090's 165.2 TFLOPS over whole steps: 95 % of peak is assumed of products.
    reached = 0.95 * peak
    return Machine(
        name,
        peak_flops=peak * TERA,
        matmul=MatmulRates(reached * TERA, reached * TERA, 0.85 * fp32 * TERA),
        gpu_memory=memory_gib * GIB,
        gpu_bandwidth=0.9 * bandwidth * GB,
        interconnect=12.0 * GB,  # half of the link: down to the host and up again
        cpu_adam_ns=_DESKTOP_ADAM,
        host_memory=128 * GIB,
        **_PCIE4,  # type: ignore[arg-type]
        **_SSD,  # type: ignore[arg-type]
    )


def _data_centre(
    name: str,
    peak: float,
    reached: float,
    fp32: float,
    memory: int,
    bandwidth: float,
    link: Mapping[str, float],
    nvlink: float,
) -> Machine:
    """A card on an NVLink board: ``nvlink`` GB/s each way by datasheet, 80 % of it in collectives."""
    return Machine(
        name,
        peak_flops=peak * TERA,
        matmul=MatmulRates(reached * TERA, reached * TERA, fp32 * TERA),
        gpu_memory=memory,
        gpu_bandwidth=0.9 * bandwidth * GB,
        interconnect=0.8 * nvlink * GB,
        cpu_adam_ns=_SERVER_ADAM,
        host_memory=512 * GIB,
        **link,  # type: ignore[arg-type]
        **_SSD,  # type: ignore[arg-type]
    )


# NVIDIA's datasheets and whitepapers (GA102, Ada; A100, H100 SXM, H200 SXM): peaks are dense, 16-bit factors
# with fp32 sums; fp32 is that of the CUDA cores. Assumed, none of it measured here, so that a profile is better:
# large products reach 85 % of an A100's peak and 72 % of Hopper's, which power limits; 90 % of the memory's
# bandwidth arrives. Memory is what `nvidia-smi` reports in total, rounded down to GiB.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _consumer("rtx4090", 165.2, 82.6, 24, 1008.0),
        _consumer("rtx3090", 71.0, 35.6, 24, 936.0),
        _consumer("rtx4080", 97.5, 48.7, 16, 717.0),
        _data_centre("a100-80g", 312.0, 265.0, 17.0, 80 * GIB, 2039.0, _PCIE4, 300.0),
        _data_centre("h100", 989.4, 710.0, 50.0, 80 * GIB, 3350.0, _PCIE5, 450.0),
        _data_centre("h200", 989.4, 710.0, 50.0, 140 * GIB, 4800.0, _PCIE5, 450.0),
    )
}


def named_machine(
    name: str,
    *,
    num_gpus: int = 1,
    host_memory: int | None = None,
    num_ssds: int | None = None,
    price_per_hour: float | None = None,
) -> Machine:
    """A machine of :data:`MACHINES` with its RAM, SSDs, GPUs and price as given.

    Args:
        host_memory: bytes, None for the usual. num_ssds: None for one.

    Raises:
        ValueError: an unknown name, with the legal ones, or an impossible value.
    """
    if name not in MACHINES:
        raise ValueError(
            f"machine is {name!r}; legal: {', '.join(MACHINES)}, or the profile.json of a run. Choose "
            "one of them."
        )
    machine = MACHINES[name]
    return replace(
        machine,
        num_gpus=num_gpus,
        host_memory=machine.host_memory if host_memory is None else host_memory,
        num_ssds=machine.num_ssds if num_ssds is None else num_ssds,
        price_per_hour=price_per_hour,
    )
