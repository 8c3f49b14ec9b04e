"""Which component of a decoder layer the outputs of its modules belong to.

A module of a layer belongs to the component of the first rule whose name pattern and kind both fit it: the rules
are made of the names in the model's own row of :data:`~hmt_deepspeed.families.table.FAMILIES`, then of those in all
rows together, since models of other families use the same words. What fits no rule is listed as unattributed, never
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from hmt_deepspeed.config.components import COMPONENTS, Component
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import FAMILIES, family_of
from hmt_deepspeed.sites import expert_weights

__all__ = ["Attribution", "Layer", "Rule", "attribute"]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        name: in the model. module: what is checkpointed.
        components: by name within the layer (``self_attn.q_proj``). A linear or a norm owns its output;
            an attention module owns that of the operations that run in it and in none of its children.
        exits: linears whose output only joins the stream that leaves the layer, by name within it. No
            operation of the layer reads it in backward, so there is nothing to hold.
        routers: modules that say which experts of a mixture a token is sent to, by name within it. What they put
            out is always kept, so that no second run sends a token elsewhere.
    """

    name: str
    module: nn.Module
    components: dict[str, Component]
    exits: frozenset[str] = frozenset()
    routers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Attribution:
    """A model's decoder layers, in order of computation, and what surrounds them.

    Attributes:
        head: name of the language-model head. final_norm: of the norm after the last layer.
        unattributed: names of what has matrices but no component: modules of a layer that are not known, and whole
            subtrees outside the layers, such as a vision tower.
    """

    layers: tuple[Layer, ...]
    head: str | None
    final_norm: str | None
    unattributed: tuple[str, ...]


# -- the rules ----------------------------------------------------------------------------------------


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    """A parameter's shape, also where ZeRO-3 has split it over ranks."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and len(_shape(weight)) == 2


def _is_norm(module: nn.Module) -> bool:
    leaf = next(module.children(), None) is None
    return leaf and all(len(_shape(p)) == 1 for p in module.parameters(recurse=False))


def _has_experts(module: nn.Module) -> bool:
    return bool(expert_weights(module))


def _is_attention(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


class Rule(NamedTuple):
    """A row: full match of a name within a layer, what such a module must be, its component (None: an exit)."""

    pattern: str
    kind: Callable[[nn.Module], bool]
    component: Component | None


_NORM = r"[\w.]*(?:norm|ln|layernorm)(?:_\w+)?"


def _rules(rows: Iterable[Family]) -> tuple[Rule, ...]:
    """Of the words that families have together: any one's attention with any one's linears in it."""
    rows = tuple(rows)
    attention = _one_of(row.attention for row in rows)
    experts = r"(?:\.shared_experts?)?"  # a mixture's MLP that all tokens pass
    mlp = _one_of(up.rpartition(".")[0] for row in rows for up in row.up) + experts

    def in_mlp(paths: Iterable[str]) -> str:
        """Linears in any one's MLP; those that lie in the layer itself are there under their own name too."""
        paths = tuple(paths)
        own = _one_of(path for path in paths if "." not in path)
        return rf"{mlp}\.{_one_of(path.rpartition('.')[2] for path in paths)}|{own}"

    def in_attention(names: Iterable[str]) -> str:
        return rf"{attention}\.{_one_of(names)}"

    return (
        Rule(in_attention(q for row in rows for q in row.qkv), _is_linear, "attention_qkv"),
        Rule(in_attention(row.output for row in rows), _is_linear, "residual"),
        Rule(in_mlp(up for row in rows for up in row.up), _is_linear, "mlp_intermediate"),
        Rule(in_mlp(row.down for row in rows), _is_linear, None),
        Rule(r"[\w.]+", _has_experts, "experts"),
        Rule(r"[\w.]*experts\.\d+\.[\w.]+", _is_linear, "experts"),
        Rule(attention, _is_attention, "attention_output"),
        Rule(rf"{_one_of(n for row in rows for n in row.norms)}|{_NORM}", _is_norm, "layernorm"),
    )


def _one_of(words: Iterable[str]) -> str:
    """A pattern for any of the words that there are; for none, one that nothing fits."""
    found = dict.fromkeys(re.escape(word) for word in words if word)
    return f"(?:{'|'.join(found)})" if found else r"(?!)"


