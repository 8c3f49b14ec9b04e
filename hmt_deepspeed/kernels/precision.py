"""fp32 products in fp32, whatever the user lets torch do with them.

``torch.set_float32_matmul_precision("high")`` multiplies fp32 matrices in TF32, with 10 bits of a number left. A
model's products bear it. Bases do not: their columns would be orthogonal to 1e-3, not 1e-6, and energies and
norms of residuals are differences of such products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["fp32_products"]

_lock = threading.Lock()
_inside = 0  # blocks, of all threads
_restore: Callable[[], None] | None = None


@contextmanager
def fp32_products() -> Iterator[None]:
    """A block, or a decorated function, whose products of fp32 matrices are fp32's.

    The setting is the process's: other threads that launch products meanwhile get fp32 ones too. What the user set
    returns with the end of the last block. Nothing waits for a device.
    """
    global _inside, _restore
    with _lock:
        if not _inside:
            _restore = _forbid_less()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _restore is not None:
                _restore()
                _restore = None


def _forbid_less() -> Callable[[], None] | None:
    """Set products to fp32; returns what undoes it, or None where they are already.

    torch has two settings, one of the process and since 2.9 one of each backend, and refuses to read the first
    where they contradict each other.
    """
    places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    backends = [place for place in places if hasattr(place, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        whole = None
    if whole == "highest":
        return None

    def assign(whole: str | None, precisions: list[str]) -> None:
        if whole is not None:
            torch.set_float32_matmul_precision(whole)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision

    assign(None if whole is None else "highest", ["ieee"] * len(backends))
    return lambda: assign(whole, before)
