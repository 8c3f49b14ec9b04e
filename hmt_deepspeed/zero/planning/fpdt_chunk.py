"""``"hmt.fpdt.chunk_size": "auto"``: the planner's choice for what the device has left."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from hmt_deepspeed.config import FpdtConfig
from hmt_deepspeed.fpdt.refusals import chunked_family
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.run.fpdt import fpdt_bytes, fpdt_chunk_size
from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.zero.planning.facts import KEPT_FREE, RunFacts, bytes_at_rest, device_capacity

__all__ = ["with_chunk_size"]


def with_chunk_size(config: FpdtConfig, facts: RunFacts, engine: Any) -> FpdtConfig:
    """The section with a number for the chunk size: the same on every rank, printed by the first.

    Planned for are the engine's micro-batch and as many tokens as the model has positions for.

    Raises:
        ValueError: not even the smallest chunks fit; a model that FPDT does not know; experts that are not computed by
            ``grouped_mm``.
    """
    chunked_family(engine.module)
    shape, length = facts.shape, int(engine.module.config.max_position_embeddings)
    computed = getattr(engine.module.config, "_experts_implementation", None)
    if isinstance(shape, ListedShape) and shape.experts and computed != "grouped_mm":
        raise ValueError(
            f'hmt.fpdt.chunk_size is "auto", but the model\'s experts_implementation is {computed!r}; legal: "grouped_mm", '
            "of which bytes are known. Load the model with it (transformers' default), or give the tokens of a chunk."
        )
    taken, capacity = device_capacity(get_accelerator())
    budget = int((1 - KEPT_FREE) * capacity) - max(taken, bytes_at_rest(facts))
    held = engine.hmt_activations
    sizes: dict[str, Any] = {
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "itemsize": facts.itemsize,
        "sequence_parallel": config.sequence_parallel_size,
        "held": None if held is None else held.held,
    }
    least = torch.tensor(budget, device=engine.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    chunk = fpdt_chunk_size(shape, length, int(least), **sizes)
    if engine.global_rank == 0:
        needed = fpdt_bytes(shape, length, chunk, **sizes)
        print(
            f"hmt: fpdt in chunks of {chunk} tokens: for sequences of {length} a rank needs "
            f"{format_bytes(needed.device)} of its device beside weights and states, of {format_bytes(int(least))}, "
            f"and {format_bytes(needed.host)} of host memory",
            flush=True,
        )
    return config.model_copy(update={"chunk_size": chunk})
