"""Whole steps and optimizer steps of HMT's engine beside DeepSpeed's AdamW and galore_torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    INTERVAL,
    LARGE,
    LAYER_ROUNDS,
    LEARNING_RATE,
    SMALL,
    STEADY_AFTER,
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    alternating_options,
    amortised_refresh,
    hmt_engine,
    llama,
    num_refreshing,
    ordinary,
    refreshes,
    stock_engine,
)
from benchmarks.timing import (
    Sample,
    column,
    interleave,
    median_of,
    now,
    paired_spread,
    percentile,
    spread,
)

RANK = 64
COMPOSED = (
    f"HMT's mean over one refresh interval of {INTERVAL} steps: the median ordinary step plus, for "
    "every matrix, the mean extra time of refreshing one, divided by the interval; both kinds of "
    "step alternate in the measured rounds"
)
PHASES = ("forward", "backward", "step")


def _settings(shapes: Sequence[Shape], **more: Any) -> dict[str, Any]:
    models = [{**asdict(shape), "intermediate": shape.intermediate} for shape in shapes]
    rank = alternating_options(shapes[0], RANK)["rank"]
    return {"models": models, "rank": rank, "zero_stage": 2, "world_size": 1, **more}


def _matrices(engine: Any) -> int:
    return len(engine.optimizer.zero.low_rank)


# -- whole step -------------------------------------------------------------------------------------


def whole_step(setting: Setting) -> CaseResult:
    targets = {TOY: 1.0} if setting.toy else {SMALL: 1.15, LARGE: 1.5}
    result = CaseResult(_settings(list(targets)))
    for shape, target in targets.items():
        _whole_step(shape, target, setting, result)
    return result


def _whole_step(shape: Shape, target: float, setting: Setting, result: CaseResult) -> None:
    stock = stock_engine(shape, setting.dtype)
    ours = hmt_engine(shape, setting.dtype, alternating_options(shape, RANK))
    adam = type(getattr(stock.optimizer, "optimizer", stock.optimizer))
    result.settings["deepspeed_adamw"] = f"{adam.__module__}.{adam.__qualname__}"
    default = hmt_engine(shape, setting.dtype, alternating_options(shape, None))
    contenders = {
        "deepspeed_adamw": EngineStep(stock, Batches(shape, setting.device)),
        "hmt": EngineStep(ours, Batches(shape, setting.device)),
        "default": EngineStep(default, Batches(shape, setting.device)),
    }
    rounds = setting.rounds_or(LAYER_ROUNDS)
    samples = interleave(contenders, rounds, warmup=STEADY_AFTER)
    result.samples[shape.label] = samples
    theirs, mine = samples["deepspeed_adamw"], samples["hmt"]
    result.measurements.append(
        _tokens_per_second(f"{shape.label}: DeepSpeed's AdamW", shape, median_of(theirs))
    )
    for name, least, own in (
        (f"HMT at rank {RANK}", target, mine),
        ("the default block", 1.0, samples["default"]),
    ):
        added = amortised_refresh(own, _matrices(ours))
        mean_step = median_of(ordinary(own)) + added
        pairs = [
            a["seconds"] / (b["seconds"] + added)
            for a, b in zip(theirs, own, strict=True)
            if not b["refreshing"]
        ]
        ratio = median_of(theirs) / mean_step
        label = f"{shape.label}: tokens/s, {name} / DeepSpeed's AdamW"
        result.measurements += [
            Measurement(label, ratio, "x", ">=", least, spread(pairs), COMPOSED),
            _tokens_per_second(f"{shape.label}: {name}", shape, mean_step),
        ]
    for phase in PHASES:
        slow, fast = median_of(theirs, phase), median_of(ordinary(mine), phase)
        note = "median steps of DeepSpeed's AdamW over HMT's ordinary steps"
        result.measurements.append(
            Measurement(
                f"{shape.label}: {phase}, {slow:.3f} s / {fast:.3f} s", slow / fast, "x", note=note
            )
        )


def _tokens_per_second(label: str, shape: Shape, seconds: float) -> Measurement:
    return Measurement(label, shape.tokens / seconds, "tokens/s")


# -- galore_torch -----------------------------------------------------------------------------------


class GaloreStep:
    """galore_torch.GaLoreAdamW in a plain PyTorch loop: no engine, no fp32 masters."""

    def __init__(
        self, shape: Shape, setting: Setting, low_rank: Sequence[str], options: dict[str, Any]
    ) -> None:
        from galore_torch import GaLoreAdamW

        self.model: Any = llama(shape).to(setting.device, setting.torch_dtype).train()
        self.batches = Batches(shape, setting.device)
        named = dict(self.model.named_parameters())
        matrices = [named[name] for name in low_rank]
        others: list[nn.Parameter] = [p for name, p in named.items() if name not in set(low_rank)]
        self.optimizer = GaLoreAdamW(
            [{"params": others}, {"params": matrices, **options}],
            lr=LEARNING_RATE,
            weight_decay=0.01,
            no_deprecation_warning=True,
        )
        self.steps = 0

    def warm_up(self) -> None:
        """A forward and a backward, so that the first step is slow by its refresh only."""
        rows = self.batches.draw()
        self.model(input_ids=rows, labels=rows).loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> Sample:
        rows = self.batches.draw()
        begin = now()
        loss = self.model(input_ids=rows, labels=rows).loss
        after_forward = now()
        loss.backward()
        after_backward = now()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = now()
        self.steps += 1
        return {
            "seconds": end - begin,
            "forward": after_forward - begin,
            "backward": after_backward - after_forward,
            "step": end - after_backward,
            "refreshing": float(self.steps % INTERVAL == 1),
        }


def galore(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SMALL
    options = alternating_options(shape, RANK)
    engine = hmt_engine(shape, setting.dtype, options)
    names = [entry.name for entry in engine.optimizer.zero.low_rank]
    galore_options = {
        "rank": options["rank"],
        "update_proj_gap": INTERVAL,
        "scale": 0.25,
        "proj_type": "std",
    }
    result = CaseResult(_settings([shape], galore=galore_options))
    theirs = GaloreStep(shape, setting, names, galore_options)
    theirs.warm_up()
    theirs.warm_up()
    first = theirs()  # computes all bases, as one step in every INTERVAL does
    contenders: dict[str, Callable[[], Sample]] = {
        "galore": theirs,
        "hmt": EngineStep(engine, Batches(shape, setting.device)),
    }
    samples = interleave(contenders, setting.rounds_or(LAYER_ROUNDS), warmup=STEADY_AFTER)
    result.samples = {**samples, "galore_refresh_step": [first]}
    slow, mine = samples["galore"], samples["hmt"]
    refresh = (first["seconds"] - median_of(slow)) / INTERVAL
    added = amortised_refresh(mine, _matrices(engine))
    fast = ordinary(mine)
    pairs = [
        (a["seconds"] + refresh) / (b["seconds"] + added)
        for a, b in zip(slow, mine, strict=True)
        if not b["refreshing"]
    ]
    note = (
        f"means over one refresh interval of {INTERVAL} steps, composed, not run through: galore_torch "
        "refreshes every basis in one step (measured once, its first step, after a warm-up), HMT one "
        "matrix at a time (measured in alternation with ordinary steps)"
    )
    result.measurements += [
        Measurement(
            f"{shape.label}: tokens/s, HMT / galore_torch",
            (median_of(slow) + refresh) / (median_of(fast) + added),
            "x",
            ">=",
            1.2,
            spread(pairs),
            note,
        ),
        Measurement(
            f"{shape.label}: the same without any refresh",
            median_of(slow) / median_of(fast),
            "x",
        ),
        Measurement(f"{shape.label}: galore_torch's refresh step", first["seconds"], "s"),
        Measurement(f"{shape.label}: galore_torch's other steps", median_of(slow), "s"),
        Measurement(f"{shape.label}: HMT's ordinary step", median_of(fast), "s"),
        Measurement(f"{shape.label}: HMT's refresh steps", median_of(refreshes(mine)), "s"),
    ]
    return result


# -- optimizer.step alone ---------------------------------------------------------------------------


class OptimizerStep:
    """Times `engine.optimizer.step` inside `engine.step`, after a backward of a few tokens."""

    def __init__(self, engine: Any, batches: Batches) -> None:
        self.engine, self.batches = engine, batches
        self._step, self._seconds = engine.optimizer.step, 0.0
        engine.optimizer.step = self._timed_step

    def _timed_step(self, *args: Any, **kwargs: Any) -> None:
        begin = now()
        self._step(*args, **kwargs)
        self._seconds = now() - begin

    def __call__(self) -> Sample:
        rows = self.batches.draw()
        refreshing = num_refreshing(self.engine)
        self.engine.backward(self.engine(input_ids=rows, labels=rows).loss)
        self.engine.step()
        return {"seconds": self._seconds, "refreshing": refreshing}


def optimizer_step(setting: Setting) -> CaseResult:
    base = TOY if setting.toy else LARGE
    # The step's time does not depend on how many tokens made the gradient.
    shape = Shape(**{**asdict(base), "sequence": 64 if base is LARGE else 16, "micro_batch": 1})
    result = CaseResult(_settings([shape]))
    stock = stock_engine(shape, setting.dtype)
    ours = hmt_engine(shape, setting.dtype, alternating_options(shape, RANK))
    contenders = {
        "deepspeed_adamw": OptimizerStep(stock, Batches(shape, setting.device)),
        "hmt": OptimizerStep(ours, Batches(shape, setting.device)),
    }
    rounds = setting.rounds_or(2 * LAYER_ROUNDS)
    result.samples = dict(interleave(contenders, rounds, warmup=STEADY_AFTER))
    theirs, mine = result.samples["deepspeed_adamw"], result.samples["hmt"]
    added = amortised_refresh(mine, _matrices(ours))
    usual = median_of(ordinary(mine))
    pairs = [
        (b["seconds"] + added) / a["seconds"]
        for a, b in zip(theirs, mine, strict=True)
        if not b["refreshing"]
    ]
    result.measurements += [
        Measurement(
            f"{shape.label}: optimizer.step, HMT / DeepSpeed's AdamW",
            (usual + added) / median_of(theirs),
            "share",
            "<=",
            0.35,
            spread(pairs),
            COMPOSED,
        ),
        Measurement(
            f"{shape.label}: the same, ordinary steps only",
            usual / median_of(theirs),
            "share",
            spread=paired_spread(
                [b["seconds"] for b in mine if not b["refreshing"]],
                [a["seconds"] for a, b in zip(theirs, mine, strict=True) if not b["refreshing"]],
            ),
        ),
        Measurement(f"{shape.label}: DeepSpeed's AdamW", median_of(theirs), "s"),
        Measurement(f"{shape.label}: HMT, ordinary step", usual, "s"),
        Measurement(f"{shape.label}: HMT, refresh step", median_of(refreshes(mine)), "s"),
    ]
    return result


# -- Muon -------------------------------------------------------------------------------------------


def muon_step(setting: Setting) -> CaseResult:
    """Whole and optimizer steps of Muon beside low-rank AdamW's, at one rank."""
    shape = TOY if setting.toy else SMALL
    options = alternating_options(shape, RANK)
    result = CaseResult(_settings([shape]))
    engines = {
        method: hmt_engine(shape, setting.dtype, {**options, "method": method})
        for method in ("lowrank_adamw", "muon")
    }
    contenders = {
        method: EngineStep(engine, Batches(shape, setting.device))
        for method, engine in engines.items()
    }
    rounds = setting.rounds_or(2 * LAYER_ROUNDS)
    samples = interleave(contenders, rounds, warmup=STEADY_AFTER)
    result.samples = dict(samples)
    adamw, muon = (ordinary(samples[method]) for method in engines)
    for key, label, most in (("seconds", "time", 1.05), ("step", "optimizer's step", None)):
        mine, theirs = column(muon, key), column(adamw, key)
        result.measurements.append(
            Measurement(
                f"{shape.label}: {label} of Muon / low-rank AdamW, ordinary steps",
                median_of(muon, key) / median_of(adamw, key),
                "x",
                *(("<=", most) if most else ()),
                spread=paired_spread(mine, theirs),
            )
        )
    return result


