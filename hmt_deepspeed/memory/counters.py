"""What was moved, and how long the host waited for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Counters", "run_in_background"]

_background = threading.local()


def run_in_background() -> None:
    """Called once in a worker thread: what it waits for holds nobody up, and is not counted."""
    _background.yes = True


class Counters:
    """Sums since construction; safe to add to from several threads.

    Attributes:
        bytes_out, bytes_in: moved away from the device (to host, to SSD), and towards it.
        num_out, num_in: transfers each way.
        seconds_waited: time callers stood still for a transfer (host side: what a device stream waits for is
            not seen here).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_out = self.bytes_in = 0
        self.num_out = self.num_in = 0
        self.seconds_waited = 0.0

    def count_out(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_out += nbytes
            self.num_out += 1

    def count_in(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_in += nbytes
            self.num_in += 1

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
