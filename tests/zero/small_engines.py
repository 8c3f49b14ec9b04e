"""Engines of three linears, their gradients by torch alone, and what is read of them between backward and step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_grad,
)
from torch import Tensor, nn
from training import ds_config, make_engine, stock_config

ADAMW = {"method": "adamw"}
LOW = {"rank": 2, "update_interval": 2, "max_full_gradient_bytes": 10**6, "scale": 1.0}
FROZEN, DENSE, LAST = 0, 1, 3


def small_net() -> nn.Sequential:
    """A frozen linear and two trained ones, none of whose sizes two ranks divide evenly but one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    net[FROZEN].requires_grad_(False)
    return net


def small_engine(stage: int, options: dict[str, Any] | None, gas: int = 1, **changes: Any) -> Any:
    """With stock's AdamW where ``options`` is None."""
    changes = {"gradient_clipping": 0.0, **changes}
    stock = options is None
    config = (
        stock_config(stage, gas, **changes) if stock else ds_config(stage, options, gas, **changes)
    )
    return make_engine(config, small_net())


def batch(number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def backward(engine: Any, number: int) -> None:
    engine.backward(engine(batch(number)).square().mean())


def gradients(weights: dict[str, Tensor], number: int, rank: int | None = None) -> list[Tensor]:
    """Of one rank's batch by torch alone, of the trained parameters; None: the mean over both ranks."""
    if rank is None:
        first, second = (gradients(weights, number, rank) for rank in range(2))
        return [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    net = small_net()
    net.load_state_dict(weights)
    net(batch(number, rank)).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def summed(*parts: list[Tensor], gas: int = 1) -> list[Tensor]:
    return [torch.stack(tensors).sum(0) / gas for tensors in zip(*parts, strict=True)]


def read(engine: Any, get: Any = safe_get_full_grad) -> list[Tensor | None] | str:
    """Of the trained parameters, copied, or what was said instead."""
    try:
        grads = [get(p) for p in engine.module.parameters() if p.requires_grad]
    except ValueError as error:
        return str(error)
    return [None if grad is None else grad.float().clone() for grad in grads]
