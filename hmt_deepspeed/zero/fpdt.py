"""FPDT in an engine: which modules ZeRO-3 gathers as one, and when the layers are replaced."""

from __future__ import annotations

from typing import Any

from deepspeed.utils import set_z3_leaf_modules

from hmt_deepspeed.config import FpdtConfig
from hmt_deepspeed.fpdt.install import Installation, decoder_layers, install

__all__ = ["install_fpdt", "prepare_for_fpdt"]


def prepare_for_fpdt(model: Any, config: FpdtConfig) -> None:
    """Before DeepSpeed's engine takes the model. Raises ValueError for a model that FPDT cannot run.

    A decoder layer becomes one leaf of ZeRO-3: its parameters are gathered once before its forward and
    once before its backward, and stay for all of it. By its submodules they would be gathered for every
    chunk, and partitioned again before the chunk's gradients are.
    """
    if config.enabled:
        layers = decoder_layers(model)
        set_z3_leaf_modules(model, [type(layers[0])])


def install_fpdt(model: Any, config: FpdtConfig) -> Installation | None:
    """After the engine and its optimizer have placed and patched the model."""
    if not config.enabled:
        return None
    return install(model, chunk_size=config.chunk_size, offload_kv=config.offload_kv)
