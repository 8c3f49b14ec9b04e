"""Counts the FLOPs that a rank computes in a step, for HFU."""

from __future__ import annotations

from torch import nn

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.engine.support import has_other_rules
from hmt_deepspeed.zero.interfaces import Engine
from hmt_deepspeed.zero.planning.found_ranks import RankWatch

__all__ = ["computed_flops"]


def computed_flops(engine: Engine, micro_batch: int, seq_length: int) -> float | None:
    """FLOPs of products and attention in forwards and backwards of the last step, recompute included.

    A projected backward counts as projected, and also in the steps in which a matrix refreshes its basis, which
    compute more; the optimizer's own products are left out.

    Args:
        micro_batch, seq_length: of this rank's forwards.

    Returns:
        None for ``module_rules`` and models that the planner does not know, and for FPDT's chunks.
    """
    if engine.hmt_fpdt is not None:
        return None
    try:
        facts = engine.run_facts(HMTConfig())
    except ValueError:  # without a config, or not built from it alone
        return None
    if engine.hmt_enabled and has_other_rules(engine.optimizer.zero.options):
        return None
    if facts.is_chosen:
        ranks = RankWatch(engine.optimizer.zero, facts.shape.names.layer).news()
        assert ranks is not None  # the first look always has some
        facts = facts.at_ranks(ranks.now, ranks.decided)
    work = facts.workload(micro_batch, seq_length)
    computed = float(work.forward_flops + work.backward_flops)
    again = 0.0
    if engine.hmt_activations is not None:
        again = float(engine.hmt_activations.metrics()["activation_rerun_flops"])
    else:
        forwards = sum(x.count * (x.forward_flops + x.projection_flops) for x in work.layers)
        computed += _checkpointed_share(engine.module) * forwards
    return facts.setup.accumulation * computed + again


def _checkpointed_share(model: nn.Module) -> float:
    """Share of a model's layers whose whole forward Hugging Face's own checkpointing runs again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return sum(layer.gradient_checkpointing for layer in layers) / max(1, len(layers))
