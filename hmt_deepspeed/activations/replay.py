"""The dispatch mode of a checkpointed function's second run, in backward: hands out saved outputs, runs the rest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.activations.caching import RAW, CachingMode, tracked
from hmt_deepspeed.activations.codecs import Codec, Keep, SavedBlocks
from hmt_deepspeed.activations.dependence import tensors_among
from hmt_deepspeed.activations.ledger import Ledger
from hmt_deepspeed.activations.ops import flops, traits_of
from hmt_deepspeed.activations.recording import Blank, Constant, Operation, Part, Recording, Site
from hmt_deepspeed.sites import is_computing_projection, serving_projections

__all__ = ["ReplayMode"]


class ReplayMode(CachingMode):
    """Recompute in backward.

    Attributes:
        decoded: what was handed out, by the identity of what was held, where somebody wants to know; else None.
    """

    def __init__(self, recording: Recording, base: Site | None, ledger: Ledger) -> None:
        super().__init__(recording, base, ledger)
        self._serving: AbstractContextManager[None] | None = None
        self._next: dict[str, int] = {}
        self.decoded: dict[int, Tensor] | None = None

    def __enter__(self) -> Any:
        self._next = dict.fromkeys(("operations", "products", "substitutes"), 0)
        self.recording.bring_back()
        self._serving = serving_projections(self._product)
        self._serving.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        assert self._serving is not None
        self._serving.__exit__(None, None, None)
        self._serving = None
        self.recording.is_coming = False
        for operation in self.recording.all_operations():
            if operation.held is not None and not operation.is_blank and not operation.read:
                self.ledger.count(self.ledger.unread, operation.site.layer, operation.label)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.heavy and self.site is not None:
            if is_computing_projection():
                return self._run_again(func, self.site.layer, "projected_inputs", args, kwargs)
            return self._replay(func, args, kwargs)
        if traits.writes and self._aliases:
            self._copy_before_write(tensors_among(traits.written(args, kwargs)))
        return func(*args, **kwargs)

    def _replay(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.recording.is_given_up:
            assert self.site is not None
            return self._run_again(func, self.site.layer, self.site.label, args, kwargs)
        operation = self._recorded("operations", func)
        if operation.held is not None:
            return self._hand_out(operation)
        return self._run_again(func, operation.site.layer, operation.label, args, kwargs)

    def _run_again(self, func: Any, layer: str, label: str, args: Any, kwargs: Any) -> Any:
        clock = self.ledger.clock
        begin = 0.0 if clock is None else clock()
        out = func(*args, **kwargs)
        if clock is not None:
            self.ledger.count_seconds(label, clock() - begin)
        self.ledger.count(self.ledger.rerun, layer, label)
        self.ledger.count(self.ledger.rerun_flops, layer, label, flops(func, args, kwargs, out))
        return out

    def _recorded(self, kind: str, func: Any) -> Operation:
        """The next one of a kind."""
        operations: list[Operation] = getattr(self.recording, kind)
        index = self._next[kind]
        self._next[kind] = index + 1
        found = operations[index] if index < len(operations) else None
        if found is None or found.site is not self.site or (func and found.func is not func):
            site = self.site
            where = "outside of the layers" if site is None else f"{site.label} of {site.layer}"
            raise RuntimeError(
                f"backward computes a layer otherwise than forward did: {func or kind} in {where} is not "
                f"what forward had as number {index} of its {kind}. A checkpointed layer must compute the "
                "same operations each time; does it depend on something that has changed in between?"
            )
        return found

    def _hand_out(self, operation: Operation) -> Any:
        assert operation.held is not None
        operation.read = True
        values = []
        for index, part in enumerate(operation.held):
            with tracked():
                value = part.decode()
                if isinstance(value, Tensor):
                    value = value.detach()  # else it would get this graph's history
                    if self.decoded is not None:
                        self.decoded[id(part)] = value
            if isinstance(part, Blank | Constant):
                pass
            elif index > 0 or isinstance(operation.codec, Keep):
                self._watch(operation, index, value, RAW)
            values.append(value)
        if operation.random_state is not None:
            _set_random_state(operation.blanks[0], operation.random_state)
        return values[0] if operation.single else tuple(values)

    def _product(self) -> Tensor | None:
        if self.site is None or self._next["products"] >= len(self.recording.products):
            return None
        operation = self._recorded("products", None)
        if operation.held is None:
            return None
        self._is_busy = True
        try:
            product: Tensor = self._hand_out(operation)
        finally:
            self._is_busy = False
        return product

    @torch.no_grad()
    def substitute(
        self, site: Site, codec: Codec, tensor: Tensor
    ) -> tuple[Tensor | None, SavedBlocks | None]:
        if self.recording.is_given_up:
            return None, None
        operation = self._recorded("substitutes", None)
        if operation.is_blank:
            return None, None
        if not operation.decodes:  # nobody reads it, whatever it is
            operation.read = True
            return None, operation.codes
        substitute: Tensor = self._hand_out(operation)
        return substitute.requires_grad_(tensor.requires_grad), operation.codes


def _set_random_state(output: Part, state: Tensor) -> None:
    assert isinstance(output, Blank)
    if output.device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(output.device.type).set_rng_state(state, output.device)
