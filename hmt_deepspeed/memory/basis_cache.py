"""A cache of projection bases in pinned host memory; the device holds only those that the step needs next.

HMT paper, stage 4: host memory as a cache of bases instead of a place to offload weights to, since bases are
so much smaller. Old bases, and low-rank moments that belong to some, are kept in what room the current ones leave.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import NamedTuple

from torch import Tensor

from .errors import PoolFull
from .growing import GrowingHostStore
from .pool import whole_pages
from .transfer import TransferEngine

__all__ = ["PREFETCH", "SLAB_BYTES", "BasisCache"]

PREFETCH = 2  # bases on their way to the device beside the one in use

# Pinned at once when the bases so far leave no room: a fraction of a large model's, and all of a small one's.
SLAB_BYTES = 2**26


class _Home(NamedTuple):
    """A current basis in the store: its key and bytes."""

    key: str
    nbytes: int


class _Kept(NamedTuple):
    """An old item: the bytes of its tensors and, of an old basis, its name and columns."""

    nbytes: tuple[int, ...]
    basis_of: str | None = None
    columns: int = 0


class BasisCache:
    """Current bases, which live nowhere else, and old bases and moments, which make room for them.

    A current basis is fetched by :meth:`get` and dropped from the device by the next one, see :meth:`together`; while it
    is used, the bases that come next are on their way, see :meth:`begin_round`. Old bases (:meth:`remember`) and groups of old
    tensors (:meth:`keep`) stay until ``max_bytes`` are reached; then the least recently used goes first.

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
        self._store = GrowingHostStore(
            engine, max_bytes, "the host memory that bases may take", min(SLAB_BYTES, max_bytes)
        )
        self._current: dict[str, _Home] = {}
        self._old: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self.held: set[str] = set()
        self._in_use: dict[str, Tensor] = {}
        self._together: Collection[str] = ()  # stay in use until their block ends
        self._coming: OrderedDict[str, None] = OrderedDict()
        self._expected: list[str] = []  # what the round will ask for, as far as is known
        self._place = 0  # in it: of what comes next
        self._learned: list[str] = []  # what the last round of unknown order asked for
        self._asked: list[str] | None = None  # what this one has
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.old_hits = self.old_misses = self.num_evicted = 0
        self.device_bytes = self.peak_device_bytes = 0

    # -- current bases --------------------------------------------------------------------------

    def put(self, name: str, basis: Tensor) -> bool:
        """Make host memory the home of a basis, in place of the one of that name.

        The caller may free it at once, not write to it. False: there is no room, and the caller keeps it.
        """
        before = self._current.get(name)
        key = name if before is None or before.key != name else f"{name} again"
        # Beside the one before, where there is room: copies of that may be under way, and need not be waited for.
        is_put = before is not None and self._put(key, basis)
        self.drop(name)
        if not is_put and not self._make_room(key, basis):
            return False
        self._current[name] = _Home(key, basis.nbytes)
        if self._asked is None and name not in self._learned:
            self._learned.append(name)  # the best guess at a first use is the order of arrival
        return True

    def get(self, name: str) -> Tensor:
        """A current basis on the device, to be read only until the next call, or in a block of :meth:`together`.

        Raises:
            KeyError: not a current basis.
            TransferError: a copy failed, either way.
        """
        is_here = name in self._in_use
        (self.hits if is_here or name in self._coming else self.misses)[name] += 1
        for other in [o for o in self._in_use if o != name and o not in self._together]:
            del self._in_use[other]  # freed before anything new is allocated
        if not is_here:
            self._coming.pop(name, None)
            self._in_use[name] = self._store.get(self._current[name].key)
        basis = self._in_use[name]
        self._fetch_ahead(name)
        return basis

    @contextmanager
    def together(self, names: Collection[str]) -> Iterator[None]:
        """Of these bases those that :meth:`get` brings stay on the device until the block ends."""
        self._together = names
        try:
            yield
        finally:
            self._together = ()
            self._in_use = dict(list(self._in_use.items())[-1:])
            self._count_device_bytes()

    def drop(self, name: str) -> None:
        """Forget a current basis; nothing if there is none of that name."""
        home = self._current.pop(name, None)
        if home is None:
            return
        self._in_use.pop(name, None)
        self._coming.pop(name, None)
        self._store.drop(home.key)
        self._count_device_bytes()

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other bases, current and old, and whatever else is old."""
        for name in [name for name in self._current if name not in names]:
            self.drop(name)
        for key, kept in list(self._old.items()):
            if kept.basis_of not in names:
                self.discard(key)

    def begin_round(self, order: Sequence[str] | None = None) -> None:
        """Say what will be asked for, in order; None: what the last round of unknown order asked for."""
        if self._asked:
            self._learned = self._asked
        self._expected, self._asked = (self._learned, []) if order is None else (list(order), None)
        self._place = 0
        self._bring()

    def __contains__(self, name: str) -> bool:
        return name in self._current

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
    def host_bytes(self) -> int:
        """Bytes of all bases in host memory, current and old, and of old moments."""
        current = sum(home.nbytes for home in self._current.values())
        return current + sum(sum(kept.nbytes) for kept in self._old.values())

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for them and for what is on its way."""
        return self._store.pinned_bytes + self.engine.pool.nbytes

    def close(self) -> None:
        """Forget everything and free the memory. Idempotent."""
        self._in_use.clear()
        self._current.clear()
        self._old.clear()
        self._coming.clear()
        self._store.close()
        self.engine.close()

    # -- steps ----------------------------------------------------------------------------------

    def _keep(self, key: str, tensors: Sequence[Tensor], kept: _Kept) -> bool:
        self.discard(key)
        current = sum(whole_pages(home.nbytes) for home in self._current.values())
        if sum(map(whole_pages, kept.nbytes)) > self._store.max_bytes - current:
            return False  # not even if all that is old made room
        for part, tensor in enumerate(tensors):
            if not self._make_room(_part(key, part), tensor):
                for done in range(part):
                    self._store.drop(_part(key, done))
                return False
        self._old[key] = kept
        return True

    def _make_room(self, key: str, tensor: Tensor) -> bool:
        """Put it into the store, at the expense of what is old if need be."""
        while not self._put(key, tensor):
            oldest = next((old for old in self._old if old not in self.held), None)
            if oldest is None:
                return False
            self.discard(oldest)
            self.num_evicted += 1
        return True

    def _put(self, key: str, tensor: Tensor) -> bool:
        try:
            self._store.put(key, tensor)
        except PoolFull:
            return False
        return True

    def _fetch_ahead(self, name: str) -> None:
        """Find the place of ``name`` in what is expected and start on what follows it there."""
        if self._asked is not None:
            self._asked.append(name)
        places = chain(range(self._place, len(self._expected)), range(self._place))
        found = next((place for place in places if self._expected[place] == name), None)
        if found is not None:  # else it was not used in the last round, or is needed out of turn
            self._place = found + 1
        self._bring()

    def _bring(self) -> None:
        """Start the copies of the next bases, and give up those that turn out not to be next."""
        wanted = self._next()
        for name in [name for name in self._coming if name not in wanted]:
            del self._coming[name]
            self._store.get(self._current[name].key)
        for name in wanted:
            if name not in self._coming:
                self._store.prefetch(self._current[name].key)
                self._coming[name] = None
        self._count_device_bytes()

    def _next(self) -> list[str]:
        """The next different bases that are expected."""
        coming: dict[str, None] = {}
        for name in islice(self._expected, self._place, None):
            if len(coming) == PREFETCH:
                break
            if name in self._current and name not in self._in_use:
                coming[name] = None
        return list(coming)

    def _count_device_bytes(self) -> None:
        coming = sum(self._current[name].nbytes for name in self._coming)
        self.device_bytes = coming + sum(basis.nbytes for basis in self._in_use.values())
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


def _old(name: str) -> str:
    return f"old basis of {name}"


def _part(key: str, part: int) -> str:
    return f"{key}, part {part}"
