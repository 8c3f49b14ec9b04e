"""Which 3-D weights have a matrix rule, on which side, and what the start table says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_modules import INNER, E, H, experts
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.rules import RULES


class Einsum(nn.Module):
    """Experts of a user's own, a convolution and a linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixing = nn.Parameter(torch.randn(3, 16, 24) / 5)
        self.conv = nn.Conv1d(16, 16, 9, padding=4)
        self.linear = nn.Linear(24, 16)
        self.narrow = nn.Parameter(torch.randn(16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("ti,eij->tj", x, self.mixing)
        return self.conv(self.linear(torch.tanh(mixed)).t()[None])[0] * self.narrow.mean()


def low_rank(optimizer: HMT) -> set[str]:
    return {row.name for row in optimizer.describe() if row.rank is not None}


def reason(optimizer: HMT, name: str) -> str:
    return next(row.reason for row in optimizer.describe() if row.name == name)


@pytest.mark.filterwarnings("ignore:hmt. .* left to AdamW")
@pytest.mark.parametrize(
    ("options", "mixing"),
    [
        ({}, False),
        ({"target_modules": ["linear"]}, False),
        ({"target_modules": ["linear", "mixing"]}, True),
        ({"target_modules": "all"}, True),
        ({"module_rules": {"mixing": {"rank": 6}}}, True),
        ({"target_modules": "all", "module_rules": {"mixing": {"method": "adamw"}}}, False),
        ({"module_rules": {"mixing": {"method": "apollo", "rank": 4}}}, True),
    ],
    ids=str,
)
def test_a_weight_that_is_known_as_nobodys_is_named(options: dict[str, Any], mixing: bool) -> None:
    optimizer = low_rank_adamw(Einsum(), rank=4, **options)
    assert low_rank(optimizer) == {"linear.weight", *["mixing"] * mixing}
    assert "3-D weight" in reason(optimizer, "conv.weight")
    assert "3-D weight" in reason(optimizer, "narrow")
    if mixing:
        assert reason(optimizer, "mixing").startswith("experts 3 x 16 x 24")


def test_it_is_projected_from_its_whole_gradient() -> None:
    torch.manual_seed(1)
    model = Einsum()
    optimizer = low_rank_adamw(model, lr=3e-3, rank=4, update_interval=4, target_modules="all")
    said = "experts 3 x 16 x 24, one basis of the last dimension, projected from whole gradients"
    assert reason(optimizer, "mixing") == said
    x, goal = torch.randn(40, 16), torch.randn(16, 40)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(x) - goal).square().mean()
        loss.backward()
        assert model.mixing.grad is not None
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ValueError, match="mixing belongs to a Einsum"):
        low_rank_adamw(Einsum(), rank=4, target_modules="all", projected_backward=True)


@pytest.mark.parametrize("basis", ["shared", "own"])
@pytest.mark.parametrize(
    ("projection", "shape"), [("right", (16, 24)), ("left", (24, 16)), ("auto", (24, 16))]
)
def test_projection_chooses_its_side(projection: str, shape: tuple[int, int], basis: str) -> None:
    rule = {"mixing": {"projection": projection}}
    optimizer = low_rank_adamw(Einsum(), rank=4, module_rules=rule, expert_basis=basis)
    matrix = optimizer.matrices["mixing"]
    assert isinstance(matrix, ProjectedMatrix)
    assert (matrix.shape, matrix.own_bases) == (shape, basis == "own")
    assert matrix.columns.whole is not None
    assert matrix.columns.whole.shape == (*[3] * (basis == "own"), shape[1], matrix.width)


@pytest.mark.parametrize("projection", ["right", "left", "auto", "two_sided"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("basis", ["shared", "own"])
def test_the_stream_chooses_the_side_of_experts(
    basis: str, transposed: bool, projection: str
) -> None:
    """Shared bases are of the stream, H wide, own ones of each expert's inputs; whatever ``projection`` is."""
    module = experts(torch.float32, is_transposed=transposed)
    optimizer = low_rank_adamw(module, rank=4, expert_basis=basis, projection=projection)
    up, down = optimizer.matrices["gate_up_proj"], optimizer.matrices["down_proj"]
    assert up.shape == (2 * INNER, H)
    assert down.shape == ((H, INNER) if basis == "own" else (INNER, H))
    for matrix in (up, down):
        stored = module.get_parameter(matrix.name).shape[1:]
        assert (matrix.shape if not matrix.transposed else matrix.shape[::-1]) == stored
        assert (matrix.count, matrix.own_bases) == (E, basis == "own")


def test_without_a_module_a_pattern_names_them() -> None:
    weights = [("a.weight", (4, 16, 24)), ("b.weight", (4, 16, 24)), ("c.weight", (16, 24))]
    params = [(name, nn.Parameter(torch.randn(shape))) for name, shape in weights]
    optimizer = low_rank_adamw(params, rank=4, module_rules={"a": {"rank": 6}})
    assert low_rank(optimizer) == {"a.weight", "c.weight"}
    assert optimizer.matrices["a.weight"].count == 4
    with pytest.raises(ValueError, match="decides nothing"):
        low_rank_adamw(
            params, rank=4, module_rules={"a": {"rank": 6}, r"a\.weight": {"rank": 8}}
        ).describe()


def test_a_rule_that_holds_none_leaves_them_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one from outside that does not say so."""
    monkeypatch.setitem(RULES, "apollo", replace(RULES["apollo"], holds_experts=False))
    optimizer = low_rank_adamw(experts(torch.float32), method="apollo")
    assert not low_rank(optimizer)
    assert reason(optimizer, "down_proj") == "apollo does not hold experts"


@pytest.mark.parametrize("target", [None, "all"])
def test_biases_of_experts_are_vectors(target: str | None) -> None:
    """E of them in one tensor, at the rate of biases."""
    module = experts(torch.float32, has_bias=True)
    optimizer = low_rank_adamw(module, rank=4, target_modules=target)
    assert low_rank(optimizer) == {"gate_up_proj", "down_proj"}
    slot = optimizer._slots[module.down_proj_bias]
    assert slot.assigned.reason == "a vector in disguise"
    assert slot.assigned.lr_scale == 5.0


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("basis", ["shared", "own"])
def test_bytes_of_experts(basis: str, state_dtype: str) -> None:
    """Moments, evidence and bases as they are kept; a budget counts moments and bases."""
    weight = nn.Parameter(torch.randn(E, 96, 64))
    fields = {"rank": 48, "state_dtype": state_dtype, "expert_basis": basis}
    optimizer = low_rank_adamw([("w", weight)], target_modules=["w"], **fields)
    (row,) = optimizer.describe()
    (matrix,) = optimizer.matrices.values()
    assert isinstance(matrix, ProjectedMatrix)
    each = {"fp32": 4 * 96 * 48, "bf16": 2 * 96 * 48, "int8": 96 * 48 + 4 * 96 * 48 // 256}
    moments = 2 * E * each[state_dtype]
    bases = 4 * 64 * 48 * (E if basis == "own" else 1)
    assert row.state_bytes == moments + bases + 4 * E * (48 + 1)
    assert matrix.moment_bytes_at(48) == moments
    assert matrix.basis_bytes_at(48) == bases
