"""The mode of a checkpointed function's forward that has a tape: compares itself with it and saves what it says.

It sees the functions of torch that are called, and what autograd saves, and no operation: what a function of torch does
with tensors of known geometry is what it did when the tape was recorded. They are compared, and outputs held, once the
function has ended. Until then all its tensors live, as they do in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.activations.caching import RAW, activate, deactivate
from hmt_deepspeed.activations.calls import CallLog
from hmt_deepspeed.activations.ledger import Ledger
from hmt_deepspeed.activations.recording import Constant, Operation, Part, Recording, Site
from hmt_deepspeed.activations.tape import Heavy, Source, Tape

__all__ = ["FollowMode"]


class FollowMode(CallLog):
    """Forward along a tape. A function that does otherwise is computed again as it is, and nothing is held of it.

    Args:
        key: of the noise of a rounding, by the number of the operation.
        measures: whether what is encoded with a loss is compared.
        tape: what the function did before.
        args: the tensors among the function's arguments.

    Attributes:
        tape: after the call None, if it did otherwise.
        given: after the call the tensors that the tape has not made.
    """

    def __init__(
        self,
        recording: Recording,
        ledger: Ledger,
        key: Callable[[int], int],
        measures: bool,
        tape: Tape,
        args: Sequence[Tensor],
    ) -> None:
        super().__init__(args)
        self.recording, self.ledger = recording, ledger
        self._key, self._measures = key, measures
        self.tape: Tape | None = tape
        self._kept = tape.kept
        self.given: Sequence[Tensor | None] = ()
        self._token: Token[Any] | None = None

    def __enter__(self) -> Any:
        self._token = activate(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        super().__exit__(*error)
        assert self._token is not None
        deactivate(self._token)
        if error[0] is None:
            self._end()
        self.log.clear()

    def enter(self, site: Site, args: tuple[Any, ...]) -> None:
        """A module begins."""

    def leave(self, site: Site) -> None:
        """A module ends."""

    def save(self, number: int, tensor: Tensor) -> int | Tensor:
        """Autograd saves a tensor, as the call's ``number``-th: what it saves in its place; the tensor itself, where
        that costs no memory."""
        self.log.append(tensor)
        return tensor if number in self._kept else number

    @torch.no_grad()
    def _end(self) -> None:
        tape, recording = self.tape, self.recording
        assert tape is not None
        if tape.calls.agree(self.log):
            tape.misses = 0
            self.given = tape.calls.given.of(self.log)
            with torch._C._DisableAutocast():
                self._hold(tape)
            self.ledger.add(self.ledger.hits, tape.hits)
            for (layer, label), nbytes in tape.charges.items():
                recording.charge(layer, label, nbytes)
        else:
            tape.misses += 1
            self.tape = None
            recording.is_given_up = True
        self.ledger.hold(recording, recording.charges)

    def _hold(self, tape: Tape) -> None:
        """What the tape knows to do of heavy operations."""
        for step in tape.heavy:
            heavy = step.heavy
            assert heavy is not None
            operation = Operation(
                step.func, heavy.site, heavy.label, heavy.bit, heavy.blanks, single=step.single
            )
            if heavy.is_blank:
                operation.held = heavy.blanks
            elif heavy.is_held:
                operation.codec = heavy.codec
                operation.held = tuple(
                    self._part(heavy, index, source) for index, source in enumerate(heavy.sources)
                )
            recording = self.recording
            (recording.products if heavy.is_product else recording.operations).append(operation)

    def _part(self, heavy: Heavy, index: int, source: Source | Part) -> Part:
        """An output of a heavy operation as it is held: the first by the codec, see :class:`RecordMode`."""
        if not isinstance(source, Source):
            return source
        output = self.log[source.place].detach()
        if source.shape is not None and source.strides is not None:
            output = output.as_strided(source.shape, source.strides)
        if not output.is_floating_point():
            return Constant(output)
        codec = heavy.codec if index == 0 else RAW
        assert codec is not None
        name = f"{heavy.site.layer}: {heavy.label}"
        held = codec.encode(output, heavy.dims if index == 0 else 0, self._key(heavy.number), name)
        if self._measures and codec.lossy:
            self.ledger.measure(heavy.label, output, held)
        return held
