"""Bytes that a contender of the GPU suite takes whatever its activations: what cannot fit need not be tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Elements(NamedTuple):
    """Of a Llama's weights: those of its linears, all others, and the sum of the linears' rows."""

    linears: int
    others: int
    rows: int


class Bytes(NamedTuple):
    """At least so many on the device and on the host."""

    device: int
    host: int


def elements_of(model: Mapping[str, int]) -> Elements:
    """Of the Llama that the fields of a ``LlamaConfig`` describe."""
    hidden, inner, layers = (
        model[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads = model["num_attention_heads"]
    keys = hidden // heads * model.get("num_key_value_heads", heads)
    linears = layers * hidden * (2 * hidden + 2 * keys + 3 * inner)
    others = 2 * model["vocab_size"] * hidden + (2 * layers + 1) * hidden
    return Elements(linears, others, layers * (3 * hidden + 2 * keys + 2 * inner))


def least_bytes(
    config: Mapping[str, Any] | None, elements: Elements, weight_bytes: int, rank: int
) -> Bytes:
    """Weights, masters, moments and whole gradients of one rank, without bases, projections and activations.

    Args:
        config: the JSON; None is galore_torch. weight_bytes: of an element of the weights.
    """
    linears, others, rows = elements
    weights = weight_bytes * (linears + others)
    low_rank_moments = 8 * rank * rows
    if config is None:  # moments are of the weights' dtype
        return Bytes(2 * weights + 2 * weight_bytes * (others + rank * rows), 0)
    fields = config.get("hmt", {}).get("optimizer", {"method": "adamw"})
    dense = fields.get("method") == "adamw"
    if "offload_optimizer" in config["zero_optimization"]:
        return Bytes(weights, 12 * (linears + others) if dense else 12 * others)
    if dense:
        masters = 4 * (linears + others) if weight_bytes < 4 else 0
        return Bytes(2 * weights + masters + 8 * (linears + others), 0)
    moments = 8 * others
    if "method" not in fields and fields.get("projection") != "two_sided":
        moments += low_rank_moments // (2 if fields.get("state_dtype") == "bf16" else 1)
    if fields.get("weight_dtype") == "int8":
        return Bytes(linears + (weight_bytes + 4) * others + moments, 0)
    has_masters = weight_bytes < 4 and fields.get("master_weights") != "none"
    return Bytes(weights + (4 * (linears + others) if has_masters else 0) + moments, 0)


def why_not(needs: Bytes, device: int, host: int) -> str | None:
    """Why it cannot run with so many bytes; None where it may."""
    for place, least, there in (("GPU", needs.device, device), ("host", needs.host, host)):
        if least > there:
            return (
                f"weights, gradients and states alone take {least / 2**30:.1f} GiB of {place} memory, "
                f"there are {there / 2**30:.1f} GiB"
            )
    return None
