"""``hmt.activations`` under DeepSpeed: installs the backend, describes it, reports its numbers, removes it."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.utils import logger
from pydantic import BaseModel
from torch import nn

from hmt_deepspeed.activations.backend import ActivationBackend
from hmt_deepspeed.activations.codecs import Codec, build_codec
from hmt_deepspeed.activations.policy import check_overrides
from hmt_deepspeed.attribution import attribute
from hmt_deepspeed.config import ActivationsConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.config.codecs import CODECS
from hmt_deepspeed.config.components import POLICY_COMPONENTS, Choice, Component
from hmt_deepspeed.report.metrics import format_bytes, format_table
from hmt_deepspeed.zero.activations.boundary import Boundary
from hmt_deepspeed.zero.activations.checkpointing import LayerInputs, Service
from hmt_deepspeed.zero.activations.swap import SwapMemory

__all__ = [
    "Activations",
    "build_codecs",
    "choices_of",
    "describe_exceptions",
    "describe_swap",
]

# The rounding noise is keyed by checkpointed calls; each step numbers its own, so that a resumed run goes on
# as the uninterrupted one. It measures errors in the same steps, too.
_CALLS_PER_STEP = 2**14


class Activations:
    """The activation backend of one engine, from construction to :meth:`close`.

    Args:
        model: of the engine, as it will be called.
        config: validated ``hmt.activations``.
        keys: DeepSpeed's ``activation_checkpointing`` section.
        device: of the activations.
        mpu: of the engine, or None.
        aio: DeepSpeed's ``aio`` section as parsed, if the JSON has one.
        current_step: the engine's count of optimizer steps.
        error_interval: see :class:`ActivationBackend`.

    Raises:
        ValueError: the model's layers are not found or not known, a pattern matches nothing, or the keys do
            not go with the policy.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ActivationsConfig,
        keys: ActivationCheckpointing,
        *,
        device: torch.device,
        mpu: Any,
        aio: dict[str, Any] | None,
        current_step: Callable[[], int],
        error_interval: int = 0,
    ) -> None:
        self.attribution = attribute(model, config.components)
        self.policy = choices_of(config.policy)
        self.overrides = {pattern: choices_of(over) for pattern, over in config.overrides.items()}
        check_overrides(self.overrides, self.attribution)
        self._current_step, self._step = current_step, -1
        self._has_checked = False
        with ExitStack() as undo:  # of what was done before something is refused
            self.memory = SwapMemory(device, config.host_memory, config.nvme_path, aio)
            undo.callback(self.memory.close)
            self._codecs = build_codecs(self.policy, self.overrides, self.memory)
            inputs = LayerInputs(keys, mpu, self._swap_host)
            self.backend = ActivationBackend(
                model,
                self.attribution,
                self.policy,
                self._codecs,
                self.overrides,
                of_inputs=inputs.codec,
                around=Boundary(inputs.keys).run,
                error_interval=error_interval,
                engine="an engine",
            )
            undo.callback(self.backend.uninstall)
            self.backend.install()
            first = model.register_forward_pre_hook(self._begin_step, prepend=True)
            undo.callback(first.remove)
            undo.callback(Service(model, self.backend).close)
            self._undo = undo.pop_all()

    def _swap_host(self) -> Codec:
        return self._codecs.get("swap_host") or build_codec("swap_host", self.memory.host)

    def _begin_step(self, module: nn.Module, _: Any) -> None:
        """Before a forward: begin a new report where an accumulation window begins."""
        step = self._current_step()
        if module.training and step != self._step:
            if self._step >= 0 and not self._has_checked:
                self._check_missed()
            self._step = step
            self.memory.begin_step()
            self.backend.steps = step
            self.backend.begin_step()
            self.backend.calls = step * _CALLS_PER_STEP

    def _check_missed(self) -> None:
        """After the first step: a policy on operations that a layer does not have does nothing, which is told."""
        self._has_checked = True
        missed = _grouped(self.backend.report().missed)
        if missed:
            logger.warning(
                "hmt.activations: no operation was found for %s. Its modules compute in another way than "
                "attribution expects: see hmt.activations.components.",
                ", ".join(missed),
            )

    # -- what people see --------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Numbers of the last optimizer step on this rank; bytes saved are those of its fullest moment."""
        report = self.backend.report()
        return {
            "activation_bytes": report.total_bytes,
            "activation_bytes_per_component": report.bytes_by_label,
            "activation_bytes_per_layer": report.bytes_by_layer,
            "activation_rerun_flops": sum(report.rerun_flops.values()),
            "activation_rerun_flops_per_component": dict(report.rerun_flops),
            "activation_unread_outputs": sum(report.unread.values()),
            **self.memory.numbers(),
        }

    def describe(self) -> str:
        """The start table: per component its choice and where it applies, what is not attributed, the swap."""
        layers, found = self.attribution.layers, self._modules()
        rows = [[part, self.policy[part], found[part]] for part in POLICY_COMPONENTS if found[part]]
        table = format_table(rows, ["component", "choice", "modules"])
        lines = [f"hmt: activations of {len(layers)} layers, {layers[0].name} to {layers[-1].name}"]
        lines += [table, *describe_exceptions(self.overrides)]
        if self.attribution.unattributed:
            names = ", ".join(_grouped(self.attribution.unattributed))
            lines.append(_wrapped(f"no component, held as they are: {names}"))
        return "\n".join([*lines, *describe_swap(self._codecs, self.memory)])

    def _modules(self) -> Counter[str]:
        """Number of modules whose outputs, or inputs, belong to a component."""
        found: Counter[str] = Counter(
            component
            for layer in self.attribution.layers
            for component in layer.components.values()
        )
        found["layer_input"] = len(self.attribution.layers)
        found["lm_head"] = int(self.attribution.head is not None)
        found["projected_inputs"] = len(self.attribution.layers)  # each has one choice
        return found

    def close(self) -> None:
        """Restore the model, free host memory and files. Idempotent."""
        self._undo.close()


