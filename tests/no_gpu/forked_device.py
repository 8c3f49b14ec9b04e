"""Commands on the device that is not there, in forks of an interpreter that has put it in place."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import device  # noqa: E402
import forked  # noqa: E402

FOLDER = Path(__file__).parent


@cache
def _interpreter() -> forked.Interpreter:
    env = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
    return forked.Interpreter(__file__, env | {"OMP_NUM_THREADS": "1"})


def output_of(script: str, *arguments: str) -> str:
    """What a script of this folder prints."""
    done = _interpreter().run(FOLDER / script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    device.require()
    to = forked.answers()
    import subjects  # noqa: F401
    import torch._dynamo  # noqa: F401  the first operation of a dispatch mode imports it
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    import hmt_deepspeed.zero.registration  # noqa: F401

    forked.serve(to)
