"""FPDT in an engine: sets which modules ZeRO-3 gathers as one, and replaces the layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules, z3_leaf_module
from torch import nn

from hmt_deepspeed.config import FpdtConfig
from hmt_deepspeed.fpdt.inputs import AttentionHolder, Holder
from hmt_deepspeed.fpdt.install import clear_for_fpdt, decoder_layers, install
from hmt_deepspeed.fpdt.installation import Installation
from hmt_deepspeed.fpdt.sequence import TorchGroup
from hmt_deepspeed.zero.bases.storage import BasisStorage

__all__ = ["check_ranks", "install_fpdt", "prepare_for_fpdt"]


def prepare_for_fpdt(model: Any, undo: ExitStack) -> None:
    """Prepare a model for FPDT, before DeepSpeed's engine takes it.

    A decoder layer becomes one leaf of ZeRO-3: its parameters are gathered once before its forward and
    once before its backward, and stay for all of it. By its submodules they would be gathered for every
    chunk, and partitioned again before the chunk's gradients are.

    Args:
        model: of the engine. undo: makes the layers ordinary again.

    Raises:
        ValueError: FPDT cannot run the model.
    """
    clear_for_fpdt(model)
    kind = type(decoder_layers(model)[0])
    ordinary = {m for m in model.modules() if isinstance(m, kind) and not z3_leaf_module(m)}
    for module in set_z3_leaf_modules(model, [kind]):
        if module in ordinary:
            undo.callback(vars(module).pop, "_z3_leaf", None)


def install_fpdt(
    model: Any,
    config: FpdtConfig,
    bases: BasisStorage | None,
    holders: Mapping[nn.Module, Holder] | None = None,
    attention_holders: Mapping[nn.Module, AttentionHolder] | None = None,
) -> Installation:
    """After the engine and its optimizer have placed and patched the model, with a number as chunk size.

    Ranks may have different numbers of chunks, and the bases that stage 3 shards over ranks are gathered by
    whatever linear is called: once per layer, then, not once per chunk.

    Args:
        holders, attention_holders: of inputs and of attention between forward and backward, see
            :class:`ChunkedActivations`.
    """
    assert config.chunk_size != "auto", "resolved before, see fpdt_chunk.py"
    return install(
        model,
        chunk_size=config.chunk_size,
        offload_kv=config.offload_kv,
        group=_sequence_group(config.sequence_parallel_size),
        around_backward=nullcontext if bases is None else bases.gathered_once,
        holders=holders,
        attention_holders=attention_holders,
        engine="an engine",
    )


def check_ranks(size: int, world: int) -> None:
    """Refuse ranks that cannot share each sequence.

    Args:
        size: ranks of a sequence. world: all ranks.

    Raises:
        ValueError: ``size`` does not divide ``world``.
    """
    if world % size:
        raise ValueError(
            f"hmt.fpdt.sequence_parallel_size is {size}, but there are {world} ranks: it must divide them"
        )


def _sequence_group(size: int) -> TorchGroup | None:
    """This rank's group of ``size`` consecutive ranks.

    ZeRO goes on to reduce over all ranks: the mean of gradients over those that share a sequence is the
    gradient of its loss.
    """
    world = dist.get_world_size()
    check_ranks(size, world)
    if size == 1:
        return None
    mine = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)  # every rank makes every group
        mine = group if dist.get_rank() in ranks else mine
    return TorchGroup(mine)
