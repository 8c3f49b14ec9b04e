"""Worker threads of this package."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from .counters import run_in_background

__all__ = ["background_threads"]


def background_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads on the caller's CUDA device, whose waiting is not counted.

    A new thread begins on device 0 whatever device its maker is on, and whatever asks CUDA anything there
    opens a context: half a gigabyte of device 0 for every rank.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def begin() -> None:
        run_in_background()
        if device is not None:
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(num_threads, name, initializer=begin)
