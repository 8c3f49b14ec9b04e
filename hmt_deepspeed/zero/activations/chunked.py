"""``hmt.activations`` beside ``hmt.fpdt``: saves the inputs of layers in chunks and of the head.

A layer in chunks computes everything but its input again, so of the policy's components there are three:
``layer_input``, ``lm_head``, and ``attention_output``, which is saved where the policy says so, for the time that attending again would take.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hmt_deepspeed.activations.codecs import Codec, Keep, SavedTensor
from hmt_deepspeed.activations.ledger import Ledger, by_label, by_layer
from hmt_deepspeed.activations.policy import Policy
from hmt_deepspeed.attribution import attribute
from hmt_deepspeed.config import ActivationsConfig
from hmt_deepspeed.config.components import POLICY_COMPONENTS, Choice, Component
from hmt_deepspeed.kernels.backward import is_transformed
from hmt_deepspeed.planner.run.fpdt import SavedInChunks
from hmt_deepspeed.report.metrics import format_table
from hmt_deepspeed.zero.activations.install import (
    build_codecs,
    choices_of,
    describe_exceptions,
    describe_swap,
)
from hmt_deepspeed.zero.activations.swap import SwapMemory

__all__ = ["CHUNKED", "ChunkedActivations", "SavedAttention", "refused_beside_chunks"]

CHUNKED: tuple[Component, ...] = ("layer_input", "attention_output", "lm_head")
_RECOMPUTED: dict[Component, Choice] = {
    c: "recompute" for c in POLICY_COMPONENTS if c not in CHUNKED
}


class ChunkedActivations:
    """Saves the activations of a model in chunks, from construction to :meth:`close`.

    Args:
        model: of the engine, before its layers are replaced.
        config: validated ``hmt.activations``, see :func:`refused_beside_chunks`.
        device: of the activations.
        aio: DeepSpeed's ``aio`` section as parsed, if the JSON has one.
        current_step: the engine's count of optimizer steps.

    Attributes:
        holders, attention_holders: for :func:`hmt_deepspeed.fpdt.install.install`.
        held: the choices, for the planner.

    Raises:
        ValueError: a pattern matches neither a layer nor the head; rounded values before a router.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ActivationsConfig,
        *,
        device: torch.device,
        aio: dict[str, Any] | None,
        current_step: Callable[[], int],
    ) -> None:
        attribution = attribute(model)
        self.policy = _of_chunks(choices_of(config.policy))
        if "attention_output" not in config.policy.model_fields_set:
            self.policy["attention_output"] = "recompute"
        self.overrides = {p: _of_chunks(choices_of(over)) for p, over in config.overrides.items()}
        inputs = _inputs(attribution.layers, attribution.head)
        _check_patterns(self.overrides, [name for name, _ in inputs])
        self._found = {part: sum(p == part for _, p in inputs) for part in CHUNKED}
        self._current_step, self._step, self._count = current_step, -1, itertools.count()
        self._ledger = Ledger()
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        with ExitStack() as undo:
            self.memory = SwapMemory(device, config.host_memory, config.nvme_path, aio)
            undo.callback(self.memory.close)
            self._codecs = build_codecs(self.policy, self.overrides, self.memory)
            policy = Policy(_RECOMPUTED | self.policy, self.overrides, self._codecs)
            self.holders: dict[nn.Module, Callable[[], Callable[[Tensor], SavedTensor]]] = {}
            self.attention_holders: dict[
                nn.Module, Callable[[], Callable[[Tensor, Tensor], SavedAttention]]
            ] = {}
            chosen: dict[Component, list[Choice]] = {component: [] for component in CHUNKED}
            routed = {layer.name for layer in attribution.layers if layer.routers}
            for name, component in inputs:
                choice = policy.choice(component, name)
                chosen[component].append(choice)
                if name in routed and choice != "recompute" and self._codecs[choice].lossy:
                    raise ValueError(_rounded_before_router(name, component, choice))
                if component == "attention_output":
                    if choice != "recompute":
                        layer = model.get_submodule(name)
                        self._hold_attention(layer, name, self._codecs[choice])
                    continue
                codec = self._codecs[choice]
                undo.callback(self._hold(model.get_submodule(name), name, component, codec))
            self.held = SavedInChunks(
                inputs=tuple(chosen["layer_input"]),
                attention=tuple(chosen["attention_output"]),
                head=next(iter(chosen["lm_head"]), "keep"),
            )
            first = model.register_forward_pre_hook(self._begin_step, prepend=True)
            undo.callback(first.remove)
            self._undo = undo.pop_all()

    # -- holding ------------------------------------------------------------------------------------

    def _hold(
        self, module: nn.Module, name: str, component: Component, codec: Codec
    ) -> Callable[[], object]:
        """Lets a codec save a module's input; returns what undoes it."""
        if isinstance(codec, Keep):  # autograd saves it, here it is only counted
            return module.register_forward_pre_hook(
                lambda _, args, kwargs: self._count_kept(name, component, args, kwargs),
                with_kwargs=True,
            ).remove

        def begin() -> Callable[[Tensor], SavedTensor]:
            return lambda piece: self._encode(piece, codec, name, component)

        self.holders[module] = begin
        return self.holders.clear

    def _hold_attention(self, layer: nn.Module, name: str, codec: Codec) -> None:
        # probabilities are exponentials of their distance to the log-sum-exp: it is never rounded
        exact = self._codecs["keep"] if codec.lossy else codec

        def begin() -> Callable[[Tensor, Tensor], SavedAttention]:
            return lambda out, log_sum_exp: SavedAttention(
                self._encode(out, codec, name, "attention_output"),
                self._encode(log_sum_exp, exact, name, "attention_output"),
            )

        self.attention_holders[layer] = begin

    def _encode(self, piece: Tensor, codec: Codec, name: str, component: Component) -> SavedTensor:
        key = (self._step + 1) << 32 | next(self._count)  # a resumed run rounds as before
        label = f"{name}: {component}"
        held = codec.encode(piece, tuple(range(piece.dim() - 1)), key, label)
        return _Charged(held, self._charge(name, component, held.nbytes))

    def _count_kept(
        self, name: str, component: Component, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The input counts for as long as it exists."""
        x = args[0] if args else kwargs["hidden_states"]
        if torch.is_grad_enabled() and not is_transformed() and x not in self._kept:
            self._kept[x] = self._charge(name, component, x.untyped_storage().nbytes())

    def _charge(self, name: str, component: Component, nbytes: int) -> _Charge:
        """Counts bytes until what is returned is garbage."""
        charge = _Charge()
        self._ledger.hold(charge, {(name, component): nbytes})
        return charge

    def _begin_step(self, module: nn.Module, _: Any) -> None:
        """Before a forward: reset the numbers where an accumulation window begins."""
        step = self._current_step()
        if module.training and step != self._step:
            self._step, self._count = step, itertools.count()
            self.memory.begin_step()
            self._ledger.reset()

    # -- what people see ----------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Numbers of the last optimizer step on this rank; bytes saved are those of its fullest moment."""
        peak = self._ledger.peak
        layers = by_layer(peak)
        return {
            "activation_bytes": sum(peak.values()),
            "activation_bytes_per_component": by_label(peak),
            "activation_bytes_per_layer": {n: sum(held.values()) for n, held in layers.items()},
            **self.memory.numbers(),
        }

    def describe(self) -> str:
        """The start table: per component its choice and where it applies, the swap."""
        rows = [[part, self.policy[part], self._found[part]] for part in CHUNKED]
        lines = [
            "hmt: activations of layers in chunks, which compute what is not held again",
            format_table(rows, ["component", "choice", "inputs"]),
            *describe_exceptions(self.overrides),
        ]
        return "\n".join([*lines, *describe_swap(self._codecs, self.memory)])

    def close(self) -> None:
        """Free host memory and files. Idempotent."""
        self._undo.close()


class _Charge:
    """Bytes that are saved for as long as it exists."""


class _Charged:
    """A saved piece that is counted while it exists."""

    def __init__(self, held: SavedTensor, charge: _Charge) -> None:
        self._held, self._charge = held, charge

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def prefetch(self) -> None:
        self._held.prefetch()

    def decode(self) -> Tensor:
        return self._held.decode()


class SavedAttention(NamedTuple):
    """One chunk's attention, see :data:`hmt_deepspeed.fpdt.inputs.AttentionHolder`."""

    out: SavedTensor
    log_sum_exp: SavedTensor

    def prefetch(self) -> None:
        for held in self:
            held.prefetch()

    def decode(self) -> tuple[Tensor, Tensor]:
        return self.out.decode(), self.log_sum_exp.decode()


def _of_chunks(choices: Mapping[Component, Choice]) -> dict[Component, Choice]:
    return {component: choices[component] for component in CHUNKED if component in choices}


def _inputs(layers: Any, head: str | None) -> list[tuple[str, Component]]:
    """Names of modules and the component that enters them, or that their attention makes."""
    found: list[tuple[str, Component]] = [(layer.name, "layer_input") for layer in layers]
    found += [(layer.name, "attention_output") for layer in layers]
    return found if head is None else [*found, (head, "lm_head")]


def _check_patterns(overrides: Mapping[str, object], names: list[str]) -> None:
    """Raises ValueError for an override that matches none of the modules that it could be of."""
    for pattern in overrides:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"hmt.activations.overrides: {pattern!r} matches no layer and no module of one; names look "
                f"like {names[0]}, {names[1]}. Correct or remove the pattern."
            )


