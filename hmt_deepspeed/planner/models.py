"""The model of a question: a size by name, or the config of a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hmt_deepspeed.planner.families import shape_of_config
from hmt_deepspeed.planner.shapes import ModelShape, plain_shape

__all__ = ["SIZES", "model_shape"]


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
        ValueError: neither, or a family that is not known.
    """
    if name in SIZES:
        return SIZES[name](vocab_size)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"--model is {name!r}; legal: {', '.join(SIZES)}, or a folder with a Hugging Face config.json. "
            "Choose one of them."
        )
    from transformers import AutoConfig

    return shape_of_config(AutoConfig.from_pretrained(name))
