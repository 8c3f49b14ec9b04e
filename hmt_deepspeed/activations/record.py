"""The dispatch mode of a checkpointed function's forward: saves outputs for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.activations.caching import RAW, CachingMode, tracked
from hmt_deepspeed.activations.codecs import Codec, SavedBlocks
from hmt_deepspeed.activations.dependence import Dependence, tensors_among
from hmt_deepspeed.activations.ledger import Ledger
from hmt_deepspeed.activations.ops import Traits, traits_of
from hmt_deepspeed.activations.recording import Blank, Constant, Operation, Part, Recording, Site
from hmt_deepspeed.activations.tape import (
    Given,
    Heavy,
    Made,
    Several,
    Step,
    Tape,
    geometry_of,
)
from hmt_deepspeed.activations.tapes import TapeBuilder
from hmt_deepspeed.sites import is_computing_projection

__all__ = ["RecordMode"]

_END = Step(None, (), {}, True, 0, (), None)  # no operation is it


class RecordMode(CachingMode):
    """Forward.

    Args:
        base: site of the function itself; None: it is no attributed layer's, though it may call some.
        key: of the noise of a rounding, by the number of the operation.
        measures: whether what is encoded with a loss is compared.
        holds_products: whether ``X [Q | P]`` of projected linears is held, else it is computed again.
        tape: what the function did before, which decides as long as it does the same; or what records it; or None.
        args: the tensors among the function's arguments.

    Attributes:
        on_leaving: called where the function does otherwise than its tape.
        tape: after the call what it did, if there is a tape of it.
        given: the tensors that the tape has not made.
    """

    def __init__(
        self,
        recording: Recording,
        base: Site | None,
        ledger: Ledger,
        key: Callable[[int], int],
        measures: bool,
        holds_products: bool,
        tape: Tape | TapeBuilder | None = None,
        args: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(recording, base, ledger)
        self._product_codec = RAW if holds_products else None
        self._key, self._measures = key, measures
        self._dependence = Dependence()
        self._builder = tape if isinstance(tape, TapeBuilder) else None
        self.tape = tape if isinstance(tape, Tape) else None
        self.given: list[Tensor | None] = []
        self._steps: Sequence[Step] = ()
        if self.tape is not None:
            self._steps = (*self.tape.steps, _END)
            self.given = [*args, *[None] * (len(self.tape.given) - len(args))]
        self._made: list[Callable[[], Tensor | None]] = []
        self._at = self._num_saved = 0
        self.on_leaving: Callable[[], None] = lambda: None

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            if error[0] is None:
                self._end()

    def _end(self) -> None:
        tape, recording = self.tape, self.recording
        if tape is not None and (self._at, self._num_saved) != (len(tape.steps), len(tape.packs)):
            self._leave_tape()
        if self.tape is not None:
            self.tape.misses = 0
            self.ledger.add(self.ledger.hits, self.tape.hits)
            for (layer, label), nbytes in self.tape.charges.items():
                recording.charge(layer, label, nbytes)
        else:
            self._drop_unneeded()
            for operation in recording.all_operations():
                recording.charge(operation.site.layer, operation.label, operation.nbytes)
        self.ledger.hold(recording, recording.charges)
        if self._builder is not None:
            self.tape, self.given = self._builder.build()

    # -- what is needed -----------------------------------------------------------------------------

    def save(self, number: int, tensor: Tensor) -> int | Tensor:
        """Autograd saves a tensor, as the call's ``number``-th: what it saves in its place; the tensor itself, where
        that costs no memory."""
        self._num_saved = number + 1
        tape = self.tape
        if tape is not None:
            if number < len(tape.packs):
                at, source = tape.packs[number]
                if at == self._at and self._is_same(source, tensor):
                    return tensor if number in tape.kept else number
            self._leave_tape()
        self._dependence.need((tensor,))
        if self._builder is not None and self._builder.save(tensor):
            return tensor
        return number

    def _drop_unneeded(self) -> None:
        """Drop the outputs that no saved tensor depends on."""
        needed = self._dependence.needed
        for operation in self.recording.all_operations():
            operation.decodes = bool(needed & operation.bit)
            if not needed & (operation.bit | operation.codes_bit):
                operation.held = operation.blanks

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        if self.tape is not None:
            step = self._steps[self._at]
            if (
                step.func is func
                and self._are_same(args, step.args)
                and (not (kwargs or step.kwargs) or self._are_same_by_name(kwargs, step.kwargs))
                and (step.heavy is None or self._is_there(step.heavy))
            ):
                out = func(*args, **kwargs)
                self._at += 1
                for output in (out,) if step.single else out:
                    is_tensor = isinstance(output, Tensor)
                    self._made.append(weakref.ref(output) if is_tensor else _nothing)
                if step.heavy is not None:
                    self._hold_as_before(step, step.heavy, out)
                return out
            self._leave_tape()
        traits = traits_of(func)
        if traits.writes and self._aliases:
            self._copy_before_write(tensors_among(traits.written(args, kwargs)))
        out = func(*args, **kwargs)
        site, heavy = self.site, None
        if traits.heavy and site is not None:
            heavy = self._record(func, traits, site, args, kwargs, out)
        elif self._dependence.num_bits or traits.fresh:
            self._dependence.follow(traits, (*args, *kwargs.values()), out)
        if self._builder is not None:
            self._builder.add(func, traits, args, kwargs, out, self._dependence.origin, heavy)
        return out

    def _record(
        self, func: Any, traits: Traits, site: Site, args: Any, kwargs: Any, out: Any
    ) -> tuple[Operation, bool, tuple[int, ...], int]:
        """The operation, whether it is a projected linear's product, its output's dimensions of tokens, and the
        number of operations so far."""
        recording = self.recording
        inputs = self._dependence.origin((*args, *kwargs.values()))
        is_product = is_computing_projection()
        label, codec = self._choose(traits, site, inputs)
        if is_product:
            label, codec = "projected_inputs", self._product_codec
        operation = self._new_operation(func, site, label, out)
        (recording.products if is_product else recording.operations).append(operation)
        self.ledger.count(self.ledger.hits, site.layer, label)
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        if recording.redraws and traits.drew(args, kwargs):
            operation.random_state = _random_state(outputs[0].device)
        dims, number = _token_dims(traits, outputs[0]), self._dependence.num_bits
        if codec is not None:
            self._hold(operation, outputs, codec, dims, number)
        self._dependence.set(outputs, operation.bit | (0 if codec else inputs))
        return operation, is_product, dims, number

    def _choose(self, traits: Traits, site: Site, inputs: int) -> tuple[str, Codec | None]:
        """Label of an operation's output, and its codec."""
        if not site.attention or traits.attention:
            return site.label, site.codec
        if not traits.batched:
            return "unattributed", RAW
        # Unfused attention: the product that depends on another one, the scores, is the output.
        scores = (o.bit for o in self.recording.operations if o.label == "attention_scores")
        if any(bit & inputs for bit in scores):
            return site.label, site.codec
        return "attention_scores", None

    def _new_operation(self, func: Any, site: Site, label: str, out: Any) -> Operation:
        single = not isinstance(out, (list, tuple))
        blanks = tuple(_blank(output) for output in ((out,) if single else out))
        return Operation(func, site, label, self._dependence.new_bit(), blanks, single=single)

    def _hold(
        self,
        operation: Operation,
        outputs: Sequence[Any],
        codec: Codec,
        dims: tuple[int, ...],
        number: int,
    ) -> None:
        """Output 0 by the codec, further ones raw: attention's log-sum-exp is small and must be exact."""
        parts: list[Part] = []
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor) or not output.is_floating_point():
                parts.append(Constant(output.detach() if isinstance(output, Tensor) else output))
                continue
            chosen = codec if index == 0 else RAW
            with tracked():
                held = chosen.encode(
                    output, dims if index == 0 else 0, self._key(number), operation.name
                )
            if self.tape is None:
                self._watch(operation, index, output, chosen)
            if self._measures and chosen.lossy:
                self.ledger.measure(operation.label, output, held)
            parts.append(held)
        operation.codec, operation.held = codec, tuple(parts)

    @torch.no_grad()
    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[None, SavedBlocks | None]:
        """Hold it; the forward reads what it always did."""
        if self.tape is not None:
            self._leave_tape()
        if self._builder is not None:
            self._builder.give_up()
        operation = self._new_operation(None, site, "attention_output", tensor)
        self.recording.substitutes.append(operation)
        dims = tuple(range(tensor.dim() - 1))
        self._hold(operation, (tensor.detach(),), codec, dims, self._dependence.num_bits)
        self._dependence.set((tensor,), operation.bit)
        codes = operation.codes
        if codes is not None:
            operation.codes_bit = self._dependence.new_bit()
            self._dependence.set((codes.codes, codes.scales), operation.codes_bit)
        return None, codes

    # -- along a tape -------------------------------------------------------------------------------

    def _are_same(self, found: Sequence[Any], expected: Sequence[Any]) -> bool:
        """Whether arguments are what the tape has."""
        if len(found) != len(expected):
            return False
        made = self._made
        for one, other in zip(found, expected):  # noqa: B905  its check takes as long as all the rest
            kind = other.__class__
            if kind is Made:  # most of them
                if made[other]() is not one:
                    return False
            elif kind is Given:
                if not self._is_same(other, one):
                    return False
            elif kind is Several:
                if not isinstance(one, (list, tuple)) or not self._are_same(one, other):
                    return False
            elif one.__class__ is not kind or one != other:
                return False
        return True

    def _is_same(self, number: Made | Given, found: Any) -> bool:
        """Whether a tensor is that of the tape; one that the function has not made is bound by its first use."""
        if number.__class__ is Made:
            return self._made[number]() is found
        before = self.given[number]
        if before is not None or not isinstance(found, Tensor):
            return before is found and before is not None
        assert self.tape is not None
        self.given[number] = found
        return geometry_of(found) == self.tape.given[number]

    def _are_same_by_name(self, found: dict[str, Any], expected: dict[str, Any]) -> bool:
        names = list(expected)
        return found.keys() == expected.keys() and self._are_same(
            [found[name] for name in names], [expected[name] for name in names]
        )

    def _is_there(self, heavy: Heavy) -> bool:
        return self.site is heavy.site and is_computing_projection() == heavy.is_product

    def _hold_as_before(self, step: Step, heavy: Heavy, out: Any) -> None:
        """What the tape knows to do of an operation's outputs."""
        operation = Operation(
            step.func, heavy.site, heavy.label, heavy.bit, heavy.blanks, single=step.single
        )
        recording = self.recording
        (recording.products if heavy.is_product else recording.operations).append(operation)
        if heavy.is_held:
            assert heavy.codec is not None
            outputs = (out,) if step.single else out
            self._hold(operation, outputs, heavy.codec, heavy.dims, heavy.number)
        elif heavy.is_blank:
            operation.held = heavy.blanks

    def _leave_tape(self) -> None:
        """The function does otherwise: from here on as if there had been no tape.

        What the tape has decided before holds good: outputs that it has not saved are computed again.
        """
        tape, self.tape = self.tape, None
        assert tape is not None
        self.given = []
        tape.misses += 1
        self.on_leaving()
        dependence = self._dependence
        kinds = {False: iter(self.recording.operations), True: iter(self.recording.products)}
        for step in tape.steps[: self._at]:
            refs = self._made[step.first : step.first + len(step.origins)]
            made = [ref() for ref in refs]
            for tensor, origin in zip(made, step.origins, strict=True):
                if tensor is not None:
                    dependence.set((tensor,), origin)
            if step.heavy is None:
                continue
            operation = next(kinds[step.heavy.is_product])
            dependence.num_bits = step.heavy.number
            self.ledger.count(self.ledger.hits, operation.site.layer, operation.label)
            if operation.is_blank:
                operation.held = operation.codec = None
            elif operation.codec is not None:
                for index, tensor in enumerate(made):
                    if tensor is not None and tensor.is_floating_point():
                        chosen = operation.codec if index == 0 else RAW
                        self._watch(operation, index, tensor, chosen)
        dependence.needed = (1 << dependence.num_bits) - 1


# -- small things -----------------------------------------------------------------------------------


def _nothing() -> None:
    """In place of a reference to what is no tensor."""


def _blank(output: Any) -> Part:
    return Blank(output) if isinstance(output, Tensor) else Constant(output)


def _token_dims(traits: Traits, output: Tensor) -> tuple[int, ...]:
    """Dimensions of an output along which tokens follow each other."""
    if traits.attention:
        if output.dim() < 4:
            return (0,)  # packed: tokens, heads, width
        return (0, 2) if traits.heads_first else (0, 1)
    if traits.batched:
        return (1,)  # batch and heads in one, tokens, width
    return tuple(range(output.dim() - 1))


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state
