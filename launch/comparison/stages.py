"""The queue of each stage: which cells, the most informative first, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any

from comparison.cells import Cell, Point, Setting, Store, point_of
from comparison.contenders import Unavailable, build, own_embedding_lr_scale
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
    """What was asked for. None: the table's learning rates, the experiment's variants, the variants' own rate of
    embeddings, the setting's decay.
    """

    stage: str
    setting: Setting
    tokens: int
    seeds: tuple[int, ...]
    variants: tuple[str, ...] | None = None
    learning_rates: tuple[float, ...] | None = None
    embedding_lr_scales: tuple[float, ...] | None = None
    decays: tuple[float, ...] | None = None
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
    given = plan.learning_rates or plan.embedding_lr_scales or plan.decays
    points = {}
    for name in variants:
        rates = plan.learning_rates or VARIANTS[name].learning_rates
        if plan.stage == "final" and not plan.learning_rates:
            best = best_point(store, name, plan.setting, data.digest)
            rates = (best.lr,)
        points[name] = _grid(plan, name, rates) if given or plan.stage != "final" else (best,)
    cells = [
        Cell(plan.stage, name, lr, seed, plan.tokens, plan.setting, data.digest, None, *beside)
        for name, (lr, *beside), seed in _informative(points, plan.seeds)
    ]
    return Queue(cells, {cell.key: data for cell in cells})


def _grid(plan: Plan, variant: str, rates: Iterable[float]) -> tuple[Point, ...]:
    """All that is asked for of a variant; what it has by itself, or the setting, is no point of its own."""
    own = own_embedding_lr_scale(variant, plan.setting.shape.hidden)
    scales = [None if scale == own else scale for scale in plan.embedding_lr_scales or (None,)]
    decays = [None if d == plan.setting.decay else d for d in plan.decays or (None,)]
    return tuple(Point(*found) for found in product(rates, scales, decays))


def _finetune_queue(plan: Plan, variants: Sequence[str]) -> Queue:
    base_text, tuning = finetuning_texts(plan.setting, plan.cache)
    base = Cell("base", BASELINE, plan.base_lr, 0, plan.base_tokens, plan.setting, base_text.digest)
    points = {}
    for name in variants:
        usual = tuple(lr * FINETUNE_RATE for lr in VARIANTS[name].learning_rates)
        points[name] = _grid(plan, name, plan.learning_rates or usual)
    cells = [
        Cell(
            "finetune", name, lr, seed, plan.tokens, plan.setting, tuning.digest, base.key, *beside
        )
        for name, (lr, *beside), seed in _informative(points, plan.seeds)
    ]
    texts = {base.key: base_text, **{cell.key: tuning for cell in cells}}
    return Queue([base, *cells], texts)


def _informative(
    points: Mapping[str, tuple[Point, ...]], seeds: Iterable[int]
) -> list[tuple[str, Point, int]]:
    """Seed by seed: the baseline at all its points, then everyone's first point, second, ..."""
    order = []
    for seed in seeds:
        order += [(BASELINE, point, seed) for point in points.get(BASELINE, ())]
        others = {name: own for name, own in points.items() if name != BASELINE}
        for turn in range(max((len(own) for own in others.values()), default=0)):
            order += [(n, own[turn], seed) for n, own in others.items() if turn < len(own)]
    return order


def best_point(store: Store, variant: str, setting: Setting, text: str) -> Point:
    """The point with the lowest validation loss in the longest sweep of the same setting."""
    finished = []
    for record in store.records():
        lr, *beside = point_of(record)
        run = (record["seed"], record["tokens"], setting, text, None)
        own = Cell("sweep", variant, lr, *run, *beside)
        if own.key == record["key"] and record.get("val_loss") is not None:
            finished.append(record)
    if not finished:
        raise ValueError(
            f"no finished sweep cell of {variant!r} with this setting in {store.results}; run "
            f"`python launch/compare.py sweep --variants {variant}` first, or give --lrs"
        )
    longest = max(record["tokens"] for record in finished)
    return lowest_point(record for record in finished if record["tokens"] == longest)


def lowest_point(finished: Iterable[Mapping[str, Any]]) -> Point:
    """The point that the fewest others end below, two compared by their mean losses at the seeds both were run at.

    A seed that one point alone was run at says as much about the seed as about the point; where two share none, the
    means are of all there are. Of points that as many end below, the one with the lowest mean.
    """
    losses: dict[Point, dict[int, float]] = {}
    for record in finished:
        losses.setdefault(point_of(record), {})[record["seed"]] = record["val_loss"]

    def below(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
        shared = one.keys() & other.keys()
        return mean(one[s] for s in shared or one) < mean(other[s] for s in shared or other)

    def rank(point: Point) -> tuple[int, float]:
        own = losses[point]
        return sum(below(other, own) for other in losses.values()), mean(own.values())

    return min(losses, key=rank)


def check_variants(
    names: Iterable[str], setting: Setting, embedding_lr_scale: float | None = None
) -> None:
    """Construct every variant once, so that a wrong option stops the command before it trains.

    Raises:
        ValueError: what the optimizer refuses.
    """
    hyper = replace(setting.hyper(1e-3, 0), embedding_lr_scale=embedding_lr_scale)
    for name in names:
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
    for scale in dict.fromkeys(cell.embedding_lr_scale for cell in queue.cells):
        named = (cell.variant for cell in queue.cells if cell.embedding_lr_scale == scale)
        check_variants(dict.fromkeys(named), plan.setting, scale)
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
