"""A request to the planner, and the setups that it tries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from hmt_deepspeed.config.codecs import is_lossy
from hmt_deepspeed.config.components import COMPONENTS, Choice, Component
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.problem import Place, RunSetup
from hmt_deepspeed.planner.solve.solve import Allowed, allowed_choices
from hmt_deepspeed.rules import DENSE

# What becomes of activations that hmt.activations has no components for.
_ALL_KEPT: Mapping[Component, Choice] = {
    **dict.fromkeys(COMPONENTS, "keep"),
    "projected_inputs": "project",
}

# What enters layers, of all micro-batches of a step at once in vertical order.
ROUNDED_INPUTS: Mapping[Component, Choice] = {"layer_input": "swap_host_int8"}

_OPEN_STEP = 2**16  # tokens of a step in vertical order whose size is not given

# Which setup is recommended: the fastest exact one, the fastest of all where it is several times as fast, or always.
Recommend = Literal["exact", "worthwhile", "fastest"]

__all__ = [
    "ROUNDED_INPUTS",
    "Recommend",
    "Request",
    "host_modes",
    "host_setups",
    "setups",
    "stock_setups",
]


@dataclass(frozen=True)
class Request:
    """A request to the planner.

    Attributes:
        micro_batch: sequences of a rank's micro-step. global_batch: sequences of an optimizer step over all
            ranks; None for one micro-step, and, where weights come from host memory, also for as many as make 65,536
            tokens.
        modes: optimizers to choose from. lossy_modes: those with states or weights that are rounded
            (:attr:`OptimizerMode.is_lossy`), which are tried beside them.
        cpu_adam: whether states in host memory or on SSD may be recommended.
        zero_stage, offload_param: None to choose.
        lossy, fixed: see :func:`~hmt_deepspeed.planner.solve.solve.allowed_choices`. Beside exact states and weights
            nothing is rounded unless the fastest is asked for.
        recommend: what :attr:`~hmt_deepspeed.planner.advise.advise.Advice.best` is where an exact setup fits too.
        gpu_memory: bytes of a GPU to use, None for all but the context's.
        nvme: whether SSDs may be used.
    """

    shape: ModelShape
    machine: Machine
    seq_length: int
    micro_batch: int = 1
    global_batch: int | None = None
    modes: tuple[OptimizerMode, ...] = (
        OptimizerMode(expert_basis="auto"),
        OptimizerMode(method=DENSE),
    )
    lossy_modes: tuple[OptimizerMode, ...] = ()
    cpu_adam: bool = True
    zero_stage: int | None = None
    offload_param: Place | None = None
    lossy: Mapping[Component, Choice] | None = None
    fixed: Mapping[Component, Choice] | None = None
    recommend: Recommend = "worthwhile"
    gpu_memory: int | None = None
    nvme: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a batch that no accumulation makes."""
        each = self.micro_batch * self.machine.num_gpus
        if self.global_batch is not None and (self.global_batch < each or self.global_batch % each):
            raise ValueError(
                f"global_batch is {self.global_batch}; legal: a multiple of {each}, micro_batch "
                f"{self.micro_batch} x {self.machine.num_gpus} GPUs. Change one of them."
            )

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimizer step."""
        each = self.micro_batch * self.machine.num_gpus
        return 1 if self.global_batch is None else self.global_batch // each

    @property
    def open_accumulation(self) -> int:
        """Micro-steps in vertical order where the batch is not given; 1 where it is."""
        if self.global_batch is not None:
            return 1
        tokens = self.micro_batch * self.seq_length * self.machine.num_gpus
        return max(2, _OPEN_STEP // tokens)

    def beside(self, mode: OptimizerMode) -> Request:
        """What a mode may do to activations."""
        rounds = mode.is_lossy or self.recommend == "fastest"
        return self if rounds else replace(self, lossy=None)

    @property
    def allowed(self) -> Allowed:
        """Choices that the machine and the request leave."""
        machine = self.machine if self.nvme else replace(self.machine, num_ssds=0)
        if isinstance(self.shape, ListedShape) and not self.shape.is_managed:
            return allowed_choices(machine, None, _ALL_KEPT)
        return allowed_choices(machine, self.lossy, self.fixed)

    @property
    def fixes_lossy(self) -> bool:
        """Whether the request itself asks for activations in 8 bits, as the HMT paper's policy does."""
        return any(map(is_lossy, (self.fixed or {}).values()))


