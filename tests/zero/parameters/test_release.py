"""What stage 3 keeps gathered after each part of a step: what stock's does, in arrangements whose hooks do not all
fire."""

from __future__ import annotations

from collections.abc import Callable

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
        self.is_stock = kind == "stock"
        config = stock_config(3, **changes) if self.is_stock else ds_config(3, options, **changes)
        torch.manual_seed(0)
        self.engine = make_engine(config, Net(reentrant))
        self.seen: list[list[str]] = []

    def note(self) -> None:
        named = list(self.engine.module.named_parameters())
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
    """A backward dies in the recomputation of the first block."""
    block = watch.engine.module.blocks[0]
    block.dies = True
    loss = watch.forward(wants_gradient=True)
    with pytest.raises(RuntimeError, match="in recomputation"):
        watch.backward(loss)
    watch.engine.zero_grad()
    watch.note()
    block.dies = False
    loss = watch.forward(wants_gradient=True)
    if not watch.is_stock:  # whose buckets still hold what the broken backward left, an assertion
        watch.backward(loss)
        watch.step()


# drive, whether and how blocks are checkpointed, persistence threshold: biases stay gathered at the higher one
CASES: list[tuple[Callable[[Watch], None], bool | None, int]] = [
    (plain, None, 0),
    (plain, False, 0),
    (plain, False, WIDTH),
    (plain, True, WIDTH),
    (evaluating, False, 0),
    (evaluating, True, 0),
    (interrupted, False, 0),
    (interrupted, True, 0),
]


def gathered(kind: str) -> dict[str, list[list[str]]]:
    found = {}
    for drive, reentrant, threshold in CASES:
        watch = Watch(kind, reentrant, threshold)
        drive(watch)
        found[f"{drive.__name__}, {reentrant}, {threshold}"] = watch.seen
        watch.engine.destroy()
    return found


def test_what_stays_gathered_is_what_stays_in_stock(ranks: Ranks) -> None:
    stock, adamw, low_rank = (ranks.run(gathered, 1, kind)[0] for kind in KINDS)
    assert len(stock) == len(CASES)
    for case, seen in stock.items():
        for ours in (adamw, low_rank):
            assert ours[case][: len(seen)] == seen, case
        if not case.startswith("evaluating") and case.endswith(" 0"):
            assert not any(low_rank[case][-4:]), case  # after the last backward, and the step
