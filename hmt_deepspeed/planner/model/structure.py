"""Reads a model that was built without weights, module by module, into a :class:`ListedShape`.

The layers that are planned are those that ``hmt.activations`` would manage, or, where it has no components for any,
the largest list of modules. All else is outside of them: encoders, towers, classifiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from hmt_deepspeed.architectures import field_of, idle_elements
from hmt_deepspeed.attribution import Attribution, attribute
from hmt_deepspeed.families.table import family_of
from hmt_deepspeed.optim.backward.experts import expert_sites
from hmt_deepspeed.optim.backward.linear import can_project
from hmt_deepspeed.optim.settings.assign import head_weights, linear_weights
from hmt_deepspeed.planner.model.listed import (
    AttentionOp,
    LayerGroup,
    Length,
    ListedShape,
    Part,
    Place,
    Tokens,
)
from hmt_deepspeed.planner.model.names import Names
from hmt_deepspeed.planner.model.shapes import Parameter, ParameterKind
from hmt_deepspeed.planner.model.structure_modules import (
    CONVOLUTIONS,
    SCANS,
    TRANSPOSED,
    is_plain,
    norm_channels,
)
from hmt_deepspeed.planner.model.structure_sizes import Sizes, size_of, starred
from hmt_deepspeed.planner.model.structure_tokens import TokenReader
from hmt_deepspeed.sites import ExpertWeight, expert_weights

__all__ = ["listed_shape"]

_PLACES: dict[str | None, Place] = {
    "attention_qkv": "qkv",
    "residual": "out",
    "mlp_intermediate": "up",
    "experts": "experts",
    None: "down",
}


def listed_shape(model: nn.Module, built: nn.Module | None = None) -> ListedShape:
    """The shape of any model of transformers, on the meta device.

    Args:
        built: the same model as it trains, patched and partitioned; which of its parameters are trained, and of which
            experts a backward can be projected, is asked of it.
    """
    return _Reader(model, model if built is None else built).shape()


class _Reader:
    """One model, while it is read."""

    def __init__(self, model: nn.Module, built: nn.Module) -> None:
        self.model, self.built = model, built
        self.config: Any = model.config
        self.sizes = Sizes(model)
        self.reader = TokenReader(self.sizes, self._components, self.experts)

    # -- where the layers are ---------------------------------------------------------------------

    @cached_property
    def attribution(self) -> Attribution | None:
        """Layers that the activation backend would manage; None where it has no components."""
        try:
            return attribute(self.model)
        except ValueError:
            return None

    @cached_property
    def stack(self) -> str:
        """Name of the list of the layers that are planned, "" where there is none."""
        if self.attribution is not None:
            return self.attribution.layers[0].name.rpartition(".")[0]
        lists = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) > 0
        }
        return max(lists, key=lambda name: lists[name], default="")

    @cached_property
    def layers(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of each."""
        if not self.stack:
            return []
        stack = self.model.get_submodule(self.stack)
        return [(f"{self.stack}.{name}", layer) for name, layer in stack.named_children()]

    # -- the whole --------------------------------------------------------------------------------

    def shape(self) -> ListedShape:
        model, kinds = self.model, self._kinds()
        named = dict(model.named_parameters())
        for name, parameter in self.built.named_parameters():
            if name in named:
                named[name].requires_grad_(parameter.requires_grad)
        inside = f"{self.stack}." if self.stack else "\0"
        outside = [
            _parameter(n, p, kinds[n], self.experts.get(n))
            for n, p in named.items()
            if not n.startswith(inside)
        ]
        groups = self._groups(named, kinds) or [LayerGroup((0,), (), Tokens())]
        get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = get_head()
        rows = getattr(head, "weight", None)
        has_head = rows is not None
        width = self._hidden()
        ops = [op for group in groups for op in group.tokens.attentions]
        text = self.sizes.text_config(self.stack)
        widest = max(ops, key=lambda op: op.heads, default=AttentionOp(width, 1))
        key_heads = size_of(text, "num_key_value_heads", widest.heads)
        rotary, row = self._rotary_tables(), family_of(self.config)
        parts = tuple(self._parts(head if has_head else None))
        positions = self.sizes.positions(self.stack)
        self._assumptions(groups)
        return ListedShape(
            str(getattr(self.config, "model_type", type(model).__name__)),
            hidden=width,
            layers=sum(len(group.numbers) for group in groups),
            heads=widest.heads,
            kv_heads=widest.heads if widest.heads % key_heads else key_heads,
            head_dim=max(1, widest.width // widest.heads),
            intermediate=_intermediate(groups[-1].tokens),
            vocab=int(rows.shape[0]) if rows is not None else size_of(text, "vocab_size", 1),
            names=Names(f"{self.stack}.*" if self.stack else "\0", "", "", (), "", (), "", ()),
            positions=positions,
            rotary_dim=max(rotary, default=0),
            rotary_tables=max(1, len(rotary)),
            outside=tuple(outside),
            groups=tuple(groups),
            parts=parts,
            length=self.sizes.length(self.stack),
            source=self.sizes.source(),
            is_managed=self.attribution is not None,
            has_head=has_head,
            eager=not getattr(model, "_supports_sdpa", True),
            active=round(sum(p.numel() for p in named.values()) - idle_elements(model)),
            router_logits=bool(field_of(text, "output_router_logits")),
            fp32_routing=row is None or row.fp32_routing,
            coarse=tuple(self.sizes.coarse),
        )

    def _kinds(self) -> dict[str, ParameterKind]:
        """Kinds of parameters by the optimizer's own rules of which weights are linear, and which a head's."""
        linears, heads = linear_weights(self.model), head_weights(self.model)
        found: dict[str, ParameterKind] = {}
        for name, parameter in self.model.named_parameters():
            if name in self.experts:
                found[name] = "experts"
            elif parameter.dim() < 2 or (parameter.dim() == 2 and min(parameter.shape) < 2):
                found[name] = "vector"
            elif name in heads:
                found[name] = "head"
            elif name in linears and parameter.dim() == 2:
                found[name] = "linear" if can_project(linears[name]) else "formed"
            else:
                found[name] = "embedding"
        return found

    @cached_property
    def experts(self) -> dict[str, ExpertWeight]:
        """Weights of mixtures' experts, by name, of which the optimizer knows how they are computed."""
        known = {name for name, site in expert_sites(self.built).items() if not site.reason}
        return {
            f"{name}.{key}": weight
            for name, module in self.model.named_modules()
            for key, weight in expert_weights(module).items()
            if f"{name}.{key}" in known
        }

    def _groups(
        self, named: dict[str, nn.Parameter], kinds: dict[str, ParameterKind]
    ) -> list[LayerGroup]:
        """Layers that have the same parameters and modules together."""
        found: dict[Any, list[int]] = {}
        for number, (name, layer) in enumerate(self.layers):
            own = tuple(
                _parameter(
                    f"{self.stack}.*.{key[len(name) + 1 :]}", p, kinds[key], self.experts.get(key)
                )
                for key, p in named.items()
                if key.startswith(f"{name}.")
            )
            work = _repeated(self.reader.tokens(layer, name), self._repeats())
            found.setdefault((own, work), []).append(number)
        return [
            LayerGroup(tuple(numbers), tuple(replace(p, count=len(numbers)) for p in own), work)
            for (own, work), numbers in found.items()
        ]

    def _parts(self, head: nn.Module | None) -> Iterator[Part]:
        """Work outside the layers, by what its tokens are."""
        found: dict[Length, Tokens] = {}
        layers = {f"{self.stack}.{i}" for i in range(len(self.layers))}
        for length, name, module, rate in self._outermost(layers, head):
            work = self.reader.tokens(module, name)
            at = replace(length, rate=length.rate * rate)
            found[at] = _joined(found.get(at, Tokens()), work)
        for length, work in found.items():
            yield Part("outside", length, work)

    def _outermost(
        self, layers: set[str], head: nn.Module | None
    ) -> Iterator[tuple[Length, str, nn.Module, float]]:
        """(tokens, name, module, rate) of what holds no planned layer: leaves, and modules of attention whole."""
        convolutions: list[tuple[Length, str, nn.Module]] = []

        def walk(module: nn.Module, name: str) -> Iterator[tuple[Length, str, nn.Module, float]]:
            if module is head or name in layers or (name and name == self.stack):
                return
            if any(layer.startswith(f"{name}.") if name else True for layer in layers) or is_plain(
                module
            ):
                for key, child in module.named_children():
                    yield from walk(child, f"{name}.{key}" if name else key)
                return
            if isinstance(module, CONVOLUTIONS):
                convolutions.append((self.sizes.length(name), name, module))
                return
            yield self.sizes.length(name), name, module, 1.0

        yield from walk(self.model, "")
        rate: dict[Length, float] = {}
        # each runs at the rate of its outputs, which the strides of those behind it lower
        for length, name, module in reversed(convolutions):
            yield length, name, module, rate.get(length, 1.0)
            stride = 1
            for step in getattr(module, "stride", ()):
                stride *= int(step)
            if not isinstance(module, TRANSPOSED):
                rate[length] = rate.get(length, 1.0) * stride

    def _components(self, layer: str) -> tuple[dict[str, Place], list[str]]:
        """As the activation backend has them: places of a layer's linears by name within it, modules of attention."""
        found = self.attribution
        own = next((x for x in found.layers if x.name == layer), None) if found else None
        if own is None:
            return {}, []
        places = {n: _PLACES[c] for n, c in own.components.items() if c in _PLACES}
        attended = [n for n, c in own.components.items() if c == "attention_output"]
        places |= dict.fromkeys(own.routers, "router")
        return places | dict.fromkeys(own.exits, "down"), attended

    # -- sizes ------------------------------------------------------------------------------------

    def _hidden(self) -> int:
        """Channels of the stream: of the layers' own norms, else of the config."""
        for inner in self.layers[0][1].children() if self.layers else ():
            if channels := norm_channels(inner):
                return channels
        config = self.sizes.text_config(self.stack)
        names = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
        return next((size for name in names if (size := size_of(config, name, 0))), 1)

    def _rotary_tables(self) -> list[int]:
        """Channels of a head that each pair of cosines and sines rotates."""
        around = re.escape(self.stack.rpartition(".")[0])
        tables = re.compile(rf"{around}\.[^.]+\.\w*inv_freq")
        return [
            2 * buffer.numel()
            for name, buffer in self.model.named_buffers()
            if tables.fullmatch(name) and "original" not in name
        ]

    def _assumptions(self, groups: list[LayerGroup]) -> None:
        coarse = self.sizes.coarse
        coarse[
            "activations: of products, norms and attention; of other operations nothing is counted"
        ] = None
        if self.attribution is None:
            coarse[
                "hmt.activations has no components for these layers: all activations are kept, and the JSON has no "
                "such section (hmt.activations.components would name them)"
            ] = None
        others = {p.name for group in groups for p in group.tokens.products if p.place == "other"}
        if self.attribution is not None and others:
            coarse[
                f"kept, since no choice is known for them: {', '.join(sorted(map(starred, others))[:6])}"
            ] = None
        if (
            getattr(self.config, "is_encoder_decoder", False)
            and not self.sizes.length("encoder").fixed
        ):
            coarse["the encoder's sequence is taken to be as long as the decoder's"] = None
        if any(SCANS.search(type(m).__name__) for m in self.model.modules()):
            coarse[
                "scans of state-space layers: their fused kernels, which save inputs and no states"
            ] = None
        if self._windowed():
            coarse["sliding windows: attention is counted over the whole sequence (too much)"] = (
                None
            )
        if isinstance(getattr(self.config, "depths", None), list | tuple):
            coarse["stages of fewer tokens are counted with those of the first (too much)"] = None
        if self._repeats() > 1:
            coarse[
                f"layers share their weights and run {self._repeats()} times each, which is counted"
            ] = None
        experts = self.sizes.experts(self.stack)
        if experts is not None:
            coarse[f"experts: {experts.chosen} of {experts.total} for each token, in balance"] = (
                None
            )

    def _windowed(self) -> bool:
        config = self.sizes.text_config(self.stack)
        return bool(field_of(config, "sliding_window") or field_of(config, "attention_window"))

    def _repeats(self) -> int:
        groups = size_of(self.config, "num_hidden_groups", 0)  # ALBERT
        return max(1, size_of(self.config, "num_hidden_layers", 1) // groups) if groups else 1


def _parameter(
    name: str, parameter: nn.Parameter, kind: ParameterKind, experts: ExpertWeight | None
) -> Parameter:
    shape = tuple(parameter.shape)
    return Parameter(name, shape, kind, trained=parameter.requires_grad, experts=experts)


def _intermediate(work: Tokens) -> int:
    """Channels within the MLP, or within one expert of a layer that has no other."""
    experts = [p.linear.outputs for p in work.products if p.linear and p.role == "up"]
    return max(1, work.outputs("up") or max(experts, default=1))


def _joined(a: Tokens, b: Tokens) -> Tokens:
    return Tokens(
        a.products + b.products,
        a.attentions + b.attentions,
        a.activations + b.activations,
        a.norms + b.norms,
        a.centred_norms + b.centred_norms,
    )


def _repeated(work: Tokens, times: int) -> Tokens:
    """The work of layers that run several times."""
    return Tokens(
        tuple(
            replace(
                p, elements=times * p.elements, inputs=times * p.inputs, outputs=times * p.outputs
            )
            for p in work.products
        ),
        times * work.attentions,
        times * work.activations,
        times * work.norms,
        times * work.centred_norms,
    )
