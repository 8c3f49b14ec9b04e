"""The recorder against what single operations are known to do on a GPU."""

import json

import pytest
from forked_device import output_of

pytest.importorskip("triton")

# launches, host waits, copies from unpinned memory
KNOWN = {
    "a view": [0, 0, 0],
    "an allocation": [0, 0, 0],
    "zeros": [1, 0, 0],
    "on the host": [0, 0, 0],
    "a product and a sum": [2, 0, 0],
    "item": [0, 1, 0],
    "of a bool": [2, 1, 0],
    "to the host": [1, 1, 0],
    "to pinned memory, no wait": [1, 0, 0],
    "to pageable memory": [1, 1, 0],
    "from pinned memory, no wait": [1, 0, 0],
    "from a part of pinned memory": [1, 0, 0],
    "from pageable memory": [1, 0, 1],
    "a number": [1, 0, 1],
    "by a mask": [1, 1, 0],
    "an eigenvalue problem": [1, 1, 0],
    "foreach of 200": [2, 0, 0],  # 110 tensors of one list a launch
    "foreach of two lists": [4, 0, 0],  # 64 of two
    "foreach of 400 blocks": [2, 0, 0],  # 320 of 65536 elements
    "foreach of two dtypes": [200, 0, 0],  # torch's slow path
    "a cat of 200": [2, 0, 0],
    "a stream": [0, 1, 0],
    "an event": [0, 1, 0],
    "a kernel of Triton": [1, 0, 0],
    "two devices": ["two devices"],
}


def test_operations_are_counted_as_a_gpu_would_run_them() -> None:
    assert json.loads(output_of("recorded.py").splitlines()[-1]) == KNOWN