# -- also beside hmt.fpdt ------------------------------------------------------------------------------


def choices_of(model: BaseModel) -> dict[Component, Choice]:
    """The choices that a policy or an override sets."""
    return {c: choice for c in POLICY_COMPONENTS if (choice := getattr(model, c))}


def build_codecs(
    policy: Mapping[Component, Choice],
    overrides: Mapping[str, Mapping[Component, Choice]],
    memory: SwapMemory,
) -> dict[Choice, Codec]:
    """Codecs of the choices that occur; raw for tensors without a component.

    Args:
        policy: choices by component. overrides: likewise, by pattern of module names.
        memory: stores of the codecs that swap.
    """
    chosen: set[Choice] = {"keep", *policy.values()}
    chosen.update(*(choices.values() for choices in overrides.values()))
    return {
        choice: build_codec(choice, memory.store(CODECS[choice].place))
        for choice in sorted(chosen & CODECS.keys())
    }


def describe_exceptions(overrides: Mapping[str, Mapping[Component, Choice]]) -> list[str]:
    """Lines about overrides, which differ from the table, one a pattern."""
    return [
        _wrapped(f"but {pattern!r}: {', '.join(f'{part} {how}' for part, how in choices.items())}")
        for pattern, choices in overrides.items()
    ]


def _wrapped(text: str) -> str:
    """In lines of 80 columns where words fit them."""
    return textwrap.fill(
        text, 80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def describe_swap(codecs: Mapping[Choice, Codec], memory: SwapMemory) -> list[str]:
    """A line about where tensors are swapped to, if any are."""
    places = {CODECS[choice].place for choice in codecs}
    if places == {"device"}:
        return []
    ssd = memory.nvme_path if "ssd" in places else None
    line = f"swap: up to {format_bytes(memory.limit)} of host memory per rank"
    return [line + ("" if ssd is None else f", then files in {ssd}")]


def _grouped(names: tuple[str, ...]) -> list[str]:
    """Names that differ in numbers only, once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in names))
