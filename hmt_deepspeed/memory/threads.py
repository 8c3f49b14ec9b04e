"""Worker threads of this package."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

from .counters import run_in_background

__all__ = ["OrderedThread", "background_threads"]


def background_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads on the caller's CUDA device, whose waiting is not counted."""
    return ThreadPoolExecutor(num_threads, name, initializer=_beginning())


def _beginning() -> Callable[[], None]:
    """What a new thread does first.

    It begins on device 0 whatever device its maker is on, and whatever asks CUDA anything there
    opens a context: half a gigabyte of device 0 for every rank.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def begin() -> None:
        run_in_background()
        if device is not None:
            torch.cuda.set_device(device)

    return begin


class _Progress:
    """How many calls are done, and who waits for more."""

    def __init__(self) -> None:
        self.done = self.num_waiting = 0
        self.error: BaseException | None = None  # the first
        self.changed = threading.Condition()

    def advance(self) -> None:
        self.done += 1
        if (
            self.num_waiting
        ):  # read after `done` is written; who waits reads them the other way round
            with self.changed:
                self.changed.notify_all()

    def wait(self, number: int) -> None:
        if self.done < number:
            with self.changed:
                self.num_waiting += 1
                self.changed.wait_for(lambda: self.done >= number)
                self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class OrderedThread:
    """Runs calls one after another, in order of submission.

    A submission costs a tuple in a queue: no future, whose lock alone costs the submitter more than everything else
    of a short job. The thread ends when it is shut down, or nobody has this object any more, or the interpreter
    exits; each time once all that was submitted is done.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = (
            SimpleQueue()
        )
        self._progress, self._submitted = _Progress(), 0
        self._thread = threading.Thread(
            target=_run, args=(self._calls, self._progress, _beginning()), name=name
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)
        _threads.add(self)

    def submit(self, call: Callable[..., object], *args: Any) -> int:
        """Queue a call; its number, for :meth:`wait`."""
        self._calls.put((call, args))
        self._submitted += 1
        return self._submitted

    def wait(self, number: int) -> None:
        """Returns when the call of that number is done, and so are those before it. Raises the first error of any."""
        self._progress.wait(number)

    def shutdown(self) -> None:
        """Waits for what was submitted. Idempotent."""
        self._end()
        self._thread.join()


def _run(
    calls: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None],
    progress: _Progress,
    begin: Callable[[], None],
) -> None:
    begin()
    while (queued := calls.get()) is not None:
        call, args = queued
        try:
            call(*args)
        except BaseException as error:
            progress.error = progress.error or error
        del queued, call, args  # an idle thread keeps nothing alive
        progress.advance()


_threads: weakref.WeakSet[OrderedThread] = weakref.WeakSet()


def _shut_down_all() -> None:
    for thread in list(_threads):
        thread.shutdown()


# The interpreter joins threads before it calls what `atexit` holds.
threading._register_atexit(_shut_down_all)  # type: ignore[attr-defined]
