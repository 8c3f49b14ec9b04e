"""Load DeepSpeed's operators that tests use, which compiles those that are not there yet.

A process of its own: pytest's controller runs it once, before its workers ask for them. An operator is a process of
that: most of the files of one wait for its first.
"""

from __future__ import annotations

import subprocess
import sys

from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

from hmt_deepspeed.zero.operator_locks import abandoned_locks, telling_waits


def _load_async_io() -> None:
    if AsyncIOBuilder().is_compatible(verbose=False):  # libaio's headers are there
        AsyncIOBuilder().load()


LOADS = {
    "async_io": _load_async_io,
    "cpu_adam": lambda: CPUAdamBuilder().load(),
    "shm_comm": build_shm_op,
}


def load(*names: str) -> None:
    """CPU Adam, the shared-memory collectives and, where libaio's headers are, ``async_io``; or those named."""
    with telling_waits():
        for name in names or LOADS:
            LOADS[name]()


if __name__ == "__main__":
    if sys.argv[1:]:
        load(*sys.argv[1:])
    elif locks := abandoned_locks():  # nobody will ever remove them
        sys.exit("\n".join(locks))
    else:
        started = [subprocess.Popen([sys.executable, __file__, name]) for name in LOADS]
        sys.exit(max(abs(process.wait()) for process in started))
