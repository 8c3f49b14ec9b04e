"""Finds the model of a request: a size by name, or the config of a local folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hmt_deepspeed.architectures import meta_model, read_config
from hmt_deepspeed.families.table import family_of
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.shapes import ModelShape, parameters, plain_shape

__all__ = ["SIZES", "model_shape", "shape_of_architecture"]


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int
) -> Callable[[int], ModelShape]:
    return lambda vocab: plain_shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocab=vocab,
        gated=True,
        tied=False,
    )


def _gpt(layers: int, hidden: int, heads: int) -> Callable[[int], ModelShape]:
    return lambda vocab: plain_shape(
        layers=layers, hidden=hidden, heads=heads, vocab=vocab, dropout=0.0
    )


# tiny to 13b: the presets of launch/run.py; 70b: Llama 2; gpt-*: GPT-3 and OPT, LoHan's sizes.
SIZES: dict[str, Callable[[int], ModelShape]] = {
    "tiny": _llama(4, 256, 8, 4, 704),
    "125m": _llama(12, 768, 12, 12, 2048),
    "350m": _llama(24, 1024, 16, 16, 2736),
    "1b": _llama(22, 2048, 32, 4, 5632),
    "3b": _llama(26, 3200, 32, 32, 8640),
    "7b": _llama(32, 4096, 32, 32, 11008),
    "13b": _llama(40, 5120, 40, 40, 13824),
    "70b": _llama(80, 8192, 64, 8, 28672),
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-30b": _gpt(48, 7168, 56),
    "gpt-175b": _gpt(96, 12288, 96),
}


def model_shape(name: str, vocab_size: int = 32000) -> ModelShape:
    """The shape of a named size, or of the ``config.json`` in a folder.

    Args:
        vocab_size: of a named size; a folder's config has its own.

    Raises:
        ValueError: neither, or a model that transformers cannot build.
    """
    if name in SIZES:
        return SIZES[name](vocab_size)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"--model is {name!r}; legal: {', '.join(SIZES)}, or a folder with a Hugging Face config.json. "
            "Choose one of them."
        )
    return shape_of_architecture(read_config(name))


def shape_of_architecture(config: Any) -> ModelShape:
    """The shape of the model that a config names: its family's row where that has the same parameters, else as read
    module by module from the model, built without weights.

    Raises:
        ValueError: a model that transformers cannot build.
    """
    from hmt_deepspeed.planner.model.structure import listed_shape

    model = meta_model(config)
    row = family_of(config)
    if row is not None and row.sizes is not None:
        with suppress(ValueError):  # an activation that the planner does not know
            shape = shape_of_config(config)
            if _sizes(shape) == {name: tuple(p.shape) for name, p in model.named_parameters()}:
                return shape
    return listed_shape(model)


def _sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by their names in the model."""
    return {
        parameter.name.replace("*", str(number)): parameter.shape
        for parameter in parameters(shape)
        for number in range(parameter.count)
    }
