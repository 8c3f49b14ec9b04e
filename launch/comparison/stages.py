"""The queue of each stage: which cells, the most informative first, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from comparison.cells import Cell, Setting, Store
from comparison.contenders import Unavailable, build
from comparison.corpus import finetuning_texts, pretraining_text
from comparison.training import build_model, train_cell
from comparison.variants import VARIANTS, select
from hmt_deepspeed.train.data import TrainingData

STOPPED = 3  # exit status of a child whose time was up: its cell goes on next time
BASELINE = "adamw"
# Fine-tuning moves a trained model: a quarter of the pretraining rates.
FINETUNE_RATE = 0.25


@dataclass(frozen=True)
class Plan:
    """What was asked for. None: the table's learning rates, the experiment's variants."""

    stage: str
    setting: Setting
    tokens: int
    seeds: tuple[int, ...]
    variants: tuple[str, ...] | None = None
    learning_rates: tuple[float, ...] | None = None
    base_tokens: int = 0
    base_lr: float = 1e-3
    cache: str = ""
    budget_seconds: float | None = None
    save_steps: int = 100


@dataclass(frozen=True)
class Queue:
    """Cells in the order in which they are run, and the text of each."""

    cells: list[Cell]
    texts: dict[str, TrainingData]


def make_queue(plan: Plan, store: Store) -> Queue:
    """The cells of a stage, finished ones included.

    Raises:
        ValueError: an unknown variant, or a final without a finished sweep.
    """
    variants = select(plan.variants, plan.stage)
    if plan.stage == "finetune":
        return _finetune_queue(plan, variants)
    data = pretraining_text(plan.setting, plan.cache)
    if plan.stage == "final":
        rates = {
            name: plan.learning_rates or (best_rate(store, name, plan.setting, data.digest),)
            for name in variants
        }
    else:
        rates = {name: plan.learning_rates or VARIANTS[name].learning_rates for name in variants}
    cells = [
        Cell(plan.stage, name, lr, seed, plan.tokens, plan.setting, data.digest)
        for name, lr, seed in _informative(rates, plan.seeds)
    ]
    return Queue(cells, {cell.key: data for cell in cells})


def _finetune_queue(plan: Plan, variants: Sequence[str]) -> Queue:
    base_text, tuning = finetuning_texts(plan.setting, plan.cache)
    base = Cell("base", BASELINE, plan.base_lr, 0, plan.base_tokens, plan.setting, base_text.digest)
    rates = {
        name: plan.learning_rates
        or tuple(lr * FINETUNE_RATE for lr in VARIANTS[name].learning_rates)
        for name in variants
    }
    cells = [
        Cell("finetune", name, lr, seed, plan.tokens, plan.setting, tuning.digest, base.key)
        for name, lr, seed in _informative(rates, plan.seeds)
    ]
    texts = {base.key: base_text, **{cell.key: tuning for cell in cells}}
    return Queue([base, *cells], texts)


def _informative(
    rates: dict[str, tuple[float, ...]], seeds: Iterable[int]
) -> list[tuple[str, float, int]]:
    """Seed by seed: the baseline at all its rates, then everyone's first rate, second, ..."""
    order = []
    for seed in seeds:
        if BASELINE in rates:
            order += [(BASELINE, lr, seed) for lr in rates[BASELINE]]
        others = {name: lrs for name, lrs in rates.items() if name != BASELINE}
        for turn in range(max((len(lrs) for lrs in others.values()), default=0)):
            order += [(n, lrs[turn], seed) for n, lrs in others.items() if turn < len(lrs)]
    return order


def best_rate(store: Store, variant: str, setting: Setting, text: str) -> float:
    """The learning rate with the lowest validation loss in the longest sweep of the same setting."""
    finished = []
    for record in store.records():
        own = Cell("sweep", variant, record["lr"], record["seed"], record["tokens"], setting, text)
        if own.key == record["key"] and record.get("val_loss") is not None:
            finished.append(record)
    if not finished:
        raise ValueError(
            f"no finished sweep cell of {variant!r} with this setting in {store.results}; run "
            f"`python launch/compare.py sweep --variants {variant}` first, or give --lrs"
        )
    longest = max(record["tokens"] for record in finished)
    return lowest_rate(record for record in finished if record["tokens"] == longest)


