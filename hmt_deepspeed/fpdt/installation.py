"""An installation of FPDT on a model, and its removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from hmt_deepspeed import ownership
from hmt_deepspeed.fpdt.chunks import ChunkMemory
from hmt_deepspeed.fpdt.sequence import SequenceParallel

__all__ = ["Installation"]


class Installation:
    """The changes of :func:`hmt_deepspeed.fpdt.install.install`.

    They stay until :meth:`remove`, or until another owner takes the model over.

    Args:
        model: that it is on. engine: whose installation it is, for messages; nothing takes an engine's place while
            that lives.

    Attributes:
        memory: the chunks' store, with its transfer counters.
        sequence: the ranks that share each sequence.
    """

    dropped = False  # the model keeps it

    def __init__(
        self, model: nn.Module, memory: ChunkMemory, sequence: SequenceParallel, engine: str = ""
    ) -> None:
        self.model, self.engine = model, engine
        self.memory, self.sequence = memory, sequence
        self._changes: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self._replaced: list[nn.Module] = []

    def replace_method(self, module: Any, name: str, method: Callable[..., Any]) -> None:
        """Gives one module another method until :meth:`remove`."""
        before = vars(module).get(name)
        bound = MethodType(method, module)

        def undo() -> None:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

        self._change(lambda: setattr(module, name, bound), undo)
        self._replaced.append(module)

    def set_config(self, config: Any, name: str, value: object) -> None:
        """Sets an attribute until :meth:`remove`."""
        before = getattr(config, name)
        self._change(lambda: setattr(config, name, value), lambda: setattr(config, name, before))

    def _change(self, do: Callable[[], object], undo: Callable[[], object]) -> None:
        do()
        self._changes.append((do, undo))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model is its own for a while: caches and all."""
        for _, undo in reversed(self._changes):
            undo()
        try:
            yield
        finally:
            for do, _ in self._changes:
                do()

    def remove(self) -> None:
        """Restores the model and frees the host memory. Idempotent."""
        ownership.leave(self)
        while self._changes:
            self._changes.pop()[1]()
        self.memory.close()

    def owner_name(self) -> str:
        """See :class:`hmt_deepspeed.ownership.Owner`."""
        return f"an earlier FPDT installation on {type(self.model).__name__}"

    def owned(self) -> Iterable[nn.Module]:
        """The modules whose forward is replaced, and the model."""
        return [self.model, *self._replaced]

    def unfinished(self) -> str:
        """The engine that it belongs to."""
        return f"it is that of {self.engine}, which is in use" if self.engine else ""

    def give_up(self, to: str) -> None:
        """As :meth:`remove`."""
        self.remove()
