"""`launch/bench.py` as a command, cheaply: one interpreter imports what it needs, every command is a fork of it.

Importing torch, DeepSpeed and transformers takes longer than most toy cases. A fork has its own arguments, output,
exit status and process group, as a process that was started for the command has.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

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


def run_forked(arguments: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """What ``python launch/bench.py ARGUMENTS`` returns and prints. ``folder``: for its output, empty."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([arguments, str(folder)]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the interpreter is gone"
    out, err = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([BENCH, *arguments], json.loads(answer), out, err)


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment(),
        stdin=subprocess.PIPE,  # whose end ends it
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import hmt_deepspeed.zero.registration  # noqa: F401
    from benchmarks import suites  # noqa: F401

    assert torch.get_num_threads() == 1  # a pool of threads would not survive the fork
    for line in sys.stdin:
        arguments, folder = json.loads(line)
        if (pid := os.fork()) == 0:
            _command(arguments, folder)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _command(arguments: list[str], folder: str) -> None:
    """Never returns."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [BENCH, *arguments]
    code: int | str | None = 1
    try:
        runpy.run_path(BENCH, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve()
