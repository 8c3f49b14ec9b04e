"""Resolves a policy on a model: the site of every module, and the codec of every layer's input."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from hmt_deepspeed.activations.codecs import Codec
from hmt_deepspeed.activations.recording import Site
from hmt_deepspeed.attribution import Attribution, Layer
from hmt_deepspeed.config.codecs import CODECS
from hmt_deepspeed.config.components import (
    COMPONENTS,
    PAPER_POLICY,
    Choice,
    Component,
    legal_choices,
)

__all__ = ["LayerSites", "Policy", "check_overrides"]


@dataclass(frozen=True, eq=False)
class LayerSites:
    """The policy's choices for one layer.

    Attributes:
        module: the layer. base: of what it computes itself.
        modules: sites of modules within it.
        input_label: component of its input. input_codec: holds it.
        holds_products: ``X [Q | P]`` of projected linears is held, else it is computed again.
        expected: components that its operations should be found for.
    """

    module: nn.Module
    base: Site
    modules: tuple[tuple[nn.Module, Site], ...]
    input_label: Component
    input_codec: Codec
    holds_products: bool
    expected: frozenset[str]


class Policy:
    """Choice by component, with exceptions by name.

    Args:
        choices: by component; a component that is left out has the HMT paper's choice.
        overrides: regular expressions searched in the names of layers and of modules, with choices for what
            they match; the first match decides.
        codecs: of every choice that holds something.
        of_inputs: makes the codec of a layer's input from that of its choice and its position among the
            layer's activations (ZeRO-R's partitions, for example).

    Raises:
        ValueError: a choice that is not legal for its component, or one without a codec.
    """

    def __init__(
        self,
        choices: Mapping[Component, Choice],
        overrides: Mapping[str, Mapping[Component, Choice]],
        codecs: Mapping[Choice, Codec],
        of_inputs: Callable[[Codec, int], Codec] | None = None,
    ) -> None:
        self._choices = {**PAPER_POLICY, **choices}
        self._overrides = [(re.compile(p), dict(chosen)) for p, chosen in overrides.items()]
        self._codecs = dict(codecs)
        self._of_inputs = of_inputs
        self._check("policy", self._choices)
        for pattern, chosen in self._overrides:
            self._check(f"overrides[{pattern.pattern!r}]", chosen)

    def _check(self, field: str, choices: Mapping[Component, Choice]) -> None:
        for component, choice in choices.items():
            legal = legal_choices(component) if component in COMPONENTS else ()
            if choice not in legal:
                raise ValueError(
                    f"hmt.activations.{field}.{component} is {choice!r}, legal: {', '.join(legal)}. "
                    "Choose one of them."
                )
            needed = choice if choice in CODECS else "keep"
            if needed not in self._codecs:
                raise ValueError(
                    f"hmt.activations.{field}.{component} is {choice!r}, but the backend was given codecs of "
                    f"{', '.join(self._codecs)} only. Give it one of {needed!r}."
                )

    def choice(self, component: Component, *names: str) -> Choice:
        """Choice for a component in a layer or module of these names."""
        for pattern, chosen in self._overrides:
            if component in chosen and any(pattern.search(name) for name in names):
                return chosen[component]
        return self._choices[component]

    def input_codec(self, choice: Choice, position: int) -> Codec:
        """Codec of an activation that enters a checkpointed function."""
        codec = self._codecs[choice]
        return codec if self._of_inputs is None else self._of_inputs(codec, position)

    def head_codec(self, name: str) -> Codec:
        """Codec of the input of the language-model head of this name."""
        return self._codecs[self.choice("lm_head", name)]

    def holds_products(self, *names: str) -> bool:
        """Whether ``X [Q | P]`` is held in a layer of this name, or outside of layers."""
        return self.choice("projected_inputs", *names) == "project"

    def layer(self, layer: Layer) -> LayerSites:
        """The sites of a layer."""
        input_codec = self.input_codec(self.choice("layer_input", layer.name), 0)
        found = {
            name: self._site(layer, name, component)
            for name, component in layer.components.items()
            if component != "layernorm"
        }
        for name, component in layer.components.items():
            if component == "attention_output":
                found |= self._consistent(name, found, input_codec)
        found |= {name: Site(layer.name, "exit", None) for name in layer.exits}
        kept = self._codecs["keep"]
        found |= {name: Site(layer.name, "experts", kept) for name in layer.routers}
        modules = dict(layer.module.named_modules())
        return LayerSites(
            layer.module,
            Site(layer.name, "unattributed", kept),
            tuple((modules[name], site) for name, site in found.items()),
            "layer_input",
            input_codec,
            self.holds_products(layer.name),
            frozenset(layer.components.values()) - {"layernorm"},
        )

    def _site(self, layer: Layer, name: str, component: Component) -> Site:
        choice = self.choice(component, layer.name, f"{layer.name}.{name}")
        codec = None if choice == "recompute" else self._codecs[choice]
        return Site(layer.name, component, codec, attention=component == "attention_output")

    @staticmethod
    def _consistent(name: str, sites: Mapping[str, Site], input_codec: Codec) -> dict[str, Site]:
        """Sites of an attention module and its output projection that agree with its q, k and v.

        Attention's backward reads q, k, v, its output and log-sum-exp. Where q, k or v come back with an
        error, output and log-sum-exp must be those of the same q, k and v (else the gradient's error
        doubles): the operation is run again. What is held is then what the output projection reads.
        """
        attention = sites[name]
        inside = {n: site for n, site in sites.items() if n.startswith(f"{name}.")}
        inexact = any(
            input_codec.lossy if site.codec is None else site.codec.lossy
            for site in inside.values()
            if site.label == "attention_qkv"
        )
        if attention.codec is None or not inexact:
            return {}
        changed = {name: Site(attention.layer, attention.label, None, attention=True)}
        for inner, site in inside.items():
            if site.label == "residual":
                changed[inner] = Site(
                    site.layer, site.label, site.codec, input_codec=attention.codec
                )
        return changed


def check_overrides(
    overrides: Mapping[str, Mapping[Component, Choice]], attribution: Attribution
) -> None:
    """Each exception must decide something.

    Raises:
        ValueError: a regular expression that matches nothing, no owner of a component that it names, or only
            owners for which an earlier one has decided.
    """
    owners = _owners(attribution)
    everything = dict.fromkeys(
        name for found in owners.values() for names in found for name in names
    )
    earlier: list[tuple[str, Mapping[Component, Choice]]] = []
    for pattern, chosen in overrides.items():
        if not any(re.search(pattern, name) for name in everything):
            raise ValueError(
                f"hmt.activations.overrides: {pattern!r} matches no layer and no module of one; names look "
                f"like {', '.join(list(everything)[:3])}. Correct or remove the pattern."
            )
        for component in chosen:
            _check_override(pattern, component, owners.get(component, []), earlier)
        earlier.append((pattern, chosen))


def _check_override(
    pattern: str,
    component: Component,
    owners: list[tuple[str, ...]],
    earlier: list[tuple[str, Mapping[Component, Choice]]],
) -> None:
    matched = [names for names in owners if any(re.search(pattern, name) for name in names)]
    field = f"hmt.activations.overrides[{pattern!r}].{component}"
    if not matched:
        known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", n[-1]) for n in owners))
        raise ValueError(
            f"{field} decides nothing: what the pattern matches has no {component}; legal is a pattern that "
            f"matches a layer that has, or what it belongs to: {known or 'nothing in this model'}. Correct the "
            "pattern, or remove the component from it."
        )
    before = [p for p, chosen in earlier if component in chosen]
    decided = [any(re.search(p, n) for p in before for n in names) for names in matched]
    if all(decided):
        raise ValueError(
            f"{field} decides nothing: the first match decides, and all that it matches is matched by "
            f"{' or '.join(map(repr, before))} before it. Put the narrower pattern first."
        )


def _owners(attribution: Attribution) -> dict[Component, list[tuple[str, ...]]]:
    """Names under which each component's choice is looked up, the owner's own last, once for each owner."""
    found: dict[Component, list[tuple[str, ...]]] = {component: [] for component in COMPONENTS}
    for layer in attribution.layers:
        found["layer_input"].append((layer.name,))
        found["projected_inputs"].append((layer.name,))
        for name, component in layer.components.items():
            found[component].append((layer.name, f"{layer.name}.{name}"))
    if attribution.head is not None:
        found["lm_head"].append((attribution.head,))
    return found
