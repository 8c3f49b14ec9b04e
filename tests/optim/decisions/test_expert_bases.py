"""Down projections of experts decide, once, what their bases are of: by a gradient that made none of them."""

from __future__ import annotations

import copy

import pytest
import torch
from expert_modules import INNER, E, H, experts
from low_rank_adamw import low_rank_adamw
from torch import Tensor

from hmt_deepspeed.optim.decisions.expert_bases import decide_expert_bases
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

DOWN, RANK = "down_proj", 8


def gradient(structure: str, seed: int) -> Tensor:
    """E x outputs x inputs, in noise: of as many directions as a shared basis has, or of few inputs of each expert;
    "few tokens" has both, but the inputs are others every time."""
    generator = torch.Generator().manual_seed(seed)
    found = 0.1 * torch.randn(E, H, INNER, generator=generator)
    if structure == "outputs":
        few = torch.randn(H, RANK, generator=torch.Generator().manual_seed(3))
        return found + few @ torch.randn(E, RANK, INNER, generator=generator)
    if structure == "few tokens":
        few = torch.randn(H, RANK, generator=torch.Generator().manual_seed(3))
        tokens = torch.randn(E, 2, INNER, generator=generator)
        return 0.1 * found + few @ torch.randn(E, RANK, 2, generator=generator) @ tokens
    few = torch.randn(E, 2, INNER, generator=torch.Generator().manual_seed(4))
    return found + torch.randn(E, H, 2, generator=generator) @ few


def stepped(optimizer: HMT, module: torch.nn.Module, structure: str, steps: range) -> None:
    for step in steps:
        own = gradient(structure, step)
        for name, weight in module.named_parameters():
            given = own if name == DOWN else torch.ones(E, 2 * INNER, H)
            stored = module.is_transposed
            weight.grad = (given.mT if stored else given).contiguous().to(weight.dtype)
        optimizer.step()


def optimizer_of(module: torch.nn.Module, **more: object) -> HMT:
    fields = {"rank": RANK, "update_interval": 3, "max_full_gradient_bytes": 2**30, **more}
    return low_rank_adamw(module, lr=1e-2, **fields)


def down(optimizer: HMT) -> ProjectedMatrix:
    matrix = optimizer.matrices[DOWN]
    assert isinstance(matrix, ProjectedMatrix)
    return matrix


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("structure", ["outputs", "inputs", "few tokens"])
def test_what_captures_more_at_equal_bytes(structure: str, transposed: bool) -> None:
    module = experts(torch.float32, is_transposed=transposed)
    optimizer = optimizer_of(module)
    matrix, own = down(optimizer), structure == "inputs"
    assert matrix.undecided
    assert matrix.shape == (INNER, H)
    bound = matrix.moment_bytes_at(RANK) + matrix.basis_bytes_at(RANK)
    (row,) = (row for row in optimizer.describe() if row.name == DOWN)
    assert f"experts {E} x " in row.reason
    assert "until a later gradient decides" in row.reason
    stepped(optimizer, module, structure, range(1))
    assert matrix.undecided
    assert matrix.rank == RANK
    assert matrix.proposed is not None
    assert matrix.proposed.shape == (E, INNER, 7)
    stepped(optimizer, module, structure, range(1, 2))
    assert not matrix.undecided
    assert matrix.proposed is None
    assert matrix.own_bases == own
    assert matrix.shape == ((H, INNER) if own else (INNER, H))
    assert matrix.rank == (7 if own else RANK)
    # one column more would be too many bytes
    taken = [matrix.moment_bytes_at(r) + matrix.basis_bytes_at(r) for r in (7, 8)]
    assert not own or taken[0] <= bound < taken[1]
    stepped(optimizer, module, "outputs" if own else "inputs", range(2, 8))
    assert matrix.own_bases == own  # kept
    assert not optimizer.matrices["gate_up_proj"].own_bases


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_gradient_that_says_nothing_decides_nothing(value: float) -> None:
    module = experts(torch.float32)
    optimizer = optimizer_of(module)
    module.down_proj.grad = torch.full_like(module.down_proj, value)
    optimizer.step()
    assert down(optimizer).undecided
    with torch.no_grad():
        module.down_proj.copy_(torch.ones_like(module.down_proj))
    stepped(optimizer, module, "inputs", range(1, 3))
    assert down(optimizer).own_bases
    optimizer = optimizer_of(experts(torch.float32))
    matrix = down(optimizer)
    matrix.proposed = torch.ones(E, INNER, 7)
    decide_expert_bases({matrix: torch.full((E, INNER, H), value)})
    assert matrix.undecided


@pytest.mark.parametrize("rank", [RANK, "auto"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("structure", ["outputs", "inputs"])
def test_the_decision_is_in_checkpoints(structure: str, steps: int, rank: object) -> None:
    """The proposal, too, which is there after one step."""
    options = {"rank": rank}
    module = experts(torch.float32)
    optimizer = optimizer_of(module, **options)
    stepped(optimizer, module, structure, range(steps))
    other = copy.deepcopy(module)
    resumed = optimizer_of(other, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert down(resumed).undecided == (steps == 1)
    stepped(optimizer, module, structure, range(steps, 9))
    stepped(resumed, other, structure, range(steps, 9))
    assert down(resumed).own_bases == (structure == "inputs")
    for weight, twin in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, twin)


def test_states_of_another_basis_are_refused() -> None:
    saved = optimizer_of(experts(torch.float32), expert_basis="own").state_dict()
    with pytest.raises(ValueError, match="experts, shared"):
        optimizer_of(experts(torch.float32), expert_basis="shared").load_state_dict(saved)
