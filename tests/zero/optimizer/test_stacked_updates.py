"""Updates of stacks of matrices under the engine are those of each matrix alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from held import held
from modes import MODES, SAME_LAYOUT, mode_engine, wide_llama
from torch import Tensor
from training import tiny_llama, train

BF16 = {"bf16": {"enabled": True}}
INT8 = {**MODES["right"], "weight_dtype": "int8"}
NO_MASTERS = {"master_weights": "none"}
# Fields of hmt.optimizer, of the JSON, and ZeRO stages.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "right": (MODES["right"], {}, (1, 3)),
    "right, bf16": (MODES["right"], BF16, (0, 2)),
    "left": (MODES["left"], {}, (1,)),
    "left, bf16": (MODES["left"], BF16, (3,)),
    "no masters": ({**MODES["right"], **NO_MASTERS}, BF16, (0, 3)),
    "left, no masters": ({**MODES["left"], **NO_MASTERS}, BF16, (2,)),
    "two_sided": (MODES["two_sided"], BF16, (3,)),
    "full residual": (MODES["full residual"], {}, (2,)),
    "left, full residual": (MODES["left, full residual"], BF16, (3,)),
    "factored": (MODES["factored"], BF16, (1,)),
    "full_rank_budget": (MODES["full_rank_budget"], {}, (2,)),
    "share_basis": (MODES["share_basis"], BF16, (3,)),
    "random": (MODES["random"], {}, (1,)),
    "apollo": (MODES["apollo"], BF16, (2,)),
    "muon": (MODES["muon"], BF16, (2,)),
    "apollo_mini": (MODES["apollo_mini"], {}, (3,)),
    "int8 weights": (INT8, BF16, (0, 2)),
    "int8 weights, left": ({**INT8, "projection": "left"}, BF16, (2,)),
    "bf16 states": (SAME_LAYOUT["bf16 states"], {}, (1,)),
    "int8": (SAME_LAYOUT["int8"], BF16, (3,)),
}

# Whose products and norms of whole gradients are taken of the stack, and summed in another order than of one.
SUMMED = {"full residual", "left, full residual", "two_sided", "muon", "apollo", "apollo_mini"}


# On one rank shards are whole matrices, as those of stage 0 are on two: there some are enough.
LAYOUTS = [*((name, 2) for name in CASES), ("right", 1), ("two_sided", 1)]
MOST = {"together": 1 << 26, "alone": 1}  # elements of a stack's part
STEPS = 4  # the first five or six of seven matrices refresh, the others do, none does, the first do again

Held = list[tuple[dict[str, Tensor], set[int]]]


def trained(name: str) -> dict[str, Held]:
    """What this rank has after a few steps of each stage, and sizes of its stacks' parts, by how large those may be."""
    from hmt_deepspeed.zero.optimizer import step as module

    fields, changes, stages = CASES[name]
    found: dict[str, Held] = {how: [] for how in MOST}
    for how, module.MOST_ALIVE in MOST.items():
        for stage in stages:
            model = wide_llama() if name == "int8" else tiny_llama(layers=1)
            engine = mode_engine(fields, stage, model=model, **changes)
            train(engine, STEPS)
            parts = engine.optimizer._step.parts()
            sizes = {len(own.members) for part in parts for own in part.parts}
            found[how].append((held(engine.optimizer), sizes))
            engine.destroy()
    return found


@pytest.mark.parametrize(("name", "world"), LAYOUTS)
def test_matrices_step_in_stacks_as_alone(ranks: Ranks, name: str, world: int) -> None:
    for found in ranks.run(trained, world, name):
        together, alone = found["together"], found["alone"]
        for (tensors, sizes), (expected, ones) in zip(together, alone, strict=True):
            assert max(sizes) > 1
            assert ones == {1}
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                if name not in SUMMED:
                    assert torch.equal(tensors[key], value), key
                    continue
                # fp32's 6e-8, which Adam's division enlarges; a weight of 16 bits may be rounded elsewhere
                limit = 1e-5 if value.dtype == torch.float32 else 1e-3
                error = (tensors[key].double() - value.double()).norm()
                assert error <= limit * value.double().norm(), key
