"""Planning in a run: its predictions against what happens, and what the profile costs."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks import presets, recipes
from benchmarks.activations import end_copies
from benchmarks.held_bytes import held_for_backward
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    STEADY_AFTER,
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    engine_config,
    llama,
)
from benchmarks.timing import Sample, column, interleave, median_of, paired_spread
from hmt_deepspeed.config.components import COMPONENTS
from hmt_deepspeed.planner.advise.compare import held_by_component
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import uniform_plan

SUITE = "planner"
SHAPE = Shape(256, 4, 4, vocabulary=2048, sequence=512, micro_batch=2)
RANK = 32
EVERYTHING = "everything computed again"
LOSSY = {"attention_output": "int8", "mlp_intermediate": "int8"}
# Limits as parts of the way from what the most frugal plan takes to what keeping everything does.
PLANS: dict[str, tuple[float, dict[str, str]]] = {
    "room for everything": (1.5, {}),
    "room for two thirds": (0.67, {}),
    "room for a third": (0.33, {}),
    "room for a third, 8 bits allowed": (0.33, LOSSY),
}
_RECOMPUTED = ("attention_qkv", "attention_output", "mlp_intermediate", "residual")


def _engine(shape: Shape, dtype: str, activations: dict[str, Any], **planner: Any) -> Any:
    """HMT's optimizer, whose first step finds every basis and no later one does."""
    import hmt_deepspeed

    model = llama(shape)
    config = engine_config(shape, dtype)
    config["optimizer"]["type"] = "HMT"
    elements = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    options = {
        "method": "lowrank_adamw",
        "rank": min(RANK, shape.hidden // 2),
        "update_interval": 10**6,
    }
    options |= {"max_full_gradient_bytes": 4 * elements}
    config["hmt"] = {"optimizer": options, "activations": activations}
    if planner:
        config["hmt"]["planner"] = planner
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def in_a_run(setting: Setting) -> CaseResult:
    from hmt_deepspeed.zero.planning import plan_files, profile_files

    shape = TOY if setting.toy else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        plan_files.cache_file = partial(profile_files.cache_file, folder=folder)
        profiled, cost = _profiled(setting, shape, folder)
        plan_files.cache_file = lambda _: Path(folder) / "profile.json"  # one machine for all plans
        engines = {
            EVERYTHING: _engine(
                shape, setting.dtype, {"policy": dict.fromkeys(_RECOMPUTED, "recompute")}
            )
        }
        for name, (part, lossy) in PLANS.items():
            engines[name] = _engine(
                shape,
                setting.dtype,
                {"policy": "plan"},
                gpu_memory=_limit(profiled, shape, part),
                lossy=lossy,
            )
        steps = {n: EngineStep(e, Batches(shape, setting.device)) for n, e in engines.items()}
        contenders = {name: partial(_timed, step, setting.device) for name, step in steps.items()}
        samples = interleave(contenders, setting.rounds_or(9), warmup=STEADY_AFTER)
        held = {n: _held(e, steps[n].batches) for n, e in engines.items() if n in PLANS}
        result = CaseResult(
            {"model": asdict(shape), "rank": RANK, "zero_stage": 2, "world_size": 1},
            samples={"steps": samples, "held_bytes": held, "profile": cost},
        )
        result.measurements += _costs(cost)
        base = samples[EVERYTHING]
        for name in PLANS:
            planner = engines[name].hmt_planner
            result.measurements += _bytes(name, planner, held[name]["device"])
            result.measurements += _times(name, planner, samples[name], base)
        for engine in [*engines.values(), profiled]:
            engine.destroy()
    gc.collect()
    return result


def _profiled(setting: Setting, shape: Shape, folder: str) -> tuple[Any, dict[str, float]]:
    """An engine that has profiled itself, and what that took."""
    from hmt_deepspeed.zero.planning.planner import WARM_UP
    from hmt_deepspeed.zero.planning.run_profile import PROFILED

    engine = _engine(shape, setting.dtype, {"policy": "plan"}, lossy=LOSSY)
    step = EngineStep(engine, Batches(shape, setting.device))
    seconds = [step()["seconds"] for _ in range(WARM_UP + PROFILED + 1)]
    planner = engine.hmt_planner
    planner.save(Path(folder))
    timed = sorted(seconds[WARM_UP : WARM_UP + PROFILED])
    return engine, {
        "iteration": (timed[1] + timed[2]) / 2,
        "profile": planner.profile_seconds,
        "search": planner.planning_seconds,
    }


def _timed(step: EngineStep, device: str) -> Sample:
    """A step. On a processor its seconds are those of the process, which others on it do not lengthen."""
    before = process_time()
    sample = step()
    if device == "cpu":
        sample |= {"wall": sample["seconds"], "seconds": process_time() - before}
    return sample


def _reference(planner: Any, problem: Any) -> Any:
    """The plan that computes everything again that may be."""
    from hmt_deepspeed.zero.planning.run_profile import reference_plan

    return reference_plan(planner._hmt, planner.facts, problem.workload, problem.machine)


def _limit(profiled: Any, shape: Shape, part: float) -> int:
    planner = profiled.hmt_planner
    work = planner.facts.workload(shape.micro_batch, shape.sequence)
    problem = planner.facts.problem(work, planner.machine)
    least, most = (
        estimate(problem, plan).peak("gpu")
        for plan in (
            _reference(planner, problem),
            uniform_plan(
                work,
                planner.machine,
                dict.fromkeys(COMPONENTS, "keep") | {"projected_inputs": "project"},
            ),
        )
    )
    return int(max(2**20, least + part * (most - least)))


def _held(engine: Any, batches: Batches) -> dict[str, int]:
    rows = batches.draw()
    found = held_for_backward(
        engine.module,
        lambda: engine(input_ids=rows, labels=rows).loss,
        lambda _: nullcontext(),
        lambda: end_copies(engine.hmt_activations),
    )
    engine.zero_grad()
    return found


def _costs(cost: dict[str, float]) -> list[Measurement]:
    return [
        Measurement(
            "profile / one iteration",
            cost["profile"] / cost["iteration"],
            "x",
            "<=",
            3.0,
            note="once for each machine and model; the profiled iterations train as any others",
        ),
        Measurement("search for the plan", cost["search"], "s"),
    ]


def _bytes(name: str, planner: Any, counted: int) -> list[Measurement]:
    problem = planner.problem
    predicted = sum(held_by_component(problem, planner.plan).values())
    predicted += problem.workload.shared_bytes
    return [
        Measurement(
            f"{name}: bytes held for backward, predicted / counted, less 1",
            abs(predicted / counted - 1),
            "share",
            "<=",
            0.05,
            note="storages that a forward allocated and that still exist when it has ended, up to the logits",
        )
    ]


def _times(name: str, planner: Any, mine: Any, base: Any) -> list[Measurement]:
    problem, plan = planner.problem, planner.plan
    expected = plan.seconds / estimate(problem, _reference(planner, problem)).seconds
    took = median_of(mine) / median_of(base)
    between = paired_spread(column(mine), column(base))
    return [
        Measurement(
            f"{name}: step time over that of {EVERYTHING}, measured",
            took,
            "x",
            spread=between,
            note="medians of interleaved rounds, on a processor of the process's own seconds; quartiles of the "
            "ratio within a round",
        ),
        Measurement(f"{name}: the same, predicted", expected, "x"),
        Measurement(
            f"{name}: step time, predicted / measured, less 1",
            abs(expected / took - 1),
            "share",
            "<=",
            0.15,
            note=f"both relative to {EVERYTHING} in the same rounds, by which the profile is calibrated",
        ),
    ]


CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "in_a_run": in_a_run,
    **recipes.CASES,
    **presets.CASES,
}
USES_ENGINE = {"in_a_run"}
