"""Two ranks: bytes that a step sends, and how much of the reduction runs beside the backward."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import (
    INTERVAL,
    TOY,
    Batches,
    EngineStep,
    Setting,
    Shape,
    free_port,
    hmt_engine,
    join_ranks,
)
from benchmarks.timing import Sample, column, interleave, median_of, paired_spread

WORLD = 2
COUNTED_INTERVAL = 20
COMMUNICATION = Shape(256, 2, 4, vocabulary=512, sequence=64, micro_batch=1)
OVERLAP = Shape(256, 4, 4, vocabulary=512, sequence=128, micro_batch=1)
Job = Callable[[int, dict[str, Any]], dict[str, Any]]


# -- spawning ---------------------------------------------------------------------------------------


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def on_two_ranks(job: Job, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """What `job` returns on rank 0, run by two fresh processes of one thread each."""
    variables = {"OMP_NUM_THREADS": "1"}
    if device == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder, _environment(**variables):
        answer = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(
            _run_rank, (job, arguments, device, free_port(), str(answer)), nprocs=WORLD
        )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _run_rank(
    rank: int, job: Job, arguments: dict[str, Any], device: str, port: int, answer: str
) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    join_ranks(rank, WORLD, port, "gloo" if device == "cpu" else "nccl")
    found = job(rank, arguments)
    if rank == 0:
        Path(answer).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# -- communication ----------------------------------------------------------------------------------


def communication(setting: Setting) -> CaseResult:
    """Bytes do not depend on the machine: bf16 and gloo everywhere."""
    shape = TOY if setting.toy else COMMUNICATION
    arguments = {"shape": asdict(shape), "rank": max(4, shape.hidden // 16)}
    found = on_two_ranks(_count_bytes, arguments, "cpu")
    stock, steps = found["stock_low_rank_bytes"], found["steady_steps"]
    dense = found["dense_bytes"]
    usual = median(s["bytes"] - dense for s in steps if not s["refreshing"])
    interval_mean = mean(s["bytes"] - dense for s in steps)
    refreshed = sum(s["refreshing"] for s in steps)
    extra = (sum(s["bytes"] - dense - usual for s in steps)) / refreshed
    composed = usual + extra * found["matrices"] / INTERVAL
    found["refreshes_in_steady_interval"] = refreshed
    label = f"{shape.label}, r = {arguments['rank']}, stage 2, master_weights none"
    note = (
        "counted at the collectives, all parameters, less what the parameters outside the low-rank "
        "matrices send (their padded reduce-scatter and all-gather); scalars such as norms count as "
        "low-rank; stock ZeRO-2: reduce-scatter and all-gather of the same matrices in bf16"
    )
    result = CaseResult(
        {"model": asdict(shape), **arguments, "world_size": WORLD},
        samples=found,
        dtype=("bf16", "two gloo ranks on the CPU, where only bytes are counted"),
    )
    result.measurements += [
        Measurement(
            f"{label}: bytes per step for low-rank matrices / stock ZeRO-2, interval {INTERVAL}",
            composed / stock,
            "share",
            "<=",
            1 / 8,
            note=f"{note}; composed from the counted ordinary steps and refreshes",
        ),
        Measurement(
            f"{label}: the same, counted over a whole interval of {COUNTED_INTERVAL} steps",
            interval_mean / stock,
            "share",
            "<=",
            1 / 8,
            note=note,
        ),
        Measurement(f"{label}: the same, steps without a refresh", usual / stock, "share"),
        Measurement(
            "method adamw: bytes counted less bytes by formula",
            found["adamw_excess_bytes"],
            "bytes",
            "=",
            found["adamw_scalar_bytes"],
            note="checks the formula used for the dense part: only the norms' all-reduce is left over",
        ),
    ]
    return result


def _count_bytes(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    from hmt_deepspeed.zero.optimizer.statistics import stock_communication_bytes

    shape = Shape(**arguments["shape"])
    options = {"update_interval": COUNTED_INTERVAL, "master_weights": "none"}
    ours = hmt_engine(shape, "bf16", {**options, "rank": arguments["rank"]})
    steps = _counted_steps(ours, shape, rank, 2 * COUNTED_INTERVAL)
    optimizer = ours.optimizer
    dense = [entry for entry in optimizer.zero.param_states if entry.matrix is None]
    adamw = hmt_engine(shape, "bf16", {"method": "adamw", "master_weights": "none"})
    counted = _counted_steps(adamw, shape, rank, 2)[-1]["bytes"]
    return {
        "first_steps": steps[:COUNTED_INTERVAL],
        "steady_steps": steps[COUNTED_INTERVAL:],
        "matrices": len(optimizer.zero.low_rank),
        "dense_bytes": _dense_bytes(optimizer, dense),
        "stock_low_rank_bytes": stock_communication_bytes(optimizer.zero, low_rank_only=True),
        "stock_bytes": stock_communication_bytes(optimizer.zero),
        "adamw_excess_bytes": counted
        - _dense_bytes(adamw.optimizer, adamw.optimizer.zero.param_states),
        "adamw_scalar_bytes": _scalar_bytes(adamw.optimizer),
    }


def _counted_steps(engine: Any, shape: Shape, rank: int, count: int) -> list[Sample]:
    """Bytes sent and matrices refreshed in each step, from the first on."""
    step, steps = EngineStep(engine, Batches(shape, str(engine.device), rank)), []
    for _ in range(count):
        refreshing = step()["refreshing"]
        steps.append({"bytes": engine.optimizer.communication_bytes, "refreshing": refreshing})
    return steps


def _dense_bytes(optimizer: Any, entries: list[Any]) -> int:
    """What parameters under AdamW send in a step: gradients scattered, weights gathered, padded."""
    from hmt_deepspeed.zero.sharding.collectives import gather_bytes

    settings = optimizer.settings
    gradient, weight = settings.comm_dtype.itemsize, settings.model_dtype.itemsize
    total = 0
    for entry in entries:
        shards = entry.gradient.shards
        total += gather_bytes(shards.world * shards.max_rows * gradient, WORLD)
        total += gather_bytes(shards.world * shards.partition * weight, WORLD)
    return total


def _scalar_bytes(optimizer: Any) -> int:
    """The all-reduce of one squared norm per dense parameter, and of the overflow flag, in fp32."""
    from hmt_deepspeed.zero.sharding.collectives import reduce_bytes

    flag = reduce_bytes(4, WORLD) if optimizer.settings.check_overflow else 0
    return reduce_bytes(4 * len(optimizer.zero.param_states), WORLD) + flag


# -- overlap ----------------------------------------------------------------------------------------


def overlap(setting: Setting) -> CaseResult:
    """With two GPUs on them, otherwise on two gloo ranks, where only the order of events tells."""
    shape = TOY if setting.toy else OVERLAP
    device = "cuda" if torch.cuda.device_count() >= WORLD else "cpu"
    arguments: dict[str, Any] = {
        "shape": asdict(shape),
        "rank": shape.hidden // 8,
        "dtype": setting.dtype if device == "cuda" else "fp32",
        "bucket": shape.hidden * shape.hidden // 2,
        "rounds": setting.rounds_or(8),
    }
    found = on_two_ranks(_watch_events, arguments, device)
    result = CaseResult(
        {**arguments, "world_size": WORLD, "backend_device": device},
        samples=found,
        dtype=(arguments["dtype"], f"two ranks on {device}"),
    )
    apart, beside = found["waiting"], found["overlapping"]
    buckets = median(found["reductions"])
    result.measurements += [
        Measurement(
            f"{shape.label}: share of {buckets:.0f} reductions launched before the last gradient",
            median(found["early_share"]),
            "share",
            ">",
            0.0,
            (min(found["early_share"]), max(found["early_share"])),
            "order of events in the reducer, smallest and largest step in place of quartiles; the "
            "reduction that holds the last gradient cannot be early",
        ),
        Measurement(
            f"{shape.label}: backward on {device}, overlap_comm false / true",
            median_of(apart, "backward") / median_of(beside, "backward"),
            "x",
            spread=paired_spread(column(apart, "backward"), column(beside, "backward")),
            note="on CPU ranks the reduction takes cores away from the backward: only a GPU's time counts",
        ),
    ]
    return result


def _watch_events(rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    shape = Shape(**arguments["shape"])
    options = {"rank": arguments["rank"]}
    engines = {
        name: hmt_engine(
            shape,
            arguments["dtype"],
            options,
            overlap_comm=overlapping,
            reduce_bucket_size=arguments["bucket"],
        )
        for name, overlapping in (("waiting", False), ("overlapping", True))
    }
    steps = {
        name: EngineStep(engine, Batches(shape, str(engine.device), rank))
        for name, engine in engines.items()
    }
    samples: dict[str, Any] = dict(interleave(steps, arguments["rounds"], warmup=2))
    reducer, shares, reductions = engines["overlapping"].optimizer.reducer, [], []
    for _ in range(arguments["rounds"]):
        reducer.events = []
        steps["overlapping"]()
        kinds = [kind for kind, _ in reducer.events]
        last = len(kinds) - 1 - kinds[::-1].index("arrive")
        reductions.append(kinds.count("launch"))
        shares.append(kinds[:last].count("launch") / kinds.count("launch"))
    return {**samples, "early_share": shares, "reductions": reductions}
