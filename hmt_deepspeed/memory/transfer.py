"""The engine that moves tensors between the device and pinned host memory, beside the device's work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .counters import Counters, Way
from .errors import TransferError
from .layout import Layout, bytes_layout, flatten, new_like
from .pool import Buffer, PinnedPool
from .streams import Direction, Event, Streams, streams_of

__all__ = ["Arrival", "Transfer", "TransferEngine"]

_ALL = slice(None)


class Arrival:
    """A tensor on its way to the device, whole or in parts.

    Made by :meth:`TransferEngine.expect`, ``into`` or ``fetch``.
    """

    def __init__(self, name: str, tensor: Tensor, flat: Tensor, home: Any, ready: Event) -> None:
        self.name, self.tensor, self.flat, self.home = name, tensor, flat, home
        self.ready = ready  # the memory below it may be written
        self.copies: list[tuple[Tensor, Event]] = []  # submitted: bytes of ``flat``, and their end


class Transfer:
    """Handle of a tensor put on the host: ``put`` -> held -> ``drop``; fetched as often as wanted between.

    Attributes:
        name: for messages.
        layout: type and geometry of the tensor.
        stored: its bytes have arrived on the host.
        arrival: what a prefetch has begun and nobody has taken yet.
    """

    def __init__(
        self, name: str, layout: Layout, pool: PinnedPool, buffer: Buffer, stored: Event
    ) -> None:
        self.name, self.layout, self.stored = name, layout, stored
        self._pool, self.buffer = pool, buffer
        self._fetched: tuple[Event, ...] = ()  # the last fetch, which ends after those before it
        self.arrival: Arrival | None = None
        self._dropped = False


class TransferEngine:
    """Asynchronous copies over one side stream each way and a pinned pool of constant size.

    A copy to the host starts when the work submitted so far to the caller's current stream is done; a
    fetched tensor is waited for by the stream that is current in :meth:`get`, not by the host. The host
    waits only for room: in a pool, or because ``pool_bytes`` are already on their way to the host, which
    bounds the device memory that waits to be freed. The caller must not write into a tensor between
    :meth:`put` and the end of its copy (``transfer.stored``), but may free it at once.

    Call these methods outside ``with torch.cuda.stream(side)``, or mean that stream: the current stream
    is where a tensor was made and where it will be used. Safe to use from several threads.

    Args:
        device: of the tensors; CUDA, or the CPU with :class:`TwinStreams`.
        pool_bytes: pinned bytes of ``pool``, where transfers on their way to or from an SSD stay, and the
            bytes that may be on their way to the host at once (a larger tensor goes alone).
        streams: for a device that is neither CPU nor CUDA, or for tests.
        outgoing_bytes: that may be on their way to the host at once, if not ``pool_bytes``; for a caller whose
            tensors live on, so that none waits to be freed.

    Attributes:
        pool: see ``pool_bytes``.

    Raises:
        ValueError: no streams are known for the device, or ``pool_bytes`` is not positive.
        RuntimeError: the memory cannot be page-locked.
    """

    def __init__(
        self,
        device: torch.device | str,
        pool_bytes: int,
        streams: Streams | None = None,
        outgoing_bytes: int | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.streams = streams or streams_of(device)
        self._counters = Counters()
        self._copying: dict[Way, deque[Event]] = {"out": deque(), "in": deque()}
        self._counting = threading.Lock()
        self._lock = threading.RLock()
        self._pools: list[PinnedPool] = []
        self.pool = self.new_pool(pool_bytes, "transfer pool")
        self._outgoing: deque[tuple[Event, int]] = deque()
        self._outgoing_bytes = 0
        self._most_outgoing = self.pool.nbytes if outgoing_bytes is None else outgoing_bytes

    @property
    def counters(self) -> Counters:
        """Bytes and copies each way, as submitted; seconds the host waited, and those of the copies done."""
        self._count_seconds()
        return self._counters

    def new_pool(self, nbytes: int, purpose: str) -> PinnedPool:
        """A further pinned pool of constant size, for a store that keeps what is put there."""
        pool = PinnedPool(nbytes, purpose, self.streams, self._counters)
        self._pools.append(pool)
        return pool

    # -- handles ----------------------------------------------------------------------------------

    def put(
        self, tensor: Tensor, name: str, pool: PinnedPool | None = None, lent: bool = False
    ) -> Transfer:
        """Starts the copy of a tensor to the host. Dense tensors keep their strides, see ``layout``.

        Args:
            pool: where to; by default ``self.pool``.
            lent: another thread will drop the handle without the caller's help.

        Raises:
            ValueError: not on ``self.device``, or not a plain dense tensor.
            PoolFull: larger than the pool, or no room while every buffer in it is held.
            TransferError: the copy could not be started.
        """
        if tensor.device != self.device:
            raise ValueError(f"{name!r} is on {tensor.device}, this engine moves {self.device}")
        layout, flat = flatten(tensor)
        pool = pool or self.pool
        buffer = pool.take(layout.nbytes, name, lent)
        try:
            stored = self._store(flat, name, buffer.memory[: layout.nbytes], [])
        except BaseException:
            pool.release(buffer)
            raise
        return Transfer(name, layout, pool, buffer, stored)

    def reserve(self, nbytes: int, name: str, pool: PinnedPool) -> Transfer:
        """A handle of so many bytes, which are undefined until they are written.

        Raises:
            PoolFull: as :meth:`put`.
        """
        buffer = pool.take(nbytes, name)
        return Transfer(name, bytes_layout(nbytes), pool, buffer, self.streams.mark())

    def write(self, transfer: Transfer, begin: int, flat: Tensor) -> None:
        """Starts the copy of flat bytes (uint8) into what a handle holds, from its byte ``begin`` on. What was fetched
        before brings what was held then; the host waits for neither.

        Raises:
            RuntimeError: the handle was dropped.
            TransferError: the copy could not be started.
        """
        with self._lock:
            self._check(transfer)
            before = [transfer.stored, *transfer._fetched]
            target = transfer.buffer.memory[begin : begin + flat.numel()]
            transfer.stored = self._store(flat, transfer.name, target, before)

    def prefetch(self, transfer: Transfer) -> None:
        """Starts the copy back to the device, unless it is on its way.

        When that does not work now (no device memory), :meth:`get` tries again and raises.

        Raises:
            RuntimeError: the handle was dropped.
        """
        with self._lock:
            self._check(transfer)
            if transfer.arrival is None:
                with suppress(TransferError):
                    transfer.arrival = self.fetch(transfer)

    def get(self, transfer: Transfer) -> Tensor:
        """The tensor, on the device, ready for the caller's current stream. The host keeps its bytes.

        Each call without a :meth:`prefetch` since the last one makes a new copy.

        Raises:
            TransferError: the copy failed, either way; the message names the handle.
            RuntimeError: the handle was dropped.
        """
        with self._lock:
            self._check(transfer)
            arrival, transfer.arrival = transfer.arrival or self.fetch(transfer), None
        return self.receive(arrival)

    def host_bytes(self, transfer: Transfer) -> Tensor:
        """The bytes on the host (uint8, ``layout.nbytes``), once they are there; valid until the drop.

        Raises:
            TransferError: the copy failed.
            RuntimeError: the handle was dropped.
        """
        self._check(transfer)
        with self._counters.waiting(), _named(transfer.name, transfer.layout.nbytes):
            transfer.stored.wait()
        return transfer.buffer.memory[: transfer.layout.nbytes]

    def drop(self, transfer: Transfer) -> None:
        """Frees the host bytes, once the copies that use them are done.

        Raises:
            RuntimeError: the handle was dropped before.
        """
        with self._lock:
            self._check(transfer)
            transfer._dropped = True
            arrival, transfer.arrival = transfer.arrival, None
        if arrival is not None:
            self.abandon(arrival)
        transfer._pool.release(transfer.buffer, transfer.stored, *transfer._fetched)

    # -- arrivals: what the handles' fetches and the SSD's reads are made of --------------------------

    def fetch(self, transfer: Transfer, part: slice | None = None) -> Arrival:
        """Starts a copy of its own back to the device; end it with :meth:`receive` or :meth:`abandon`.

        Args:
            part: of the bytes held, which come as they are, flat uint8; by default the tensor.

        Raises:
            TransferError: it could not be started, for want of device memory for example.
            RuntimeError: the handle was dropped.
        """
        with self._lock:
            self._check(transfer)
            if part is None:
                arrival = self.expect(transfer.layout, transfer.name)
                self.send(transfer, arrival)
                return arrival
            arrival = self.expect(bytes_layout(part.stop - part.start), transfer.name)
            memory = transfer.buffer.memory[part]
            transfer._fetched = (self._send(arrival, memory, [transfer.stored]),)
            return arrival

    def send(self, transfer: Transfer, arrival: Arrival, part: slice = _ALL) -> None:
        """Starts the copy of what a handle holds to a part of an expected tensor's bytes.

        Raises:
            TransferError: it could not be started.
            RuntimeError: the handle was dropped.
        """
        with self._lock:
            self._check(transfer)
            event = self._send(arrival, transfer.buffer.memory, [transfer.stored], part)
            transfer._fetched = (event,)

    def expect(self, layout: Layout, name: str) -> Arrival:
        """Allocates a tensor on the caller's current stream; its bytes will be :meth:`deliver`-ed.

        Raises:
            TransferError: there is no device memory for it.
        """
        home = self.streams.current()
        with _named(name, layout.nbytes):
            tensor, flat = new_like(layout, self.device)
        self.streams.scrub(flat)
        return Arrival(name, tensor, flat, home, self.streams.mark())

    def into(self, tensor: Tensor, name: str) -> Arrival:
        """An existing contiguous device tensor whose bytes will be replaced by :meth:`deliver`, after the work
        submitted so far to the caller's current stream. The caller does not touch it before :meth:`receive`.
        """
        if tensor.device != self.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name!r} must be contiguous and on {self.device}, is on {tensor.device}"
            )
        flat = tensor.detach().view(-1).view(torch.uint8)
        return Arrival(name, tensor, flat, self.streams.current(), self.streams.mark())

    def deliver(
        self, arrival: Arrival, pool: PinnedPool, buffer: Buffer, part: slice = _ALL
    ) -> None:
        """Starts the copy of an expected tensor's bytes, or of a part of them; releases the buffer.
        For any thread."""
        try:
            event = self._send(arrival, buffer.memory, [], part)
        except BaseException:
            pool.release(buffer)
            raise
        pool.release(buffer, event)

    def receive(self, arrival: Arrival) -> Tensor:
        """The tensor of an arrival all of whose bytes were sent, ready for the caller's current stream.

        Raises:
            TransferError: a copy failed, either way.
        """
        if not arrival.copies:
            raise RuntimeError(f"{arrival.name!r} is received before its bytes were sent")
        try:
            with self._counters.waiting(), _named(arrival.name, arrival.flat.numel()):
                for target, event in arrival.copies:
                    self.streams.use(target, event, arrival.home)
        except BaseException:
            self.abandon(arrival)
            raise
        return arrival.tensor

    def abandon(self, arrival: Arrival) -> None:
        """Gives up an arrival; its device memory is freed once the copies into it are done."""
        for target, _ in arrival.copies:
            self.streams.keep(target, Direction.TO_DEVICE)

    def close(self) -> None:
        """Waits for all copies and frees the pools; every handle is void after it. Idempotent."""
        with self._lock:
            self.streams.drain()
            self._outgoing.clear()
            self._outgoing_bytes = 0
        for pool in self._pools:
            pool.close()

    # -- steps --------------------------------------------------------------------------------------

    def _store(self, flat: Tensor, name: str, target: Tensor, after: list[Event]) -> Event:
        """Starts the copy of flat bytes to the host."""
        nbytes = flat.numel()
        with self._lock, _named(name, nbytes):
            self._make_room(nbytes)
            before = [self.streams.mark(), *after]
            stored = self.streams.copy(Direction.TO_HOST, target, flat, before)
            self.streams.keep(flat, Direction.TO_HOST)
            self._outgoing.append((stored, nbytes))
            self._outgoing_bytes += nbytes
        self._counters.count_out(nbytes)
        self._count_seconds("out", stored)
        return stored

    def _send(
        self, arrival: Arrival, memory: Tensor, after: list[Event], part: slice = _ALL
    ) -> Event:
        target = arrival.flat[part]
        nbytes = target.numel()
        source, before = memory[:nbytes], [arrival.ready, *after]
        with _named(arrival.name, nbytes):
            event = self.streams.copy(Direction.TO_DEVICE, target, source, before)
        arrival.copies.append((target, event))
        self._counters.count_in(nbytes)
        self._count_seconds("in", event)
        return event

    def _count_seconds(self, way: Way | None = None, begun: Event | None = None) -> None:
        """Counts copies that are done; ``begun``: a new one. Waits for nothing."""
        with self._counting:
            if way is not None and begun is not None:
                self._copying[way].append(begun)
            for each, copies in self._copying.items():
                while copies and copies[0].done():  # in order of submission, as they run
                    self._counters.count_seconds(each, copies.popleft().seconds())

    def _make_room(self, nbytes: int) -> None:
        """Waits for the oldest copies to the host while there is no room for ``nbytes`` beside them."""
        while self._outgoing:
            event, size = self._outgoing[0]
            if not event.done():
                if self._outgoing_bytes + nbytes <= self._most_outgoing:
                    return
                with self._counters.waiting(), suppress(Exception):  # raised where it is used
                    event.wait()
            self._outgoing.popleft()
            self._outgoing_bytes -= size

    def _check(self, transfer: Transfer) -> None:
        if transfer._dropped:
            raise RuntimeError(f"{transfer.name!r} was dropped and is used again")


@contextmanager
def _named(name: str, nbytes: int) -> Iterator[None]:
    """Says which tensor an error is about."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"moving {name!r} ({nbytes} bytes) failed: {error}") from error
