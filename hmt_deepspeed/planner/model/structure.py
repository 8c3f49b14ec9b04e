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

from hmt_deepspeed.attribution import Attribution, attribute
from hmt_deepspeed.optim.settings.assign import head_weights, linear_weights
from hmt_deepspeed.planner.model.listed import (
    AttentionOp,
    LayerGroup,
    Length,
    ListedShape,
    Part,
    Place,
    Product,
    Tokens,
)
from hmt_deepspeed.planner.model.shapes import Linear, Names, Parameter, ParameterKind
from hmt_deepspeed.planner.model.structure_modules import (
    CONVOLUTIONS,
    SCANS,
    TRANSPOSED,
    attentions,
    has_no_weights,
    is_matrix,
    is_plain,
    norm_channels,
)
from hmt_deepspeed.planner.model.structure_sizes import Sizes, field_of, size_of, starred

__all__ = ["listed_shape"]

_PLACES: dict[str | None, Place] = {
    "attention_qkv": "qkv",
    "residual": "out",
    "mlp_intermediate": "up",
    None: "down",
}
# Linears that read what attention put out, and not the stream beside the queries.
_BACK = re.compile(r"o|wo|out|o_proj|out_proj|c_proj|proj|dense|out_lin|to_out")


def listed_shape(model: nn.Module) -> ListedShape:
    """The shape of any model of transformers, on the meta device."""
    return _Reader(model).shape()


