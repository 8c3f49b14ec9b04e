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
    "right": (MODES["right"], {}, (0, 1, 3)),
    "right, bf16": (MODES["right"], BF16, (0, 2, 3)),
    "left": (MODES["left"], {}, (1, 3)),
    "left, bf16": (MODES["left"], BF16, (2, 3)),
    "no masters": ({**MODES["right"], **NO_MASTERS}, BF16, (0, 1, 3)),
    "left, no masters": ({**MODES["left"], **NO_MASTERS}, BF16, (0, 2, 3)),
    "two_sided": (MODES["two_sided"], BF16, (1, 3)),
    "full residual": (MODES["full residual"], {}, (2,)),
    "left, full residual": (MODES["left, full residual"], BF16, (2, 3)),
    "factored": (MODES["factored"], BF16, (1, 3)),
    "full_rank_budget": (MODES["full_rank_budget"], {}, (2,)),
    "share_basis": (MODES["share_basis"], BF16, (3,)),
    "random": (MODES["random"], {}, (1,)),
    "apollo": (MODES["apollo"], BF16, (2, 3)),
    "apollo_mini": (MODES["apollo_mini"], {}, (3,)),
    "int8 weights": (INT8, BF16, (0, 2)),
    "int8 weights, left": ({**INT8, "projection": "left"}, BF16, (0, 2)),
    "bf16 states": (SAME_LAYOUT["bf16 states"], {}, (1,)),
    "int8": (SAME_LAYOUT["int8"], BF16, (3,)),
}

# Whose products and norms of whole gradients are taken of the stack, and summed in another order than of one.
SUMMED = {"full residual", "left, full residual", "two_sided", "apollo", "apollo_mini"}


def trained(name: str, most: int) -> list[tuple[dict[str, Tensor], set[int]]]:
    """What this rank has after six steps of each stage, and sizes of its stacks' parts; a part is of at most so many
    elements."""
    from hmt_deepspeed.zero.optimizer import step as module

    module.MOST_ALIVE = most
    fields, changes, stages = CASES[name]
    found = []
    for stage in stages:
        model = wide_llama() if name == "int8" else tiny_llama()
        engine = mode_engine(fields, stage, model=model, **changes)
        train(engine, 6)
        sizes = {len(own.members) for part in engine.optimizer._step.parts() for own in part.parts}
        found.append((held(engine.optimizer), sizes))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_matrices_step_in_stacks_as_alone(ranks: Ranks, name: str, world: int) -> None:
    together, alone = (ranks.run(trained, world, name, most) for most in (1 << 26, 1))
    for stacked, single in zip(together, alone, strict=True):
        for (found, sizes), (expected, ones) in zip(stacked, single, strict=True):
            assert max(sizes) > 1
            assert ones == {1}
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                if name not in SUMMED:
                    assert torch.equal(found[key], value), key
                    continue
                # fp32's 6e-8, which Adam's division enlarges; a weight of 16 bits may be rounded elsewhere
                limit = 1e-5 if value.dtype == torch.float32 else 1e-3
                error = (found[key].double() - value.double()).norm()
                assert error <= limit * value.double().norm(), key
