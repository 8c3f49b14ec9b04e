"""An optimizer whose matrices step in stacks is one whose matrices step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hmt_runs import OPTIONS, PAPERS_RULE, batches
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn

from hmt_deepspeed.optim import stacked_step
from hmt_deepspeed.optim.backward.int8_linear import encoded_weight

SHAPES = [(24, 32)] * 4 + [(32, 24), (24, 32), (7,), (24,)]
ABSENT = 2  # has no gradient in some steps
CHANGING = {**PAPERS_RULE, "rank_candidates": (4, 8, 16), "energy_threshold": 0.97}
FULL = {**CHANGING, "energy_threshold": 1.0, "full_rank_budget": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "right": {"rank": 6},
    "left": {"rank": 6, "projection": "left"},
    "auto": {"rank": 6, "projection": "auto"},
    "full residual": {"rank": 6, "residual": "full"},
    "two-sided": {"rank": 6, "projection": "two_sided"},
    "factored": {"rank": 6, "second_moment": "factored"},
    "drawn anew": {"rank": 6, "range_finder": "random"},
    "apollo": {"method": "apollo", "rank": 3},
    "mini": {"method": "apollo_mini"},
    "adamw": {"method": "adamw"},
    "changing ranks": CHANGING,
    "full rank": FULL,
    "full rank, left": {**FULL, "projection": "left"},
    "full rank, factored": {**FULL, "second_moment": "factored"},
}


def gradients(step: int) -> list[Tensor | None]:
    """Of ranks from 2 to 12 that change with the step, in noise."""
    generator = torch.Generator().manual_seed(step)
    found: list[Tensor | None] = []
    for place, shape in enumerate(SHAPES):
        gradient = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            rank = 2 + (3 * place + step) % 11
            left = torch.randn(shape[0], rank, generator=generator)
            right = torch.randn(rank, shape[1], generator=generator)
            gradient = left @ right + 0.3 * gradient
        found.append(None if place == ABSENT and step % 3 == 1 else gradient)
    return found


def trained(apart: bool, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Ten steps; ``apart``: every parameter in a group of its own, so that nobody steps with another."""
    torch.manual_seed(0)
    params = [nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in SHAPES]
    groups: Any = [{"params": [param]} for param in params] if apart else params
    fields = {"lr": 1e-2, "weight_decay": 0.1, **options}
    if fields.get("method") != "adamw":
        fields["update_interval"] = 3
    optimizer = low_rank_adamw(groups, **fields)
    ranks, shared = [], set()
    for step in range(10):
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = None if gradient is None else gradient.to(dtype)
        before = params[ABSENT].detach().clone()
        optimizer.clip_grad_norm_(20.0)
        optimizer.step()
        assert torch.equal(params[ABSENT], before) == (params[ABSENT].grad is None)
        matrices = list(optimizer.matrices.values())
        ranks.append([matrix.rank for matrix in matrices])
        shared.add(len({m.energy.untyped_storage().data_ptr() for m in matrices}) < len(matrices))
    return {
        "weights": [param.detach() for param in params],
        "states": optimizer.state_dict()["state"],
        "ranks": ranks,
        "stacks": True in shared,
    }


def assert_same_runs(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert one["ranks"] == other["ranks"]
    for first, second in zip(one["weights"], other["weights"], strict=True):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
    for place, state in one["states"].items():
        for key, value in state.items():
            found = other["states"][place][key]
            if isinstance(value, Tensor) and value.is_floating_point():
                scale = float(value.abs().max()) if value.numel() else 0.0
                torch.testing.assert_close(value, found, rtol=tolerance, atol=tolerance * scale)
            elif not isinstance(value, Tensor):
                assert value == found, key


# Copies of masters are rounded after a matrix has stepped, by whichever rule: one rule of each kind of step.
COPIED = ("right", "two-sided", "apollo", "adamw", "full rank")
BY_WEIGHTS = [(case, weights) for weights in ("fp32", "bf16 without masters") for case in CASES]
BY_WEIGHTS += [(case, "bf16") for case in COPIED]


@pytest.mark.parametrize(("case", "weights"), BY_WEIGHTS)
def test_steps_in_stacks_are_those_alone(case: str, weights: str) -> None:
    """Clipped, with a parameter that has no gradient in every third step."""
    options, dtype = dict(CASES[case]), torch.float32 if weights == "fp32" else torch.bfloat16
    if "without" in weights:
        options["master_weights"] = "none"
    together, apart = (trained(apart, dtype, options) for apart in (False, True))
    assert together["stacks"] == (case != "adamw")
    assert not apart["stacks"]
    # Products of stacks are summed in another order, and Adam enlarges it; of 16 bits one may be rounded elsewhere.
    assert_same_runs(together, apart, 1e-4 if "without" not in weights else 2**-7)
    if case == "changing ranks":
        assert len({rank for ranks in together["ranks"] for rank in ranks}) == 3
        assert any(len(set(ranks[:4])) > 1 for ranks in together["ranks"])
    if "full rank" in case:
        assert together["ranks"][-1].count(24 if "left" in case else 32) >= 4


@pytest.mark.parametrize("options", [{}, {"projection": "left"}, {"share_basis": True}], ids=str)
def test_int8_weights_step_in_stacks_as_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = []
    for most in (1 << 26, 1):  # elements of a part of a stack
        monkeypatch.setattr(stacked_step, "MOST_ALIVE", most)
        torch.manual_seed(3)
        model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)], nn.Linear(24, 40))
        optimizer = low_rank_adamw(model, weight_dtype="int8", **OPTIONS, **options)
        for x, _ in batches(10):
            optimizer.zero_grad()
            (model(x) - 0.3).square().mean().backward()
            optimizer.step()
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        encoded = [encoded_weight(module) for module in linears]
        found.append([one for one in encoded if one is not None])
        assert len(found[-1]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)
