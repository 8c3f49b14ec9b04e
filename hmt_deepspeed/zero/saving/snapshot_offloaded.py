"""Takes masters and moments in host memory or on an SSD into snapshots.

Both are taken as the last step leaves them, though that may still be under way, and nobody waits for it. In host
memory the worker copies them itself: a job among its updates, after those of this step and before those of the
next. On an SSD the files of a step are never written again before another one counts, so these are held from
this step's commit on until they have a second name in the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.alternate import Held
from hmt_deepspeed.zero.interfaces import HostUpdates
from hmt_deepspeed.zero.offload.states import MASTER, RamStates, SsdStates
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.saving.snapshot_writer import Staged
from hmt_deepspeed.zero.saving.ssd_files import describe_files, hold_files, keep_files
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["OffloadedStates"]


class OffloadedStates:
    """Takes one rank's states off the device into one snapshot after another.

    :meth:`take` and :meth:`when_ready` are for the training thread, the others for the one that writes.

    Args:
        zero: the states of the optimizer.

    Attributes:
        nbytes: of host memory that copies need.
    """

    def __init__(self, zero: ZeroState) -> None:
        self._worker = zero.host
        weights = [p.weight for p in zero.param_states if isinstance(p.weight, HostWeight)]
        self._weights = weights
        self._in_ram = [w for w in weights if isinstance(w.states, RamStates)]
        self._on_ssd = any(isinstance(w.states, SsdStates) for w in weights)
        columns = [(w.num_elements, c) for w in self._in_ram for c in w.states.columns]
        self.nbytes = sum(numel * torch.float32.itemsize for numel, _ in columns)
        # Weights without masters are the device's, where the updates of this step arrive.
        self.must_synchronize = not all(w.has_master for w in weights)
        self._copies: dict[str, Tensor] = {}
        self._job = 0  # the last copy
        self._held: dict[str, Held] = {}

    # -- training thread ------------------------------------------------------------------------

    def allocate(self) -> None:
        """Take the memory for copies, for all snapshots; written to, or the machine would still call it free."""
        for weight in self._in_ram:
            for column in weight.states.columns:
                self._copies[_name(weight, column)] = torch.empty(weight.num_elements).zero_()

    def outline(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The result of :meth:`take` by the same names, without states."""
        masters: dict[str, Any] = {w.name: {} for w in self._weights if MASTER in w.states.columns}
        return masters, {w.name: {} for w in self._weights}

    def take(self, zero: ZeroState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin to take them, between two steps.

        Returns:
            masters and moments by name of the parameter, of those that are taken here: a :class:`Staged` for
            each column, or in which files the columns are.

        Raises:
            RuntimeError: an update has failed.
        """
        masters: dict[str, Any] = {}
        moments: dict[str, Any] = {**describe_files(zero, masters=True)}
        for name, files in moments.items():
            if MASTER in files["columns"]:
                masters[name] = files
        for weight in self._in_ram:
            assert self._worker is not None
            copies = {c: self._copies[_name(weight, c)] for c in weight.states.columns}
            self._job = self._worker.submit(weight.name, _copy, (weight, copies))
            staged = {
                column: Staged(_name(weight, column), values.dtype, values.shape, column == MASTER)
                for column, values in copies.items()
            }
            if MASTER in staged:
                masters[weight.name] = {"values": staged.pop(MASTER)}
            moments[weight.name] = staged
        return masters, moments

    def when_ready(self, zero: ZeroState, updates: HostUpdates, write: Callable[[], None]) -> None:
        """Call ``write`` once the states taken can be written: now, or when the step's files are committed."""

        def counted() -> None:
            self._held = hold_files(zero, masters=True)
            write()

        if self._on_ssd:
            updates.when_committed(counted)
        else:
            write()

    # -- writing thread -------------------------------------------------------------------------

    def wait(self) -> None:
        """Returns when all copies are there.

        Raises:
            RuntimeError: an update failed before they were.
        """
        if self._worker is not None:
            self._worker.wait(self._job)

    def host_bytes(self, name: str) -> Tensor | None:
        """The bytes (uint8) of a copy; None where it is none of these."""
        values = self._copies.get(name)
        return None if values is None else values.view(torch.uint8)

    def keep_files(self, folder: str) -> Mapping[str, dict[str, Any]]:
        """Give the files on the SSD a second name in ``folder``; entries for its manifest.

        Raises:
            StoreError, OSError: naming the file.
        """
        return keep_files(self._held, folder)

    def forget(self) -> None:
        """Give up what was taken; after the files were kept, or if they will not be."""
        held, self._held = self._held, {}
        for file in held.values():
            file.release()


def _name(weight: HostWeight, column: str) -> str:
    return f"{column} of {weight.name}"


def _copy(weight: HostWeight, copies: Mapping[str, Tensor], _: Tensor) -> None:
    """Worker thread."""
    for column, values in copies.items():
        values.copy_(weight.states.read(column))
