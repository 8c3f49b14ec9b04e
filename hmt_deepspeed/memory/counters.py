"""Counts bytes moved and the host's waiting time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["Counters", "in_background", "run_in_background"]

Way = Literal["out", "in"]

_background = threading.local()


def run_in_background() -> None:
    """Called once in a worker thread: what it waits for holds nobody up, and is not counted."""
    _background.yes = True


def in_background() -> bool:
    """Whether this is a worker thread."""
    return getattr(_background, "yes", False)


class Counters:
    """Sums since construction; safe to add to from several threads.

    Attributes:
        bytes_out, bytes_in: moved away from the device (to host, to SSD), and towards it.
        num_out, num_in: transfers each way.
        seconds_out, seconds_in: during which something moved that way, overlapping transfers once; of a copy
            between device and host once it is done.
        seconds_waited: time callers stood still for a transfer (host side: what a device stream waits for is
            not seen here).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_out = self.bytes_in = 0
        self.num_out = self.num_in = 0
        self.seconds_waited = self.seconds_out = self.seconds_in = 0.0
        self._num_moving = {"out": 0, "in": 0}
        self._moving_since = {"out": 0.0, "in": 0.0}

    def count_out(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_out += nbytes
            self.num_out += 1

    def count_in(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_in += nbytes
            self.num_in += 1

    def count_seconds(self, way: Way, seconds: float) -> None:
        """Count the seconds of a transfer whose clock is not the host's."""
        with self._lock:
            self._add_seconds(way, seconds)

    @contextmanager
    def moving(self, way: Way) -> Iterator[None]:
        """Counts the duration of a block that moves bytes; of blocks at once in several threads, their union."""
        self._change_moving(way, 1)
        try:
            yield
        finally:
            self._change_moving(way, -1)

    def _change_moving(self, way: Way, change: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._num_moving[way]:
                self._add_seconds(way, now - self._moving_since[way])
            self._moving_since[way] = now
            self._num_moving[way] += change

    def _add_seconds(self, way: Way, seconds: float) -> None:
        if way == "out":
            self.seconds_out += seconds
        else:
            self.seconds_in += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the duration of a block as waited, unless in a background thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if not getattr(_background, "yes", False):
                with self._lock:
                    self.seconds_waited += time.perf_counter() - start
