"""Reads the work per token off a stack of modules: products, attention, norms."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hmt_deepspeed.planner.model.listed import AttentionOp, Place, Product, Tokens
from hmt_deepspeed.planner.model.shapes import Linear
from hmt_deepspeed.planner.model.structure_modules import (
    CONVOLUTIONS,
    attentions,
    has_no_weights,
    is_matrix,
    norm_channels,
)
from hmt_deepspeed.planner.model.structure_sizes import Sizes, size_of, starred
from hmt_deepspeed.sites import ExpertWeight, expert_weights

__all__ = ["TokenReader"]

# Linears that read what attention put out, and not the stream beside the queries.
_BACK = re.compile(r"o|wo|out|o_proj|out_proj|c_proj|proj|dense|out_lin|to_out")

# A norm of queries or keys, whose projection bears the same letter.
_OF_HEADS = re.compile(r"([qk])_(?:layer)?norm")


class TokenReader:
    """Reads the work per token of one model.

    Args:
        sizes: of the model.
        components: of a layer by its name: places of its linears by name within it, and its modules of attention.
        experts: names of experts' weights whose backward can be projected.
    """

    def __init__(
        self,
        sizes: Sizes,
        components: Callable[[str], tuple[dict[str, Place], list[str]]],
        experts: Collection[str] = (),
    ) -> None:
        self._sizes, self._components, self._experts = sizes, components, experts

    def tokens(self, module: nn.Module, name: str) -> Tokens:
        """Work of a module and all in it on each token."""
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
                shared = shared and product.experts is None  # which read rows of their own
                seen.add(reads)
                if product.place == "out" and any(p.place == "up" for p in products):
                    product = replace(product, place="mlp_out")
                products.append(replace(product, shares_input=shared))
            channels = norm_channels(inner) * self._heads(key, inner, products)
            norms += 0 if isinstance(inner, nn.LayerNorm | nn.GroupNorm) else channels
            centred += channels if isinstance(inner, nn.LayerNorm | nn.GroupNorm) else 0
        for key, inner in attentions(module):
            known = any(n == key or n.startswith(f"{key}.") for n in attended)
            ops.append(self._attention(inner, f"{name}.{key}" if key else name, known))
        ups = sum(p.outputs for p in products if p.place == "up")
        downs = sum(p.inputs for p in products if p.place == "down")
        activations += downs if ups >= 2 * downs else 0
        activations += sum(p.outputs / 2 for p in products if p.name.endswith("gate_up_proj"))
        return Tokens(tuple(products), tuple(ops), activations, norms, centred)

    @staticmethod
    def _heads(key: str, norm: nn.Module, products: list[Product]) -> int:
        """Times that a norm's channels are in what it reads: of a head's norm as many as its projection has heads."""
        path, _, name = key.rpartition(".")
        found = _OF_HEADS.fullmatch(name)
        if found is None:
            return 1
        read = next((p for p in products if p.name == f"{path}.{found[1]}_proj"), None)
        channels = norm_channels(norm)
        return 1 if read is None or read.outputs % channels else int(read.outputs // channels)

    def _products(
        self, module: nn.Module, key: str, full: str, components: dict[str, Place]
    ) -> Iterator[Product]:
        """Products of the weights that a module itself has."""
        place = components.get(key, "other")
        times = self._sizes.times(full)
        experts = expert_weights(module)
        for name, weight in module._parameters.items():
            if weight is None or weight.dim() < 2 or not weight.numel():
                continue
            if name in experts:
                product = self._of_experts(f"{key}.{name}", place, experts[name], full)
                known = f"{full}.{name}" in self._experts
                yield product if known else replace(product, linear=None)
                continue
            if experts:  # their biases
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
                is_linear = (
                    isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
                )
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
            else:  # several matrices in one tensor
                yield self._expert_product(path, weight, full)

    def _of_experts(self, path: str, place: Place, weight: ExpertWeight, full: str) -> Product:
        """The product of those experts that a token is sent to, or of all where all compute it."""
        found = self._sizes.experts(full)
        chosen = found.chosen if found is not None and found.total == weight.count else weight.count
        times = chosen if weight.is_routed else weight.count
        linear = Linear(path, weight.role, weight.inputs, weight.outputs, False, weight)
        return Product(
            path,
            place,
            float(times * linear.elements),
            times * linear.inputs,
            times * linear.outputs,
            linear=linear,
            useful=chosen / times,
        )

    def _expert_product(self, path: str, weight: nn.Parameter, full: str) -> Product:
        experts = self._sizes.experts(full)
        count = int(weight.shape[0])
        chosen = experts.chosen if experts is not None and experts.total == count else count
        one = weight.numel() / count
        # (experts, out, in) or (experts, in, out): the stream is what both tensors of an expert have
        a, b = int(weight.shape[-2]), int(weight.shape[-1])
        wide_first = ("down" not in path and a > b) or ("down" in path and a < b)
        outputs, inputs = (a, b) if wide_first else (b, a)
        if chosen == count > 1 and "expert" in full:
            self._sizes.coarse[
                f"{starred(full)}: every token is counted with all {count} parts of a 3-D weight"
            ] = None
        return Product(path, "other", chosen * one, chosen * inputs, chosen * outputs)

    def _attention(self, module: nn.Module, full: str, is_known: bool) -> AttentionOp:
        config = self._sizes.text_config(full)
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