def lowest_rate(finished: Iterable[Mapping[str, Any]]) -> float:
    """The learning rate with the lowest mean loss at the seeds that every rate was run at.

    A seed that one rate alone was run at says as much about the seed as about the rate; where no seed is
    common to all, the means are of all there are.
    """
    losses: dict[float, dict[int, float]] = {}
    for record in finished:
        losses.setdefault(float(record["lr"]), {})[record["seed"]] = record["val_loss"]
    shared = set.intersection(*(set(own) for own in losses.values()))

    def loss(rate: float) -> float:
        return mean(v for seed, v in losses[rate].items() if seed in shared or not shared)

    return min(losses, key=loss)


def check_variants(names: Iterable[str], setting: Setting) -> None:
    """Construct every variant once, so that a wrong option stops the command before it trains.

    Raises:
        ValueError: what the optimizer refuses.
    """
    for name in names:
        hyper = setting.hyper(1e-3, 0)
        try:
            build(name, build_model(setting, 0), setting.shape.hidden, hyper).close()
        except Unavailable as reason:
            print(f"{name}: skipped, {reason}", flush=True)
        except ValueError as error:
            raise ValueError(f"variant {name!r}: {error}") from error


def run_queue(plan: Plan, store: Store, command: Sequence[str]) -> int:
    """Run what is not finished, one child process a cell (`command --only KEY`).

    A child that fails is reported and the queue goes on. Exit status: 1 if any failed.
    """
    begin = time.monotonic()
    queue = make_queue(plan, store)
    check_variants(dict.fromkeys(cell.variant for cell in queue.cells), plan.setting)
    failed = []
    for number, cell in enumerate(queue.cells, 1):
        if store.is_finished(cell):
            continue
        child = [sys.executable, *command, "--only", cell.key]
        if plan.budget_seconds is not None:
            left = plan.budget_seconds - (time.monotonic() - begin)
            if left <= 0:
                print("time is up: the same command goes on from here", flush=True)
                break
            child += ["--budget_minutes", f"{left / 60:.3f}"]
        print(f"=== {number}/{len(queue.cells)} {cell.key}", flush=True)
        status = subprocess.run(child, check=False).returncode
        if status == STOPPED:
            print("time is up: the same command goes on from here", flush=True)
            break
        if status:
            failed.append(cell.key)
            if cell.stage == "base":
                break
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_one(plan: Plan, store: Store, key: str) -> int:
    """The child: one cell in this process."""
    queue = make_queue(plan, store)
    found = [cell for cell in queue.cells if cell.key == key]
    if not found:
        raise ValueError(f"--only {key!r} is no cell of this command")
    cell = found[0]
    begin = time.monotonic()

    def time_is_up(step: int) -> bool:
        budget = plan.budget_seconds
        return budget is not None and time.monotonic() - begin > budget

    with store.claimed(cell) as claimed:
        if not claimed:
            print(f"{key}: another process is running it", flush=True)
            return 0
        try:
            result = train_cell(cell, queue.texts[key], store, time_is_up, plan.save_steps)
        except Unavailable as reason:
            store.write(cell, {"skipped": str(reason)})
            print(f"skipped: {reason}", flush=True)
            return 0
    if result is None:
        return STOPPED
    print(_line(result), flush=True)
    return 0


def _line(result: dict[str, Any]) -> str:
    share = result["state_bytes"]["moments_share"]
    loss = "diverged" if result["diverged"] else f"validation loss {result['val_loss']:.4f}"
    held = "" if share is None else f", moments {share:.3f} of AdamW's"
    return f"{loss}, {result['tokens_per_second']:.0f} tokens/s{held}"
