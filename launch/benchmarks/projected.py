"""Projected backward of a SwiGLU stack against the ordinary backward of the same linears."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import DTYPES, Setting
from benchmarks.timing import column, interleave, median_of, paired_spread, timed
from hmt_deepspeed.optim.backward.linear import patch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings

INPUT_BYTES_TARGET = 1 / 8


@dataclass(frozen=True)
class Stack:
    width: int
    rank: int
    layers: int
    tokens: int
    rounds: int
    target: float | None

    @property
    def label(self) -> str:
        return f"d={self.width} r={self.rank}"


STACKS = (Stack(1024, 64, 2, 2048, 9, 1.3), Stack(2048, 128, 1, 2048, 7, 1.4))
TOY_STACKS = (Stack(64, 8, 2, 128, 3, 1.3),)
BF16_ROW = Stack(256, 16, 1, 256, 3, None)
EXACT = Stack(64, 8, 2, 96, 1, None)


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = round(width * 8 / 3 / 64) * 64
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Contender:
    """A stack whose input wants a gradient, as inside a model: both sides compute every dX."""

    def __init__(self, stack: Stack, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        layers = [SwiGLU(stack.width) for _ in range(stack.layers)]
        self.net = nn.Sequential(*layers).to(device, dtype)
        self.linears = [m for m in self.net.modules() if isinstance(m, nn.Linear)]
        x = torch.randn(1, stack.tokens, stack.width, device=device, dtype=dtype)
        self.x = x.requires_grad_()

    def forward_backward(self) -> None:
        self.x.grad = None
        self.net(self.x).square().mean().backward()

    def run(self) -> None:
        self.forward_backward()
        for linear in self.linears:
            linear.weight.grad = None


class Projected(Contender):
    """The same stack with every linear patched, width r + k as the optimizer would choose."""

    def __init__(self, stack: Stack, dtype: torch.dtype, device: str) -> None:
        super().__init__(stack, dtype, device)
        self.projected = [ProjectedLinear(str(i)) for i in range(len(self.linears))]
        self.shared = SharedInputs(self.projected)
        for linear, patched in zip(self.linears, self.projected, strict=True):
            settings = matrix_settings(
                complete_options({"method": "lowrank_adamw", "rank": stack.rank})
            )
            assert settings is not None
            shape = (linear.out_features, linear.in_features)
            matrix = LowRankMatrix(
                patched.name, shape, (0, shape[0]), settings, dtype, self.x.device
            )
            matrix.prepare(0)
            patched.projection = matrix.projection
            patch_linear(linear, patched, self.shared)
        self.shared.lay_out()
        self.run()  # one window is observed to learn which linears read the same input
        self.shared.lay_out()

    def run(self) -> None:
        self.shared.lay_out()  # the optimizer does this once a step: it counts
        self.forward_backward()
        for patched in self.projected:
            patched.take()


def projected_backward(setting: Setting) -> CaseResult:
    stacks = TOY_STACKS if setting.toy else STACKS
    result = CaseResult({"stacks": [asdict(stack) for stack in stacks]})
    for stack in stacks:
        _compare(stack, setting, setting.dtype, result)
    if setting.dtype != "bf16" and not setting.toy:
        _compare(BF16_ROW, setting, "bf16", result)
    result.measurements.append(
        Measurement(
            "fp64: largest error of the projected gradient, relative to its largest entry",
            exactness_error(EXACT),
            "error",
            "<=",
            1e-12,
        )
    )
    return result


def _compare(stack: Stack, setting: Setting, dtype: str, result: CaseResult) -> None:
    usual = Contender(stack, DTYPES[dtype], setting.device)
    projected = Projected(stack, DTYPES[dtype], setting.device)
    contenders: dict[str, Callable[[], Any]] = {
        "ordinary": lambda: timed(usual.run),
        "projected": lambda: timed(projected.run),
    }
    samples = interleave(contenders, setting.rounds_or(stack.rounds), warmup=2)
    label = f"{dtype}, {stack.label}, {stack.tokens} tokens, {stack.layers} layers"
    result.samples[label] = samples
    slow, fast = samples["ordinary"], samples["projected"]
    result.measurements.append(
        Measurement(
            f"{label}: ordinary / projected time, forward and backward",
            median_of(slow) / median_of(fast),
            "x",
            ">=" if stack.target else "",
            stack.target,
            paired_spread(column(slow), column(fast)),
            "" if stack.target else "for the record: the time of emulated arithmetic",
        )
    )
    usual_bytes, projected_bytes = linear_input_bytes(usual, projected)
    result.samples[label]["saved_input_bytes"] = [
        {"ordinary": float(usual_bytes), "projected": float(projected_bytes)}
    ]
    result.measurements.append(
        Measurement(
            f"{label}: bytes saved for the linears' inputs, projected / ordinary",
            projected_bytes / usual_bytes,
            "share",
            "<=",
            INPUT_BYTES_TARGET,
        )
    )


# -- saved bytes ------------------------------------------------------------------------------------


@contextmanager
def _input_storages(linears: list[nn.Linear]) -> Iterator[dict[int, Tensor]]:
    """Storages that the linears read in the block, by address; kept alive so none is reused."""
    found: dict[int, Tensor] = {}

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[inputs[0].untyped_storage().data_ptr()] = inputs[0]

    handles = [linear.register_forward_pre_hook(note) for linear in linears]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _saved_storages(contender: Contender) -> tuple[dict[int, int], set[int]]:
    """Bytes of every distinct storage that autograd saves in a forward, weights left out; whose
    storages the linears read."""
    weights = {p.untyped_storage().data_ptr() for p in contender.net.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor.detach()
        return tensor

    with _input_storages(contender.linears) as inputs:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks:
            output = contender.net(contender.x)
        sizes = {address: t.untyped_storage().nbytes() for address, t in saved.items()}
        read = set(inputs)
    del output
    return sizes, read


def linear_input_bytes(usual: Contender, projected: Projected) -> tuple[int, int]:
    """Bytes saved for the linears' inputs by either backward.

    What else a forward saves is the same on both sides, so what the projected one saves in place of
    its inputs is the rest of its total.
    """
    sizes, read = _saved_storages(usual)
    inputs = sum(size for address, size in sizes.items() if address in read)
    others = sum(sizes.values()) - inputs
    projected.shared.lay_out()
    total = sum(_saved_storages(projected)[0].values())
    projected.shared.lay_out()
    return inputs, total - others


# -- exactness --------------------------------------------------------------------------------------


def exactness_error(stack: Stack) -> float:
    """Largest |projected - G B| over all linears in fp64, relative to the largest |G B|."""
    usual = Contender(stack, torch.float64, "cpu")
    projected = Projected(stack, torch.float64, "cpu")
    projected.x = copy.deepcopy(usual.x)
    usual.forward_backward()
    projected.shared.lay_out()
    projected.forward_backward()
    worst = 0.0
    for linear, patched in zip(usual.linears, projected.projected, strict=True):
        assert linear.weight.grad is not None
        assert patched.projection is not None
        product = patched.take()
        assert product is not None
        expected = linear.weight.grad @ patched.projection
        error = (product - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(error))
    return worst
