"""Counts the activation backend's saved bytes, recomputation and encoding errors."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from hmt_deepspeed.activations.codecs import SavedTensor
from hmt_deepspeed.kernels.chunks import row_chunks

__all__ = ["ActivationReport", "Ledger"]

_Key = tuple[str, str]  # layer, label


@dataclass(frozen=True)
class ActivationReport:
    """Since the last :meth:`ActivationBackend.begin_step`.

    Labels are components, and ``unattributed`` (heavy
    operations of no component, held raw), ``attention_scores`` and ``exit`` (what only leaves the layer).

    Attributes:
        held_bytes: device bytes held for backward when they were most, by layer (or the head) and label.
        hits: heavy operations that a component's choice was applied to in forward, by layer and component.
        missed: ``layer: component`` for which there is a policy but were none.
        unread: held outputs that a backward did not ask for.
        rerun: heavy operations run again in backward. rerun_flops: their FLOPs. rerun_seconds: their time,
            while :attr:`Ledger.clock` is set.
        errors: ``|decoded - original| / |original|`` (Frobenius) of what was encoded with a loss.
        swapped_out_bytes, swapped_in_bytes: moved away from the device, and back.
        seconds_waited: time the host stood still for those moves.
    """

    held_bytes: Mapping[str, Mapping[str, int]]
    hits: Mapping[str, Mapping[str, int]]
    missed: tuple[str, ...]
    unread: Mapping[str, int]
    rerun: Mapping[str, int]
    rerun_flops: Mapping[str, int]
    rerun_seconds: Mapping[str, float]
    errors: Mapping[str, float]
    swapped_out_bytes: int
    swapped_in_bytes: int
    seconds_waited: float

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_label.values())

    @property
    def bytes_by_label(self) -> dict[str, int]:
        """Bytes of all layers."""
        found: Counter[str] = Counter()
        for labels in self.held_bytes.values():
            found.update(labels)
        return dict(found)

    @property
    def bytes_by_layer(self) -> dict[str, int]:
        return {layer: sum(labels.values()) for layer, labels in self.held_bytes.items()}


class Ledger:
    """Counts; safe to use from several threads.

    Attributes:
        hits, unread, rerun, rerun_flops: by layer and label, see :class:`ActivationReport`.
        layers: those that were recorded.
        held: bytes by layer and label now.
        clock: seconds after what the device has been given is done; times what is run again. None: nothing
            is timed, so nothing waits for the device.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] | None = None
        self._lock = threading.Lock()
        # Garbage may be collected at any allocation, also while the lock is held.
        self._released: SimpleQueue[dict[_Key, int]] = SimpleQueue()
        self._held: Counter[_Key] = Counter()
        self._held_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but what is held."""
        with self._lock:
            self._sweep()
            self.layers: set[str] = set()
            self.hits: Counter[_Key] = Counter()
            self.unread: Counter[_Key] = Counter()
            self.rerun: Counter[_Key] = Counter()
            self.rerun_flops: Counter[_Key] = Counter()
            self.rerun_seconds: defaultdict[str, float] = defaultdict(float)
            self._squares: dict[str, list[Tensor]] = {}
            self._note_peak()

    def _note_peak(self) -> None:
        self._peak = Counter(self._held)
        self._peak_bytes = self._held_bytes

    def _sweep(self) -> None:
        while True:
            try:
                released = self._released.get_nowait()
            except Empty:
                return
            for key, nbytes in released.items():
                self._held[key] -= nbytes
                self._held_bytes -= nbytes

    def hold(self, owner: object, charges: Mapping[_Key, int]) -> None:
        """Device bytes by layer and label are held from now on, until ``owner`` is garbage."""
        charges = dict(charges)
        with self._lock:
            self._sweep()
            for key, nbytes in charges.items():
                self._held[key] += nbytes
                self._held_bytes += nbytes
            if self._held_bytes > self._peak_bytes:
                self._note_peak()
        weakref.finalize(owner, self._released.put, charges).atexit = False

    @property
    def held(self) -> dict[_Key, int]:
        with self._lock:
            self._sweep()
            return {key: nbytes for key, nbytes in self._held.items() if nbytes}

    @property
    def peak(self) -> dict[_Key, int]:
        with self._lock:
            return dict(self._peak)

    def count(self, counter: Counter[_Key], layer: str, label: str, amount: int = 1) -> None:
        with self._lock:
            counter[layer, label] += amount

    def add(self, counter: Counter[_Key], amounts: Mapping[_Key, int]) -> None:
        with self._lock:
            for key, amount in amounts.items():
                counter[key] += amount

    def count_seconds(self, label: str, seconds: float) -> None:
        with self._lock:
            self.rerun_seconds[label] += seconds

    def visit(self, layer: str) -> None:
        with self._lock:
            self.layers.add(layer)

    @torch.no_grad()
    def measure(self, label: str, tensor: Tensor, held: SavedTensor) -> None:
        """Add to a label's error. On the device: nothing waits."""
        read, flat = held.decode().reshape(-1), tensor.detach().reshape(-1)
        chunks = list(row_chunks(len(flat), 1))
        lost = [(read[chunk].float() - flat[chunk].float()).square().sum() for chunk in chunks]
        whole = [flat[chunk].float().square().sum() for chunk in chunks]
        squares = [torch.stack(lost).sum(), torch.stack(whole).sum()]
        with self._lock:
            before = self._squares.get(label)
            if before is not None:
                squares = [a + b for a, b in zip(before, squares, strict=True)]
            self._squares[label] = squares

    def errors(self) -> dict[str, float]:
        """Relative error by label; waits for the device."""
        with self._lock:
            squares = dict(self._squares)
        return {
            label: float((lost / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt())
            for label, (lost, whole) in squares.items()
        }


def by_layer(counter: Mapping[_Key, int]) -> dict[str, dict[str, int]]:
    """Nested by layer, then label."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (layer, label), amount in counter.items():
        if amount:
            found[layer][label] = amount
    return dict(found)


def by_label(counter: Mapping[_Key, int]) -> dict[str, int]:
    """Summed over layers."""
    found: Counter[str] = Counter()
    for (_, label), amount in counter.items():
        found[label] += amount
    return {label: amount for label, amount in found.items() if amount}