def _rounded_before_router(name: str, component: Component, choice: Choice) -> str:
    return (
        f"hmt.activations: {component} of {name} is {choice!r}, legal with hmt.fpdt is a choice that does not round "
        "where a layer has a router: backward runs the router again, which would send tokens to other experts. "
        'Set "keep", "swap_host" or "swap_ssd", for these layers in hmt.activations.overrides.'
    )


# -- refusals ---------------------------------------------------------------------------------------


def refused_beside_chunks(
    config: ActivationsConfig, checkpointing: Mapping[str, Any]
) -> Iterator[str]:
    """Messages for what a model in chunks cannot honour: key, value, what is legal, what to do.

    Args:
        checkpointing: the JSON's ``activation_checkpointing``.
    """
    sections = {
        "policy": config.policy,
        **{f"overrides[{p!r}]": o for p, o in config.overrides.items()},
    }
    for place, section in sections.items():
        for component in sorted(section.model_fields_set):
            choice = getattr(section, component)
            if choice not in (None, "recompute") and component not in CHUNKED:
                yield (
                    f'hmt.activations.{place}.{component} is {choice!r}, legal is "recompute" with '
                    "hmt.fpdt: a layer in chunks computes all but its input again. Remove it, or set "
                    f"one of {', '.join(CHUNKED)}."
                )
    if config.components:
        yield (
            f"hmt.activations.components is {config.components!r}, legal is {{}} with hmt.fpdt, which "
            "knows its families: remove it."
        )
    for key, value in checkpointing.items():
        if value:
            yield (
                f"activation_checkpointing.{key} is {value!r}, legal with hmt.fpdt is to leave it out: "
                'layers in chunks are no checkpoints. "layer_input": "swap_host" moves their inputs to the host.'
            )