# -- refresh ----------------------------------------------------------------------------------------


def refresh(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SMALL
    engine = hmt_engine(shape, setting.dtype, alternating_options(shape, RANK))
    step = EngineStep(engine, Batches(shape, setting.device))
    samples = interleave({"hmt": step}, setting.rounds_or(3 * LAYER_ROUNDS), STEADY_AFTER)["hmt"]
    result = CaseResult(_settings([shape], interval=INTERVAL), samples={"hmt": samples})
    usual, renewing = ordinary(samples), refreshes(samples)
    counts = sorted({int(sample["refreshing"]) for sample in renewing})
    result.settings["matrices_per_refresh_step"] = counts
    added = amortised_refresh(samples, _matrices(engine))
    mean_step = median_of(usual) + added
    tail = percentile(column(renewing), 0.99) / median_of(usual)
    result.measurements += [
        Measurement(
            f"{shape.label}: share of refreshing in the mean step, interval {INTERVAL}",
            added / mean_step,
            "share",
            "<=",
            0.05,
            note=COMPOSED,
        ),
        Measurement(
            f"{shape.label}: 99th percentile of {len(renewing)} refresh steps / median ordinary step",
            tail,
            "x",
            "<=",
            1.5,
            spread([sample["seconds"] / median_of(usual) for sample in renewing]),
        ),
        Measurement(
            f"{shape.label}: 99th percentile / median of ordinary steps",
            percentile(column(usual), 0.99) / median_of(usual),
            "x",
            note="the machine's own jitter",
        ),
    ]
    return result
