"""One contender of the GPU suite, alone in its process: build, step, print one line of JSON.

An allocator that ran out of memory, or that another engine has fragmented, says nothing about the next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[1]),
        str(Path(__file__).resolve().parents[2]),
    ]

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.setting import DTYPES, INTERVAL, LEARNING_RATE, free_port, join_ranks
from benchmarks.timing import median_of, timed
from hmt_deepspeed.report.metrics import peak_host_bytes

WARMUP = 3  # the first steps find bases, compile operators and fill pools


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


def galore_step(model: Any, spec: dict[str, Any]) -> Callable[[Tensor], None]:
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

    return step


def engine_step(model: Any, spec: dict[str, Any]) -> Callable[[Tensor], None]:
    """A DeepSpeed engine, stock or ours by the JSON."""
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
    if "activations" not in config.get("hmt", {}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(rows: Tensor) -> None:
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()

    return step


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a step, the first step's, peak bytes, and FLOPs run in one step."""
    cuda = spec["device"] == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        if spec["gpu_memory"] < total:
            torch.cuda.set_per_process_memory_fraction(spec["gpu_memory"] / total)
    step = (galore_step if spec["kind"] == "galore" else engine_step)(build_model(spec), spec)
    generator = torch.Generator().manual_seed(1)
    size = (spec["micro_batch"], spec["sequence"])

    def run() -> None:
        rows = torch.randint(0, spec["model"]["vocab_size"], size, generator=generator)
        step(rows.to(spec["device"]))

    first = timed(run)["seconds"]
    for _ in range(WARMUP - 1):
        run()
    samples = [timed(run) for _ in range(spec["steps"])]
    with FlopCounterMode(display=False) as counter:
        run()
    return {
        "seconds": median_of(samples),
        "first_seconds": first,
        "samples": samples,
        "flops": counter.get_total_flops(),
        "device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "host_bytes": peak_host_bytes(),
    }


if __name__ == "__main__":
    try:
        found = measure(json.loads(sys.argv[1]))
    except torch.OutOfMemoryError:
        found = {"out_of_memory": True}
    print("\n" + json.dumps(found), flush=True)
