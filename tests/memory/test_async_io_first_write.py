"""DeepSpeed 0.19.8's first write logs a warning inside ``std::call_once``: a second thread that comes to it
meanwhile waits with the GIL held, and the process hangs for good. ``AsyncIO`` makes its first write alone."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import torch
from harness import Ranks
from ssd_io import async_io


class Slow(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.2)  # gives up the GIL, as any log file does


def first_writes(folder: str) -> list[int]:
    """Sizes of two files, in a process that has written none before."""
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    logger.addHandler(Slow())
    io, memory = async_io(), torch.zeros(4096, dtype=torch.uint8)
    paths = [Path(folder, str(index)) for index in range(2)]
    for path in paths:
        path.write_bytes(bytes(4096))
    threads = [threading.Thread(target=io.write, args=(str(path), memory)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [path.stat().st_size for path in paths]


def test_two_threads_come_to_the_first_write(ranks: Ranks, tmp_path: Path) -> None:
    async_io()  # or skip
    assert ranks.run(first_writes, 1, str(tmp_path)) == [[4096, 4096]]
