"""Milliseconds of Python that a training step costs the host: tiny matrices, kernels that do nothing.

    python tests/no_gpu/host_time.py                    the engine at stage 2, 32 layers (224 matrices)
    python tests/no_gpu/host_time.py --stage 3 --option state_dtype=int8
    python tests/no_gpu/host_time.py --adamw            DeepSpeed's engine with torch's fused AdamW
    python tests/no_gpu/host_time.py --profile          where the time goes

What a GPU would have to wait for, if it were faster than its host: CPU time of the training thread, medians.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "launch")]

import argparse  # noqa: E402
import cProfile  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import pkgutil  # noqa: E402
import pstats  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402
from itertools import pairwise  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.setting import Batches, Shape, engine_config, free_port, join_ranks, llama  # noqa: E402
from hmt_deepspeed import kernels  # noqa: E402
from hmt_deepspeed.kernels import noise  # noqa: E402

WARMUP, ROUNDS, PROFILED = 4, 9, 5


def stub_kernels() -> None:
    """Let the twins, which stand for kernels on a CPU, do nothing where they write in place."""
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for name, twin in list(vars(module).items()):
            if name.endswith("moment_update_reference_"):  # gives norms of rows
                setattr(module, name, lambda gradient, *args, **how: gradient[..., 0])
            elif re.search("_reference_?$", name) and twin.__annotations__["return"] == "None":
                setattr(module, name, lambda *args, **kwargs: None)
    noise.normals_reference = lambda keys, rows, columns, *how: torch.randn(
        len(keys), rows, columns
    )


def build(shape: Shape, stage: int, options: dict[str, Any], adamw: bool) -> Any:
    """An engine in bf16 with clipping, of which no matrix refreshes after the first step."""
    import deepspeed

    import hmt_deepspeed

    join_ranks(0, 1, free_port())
    config = engine_config(shape, "bf16", stage=stage)
    config |= {"gradient_clipping": 1.0}
    model = llama(shape)
    if adamw:
        config["optimizer"]["params"]["torch_adam"] = True
        config["optimizer"]["params"]["fused"] = True
        start = deepspeed.initialize
    else:
        config["optimizer"]["type"] = "HMT"
        config["hmt"] = {"optimizer": options}
        start = hmt_deepspeed.initialize
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=config)
    return engine


def step(engine: Any, rows: Tensor) -> list[float]:
    """Seconds of forward, backward and step."""
    stamps = [time.thread_time()]
    loss = engine(input_ids=rows, labels=rows).loss
    stamps.append(time.thread_time())
    engine.backward(loss)
    stamps.append(time.thread_time())
    engine.step()
    stamps.append(time.thread_time())
    return [end - begin for begin, end in pairwise(stamps)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=32)
    add("--stage", type=int, default=2)
    add("--adamw", action="store_true")
    add("--option", action="append", default=[], metavar="FIELD=VALUE", help="of hmt.optimizer")
    add("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stub_kernels()
    shape = Shape(64, args.layers, 4, vocabulary=64, sequence=8, micro_batch=1)
    options: dict[str, Any] = {"rank": 16, "update_interval": 10**6}
    options["max_full_gradient_bytes"] = 2**30
    for text in args.option:
        field, _, value = text.partition("=")
        try:
            options[field] = json.loads(value)
        except json.JSONDecodeError:
            options[field] = value
    engine, batches = build(shape, args.stage, options, args.adamw), Batches(shape, "cpu")
    for _ in range(WARMUP):
        step(engine, batches.draw())
    found = [step(engine, batches.draw()) for _ in range(ROUNDS)]
    for phase, seconds in zip(
        ("forward", "backward", "step"), zip(*found, strict=True), strict=True
    ):
        print(f"{phase:10}{1000 * median(seconds):8.2f} ms")
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(PROFILED):
                step(engine, batches.draw())
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
