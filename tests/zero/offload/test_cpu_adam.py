"""DeepSpeed's CPU Adam kernel as a function: exact, and the same however it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from torch import Tensor

HYPER = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def stepped(numel: int, steps: int, size: int, lr: float) -> dict[str, Any]:
    """Steps in pieces of ``size``; beside them torch's AdamW in fp64 and DeepSpeed's own optimizer."""
    import cpuinfo
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from hmt_deepspeed.zero.offload.cpu_adam import CpuAdam

    cpuinfo.get_cpu_info = dict
    hyper = {**HYPER, "lr": lr}
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator)
    gradients = [torch.randn(numel, generator=generator) for _ in range(steps)]
    ours, moments, adam = start.clone(), torch.zeros(2, numel), CpuAdam()
    exact = torch.nn.Parameter(start.double())
    stock = torch.nn.Parameter(start.clone())
    others = [torch.optim.AdamW([exact], **hyper), DeepSpeedCPUAdam([stock], **hyper)]
    for number, gradient in enumerate(gradients, 1):
        for piece in range(0, numel, size):
            part = slice(piece, piece + size)
            states = (ours[part], gradient[part], moments[0, part], moments[1, part])
            adam.step_(*states, number, **hyper)
        exact.grad, stock.grad = gradient.double(), gradient.clone()
        for other in others:
            other.step()
    return {"ours": ours, "exact": exact.detach(), "stock": stock.detach(), "start": start}


def error(values: Tensor, exact: Tensor, start: Tensor) -> float:
    """Largest, relative to the mean way."""
    return float((values - exact).abs().max() / (exact - start).abs().mean())


def test_it_is_adamw_as_exactly_as_deepspeeds(ranks: Ranks) -> None:
    for steps in (1, 20):
        found = ranks.run(stepped, 1, 1000, steps, 1000, 3e-3)[0]
        start = found["start"]
        # fp32 weights of size 1 that move by 3e-3 a step: a unit in the last place is 1e-7 / 3e-3
        assert error(found["stock"], found["exact"], start) < 3e-4
        assert error(found["ours"], found["exact"], start) < 3e-4


def test_pieces_give_the_bits_of_the_whole(ranks: Ranks) -> None:
    whole = ranks.run(stepped, 1, 1000, 5, 1000, 3e-3)[0]["ours"]
    for size in (128, 256):
        assert torch.equal(ranks.run(stepped, 1, 1000, 5, size, 3e-3)[0]["ours"], whole)


def test_a_learning_rate_of_zero_changes_nothing(ranks: Ranks) -> None:
    """The first step of a warmup: the weight decay is handed over divided by the step length."""
    found = ranks.run(stepped, 1, 300, 3, 300, 0.0)[0]
    assert torch.equal(found["ours"], found["start"])


def a_later_step(history: list[int]) -> Tensor:
    """Step 7 of a kernel that was called with other step numbers before."""
    from hmt_deepspeed.zero.offload.cpu_adam import CpuAdam

    adam = CpuAdam()
    for step in history:
        adam.step_(*torch.ones(4, 256), step, **HYPER)
    param, gradient, first, second = torch.linspace(0.1, 1, 4 * 256).view(4, 256)
    adam.step_(param, gradient, first, second, 7, **HYPER)
    return param


@pytest.mark.parametrize("history", [[1, 2, 3, 4, 5, 6], [6], [9, 2]])
def test_a_step_depends_on_its_number_alone(ranks: Ranks, history: list[int]) -> None:
    """A resumed run has another history; with DeepSpeed's running products it would differ."""
    fresh = ranks.run(a_later_step, 1, [])[0]
    assert torch.equal(ranks.run(a_later_step, 1, history)[0], fresh)