# Gemma-2 and -3, OLMo-2, GLM-4: a norm between the MLP and the residual stream reads the MLP's output.
_POST_NORM = re.compile(r"post_(?:feedforward|mlp|ffn)_(?:layer)?norm")
# An adapter's matrices belong to what they adapt (PEFT).
_ADAPTER = re.compile(r"\.(?:base_layer|lora_[AB]\.\w+)$")
_HEAD = re.compile(r"(?:[\w.]*\.)?(?:lm_head|embed_out|output|head)")
_FINAL_NORM = re.compile(r"norm|norm_f|final_norm|final_layer_?norm|ln_f")


# -- the walk -----------------------------------------------------------------------------------------


def attribute(model: nn.Module, overrides: Mapping[str, Component] | None = None) -> Attribution:
    """Find the decoder layers of a model and the components of their modules.

    Args:
        model: any Hugging Face causal model, or a module whose layers are in an ``nn.ModuleList``.
        overrides: regular expressions searched in a module's full name, and the component of the
            matches; the first match decides, before the rules. ``lm_head`` and ``layernorm`` may name
            the head and the final norm; a match in another ``nn.ModuleList`` makes that one's items layers too.

    Raises:
        ValueError: no layers, layers of a family that is not known, or an override that matches nothing
            or has no meaning there; saying what to write.
    """
    chosen = _Overrides(overrides or {})
    names = {name: module for name, module in model.named_modules() if name}
    lists = _layer_lists(model, names, chosen)
    row = family_of(getattr(model, "config", None))
    rules = (*_rules([] if row is None else [row]), *_rules(FAMILIES.values()))
    layers = tuple(
        _layer(f"{list_name}.{index}", module, chosen, rules)
        for list_name in lists
        for index, module in names[list_name].named_children()
    )
    outside = {n: m for n, m in names.items() if not any(_within(n, held) for held in lists)}
    head = chosen.only(outside, "lm_head") or _head(model, outside)
    parent = lists[0].rpartition(".")[0]
    own_norm = "" if row is None else row.final_norm.rpartition(".")[2]
    final_norm = chosen.only(outside, "layernorm") or next(
        (
            name
            for name, module in outside.items()
            if name.rpartition(".")[0] == parent
            and (
                name.rpartition(".")[2] == own_norm
                or _FINAL_NORM.fullmatch(name.rpartition(".")[2])
            )
            and _is_norm(module)
        ),
        None,
    )
    chosen.check(names)
    if not any(set(layer.components.values()) - {"layernorm"} for layer in layers):
        raise ValueError(_unknown_family(model, layers[0]))
    known = {*lists, *([head] if head else [])}
    return Attribution(
        layers=layers,
        head=head,
        final_norm=final_norm,
        unattributed=(*_unattributed_inside(layers), *_unattributed_outside(model, "", known)),
    )


def _within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


def _layer_lists(model: nn.Module, names: Mapping[str, nn.Module], chosen: _Overrides) -> list[str]:
    """Names of the outermost module lists that hold layers.

    The largest one of the language model's decoder, and those in which an override has a match.
    """
    lists: list[str] = []
    for name, module in names.items():  # outer modules come before inner ones
        is_list = isinstance(module, nn.ModuleList) and len(module) > 0
        if is_list and not any(_within(name, outer) for outer in lists):
            lists.append(name)
    if not lists:
        raise ValueError(
            f"hmt.activations: found no decoder layers in {type(model).__name__}, legal is a model that "
            "keeps them in an nn.ModuleList. Put them in one, or remove the section."
        )
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    inside = {id(module) for module in get_decoder().modules()}
    eligible = [name for name in lists if id(names[name]) in inside] or lists
    largest = max(eligible, key=lambda name: _size(names[name]))
    return [largest] + [
        name
        for name in lists
        if name != largest and any(_within(n, name) and chosen.component(n) for n in names)
    ]


