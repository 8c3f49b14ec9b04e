"""The dispatch mode of a checkpointed function's forward: saves outputs for backward."""

from __future__ import annotations

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
from hmt_deepspeed.activations.tape import Tape
from hmt_deepspeed.activations.tapes import TapeBuilder
from hmt_deepspeed.sites import is_computing_projection

__all__ = ["RecordMode"]


class RecordMode(CachingMode):
    """Forward.

    Args:
        base: site of the function itself; None: it is no attributed layer's, though it may call some.
        key: of the noise of a rounding, by the number of the operation.
        measures: whether what is encoded with a loss is compared.
        holds_products: whether ``X [Q | P]`` of projected linears is held, else it is computed again.
        builder: records a tape.

    Attributes:
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
        builder: TapeBuilder | None = None,
    ) -> None:
        super().__init__(recording, base, ledger)
        self._product_codec = RAW if holds_products else None
        self._key, self._measures = key, measures
        self._dependence, self._builder = Dependence(), builder
        self.tape: Tape | None = None
        self.given: Sequence[Tensor | None] = ()

    def __enter__(self) -> Any:
        if self._builder is not None:
            self._builder.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            if self._builder is not None:
                self._builder.calls.__exit__(*error)
            if error[0] is None:
                self._end()

    def _end(self) -> None:
        recording = self.recording
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
            self._builder.add(func, traits, args, kwargs, out, heavy)
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


# -- small things -----------------------------------------------------------------------------------


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
