"""`launch/bench.py` as a command, in forks of an interpreter that has imported its suites."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import forked

BENCH = str(Path(__file__).resolve().parents[1] / "launch" / "bench.py")


def environment() -> dict[str, str]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        env.pop(name, None)
    return env


if __name__ == "__main__":
    to = forked.answers()
    import deepspeed  # noqa: F401
    import torch._dynamo  # noqa: F401  the first operation of a dispatch mode imports it
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    import hmt_deepspeed.zero.registration  # noqa: F401
    from benchmarks import gpu, suites  # noqa: F401

    gpu.subprocess = SimpleNamespace(run=forked.run)  # contenders are forks too
    forked.serve(to)
