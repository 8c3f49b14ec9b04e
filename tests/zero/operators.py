"""Load DeepSpeed's operators that tests use, which compiles those that are not there yet.

A process of its own: pytest's controller runs it once, before its workers ask for them.
"""

from __future__ import annotations

from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

from hmt_deepspeed.zero.operator_locks import telling_waits


def load() -> None:
    """The shared-memory collectives, CPU Adam and, where libaio's headers are, ``async_io``."""
    with telling_waits():
        build_shm_op()
        CPUAdamBuilder().load()
        if AsyncIOBuilder().is_compatible(verbose=False):
            AsyncIOBuilder().load()


if __name__ == "__main__":
    load()
