"""A 3-D weight of E experts is E matrices that step alike: bit for bit those that are parameters of their own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn

from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.decisions.sharing import share_bases
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules import moments

E, SHAPE, RARE = 4, (96, 72), 2  # an expert without tokens in two of three steps
CASES: dict[str, dict[str, Any]] = {
    "shared": {},
    "shared, left": {"projection": "left"},
    "shared, full residual": {"residual": "full"},
    "shared, no residual": {"residual": "none"},
    "shared, factored": {"second_moment": "factored"},
    "shared, chosen rank": {"rank": "auto", "rank_candidates": (8, 24, 60), "rank_budget": None},
    "shared, full rank": {"rank": 72},
    "own": {"expert_basis": "own", "range_finder": "svd"},
    "own, left": {"expert_basis": "own", "range_finder": "svd", "projection": "left"},
    "own, full residual": {"expert_basis": "own", "range_finder": "svd", "residual": "full"},
    "own, factored": {"expert_basis": "own", "range_finder": "svd", "second_moment": "factored"},
    "own, drawn anew": {"expert_basis": "own", "range_finder": "random"},
    "apollo": {"method": "apollo"},
    "mini": {"method": "apollo_mini"},
}


def gradient(step: int) -> Tensor | None:
    """Of all experts; ranks of 30, so that no basis has columns that are rounding."""
    if step == 4:
        return None
    generator = torch.Generator().manual_seed(step)
    left = torch.randn(E, SHAPE[0], 30, generator=generator)
    found = left @ torch.randn(E, 30, SHAPE[1], generator=generator)
    found += 0.1 * torch.randn(found.shape, generator=generator)
    if step % 3:
        found[RARE] = 0.0
    return found


def options_of(case: str, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "update_interval": 3}
    if case not in ("apollo", "mini"):
        options |= {"rank": 24}
        if "drawn" not in case:
            options |= {"max_full_gradient_bytes": 2**30}
    return options | CASES[case] | more


def refreshed_at_once(schedule: RefreshSchedule, index: int, step: int) -> None:
    """All have the phase of a parameter alone."""
    schedule.num_refreshes[index] += 1
    schedule.next_refresh[index] = step + (schedule.interval - step - 1) % schedule.interval + 1


def together(weight: Tensor, options: dict[str, Any]) -> tuple[HMT, list[nn.Parameter]]:
    """One parameter of all experts."""
    param = nn.Parameter(weight.clone())
    optimizer = low_rank_adamw([("w", param)], target_modules=["w"], **options)
    return optimizer, [param]


def apart(weight: Tensor, options: dict[str, Any]) -> tuple[HMT, list[nn.Parameter]]:
    """A parameter for each expert, of which the first leads where they share a basis."""
    params = [nn.Parameter(one.clone()) for one in weight]
    shares = options.pop("expert_basis", "shared") == "shared" and "method" not in options
    names = ["w" if shares and not place else f"w[{place}]" for place in range(E)]
    optimizer = low_rank_adamw(list(zip(names, params, strict=True)), **options)
    optimizer.describe()  # builds
    bases, matrices = optimizer._bases, list(optimizer.matrices.values())
    schedule = bases.schedule
    schedule.refreshed = partial(refreshed_at_once, schedule)  # type: ignore[method-assign]
    schedule.next_refresh = [schedule.interval * (n > 0) for n in schedule.num_refreshes]
    if shares:
        leader = matrices[0]
        leader.names = leader.moments.names = ["w[0]"]
        optimizer._stacked._stacks.forget()
        bases.schedule = schedule.regrouped([range(E)], False)
        bases.groups = bases.schedule.groups
        share_bases([matrices])
        bases.policy = build_policy([matrices], optimizer.options)
        optimizer._prepare()
    return optimizer, params


def trained(
    build: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32, steps: int = 8
) -> tuple[HMT, Tensor]:
    weight = torch.randn(E, *SHAPE, generator=torch.Generator().manual_seed(99)).to(dtype)
    optimizer, params = build(weight, dict(options))
    for step in range(steps):
        given = gradient(step)
        for place, param in enumerate(params):
            if given is None:
                param.grad = None
            elif len(params) == 1:
                param.grad = given.to(dtype)
            else:
                own = given[place].to(dtype)
                param.grad = own if own.any() else None
        if optimizer.options["probes"] != 0:
            optimizer.clip_grad_norm_(50.0)
        optimizer.step()
    found = params[0].detach() if len(params) == 1 else torch.stack([p.detach() for p in params])
    return optimizer, found


def states(optimizer: HMT) -> dict[str, Tensor]:
    """Of all experts, with a leading dimension."""
    matrices = list(optimizer.matrices.values())
    found: dict[str, Tensor] = {}
    for key in matrices[0].state_dict():
        values = [matrix.state_dict()[key] for matrix in matrices]
        if isinstance(values[0], Tensor) and key != "basis":
            found[key] = values[0] if len(values) == 1 else torch.stack(values)
    return found


# Of state dtype and weights; moments of 60 columns are enough for 8 bits.
STORED: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({}, torch.float32),
    "bf16 states": ({"state_dtype": "bf16"}, torch.float32),
    "int8 states": ({"state_dtype": "int8"}, torch.float32),
    "bf16 weights": ({}, torch.bfloat16),
    "no masters": ({"master_weights": "none"}, torch.bfloat16),
}


MAIN = ("shared", "shared, factored", "own")
# What is stored meets rules' states: all ways of storing of three rules, two of each other one.
ROWS = [(case, stored) for case in MAIN for stored in STORED] + [
    (case, stored)
    for case in CASES
    if case not in MAIN
    for stored in ("fp32", "no masters" if "residual" in case else "int8 states")
]


@pytest.mark.parametrize(
    ("case", "stored"),
    [(case, stored) for case, stored in ROWS if case in MAIN or stored == "fp32"],
)
def test_experts_step_as_matrices_of_their_own(case: str, stored: str) -> None:
    """Clipped, with a step without gradients and an expert that is rare."""
    fields, dtype = STORED[stored]
    options = options_of(case, **fields, **({"rank": 60} if "states" in stored else {}))
    one, weights = trained(together, options, dtype)
    other, expected = trained(apart, options, dtype)
    (matrix,) = one.matrices.values()
    assert (matrix.count, matrix.steps) == (E, 7)
    assert {m.rank for m in other.matrices.values()} == {matrix.rank}
    assert {m.state_dtype for m in other.matrices.values()} == {matrix.state_dtype}
    # Products of stacks are summed in another order: what 16 bits round may go elsewhere, and codes are 9 %
    # apart.
    tolerance = {"fp32": 1e-4, "int8 states": 0.1}.get(stored, 2**-7)
    scale = float(expected.abs().max())
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance * scale)
    found = states(other)
    for key, value in states(one).items():
        largest = float(value.abs().max())
        torch.testing.assert_close(value, found[key], rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("case", "stored"), ROWS)
def test_an_expert_without_tokens_stays_as_it_is(case: str, stored: str) -> None:
    """Bit for bit, and no decay, where its gradient is zero; the others move."""
    fields, dtype = STORED[stored]
    optimizer, before = trained(together, options_of(case, **fields), dtype, steps=4)
    (matrix,), weights = optimizer.matrices.values(), before.clone()
    (param,) = (p for group in optimizer.param_groups for p in group["params"])
    known = {key: value.clone() for key, value in states(optimizer).items()}
    param.grad = gradient(5).to(dtype)  # type: ignore[union-attr]
    optimizer.step()
    for key, value in states(optimizer).items():
        assert torch.equal(value[RARE], known[key][RARE]), key
    assert torch.equal(param[RARE], weights[RARE])
    others = [place for place in range(E) if place != RARE]
    assert not any(torch.equal(param[place], weights[place]) for place in others)
    assert matrix.steps == 5


@pytest.mark.parametrize(("case", "stored"), ROWS)
def test_experts_resume_bit_for_bit(case: str, stored: str) -> None:
    fields, dtype = STORED[stored]
    options = options_of(case, **fields)
    optimizer, weights = trained(together, options, dtype, steps=4)
    resumed, (param,) = together(weights, options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (own,) = (p for group in optimizer.param_groups for p in group["params"])
    for step in range(5, 10):
        for one, weight in ((optimizer, own), (resumed, param)):
            weight.grad = gradient(step).to(dtype)  # type: ignore[union-attr]
            one.step()
        assert torch.equal(own, param), step
    found = states(resumed)
    for key, value in states(optimizer).items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("case", MAIN)
@pytest.mark.parametrize("stored", ["fp32", "int8 states"])
def test_moments_are_carried_a_few_experts_at_a_time(
    case: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for elements in (moments._CARRIED, 1):
        monkeypatch.setattr(moments, "_CARRIED", elements)
        options = options_of(case, **STORED[stored][0], rank=60)
        found.append(states(trained(together, options, steps=7)[0]))
    for key, value in found[0].items():
        # products of more rows may be summed in another order, and a code be the next
        tolerance = 1e-4 if stored == "fp32" else 0.1
        largest = float(value.abs().max())
        torch.testing.assert_close(value, found[1][key], rtol=tolerance, atol=tolerance * largest)


def test_bases_that_are_drawn_anew_are_shared() -> None:
    optimizer, _ = trained(
        together, options_of("shared", range_finder="random", max_full_gradient_bytes="auto")
    )
    (stack,) = optimizer._stacked._stacks._known.values()
    (matrix,) = optimizer.matrices.values()
    (columns,) = stack.projections()
    assert columns.shape[0] == E
    assert matrix.projection is not None
    for one in columns:
        torch.testing.assert_close(one, matrix.projection)
