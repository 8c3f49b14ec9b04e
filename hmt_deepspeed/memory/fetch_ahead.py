"""What a cache in host memory has on the device: what is in use, and what was announced to come next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count

from torch import Tensor

from .errors import TransferError
from .growing import GrowingHostStore
from .layout import Layout, view_of
from .places import Places
from .transfer import Arrival, TransferEngine

__all__ = ["PREFETCH", "FetchAhead"]

# Tensors on their way to the device beside those in use; the batch that makes them as many is begun as a whole.
PREFETCH = 2


@dataclass(eq=False)
class _Batch:
    """Tensors that come together.

    Attributes:
        coming: copies under way, each of neighbours in host memory: their names, and layouts. here: what has come.
        nbytes: of all.
    """

    nbytes: int
    names: set[str]
    coming: list[tuple[Arrival, dict[str, Layout]]] = field(default_factory=list)
    here: dict[str, Tensor] = field(default_factory=dict)


class FetchAhead:
    """Brings tensors from a store in batches, in the order in which they are expected.

    A batch is on the device from the first :meth:`get` of a tensor of it until that of another's; the next one is on its
    way meanwhile. Neighbours in host memory come in one copy.

    Args:
        engine, store: of the tensors. places: where they are.

    Attributes:
        nbytes, peak_nbytes: of what is on the device or on its way there, now and at most.
    """

    def __init__(self, engine: TransferEngine, store: GrowingHostStore, places: Places) -> None:
        self._engine, self._store, self._places = engine, store, places
        self._batch_of: dict[str, _Batch] = {}
        self._together: Collection[str] = ()  # stay until their block ends
        self._expected: list[list[str]] = []
        self._coming: dict[int, _Batch] = {}  # by place in what is expected
        self._asked: _Batch | None = None  # the last that was asked for
        self._place = 0  # in it: of what comes next
        self.nbytes = self.peak_nbytes = 0

    def expect(self, batches: Iterable[Sequence[str]]) -> None:
        """Say what will be asked for, in order; those of a batch together. What was asked for before is dropped, but in a
        block of :meth:`together`."""
        self._expected, self._place = [list(batch) for batch in batches], 0
        for batch in set(self._batch_of.values()):
            if batch.coming or batch.names.isdisjoint(self._together):
                self._remove(batch)
        self._coming.clear()
        self._asked = None
        self._bring()

    def __contains__(self, name: str) -> bool:
        """Whether it is on the device or on its way there."""
        return name in self._batch_of

    def get(self, name: str) -> Tensor:
        """A tensor on the device; see :meth:`BasisCache.get`."""
        batch = self._batch_of.get(name)
        if batch is not None and batch is self._asked:
            return batch.here[name]
        for other in set(self._batch_of.values()) - {batch, *self._coming.values()}:
            if other.names.isdisjoint(self._together):
                self._remove(other)  # freed before anything new is allocated
        if batch is None:
            batch = self._fetch([name])
        self._coming = {place: b for place, b in self._coming.items() if b is not batch}
        self._receive(batch)
        self._asked = batch
        self._advance(name)
        return batch.here[name]

    @contextmanager
    def together(self, names: Collection[str]) -> Iterator[None]:
        """Of these tensors those that :meth:`get` brings stay on the device until the block ends."""
        self._together = names
        try:
            yield
        finally:
            self._together = ()
            for batch in set(self._batch_of.values()) - {self._asked, *self._coming.values()}:
                self._remove(batch)
            self._count()

    def leave(self, name: str) -> None:
        """What is on the device of a tensor is not to be used any more."""
        batch = self._batch_of.pop(name, None)
        if batch is None:
            return
        batch.names.discard(name)
        batch.here.pop(name, None)
        if not batch.names:
            self._remove(batch)
            self._coming = {place: b for place, b in self._coming.items() if b is not batch}
        self._count()

    def close(self) -> None:
        """Drop everything."""
        self._batch_of.clear()
        self._coming.clear()
        self._expected, self._asked = [], None
        self._count()

    # -- steps ----------------------------------------------------------------------------------

    def _advance(self, name: str) -> None:
        """Find the place of ``name`` in what is expected and start on what follows it there."""
        this = max(self._place - 1, 0)  # the batch before may be in use still
        places = chain(range(this, len(self._expected)), range(this))
        found = next((place for place in places if name in self._expected[place]), None)
        if found is not None:  # else it was not used in the last round, or is needed out of turn
            self._place = found + 1
        self._bring()

    def _bring(self) -> None:
        """Start the copies of the next batches, and give up those that turn out not to be next."""
        wanted, known, number = dict[int, list[str]](), set[str](), 0
        here = {name for name, batch in self._batch_of.items() if batch.here}
        for place in count(self._place):
            if number >= PREFETCH or place >= len(self._expected):
                break
            homes = self._places.homes
            names = dict.fromkeys(self._expected[place])
            left = [n for n in names if n in homes and n not in here and n not in known]
            if left:
                wanted[place] = left
                known.update(left)
                number += len(left)
        for place in [place for place in self._coming if place not in wanted]:
            self._remove(self._coming.pop(place))
        for place, left in wanted.items():
            if place not in self._coming:
                with suppress(TransferError):  # tried again, and raised, where it is asked for
                    self._coming[place] = self._fetch([n for n in left if n not in self._batch_of])
        self._count()

    def _fetch(self, names: Sequence[str]) -> _Batch:
        """Start the copies of tensors, those side by side in one."""
        layouts = {name: self._places.homes[name].layout for name in names}
        batch = _Batch(sum(layout.nbytes for layout in layouts.values()), set(names))
        try:
            for piece in self._places.pieces(names):
                home = self._places.homes[piece[0]]
                end = home.begin + sum(layouts[name].nbytes for name in piece)
                arrival = self._store.fetch(home.key, slice(home.begin, end))
                batch.coming.append((arrival, {name: layouts[name] for name in piece}))
        except BaseException:
            self._remove(batch)
            raise
        self._batch_of.update(dict.fromkeys(names, batch))
        return batch

    def _receive(self, batch: _Batch) -> None:
        while batch.coming:
            arrival, layouts = batch.coming.pop(0)
            try:
                flat = self._engine.receive(arrival)
            except BaseException:
                self._remove(batch)
                raise
            begin = 0
            for name, layout in layouts.items():
                if name in batch.names:
                    batch.here[name] = view_of(flat[begin : begin + layout.nbytes], layout)
                begin += layout.nbytes

    def _remove(self, batch: _Batch) -> None:
        """Free a batch; copies under way are given up."""
        for arrival, _ in batch.coming:
            self._engine.abandon(arrival)
        for name in batch.names:
            self._batch_of.pop(name, None)
        batch.coming.clear()
        batch.here.clear()

    def _count(self) -> None:
        self.nbytes = sum(batch.nbytes for batch in set(self._batch_of.values()))
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