def setups(request: Request) -> Iterator[RunSetup]:
    """Setups that HMT's engine runs: stages 0 to 3, and weights offloaded at stage 3."""
    several = request.machine.num_gpus > 1
    for stage in _stages(request, (1, 2, 3) if several else (2, 3)):
        for place in _places(request):
            if place != "none" and stage != 3:
                continue
            if stage == 3 and place == "none" and not several and request.zero_stage is None:
                continue  # on one rank stage 3 shards nothing
            setup = RunSetup(
                ranks=request.machine.num_gpus,
                zero_stage=stage,
                offload_param=place,
                accumulation=request.accumulation,
            )
            yield from _orders(setup, request)


def _orders(setup: RunSetup, request: Request) -> Iterator[RunSetup]:
    """Both orders of accumulation, where weights travel with every micro-step and the engine runs either."""
    yield setup
    travels = setup.zero_stage == 3 and (setup.ranks > 1 or setup.offload_param == "cpu")
    if travels and setup.accumulation > 1 and setup.offload_param != "nvme":
        yield replace(setup, vertical=True)
    elif setup.offload_param == "cpu" and request.open_accumulation > 1:
        yield replace(setup, vertical=True, accumulation=request.open_accumulation)


def _stages(request: Request, usual: tuple[int, ...]) -> tuple[int, ...]:
    if request.zero_stage is None:
        return usual
    if request.offload_param not in (None, "none"):
        RunSetup(
            zero_stage=request.zero_stage, offload_param=request.offload_param
        )  # says what is wrong
    return (request.zero_stage,)


def _places(request: Request) -> tuple[Place, ...]:
    if request.offload_param is not None:
        return (request.offload_param,)
    return ("none", "cpu", "nvme") if _has_ssds(request) else ("none", "cpu")


def _has_ssds(request: Request) -> bool:
    return request.nvme and request.machine.num_ssds > 0


def host_modes(request: Request) -> Iterator[OptimizerMode]:
    """AdamW, and those asked for whose states are in fp32, which the CPU Adam kernel takes.

    Of low-rank matrices masters leave the device, of all others everything: also without masters something does.
    """
    yield OptimizerMode(method=DENSE)
    for mode in (*request.modes, *request.lossy_modes):
        in_fp32 = mode.state_dtype in ("auto", "fp32") and mode.weight_dtype == "auto"
        if in_fp32 and (not mode.rule.is_dense or mode.is_lossy):
            yield mode


def host_setups(request: Request) -> Iterator[RunSetup]:
    """States in host memory or on SSD under HMT's engine, which clips: the update waits for the overflow decision.

    It then runs beside the next forward at stage 3, and by itself below (``hmt.offload.overlap: auto``). Weights
    on SSD beside it the engine refuses.
    """
    places: list[Place] = ["cpu", "nvme"] if _has_ssds(request) else ["cpu"]
    for stage, weights, states in product(_stages(request, (2, 3)), _places(request), places):
        if stage > 0 and (weights == "none" or (weights == "cpu" and stage == 3)):
            setup = RunSetup(
                ranks=request.machine.num_gpus,
                zero_stage=stage,
                offload_param=weights,
                offload_optimizer=states,
                accumulation=request.accumulation,
                overlap="forward" if stage == 3 else "none",
                holds_gradients=True,
            )
            yield from _orders(setup, request)


def stock_setups(request: Request) -> Iterator[RunSetup]:
    """ZeRO-Infinity: states and weights on SSD, DeepSpeed's CPU Adam after the backward."""
    if "nvme" in _places(request) and 3 in _stages(request, (3,)):
        yield RunSetup(
            ranks=request.machine.num_gpus,
            zero_stage=3,
            offload_param="nvme",
            offload_optimizer="nvme",
            accumulation=request.accumulation,
            overlap="none",
            holds_gradients=True,
        )
