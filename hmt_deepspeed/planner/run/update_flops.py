"""FLOPs of the optimizer's pass on the device.

A low-rank update is a product of two factors, of rows x (r + k) and (r + k) x n, in the weights' dtype. Beside it
stand products in fp32: those that draw the probes, those of rules that project gradients in their step, and of rules that
orthogonalise, whose r x r matrices every rank works on whole.
"""

from __future__ import annotations

from functools import lru_cache

from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.states import held_rows, parameters_by_mode
from hmt_deepspeed.rules import symmetric_blocks

__all__ = ["update_flops"]


@lru_cache(maxsize=4096)  # asked for again at every batch and length of a search
def update_flops(shape: ModelShape, mode: OptimizerMode, sharding: Sharding) -> tuple[float, float]:
    """(FLOPs of products in the weights' dtype, of products in fp32) on the rank that holds most."""
    formed = exact = 0.0
    for parameter, own in parameters_by_mode(shape, mode):
        if not own.is_low_rank(parameter):
            continue
        columns, rank = own.oriented(parameter)[1], own.rank_of(parameter)
        matrices, rows = held_rows(parameter, own, sharding.ranks(1))
        each = 2.0 * parameter.count * matrices
        if not own.updates_whole(parameter):
            probes = own.probes_at(rank)
            formed += each * rows * columns * (rank + probes)
            bases = parameter.count * own.num_bases(parameter)
            exact += 2.0 * bases * columns * probes * (rank + probes)  # probes outside the basis
        elif own.rule.bases != "none" and not own.is_full(parameter):
            exact += each * rows * columns * rank  # the whole gradient, projected
        blocks = symmetric_blocks(rank, "cuda" if mode.on_gpu else "cpu")
        for (of_rows, square), part in (
            (own.rule.products, 1.0),
            (own.rule.symmetric_products, (blocks + 1) / (2 * blocks)),
        ):
            exact += each * rank**2 * (of_rows * rows + square * rank) * part
    return formed, exact
