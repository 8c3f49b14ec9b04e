"""What a process holds: by its allocators' own count, which resident bytes follow in large steps only."""

from __future__ import annotations

import ctypes
import gc
import sys

from hmt_deepspeed.report.metrics import host_bytes

__all__ = ["memory_now"]

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # malloc.h


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def memory_now() -> dict[str, int]:
    """tensor_bytes: that malloc (glibc) has given out, where a CPU's tensors, its "device bytes", are.

    python_blocks: that Python has given out for its objects. host_bytes: resident.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return {
        "tensor_bytes": int(info.uordblks + info.hblkhd),
        "python_blocks": sys.getallocatedblocks(),
        "host_bytes": host_bytes(),
    }
