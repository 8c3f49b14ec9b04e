"""One contender of the GPU suite, alone in its process: build, step, print one line of JSON.

An allocator that ran out of memory, or that another engine has fragmented, says nothing about the next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[1]),
        str(Path(__file__).resolve().parents[2]),
    ]

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.setting import (
    DTYPES,
    INTERVAL,
    LEARNING_RATE,
    amortised_refresh,
    free_port,
    join_ranks,
    ordinary,
)
from benchmarks.setting import refreshes as refreshing
from benchmarks.timing import Samples, median_of, now, timed
from hmt_deepspeed.activations.ops import flops
from hmt_deepspeed.report.metrics import peak_host_bytes

WARMUP = 10  # kernels are compiled, and the allocator's pools grow for as long as this on an H100
MOST_FIRST = 100  # steps that the first round of bases may take
MOST_TRIED = 4  # times as many steps as are wanted
TRACED = 2
MATRICES = 7  # of a layer


def build_model(spec: dict[str, Any]) -> Any:
    """A Llama with random weights, made on the device in the run's dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[spec["dtype"]])
    try:
        with torch.device(spec["device"]):
            return LlamaForCausalLM(LlamaConfig(**spec["model"], use_cache=False))
    finally:
        torch.set_default_dtype(before)


@dataclass
class Contender:
    """What is timed.

    Attributes:
        step: a training step on rows of tokens. matrices: how many refresh a basis in an interval.
        refreshes: of each of them, so far. planned_seconds: of an iteration, by the plan in execution.
        refreshes_at_once: all in the first step, and then in the first of every interval.
    """

    step: Callable[[Tensor], None]
    matrices: int = 0
    refreshes: Callable[[], Sequence[int]] = tuple
    planned_seconds: Callable[[], float | None] = lambda: None
    refreshes_at_once: bool = False


def galore(model: Any, spec: dict[str, Any]) -> Contender:
    """galore_torch as published: 16-bit weights, no masters, a plain PyTorch loop."""
    from galore_torch import GaLoreAdamW

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    linears = {
        m.weight
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and "lm_head" not in n
    }
    projection = {
        "rank": spec["rank"],
        "update_proj_gap": INTERVAL,
        "scale": 0.25,
        "proj_type": "std",
    }
    optimizer = GaLoreAdamW(
        [
            {"params": [p for p in model.parameters() if p not in linears]},
            {"params": [p for p in model.parameters() if p in linears], **projection},
        ],
        lr=LEARNING_RATE,
        no_deprecation_warning=True,
    )
    model.train()

    def step(rows: Tensor) -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(step, refreshes_at_once=True)


def engine_contender(model: Any, spec: dict[str, Any]) -> Contender:
    """A DeepSpeed engine, stock or ours by the JSON.

    Ours refreshes one matrix in every second step after the first round of bases: of an interval of 200 steps most
    would refresh one.
    """
    import hmt_deepspeed

    join_ranks(0, 1, free_port())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec["micro_batch"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": spec["dtype"] == "bf16"},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        **spec["json"],
    }
    matrices = 0
    if "hmt" in config and config["hmt"]["optimizer"].get("method") != "adamw":
        matrices = MATRICES * spec["model"]["num_hidden_layers"]
        config["hmt"]["optimizer"]["update_interval"] = 2 * matrices
    if "activations" not in config.get("hmt", {}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(rows: Tensor) -> None:
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()

    if not matrices:
        return Contender(step)
    groups = engine.optimizer.zero.basis_groups

    def planned() -> float | None:
        planner = engine.hmt_planner
        return None if planner is None or planner.plan is None else planner.plan.seconds

    return Contender(step, matrices, lambda: groups.schedule.num_refreshes, planned)


class Compilations:
    """Counts the kernels that Triton compiles: a step in which it does is not timed."""

    def __init__(self) -> None:
        self.count = 0
        with suppress(ImportError):
            from triton import knobs

            knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, **_: Any) -> None:
        self.count += 1


def take_samples(contender: Contender, run: Callable[[], None], steps: int) -> Samples:
    """Timed steps after the first round of bases, which compiled nothing: half of them refresh, where any do."""
    compilations, samples = Compilations(), Samples()
    for _ in range(MOST_FIRST):
        if min(contender.refreshes(), default=1):
            break
        run()
    for _ in range(WARMUP):
        run()
    wanted = [steps] if not contender.matrices else [steps - steps // 2, steps // 2]
    for _ in range(MOST_TRIED * steps):
        compiled, refreshes = compilations.count, sum(contender.refreshes())
        sample = timed(run)
        sample["refreshing"] = sum(contender.refreshes()) - refreshes
        if compilations.count == compiled:
            samples.append(sample)
        kinds = [ordinary(samples)] + ([refreshing(samples)] if contender.matrices else [])
        if all(len(kind) >= n for kind, n in zip(kinds, wanted, strict=True)):
            break
    return samples


class CountFlops(TorchDispatchMode):
    """Of torch's operations; torch's own counter also follows modules, which FPDT's chunks lead astray."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, out)
        return out


def trace(run: Callable[[], None], path: str | None) -> dict[str, float]:
    """Launches of a step and the share of its time in which the GPU computes, over two steps."""
    begin = now()
    on_host = [] if path is None else [ProfilerActivity.CPU]  # what makes a trace long
    with profile(activities=[*on_host, ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            run()
        seconds = now() - begin
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(path)
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    if not events:
        return {}
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:  # of several streams: what overlaps counts once
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    return {"launches": len(events) / TRACED, "busy_share": busy / 1e6 / seconds}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an ordinary step and of a step's share of refreshes, peak bytes, FLOPs of a step, launches."""
    cuda = spec["device"] == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        if spec["gpu_memory"] < total:
            torch.cuda.set_per_process_memory_fraction(spec["gpu_memory"] / total)
    build = galore if spec["json"] is None else engine_contender
    contender = build(build_model(spec), spec)
    generator = torch.Generator().manual_seed(1)
    size = (spec["micro_batch"], spec["sequence"])

    def run() -> None:
        rows = torch.randint(0, spec["model"]["vocab_size"], size, generator=generator)
        contender.step(rows.to(spec["device"]))

    first = timed(run)["seconds"]
    samples = take_samples(contender, run, spec["steps"])
    usual = ordinary(samples) or samples
    found = {
        "seconds": median_of(usual),
        "refresh_seconds": _refresh_seconds(contender, samples, first),
        "first_seconds": first,
        "samples": samples,
        "device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "host_bytes": peak_host_bytes(),
        "planned_seconds": contender.planned_seconds(),
    }
    counts = []
    for _ in range(2):  # one of them refreshes
        with CountFlops() as counter:
            run()
        counts.append(counter.total)
    return {**found, "flops": min(counts), **(trace(run, spec["trace"]) if cuda else {})}


def _refresh_seconds(contender: Contender, samples: Samples, first: float) -> float:
    """What refreshing every matrix once in an interval adds to the mean step."""
    if contender.refreshes_at_once:
        return max(0.0, first - median_of(samples)) / INTERVAL
    if not contender.matrices or not (ordinary(samples) and refreshing(samples)):
        return 0.0
    return max(0.0, amortised_refresh(samples, contender.matrices))


if __name__ == "__main__":
    try:
        found = measure(json.loads(sys.argv[1]))
    except torch.OutOfMemoryError:
        found = {"out_of_memory": True}
    print("\n" + json.dumps(found), flush=True)
