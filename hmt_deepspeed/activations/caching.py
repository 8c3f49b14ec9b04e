"""Base of the two dispatch modes of a checkpointed function: one records its forward, one replays it in backward.

Recording (``record.py``) sees every operation below autograd. Of a *heavy* one (matrix product, convolution,
attention) it saves the outputs in the form that the policy has for the module computing it, or nothing. Replaying
(``replay.py``) runs the function again, hands out saved outputs in place of running a heavy operation, and runs the
rest.

An output that nobody reads in backward is neither saved nor computed again, see :mod:`dependence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.activations.codecs import Codec, Keep, SavedBlocks
from hmt_deepspeed.activations.ledger import Ledger
from hmt_deepspeed.activations.linear import SavingCodes
from hmt_deepspeed.activations.recording import (
    Blank,
    Operation,
    Recording,
    Site,
    storage_of,
)

__all__ = ["RAW", "ActiveMode", "CachingMode", "activate", "active_mode", "deactivate", "tracked"]

RAW = Keep()


class _Alias(NamedTuple):
    """An output of an operation, held as, or still on its way out of, the function's own tensor."""

    storage: StorageWeakRef
    offset: int
    operation: Operation
    position: int
    codec: Codec


class CachingMode(TorchDispatchMode):
    """Tracks where in the model the function is, and copies tensors before they are written to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Checkpointed calls are hidden from dynamo as a whole; hiding each operation costs twice the mode."""
        return False

    def __init__(self, recording: Recording, base: Site | None, ledger: Ledger) -> None:
        super().__init__()
        self.recording, self.ledger, self._base = recording, ledger, base
        self._sites: list[Site] = []
        self._tokens: list[Token[ActiveMode | None]] = []
        self._aliases: dict[int, list[_Alias]] = {}  # by storage
        self._saving: list[tuple[Site, SavingCodes]] = []
        self._is_busy = False  # with tensors of its own, which are none of the function's

    def __enter__(self) -> Any:
        self._sites = [] if self._base is None else [self._base]
        self._tokens.append(activate(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        deactivate(self._tokens.pop())
        while self._saving:
            self._end_saving()
        self._aliases.clear()
        return super().__exit__(*error)

    # -- where the function is ----------------------------------------------------------------------

    @property
    def site(self) -> Site | None:
        """The innermost attributed module that is being computed."""
        return self._sites[-1] if self._sites else None

    def enter(self, site: Site, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A module begins; returns other arguments if it is to have others."""
        self._sites.append(site)
        if site.input_codec is None or not args or not isinstance(args[0], Tensor):
            return None
        self._is_busy = True
        try:
            substitute, codes = self.substitute(site, site.input_codec, args[0])
        finally:
            self._is_busy = False
        if codes is not None:
            saving = SavingCodes(args[0] if substitute is None else substitute, codes)
            saving.__enter__()
            self._saving.append((site, saving))
        return None if substitute is None else (substitute, *args[1:])

    def leave(self, site: Site) -> None:
        """A module ends, and with it those inside it that an exception left."""
        left = None
        while self._sites and left is not site:
            left = self._sites.pop()
            if self._saving and self._saving[-1][0] is left:
                self._end_saving()

    def _end_saving(self) -> None:
        _, saving = self._saving.pop()
        saving.__exit__(None, None, None)

    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[Tensor | None, SavedBlocks | None]:
        """What an output projection whose input is held reads instead of ``tensor`` (None: that), and the
        codes to save of it for its weight's gradient, if there are."""
        raise NotImplementedError

    # -- copy on write ------------------------------------------------------------------------------

    def _watch(self, operation: Operation, position: int, tensor: Tensor, codec: Codec) -> None:
        """A write to the tensor is to be preceded by a copy, as long as its codec makes none."""
        if not codec.lossy:
            offset = int(tensor.storage_offset())
            storage = StorageWeakRef(tensor.untyped_storage())
            alias = _Alias(storage, offset, operation, position, codec)
            self._aliases.setdefault(storage_of(tensor), []).append(alias)

    def _copy_before_write(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for alias in self._aliases.pop(storage_of(tensor), ()):
                operation = alias.operation
                if alias.storage.expired() or operation.held is None or operation.is_blank:
                    continue
                blank = operation.blanks[alias.position]
                assert isinstance(blank, Blank)
                value = torch.empty(0, dtype=blank.dtype, device=blank.device)
                value.set_(tensor.untyped_storage(), alias.offset, blank.shape, blank.strides)
                parts = list(operation.held)
                with tracked():
                    parts[alias.position] = alias.codec.encode(value.clone(), name=operation.name)
                operation.held = tuple(parts)


class ActiveMode(Protocol):
    """What is told which modules a checkpointed function computes."""

    def enter(self, site: Site, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A module begins; returns other arguments if it is to have others."""

    def leave(self, site: Site) -> None:
        """A module ends."""


# A context variable, because modes are a thread's own and backward may run in a thread of autograd.
_active: ContextVar[ActiveMode | None] = ContextVar("active", default=None)


def activate(mode: ActiveMode) -> Token[ActiveMode | None]:
    """Let it be the caller's thread's, until :func:`deactivate`."""
    return _active.set(mode)


def deactivate(token: Token[ActiveMode | None]) -> None:
    """The mode before :func:`activate` is active again."""
    _active.reset(token)


def active_mode() -> ActiveMode | None:
    """The mode under which the caller's thread is recording, following a tape or replaying."""
    return _active.get()


def tracked() -> Any:
    """Views made below autograd share the version count of what they view."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
