"""A cache of projection bases in pinned host memory; the device holds only those that the step needs next.

HMT paper, stage 4: host memory as a cache of bases instead of a place to offload weights to, since bases are
so much smaller. Old bases, and low-rank moments that belong to some, are kept in what room the current ones leave.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from torch import Tensor

from .errors import PoolFull
from .fetch_ahead import FetchAhead
from .growing import GrowingHostStore
from .layout import Layout, flatten
from .places import Places
from .pool import whole_pages
from .transfer import TransferEngine

__all__ = ["SLAB_BYTES", "BasisCache"]

# Pinned at once when the bases so far leave no room: a fraction of a large model's, and all of a small one's. Those that
# lie side by side are as many at most.
SLAB_BYTES = 2**26


class _Kept(NamedTuple):
    """An old item: the bytes of its tensors and, of an old basis, its name and columns."""

    nbytes: tuple[int, ...]
    basis_of: str | None = None
    columns: int = 0


class BasisCache:
    """Current bases, which live nowhere else, and old bases and moments, which make room for them.

    A current basis is fetched by :meth:`get` and dropped from the device by the next one, see :meth:`together`; while it
    is used, the bases that come next are on their way, see :meth:`begin_round`. Those that were put side by side travel
    together. Old bases (:meth:`remember`) and groups of old tensors (:meth:`keep`) stay until ``max_bytes`` are reached;
    then the least recently used goes first.

    Args:
        engine: what moves them.
        max_bytes: of pinned host memory; each tensor occupies whole pages of 4096 bytes.

    Attributes:
        hits, misses: by name: how often :meth:`get` found the basis on the device or on its way there, and how
            often it had to ask for it. old_hits, old_misses: of :meth:`recall`, of all names together.
        device_bytes, peak_device_bytes: of bases on the device or on their way there, now and at most; of
            what the cache holds, not of what its caller still does.
        num_evicted: old ones that had to make room, bases or what else was kept.
        held: keys that do not make room, see :meth:`keep`; the caller's.
    """

    def __init__(self, engine: TransferEngine, max_bytes: int) -> None:
        self.engine = engine
        slab = min(SLAB_BYTES, max_bytes)
        self._store = GrowingHostStore(
            engine, max_bytes, "the host memory that bases may take", slab
        )
        self._places = Places(self._store, slab)
        self._device = FetchAhead(engine, self._store, self._places)
        self._old: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self.held: set[str] = set()
        self._learned: list[str] = []  # what the last round of unknown order asked for
        self._asked: list[str] | None = None  # what this one has
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.old_hits = self.old_misses = self.num_evicted = 0

    # -- current bases --------------------------------------------------------------------------

    def arrange(self, runs: Iterable[Mapping[str, int]]) -> None:
        """Say which bases are to lie side by side, see :meth:`Places.arrange`."""
        self._places.arrange(runs)

    def put(self, name: str, basis: Tensor) -> bool:
        """Make host memory the home of a basis, see :meth:`put_all`. False: there is no room, and the caller keeps it."""
        return bool(self.put_all({name: basis}))

    def put_all(self, bases: Mapping[str, Tensor]) -> set[str]:
        """Make host memory the home of bases by name, in place of those of these names. Those that lie side by side, one
        after the other, come to lie so there if there is room for it, and travel in one copy.

        The caller may free them at once, not write to them.

        Returns:
            Those that have found room; the caller keeps the others.
        """
        placed = list[str]()
        for layouts, flat in _side_by_side(bases):
            for name in layouts:
                self._device.leave(name)
            self._places.settle(layouts, self._reserve)
            begin = 0
            for piece in self._places.pieces(layouts):
                end = begin + sum(layouts[name].nbytes for name in piece)
                if piece[0] in self:
                    home = self._places.homes[piece[0]]
                    self._store.write(home.key, home.begin, flat[begin:end])
                    placed += piece
                begin = end
        if self._asked is None:  # the best guess at a first use is the order of arrival
            known = set(self._learned)
            self._learned += [name for name in placed if name not in known]
        return set(placed)

    def get(self, name: str) -> Tensor:
        """A current basis on the device, to be read only until the next call, or in a block of :meth:`together`.

        Raises:
            KeyError: not a current basis.
            TransferError: a copy failed, either way.
        """
        (self.hits if name in self._device else self.misses)[name] += 1
        basis = self._device.get(name)
        if self._asked is not None:
            self._asked.append(name)
        return basis

    def together(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Of these bases those that :meth:`get` brings stay on the device until the block ends."""
        return self._device.together(names)

    def drop(self, name: str) -> None:
        """Forget a current basis; nothing if there is none of that name."""
        self._device.leave(name)
        self._places.drop(name)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other bases, current and old, and whatever else is old."""
        for name in [name for name in self._places.homes if name not in names]:
            self.drop(name)
        self._places.forget()
        for key, kept in list(self._old.items()):
            if kept.basis_of not in names:
                self.discard(key)

    def begin_round(self, batches: Sequence[Sequence[str]] | None = None) -> None:
        """Say what will be asked for, in order; those of a batch are on the device together, and come together. None: what
        the last round of unknown order asked for, one by one."""
        if self._asked:
            self._learned = self._asked
        self._asked = [] if batches is None else None
        self._device.expect([[name] for name in self._learned] if batches is None else batches)

    def __contains__(self, name: str) -> bool:
        return name in self._places.homes

    # -- old bases ------------------------------------------------------------------------------

    def remember(self, name: str, basis: Tensor) -> None:
        """Keep an old basis (n x r), in place of the one of that name, as long as there is room for it."""
        self._keep(_old(name), [basis], _Kept((basis.nbytes,), name, basis.shape[1]))

    def recall(self, name: str) -> Tensor | None:
        """The old basis of a name on the device, or None where none was kept or it had to make room."""
        if not self.has_kept(_old(name)):
            self.old_misses += 1
            return None
        self.old_hits += 1
        self.touch(_old(name))
        return self.old(name)

    def old(self, name: str) -> Tensor:
        """The same, not counted as a use. KeyError: there is none."""
        return self._store.get(_part(_old(name), 0))

    def old_names(self) -> list[str]:
        """Names with an old basis, least recently used first."""
        return [kept.basis_of for kept in self._old.values() if kept.basis_of is not None]

    def old_width(self, name: str) -> int:
        """Columns of the old basis of a name, 0 if there is none."""
        return self._old[_old(name)].columns if self.has_kept(_old(name)) else 0

    def forget(self, name: str) -> None:
        """Drop the old basis of a name, if there is one."""
        self.discard(_old(name))

    # -- whatever else is old -------------------------------------------------------------------

    def keep(self, key: str, tensors: Sequence[Tensor]) -> bool:
        """Keep tensors under a key, all or none of them, as long as there is room; one entry. They may be freed
        at once, not written to. False: there is no room."""
        return self._keep(key, tensors, _Kept(tuple(tensor.nbytes for tensor in tensors)))

    def has_kept(self, key: str) -> bool:
        return key in self._old

    def kept_bytes(self, key: str) -> int:
        return sum(self._old[key].nbytes)

    def expect(self, key: str) -> None:
        """Start the copies to the device of what is kept under a key; :meth:`kept` then finds them there."""
        for part in range(len(self._old[key].nbytes)):
            self._store.prefetch(_part(key, part))

    def kept(self, key: str) -> list[Tensor]:
        """The tensors kept under a key, on the device. Raises KeyError where there are none."""
        return [self._store.get(_part(key, part)) for part in range(len(self._old[key].nbytes))]

    def touch(self, key: str) -> None:
        """Count what is kept under a key as used now. KeyError: nothing is."""
        self._old.move_to_end(key)

    def discard(self, key: str) -> None:
        """Drop what is kept under a key, if anything is."""
        kept = self._old.pop(key, None)
        for part in range(0 if kept is None else len(kept.nbytes)):
            self._store.drop(_part(key, part))

    def kept_keys(self) -> list[str]:
        """Keys of all old items, least recently used first."""
        return list(self._old)

    # -- numbers --------------------------------------------------------------------------------

    @property
    def device_bytes(self) -> int:
        return self._device.nbytes

    @property
    def peak_device_bytes(self) -> int:
        return self._device.peak_nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all bases in host memory, current and old, and of old moments."""
        current = sum(home.layout.nbytes for home in self._places.homes.values())
        return current + sum(sum(kept.nbytes) for kept in self._old.values())

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for them and for what is on its way."""
        return self._store.pinned_bytes + self.engine.pool.nbytes

    def close(self) -> None:
        """Forget everything and free the memory. Idempotent."""
        self._device.close()
        self._places.clear()
        self._old.clear()
        self._store.close()
        self.engine.close()

    # -- steps ----------------------------------------------------------------------------------

    def _keep(self, key: str, tensors: Sequence[Tensor], kept: _Kept) -> bool:
        self.discard(key)
        if sum(map(whole_pages, kept.nbytes)) > self._store.max_bytes - self._places.nbytes:
            return False  # not even if all that is old made room
        for part, tensor in enumerate(tensors):
            if not self._make_room(partial(self._store.put, _part(key, part), tensor)):
                for done in range(part):
                    self._store.drop(_part(key, done))
                return False
        self._old[key] = kept
        return True

    def _reserve(self, key: str, nbytes: int, evicts: bool) -> bool:
        """Room for current bases, at the expense of what is old if it ``evicts``."""
        return self._make_room(partial(self._store.reserve, key, nbytes), evicts)

    def _make_room(self, take: Callable[[], None], evicts: bool = True) -> bool:
        """Take room in the store, at the expense of what is old if need be and it ``evicts``; whether there is any."""
        while True:
            try:
                take()
                return True
            except PoolFull:
                oldest = next((old for old in self._old if old not in self.held), None)
                if oldest is None or not evicts:
                    return False
            self.discard(oldest)
            self.num_evicted += 1


def _side_by_side(bases: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Layout], Tensor]]:
    """Bases by name in groups, each of tensors whose bytes follow one another in memory: layouts, and all bytes (uint8)."""
    group: list[tuple[str, Layout, Tensor]] = []
    for name, basis in bases.items():
        layout, flat = flatten(basis)
        if group and not _follows(group[-1][2], flat):
            yield _joined(group)
            group = []
        group.append((name, layout, flat))
    if group:
        yield _joined(group)


def _follows(flat: Tensor, other: Tensor) -> bool:
    """Whether the other's bytes are the next of the same memory."""
    is_same = flat.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_same and flat.storage_offset() + flat.numel() == other.storage_offset()


def _joined(group: Sequence[tuple[str, Layout, Tensor]]) -> tuple[dict[str, Layout], Tensor]:
    layouts = {name: layout for name, layout, _ in group}
    nbytes = sum(layout.nbytes for layout in layouts.values())
    return layouts, group[0][2].as_strided((nbytes,), (1,))


def _old(name: str) -> str:
    return f"old basis of {name}"


def _part(key: str, part: int) -> str:
    return f"{key}, part {part}"