class _Reader:
    """One model, while it is read."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.sizes = Sizes(model)

    # -- where the layers are ---------------------------------------------------------------------

    @cached_property
    def attribution(self) -> Attribution | None:
        """What the activation backend would manage; None where it has no components."""
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
        inside = f"{self.stack}." if self.stack else "\0"
        outside = [_parameter(n, p, kinds[n]) for n, p in named.items() if not n.startswith(inside)]
        groups = self._groups(named, kinds) or [LayerGroup((0,), (), Tokens())]
        get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = get_head()
        rows = getattr(head, "weight", None)
        has_head = rows is not None
        width = self._hidden()
        ops = [op for group in groups for op in group.tokens.attentions]
        text = self.sizes.text_config(self.stack)
        heads = max((op.heads for op in ops), default=1)
        parts = tuple(self._parts(head if has_head else None))
        positions = self.sizes.positions(self.stack)
        self._assumptions(groups)
        return ListedShape(
            str(getattr(self.config, "model_type", type(model).__name__)),
            hidden=width,
            layers=sum(len(group.numbers) for group in groups),
            heads=heads,
            kv_heads=heads,
            head_dim=max(1, width // heads),
            intermediate=max(1, groups[-1].tokens.outputs("up")),
            vocab=int(rows.shape[0]) if rows is not None else size_of(text, "vocab_size", 1),
            names=Names(f"{self.stack}.*" if self.stack else "\0", "", "", (), "", (), "", ()),
            positions=positions,
            outside=tuple(outside),
            groups=tuple(groups),
            parts=parts,
            length=self.sizes.length(self.stack),
            source=self.sizes.source(),
            is_managed=self.attribution is not None,
            has_head=has_head,
            eager=not getattr(model, "_supports_sdpa", True),
            active=round(sum(p.numel() for p in named.values()) - self._idle),
            coarse=tuple(self.sizes.coarse),
        )

    def _kinds(self) -> dict[str, ParameterKind]:
        """By the optimizer's own rules of which weights are linear, and which a head's."""
        linears, heads = linear_weights(self.model), head_weights(self.model)
        found: dict[str, ParameterKind] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.dim() < 2 or (parameter.dim() == 2 and min(parameter.shape) < 2):
                found[name] = "vector"
            elif name in heads:
                found[name] = "head"
            elif name in linears and parameter.dim() == 2:
                found[name] = "linear" if isinstance(linears[name], nn.Linear) else "conv1d"
            else:
                found[name] = "embedding"
        return found

    def _groups(
        self, named: dict[str, nn.Parameter], kinds: dict[str, ParameterKind]
    ) -> list[LayerGroup]:
        """Layers that have the same parameters and modules together."""
        found: dict[Any, list[int]] = {}
        for number, (name, layer) in enumerate(self.layers):
            own = tuple(
                _parameter(f"{self.stack}.*.{key[len(name) + 1 :]}", p, kinds[key])
                for key, p in named.items()
                if key.startswith(f"{name}.")
            )
            work = _repeated(self._tokens(layer, name), self._repeats())
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
            work = self._tokens(module, name)
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

    # -- one stack of modules ---------------------------------------------------------------------

    def _tokens(self, module: nn.Module, name: str) -> Tokens:
        """What a module and all in it do with each token."""
        components, attended = self._components(name)
        products, ops = list[Product](), list[AttentionOp]()
        activations, norms, centred, seen = 0.0, 0, 0, set[tuple[str, float]]()
        for key, inner in module.named_modules(remove_duplicate=False):
            if has_no_weights(inner):
                continue
            full = f"{name}.{key}" if key else name
            for product in self._products(inner, key, full, components):
                reads = (key.rpartition(".")[0], product.inputs)
                leads_back = product.place in ("out", "down") or _BACK.fullmatch(
                    key.rpartition(".")[2]
                )
                shared = product.linear is not None and reads in seen and not leads_back
                seen.add(reads)
                if product.place == "out" and any(p.place == "up" for p in products):
                    product = replace(product, place="mlp_out")
                products.append(replace(product, shares_input=shared))
            channels = norm_channels(inner)
            norms += 0 if isinstance(inner, nn.LayerNorm | nn.GroupNorm) else channels
            centred += channels if isinstance(inner, nn.LayerNorm | nn.GroupNorm) else 0
        for key, inner in attentions(module):
            known = any(n == key or n.startswith(f"{key}.") for n in attended)
            ops.append(self._attention(inner, f"{name}.{key}" if key else name, known))
        ups = sum(p.outputs for p in products if p.place == "up")
        downs = sum(p.inputs for p in products if p.place == "down")
        activations += downs if ups >= 2 * downs else 0
        activations += sum(
            p.outputs / 2 for p in products if p.place == "other" and "gate_up" in p.name
        )
        return Tokens(tuple(products), tuple(ops), activations, norms, centred)

    def _components(self, layer: str) -> tuple[dict[str, Place], list[str]]:
        """As the activation backend has them: places of a layer's linears by name within it, modules of attention."""
        found = self.attribution
        own = next((x for x in found.layers if x.name == layer), None) if found else None
        if own is None:
            return {}, []
        places = {n: _PLACES[c] for n, c in own.components.items() if c in _PLACES}
        attended = [n for n, c in own.components.items() if c == "attention_output"]
        return places | dict.fromkeys(own.exits, "down"), attended

    def _products(
        self, module: nn.Module, key: str, full: str, components: dict[str, Place]
    ) -> Iterator[Product]:
        """Of the weights that a module itself has."""
        place = components.get(key, "other")
        times = self.sizes.times(full)
        for name, weight in module._parameters.items():
            if weight is None or weight.dim() < 2 or not weight.numel():
                continue
            if isinstance(module, nn.Embedding):
                continue
            outputs, inputs = (
                int(weight.shape[0]),
                int(weight[0].numel()) if weight.dim() == 2 else 0,
            )
            path = f"{key}.{name}" if name != "weight" else key
            if isinstance(module, CONVOLUTIONS):
                elements = float(weight.numel())
                yield Product(path, "other", elements, module.in_channels, module.out_channels)
            elif weight.dim() == 2:
                if type(module).__name__ == "Conv1D":  # stored transposed
                    outputs, inputs = inputs, outputs
                is_linear = isinstance(module, nn.Linear)
                linear = Linear(key, "up", inputs, outputs, False) if is_linear else None
                yield Product(
                    path,
                    place,
                    times * weight.numel(),
                    times * inputs,
                    times * outputs,
                    False,
                    linear,
                )
            else:  # experts in one tensor
                yield self._expert_product(path, weight, full)

    def _expert_product(self, path: str, weight: nn.Parameter, full: str) -> Product:
        experts = self.sizes.experts(full)
        count = int(weight.shape[0])
        chosen = experts.chosen if experts is not None and experts.total == count else count
        one = weight.numel() / count
        # (experts, out, in) or (experts, in, out): the stream is what both tensors of an expert have
        a, b = int(weight.shape[-2]), int(weight.shape[-1])
        wide_first = ("down" not in path and a > b) or ("down" in path and a < b)
        outputs, inputs = (a, b) if wide_first else (b, a)
        if chosen == count > 1 and "expert" in full:
            self.sizes.coarse[
                f"{starred(full)}: every token is counted with all {count} parts of a 3-D weight"
            ] = None
        return Product(path, "other", chosen * one, chosen * inputs, chosen * outputs)

    @cached_property
    def _idle(self) -> float:
        """Elements of the experts that a token is not sent to."""
        idle = 0.0
        for name, module in self.model.named_modules():
            for weight in module._parameters.values():
                if weight is None:
                    continue
                experts = self.sizes.experts(name)
                if weight.dim() == 3 and experts and int(weight.shape[0]) == experts.total:
                    idle += weight.numel() * (1 - experts.chosen / experts.total)
                else:
                    idle += weight.numel() * (1 - self.sizes.times(name))
        return idle

    def _attention(self, module: nn.Module, full: str, is_known: bool) -> AttentionOp:
        config = self.sizes.text_config(full)
        # the last linear leads back to the stream and reads what attention put out
        last: Any = [
            m for m in module.modules() if is_matrix(m) and not isinstance(m, nn.Embedding)
        ][-1]
        weight = next(p for p in last._parameters.values() if p is not None and p.dim() == 2)
        width = int(weight.shape[0] if type(last).__name__ == "Conv1D" else weight.shape[1])
        heads = 0
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            heads = heads or size_of(module, name, 0) or size_of(config, name, 0)
        kind = f"{full} {type(module).__name__}"
        crossing = re.search(r"cross|encoder_attn|encdec", kind, re.IGNORECASE) is not None
        crossing = crossing or bool(getattr(module, "is_cross_attention", False))
        causal = bool(getattr(module, "is_causal", False)) and not crossing
        return AttentionOp(width, max(1, heads), crossing, causal, is_known)

    # -- sizes ------------------------------------------------------------------------------------

    def _hidden(self) -> int:
        """Channels of the stream: of the layers' own norms, else of the config."""
        for inner in self.layers[0][1].children() if self.layers else ():
            if channels := norm_channels(inner):
                return channels
        config = self.sizes.text_config(self.stack)
        names = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
        return next((size for name in names if (size := size_of(config, name, 0))), 1)

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
                f"run again in every backward, since no choice is known for them: {', '.join(sorted(map(starred, others))[:6])}"
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


def _parameter(name: str, parameter: nn.Parameter, kind: ParameterKind) -> Parameter:
    return Parameter(name, tuple(parameter.shape), kind, trained=parameter.requires_grad)


def _joined(a: Tokens, b: Tokens) -> Tokens:
    return Tokens(
        a.products + b.products,
        a.attentions + b.attentions,
        a.activations + b.activations,
        a.norms + b.norms,
        a.centred_norms + b.centred_norms,
    )


def _repeated(work: Tokens, times: int) -> Tokens:
    """Of layers that run several times."""
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