def _size(module: nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def _layer(name: str, module: nn.Module, chosen: _Overrides, rules: tuple[Rule, ...]) -> Layer:
    components: dict[str, Component] = {}
    exits: set[str] = set()
    inner = {name: module for name, module in module.named_modules() if name}
    # OPT-350m says by a flag that its norms follow the residual stream's sums, which the MLP's output enters.
    post_norm = getattr(module, "do_layer_norm_before", True) is False or any(
        _POST_NORM.search(inner_name) for inner_name in inner
    )
    for inner_name, inner_module in inner.items():
        component = chosen.component(f"{name}.{inner_name}")
        rule = _rule(rules, _ADAPTER.sub("", inner_name), inner_module)
        if component is None and rule is not None:
            component = "residual" if rule.component is None and post_norm else rule.component
        if component is not None:
            components[inner_name] = component
        elif rule is not None:
            exits.add(inner_name)
    routers = frozenset(_routers(module, {*components, *exits}))
    return Layer(name, module, components, frozenset(exits), routers)


def _routers(layer: nn.Module, known: set[str]) -> Iterator[str]:
    """Modules beside experts, of which nothing is known, that have a row of a matrix for each expert."""
    for name, mixture in layer.named_modules():
        counts = {n for key, child in mixture.named_children() if (n := _num_experts(key, child))}
        for inner, module in mixture.named_modules() if counts else ():
            full = f"{name}.{inner}".strip(".")
            shapes = [_shape(p) for p in module.parameters(recurse=False)]
            if full not in known and any(len(s) == 2 and s[0] in counts for s in shapes):
                yield full


def _num_experts(name: str, module: nn.Module) -> int:
    """Experts in a module of that name, 0 where it is something else."""
    if name.endswith("experts") and isinstance(module, nn.ModuleList):
        return len(module)
    return next((weight.count for weight in expert_weights(module).values()), 0)


def _rule(rules: tuple[Rule, ...], name: str, module: nn.Module) -> Rule | None:
    return next((r for r in rules if re.fullmatch(r.pattern, name) and r.kind(module)), None)


def _head(model: nn.Module, outside: Mapping[str, nn.Module]) -> str | None:
    """What the model calls its output embeddings; else a linear outside the layers by its name."""
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    by_identity = (name for name, module in outside.items() if module is head)
    by_name = (n for n, module in outside.items() if _HEAD.fullmatch(n) and _is_linear(module))
    return next(by_identity, None) or next(by_name, None)


def _has_matrices(module: nn.Module) -> bool:
    return not isinstance(module, nn.Embedding) and any(
        len(_shape(p)) > 1 for p in module.parameters(recurse=False)
    )


def _unattributed_inside(layers: tuple[Layer, ...]) -> Iterator[str]:
    for layer in layers:
        known = {*layer.components, *layer.exits, *layer.routers}
        for name, module in layer.module.named_modules():
            if _has_matrices(module) and name not in known:
                yield f"{layer.name}.{name}" if name else layer.name


def _unattributed_outside(module: nn.Module, name: str, known: set[str]) -> Iterator[str]:
    """Outermost subtrees that have matrices and nothing known in them."""
    if name in known:
        return
    if _has_matrices(module) or (name and not any(_within(k, name) for k in known)):
        if any(map(_has_matrices, module.modules())):
            yield name or type(module).__name__
        return
    for child_name, child in module.named_children():
        yield from _unattributed_outside(
            child, f"{name}.{child_name}" if name else child_name, known
        )


def _unknown_family(model: nn.Module, layer: Layer) -> str:
    inside = [name for name, module in layer.module.named_modules() if _has_matrices(module)]
    return (
        f"hmt.activations: the layers of {type(model).__name__} ({layer.name}, ...) are of no known family: "
        f"their matrices are in {inside[:8]}. Say what they are, for example "
        '"components": {"\\\\.(wq|wk|wv)$": "attention_qkv", "\\\\.attn$": "attention_output", '
        '"\\\\.w1$": "mlp_intermediate"}, or remove the section.'
    )


class _Overrides:
    """The user's own rules."""

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._rules = [(re.compile(p), component) for p, component in components.items()]
        self._legal = [c for c in COMPONENTS if c not in ("layer_input", "projected_inputs")]

    def component(self, name: str) -> Component | None:
        """Component of a module by its full name, or None."""
        return next((component for regex, component in self._rules if regex.search(name)), None)

    def only(self, outside: Mapping[str, nn.Module], component: Component) -> str | None:
        """The one module outside the layers that is given this component, or None."""
        found = [name for name in outside if self.component(name) == component]
        if len(found) > 1:
            raise ValueError(
                f"hmt.activations.components: {component!r} is given to {found} outside the layers, legal is "
                "one module. Make the regular expression narrower."
            )
        return found[0] if found else None

    def check(self, names: Mapping[str, nn.Module]) -> None:
        for regex, component in self._rules:
            if component not in self._legal:
                raise ValueError(
                    f"hmt.activations.components[{regex.pattern!r}] is {component!r}, legal: "
                    f"{', '.join(self._legal)}. What enters the first layer needs no rule: remove it."
                )
            if not any(regex.search(name) for name in names):
                raise ValueError(
                    f"hmt.activations.components: {regex.pattern!r} matches no module; names look like "
                    f"{list(names)[-3:]}. Correct or remove the pattern."
                )
