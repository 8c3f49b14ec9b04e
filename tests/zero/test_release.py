"""What stage 3 keeps gathered after each part of a step: what stock's does, in arrangements whose hooks do not all
fire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import ds_config, make_engine, stock_config

WIDTH = 16
KINDS = ("stock", "adamw", "low rank")


class Block(nn.Module):
    """A frozen linear with a small trained one behind it, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x))
        if self.dies and torch._C._current_graph_task_id() != -1:
            raise RuntimeError("in recomputation")
        return self.adapter(hidden)


class Net(nn.Module):
    """Two blocks, each checkpointed unless ``reentrant`` is None, and a head."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(torch.tanh(x)).sum()


class Watch:
    """An engine driven step by step; after each part, the names of what is gathered."""

    def __init__(self, kind: str, reentrant: bool | None, threshold: int) -> None:
        options = {"method": "adamw"} if kind == "adamw" else {"rank": 4, "update_interval": 2}
        zero = {"stage3_param_persistence_threshold": threshold, "stage3_max_reuse_distance": 0}
        changes = {"zero_optimization": zero, "gas": 2}
        stock = kind == "stock"
        config = stock_config(3, **changes) if stock else ds_config(3, options, **changes)
        torch.manual_seed(0)
        self.engine = make_engine(config, Net(reentrant))
        self.seen: list[list[str]] = []

    def note(self) -> None:
        named = self.engine.module.named_parameters()
        self.seen.append([n for n, p in named if p.ds_status.name != "NOT_AVAILABLE"])
        # what a module that is done still claims would keep its parameters from being released
        self.seen.append([n for n, p in named if p.ds_active_sub_modules])

    def forward(self, wants_gradient: bool = False) -> Tensor:
        loss = self.engine(torch.randn(2, WIDTH).requires_grad_(wants_gradient))
        self.note()
        return loss

    def step(self) -> None:
        self.engine.step()
        self.note()

    def backward(self, loss: Tensor, torch_style: bool = False) -> None:
        if torch_style:
            loss.backward()
        else:
            self.engine.backward(loss)
        self.note()


def plain(watch: Watch) -> None:
    for number in range(4):  # two steps
        watch.backward(watch.forward(number == 3), torch_style=number == 2)
        watch.step()


def evaluating(watch: Watch) -> None:
    for _ in range(2):
        loss = watch.forward()
        watch.backward(loss)
        watch.engine.eval()
        with torch.no_grad():
            watch.forward()
        watch.forward()  # whose graph is dropped
        watch.engine.train()
        watch.step()


def interrupted(watch: Watch) -> None:
    """A backward dies in the recomputation of the first block; the next one is whole."""
    block = watch.engine.module.blocks[0]
    for dies in (True, False):
        block.dies = dies
        loss = watch.forward()
        if dies and watch.engine.module.reentrant is not None:
            with pytest.raises(RuntimeError, match="in recomputation"):
                watch.backward(loss)
            watch.engine.zero_grad()
            watch.note()
        else:
            watch.backward(loss)
            watch.step()


DRIVES: dict[str, Callable[[Watch], None]] = {
    drive.__name__: drive for drive in (plain, evaluating, interrupted)
}


def gathered(kind: str) -> dict[Any, list[list[str]]]:
    found = {}
    for name, drive in DRIVES.items():
        for reentrant in (None, False, True):
            for threshold in (0, WIDTH):  # biases stay gathered
                watch = Watch(kind, reentrant, threshold)
                drive(watch)
                found[name, reentrant, threshold] = watch.seen
                watch.engine.destroy()
    return found


def test_what_stays_gathered_is_what_stays_in_stock(ranks: Ranks) -> None:
    stock, adamw, low_rank = (ranks.run(gathered, 1, kind)[0] for kind in KINDS)
    for case, seen in stock.items():
        assert adamw[case] == seen, case
        assert low_rank[case] == seen, case
    for reentrant in (None, False, True):
        assert not any(stock["plain", reentrant, 0][2::3]), "no backward leaves anything"
