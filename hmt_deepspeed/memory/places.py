"""Where tensors are in host memory: those that are used together side by side, to travel in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from .growing import GrowingHostStore
from .layout import Layout
from .pool import whole_pages

__all__ = ["Home", "Places", "Reserve"]


# (key, bytes, of one tensor or else of several): whether there is room for it
Reserve = Callable[[str, int, bool], bool]


@dataclass(frozen=True)
class Home:
    """Where a tensor is: from byte ``begin`` on of what the store has under a key."""

    key: str
    begin: int
    layout: Layout

    def is_before(self, other: Home) -> bool:
        """Whether the other's bytes follow its own."""
        return (self.key, self.begin + self.layout.nbytes) == (other.key, other.begin)


@dataclass(eq=False)
class _Block:
    """Room for tensors side by side: its key in the store, bytes of each in order, and which of them live there."""

    key: str
    sizes: dict[str, int]
    names: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


class Places:
    """Homes of tensors in a store.

    Args:
        store: of the tensors. most: bytes of those side by side, unless one has more.

    Attributes:
        homes: of tensors, by name.
    """

    def __init__(self, store: GrowingHostStore, most: int) -> None:
        self._store, self._most = store, most
        self.homes: dict[str, Home] = {}
        self._blocks: dict[str, _Block] = {}  # where each is, or has room once it comes
        self._num_blocks = 0
        self._neighbours: dict[str, dict[str, int]] = {}  # with bytes, of what is to come
        self._apart: set[tuple[str, ...]] = set()  # for which there was no room side by side

    @property
    def nbytes(self) -> int:
        """Of whole pages."""
        return sum(whole_pages(block.nbytes) for block in set(self._blocks.values()))

    def arrange(self, runs: Iterable[Mapping[str, int]]) -> None:
        """Say which tensors of so many bytes are to lie side by side, though they come one by one: those of equal bytes
        that follow one another in a run."""
        self._neighbours.clear()
        for run in runs:
            for _, alike in groupby(run.items(), itemgetter(1)):
                for chunk in self._chunks(dict(alike)):
                    self._neighbours.update(dict.fromkeys(chunk, chunk))

    def settle(self, layouts: Mapping[str, Layout], reserve: Reserve) -> None:
        """Have homes for tensors that are side by side elsewhere, so too if there is room for it; those without room have
        none. What was held for them is lost.

        Args:
            reserve: takes room in the store.
        """
        sizes = {name: layout.nbytes for name, layout in layouts.items()}
        for name, nbytes in sizes.items():
            if name in self.homes and self.homes[name].layout.nbytes != nbytes:
                self.drop(name)
        for chunk in self._chunks(sizes):
            if len(chunk) > 1 and len(list(self.pieces(chunk))) > 1:
                for name in chunk:
                    self.drop(name)
                self._take(chunk, reserve)
        for name, layout in layouts.items():
            if name not in self.homes and not self._has_room(name, layout.nbytes):
                self._take(self._neighbours_of(name, layout.nbytes), reserve)
                if not self._has_room(name, layout.nbytes):
                    self._take({name: layout.nbytes}, reserve)
            if self._has_room(name, layout.nbytes):
                self._move_in(name, layout)

    def pieces(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Tensors in groups, each of neighbours in the order given; one without a home is alone."""
        piece: list[str] = []
        for name in names:
            home, before = self.homes.get(name), self.homes.get(piece[-1]) if piece else None
            if piece and (home is None or before is None or not before.is_before(home)):
                yield piece
                piece = []
            piece.append(name)
        if piece:
            yield piece

    def drop(self, name: str) -> None:
        """Give a home up; nothing if there is none."""
        if self.homes.pop(name, None) is None:
            return
        block = self._blocks[name]
        block.names.remove(name)
        if not block.names:
            self._store.drop(block.key)
            for other in block.sizes:
                if self._blocks.get(other) is block:
                    del self._blocks[other]

    def clear(self) -> None:
        """Forget all homes and arrangements; the store is closed."""
        self.homes.clear()
        self._blocks.clear()
        self.forget()

    def forget(self) -> None:
        """Forget what was arranged, and what had no room."""
        self._neighbours.clear()
        self._apart.clear()

    # -- steps ----------------------------------------------------------------------------------

    def _chunks(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Names with bytes, in parts that are to lie side by side."""
        chunk: dict[str, int] = {}
        for name, nbytes in sizes.items():
            if chunk and sum(chunk.values()) + nbytes > self._most:
                yield chunk
                chunk = {}
            chunk[name] = nbytes
        if chunk:
            yield chunk

    def _neighbours_of(self, name: str, nbytes: int) -> dict[str, int]:
        """With whom it is to have room, if none of them has a home already."""
        chunk = self._neighbours.get(name, {})
        is_first = chunk.get(name) == nbytes and self.homes.keys().isdisjoint(chunk)
        return chunk if is_first else {name: nbytes}

    def _take(self, chunk: Mapping[str, int], reserve: Reserve) -> None:
        """Room for tensors side by side, if there is any; asked once of several that had none."""
        several = tuple(chunk) if len(chunk) > 1 else ()
        if several in self._apart:
            return
        block = _Block(f"block {self._num_blocks}", dict(chunk))
        self._num_blocks += 1
        if reserve(block.key, block.nbytes, not several):
            self._blocks.update(dict.fromkeys(chunk, block))
        elif several:
            self._apart.add(several)

    def _has_room(self, name: str, nbytes: int) -> bool:
        """Whether it has a place of so many bytes, used or not."""
        block = self._blocks.get(name)
        return block is not None and block.sizes[name] == nbytes

    def _move_in(self, name: str, layout: Layout) -> None:
        block, begin = self._blocks[name], 0
        for other, nbytes in block.sizes.items():
            if other == name:
                break
            begin += nbytes
        block.names.add(name)
        self.homes[name] = Home(block.key, begin, layout)
