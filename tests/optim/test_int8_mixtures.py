"""Mixtures whose weights are INT8, experts too: training, experts without tokens, checkpoints, what leaves it."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import E, experts, inputs, routes
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn
from trained_mixtures import OPTIONS, batch, mixture, train

from hmt_deepspeed.optim.backward import int8_linear
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight, encoded_weights

FAMILIES = ["qwen3", "gpt_oss"]  # gpt_oss: transposed, with biases
INT8 = {**OPTIONS, "weight_dtype": "int8"}


def weights_of(model: nn.Module) -> dict[str, Int8Weight]:
    return {
        f"{path}.{name}": weight
        for path, module in model.named_modules()
        for name, weight in encoded_weights(module).items()
    }


def of_experts(model: nn.Module) -> dict[str, Int8Weight]:
    return {name: one for name, one in weights_of(model).items() if one.codes.dim() == 3}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=batch(7)).logits
    return found


# -- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "basis", "dtype"),
    [
        ("qwen3", "own", torch.float32),
        ("gpt_oss", "shared", torch.float32),
        ("qwen3", "auto", torch.bfloat16),
        ("gpt_oss", "own", torch.bfloat16),
    ],
    ids=str,
)
def test_it_trains_as_in_the_model_s_dtype(family: str, basis: str, dtype: torch.dtype) -> None:
    """In two micro-batches, clipped, through refreshes: measured within 2 %."""
    losses = []
    for options in (INT8, OPTIONS):
        model = mixture(family, dtype)
        optimizer = low_rank_adamw(model, **options, expert_basis=basis)
        assert len(of_experts(model)) == (4 if options is INT8 else 0)
        losses.append(train(model, optimizer, range(10), micro_batches=2))
        optimizer.close()
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_rounded_to_nearest_experts_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of some hundredths of a code move them by stochastic rounding alone."""
    moved, update = [], int8_linear.int8_low_rank_updates_

    def to_nearest(*args: Any, keys: Tensor, **how: Any) -> None:
        update(*args, keys=None, **how)

    for nearest in (False, True):
        if nearest:
            monkeypatch.setattr(int8_linear, "int8_low_rank_updates_", to_nearest)
        model = mixture("qwen3")
        optimizer = low_rank_adamw(model, **INT8 | {"lr": 1e-5, "weight_decay": 0.0})
        before = {name: one.codes.clone() for name, one in of_experts(model).items()}
        train(model, optimizer, range(4))
        now = of_experts(model)
        moved.append(sum(int((now[n].codes != codes).sum()) for n, codes in before.items()))
        del optimizer
    assert moved[0] > 100 * max(1, moved[1])


STEPS: dict[str, dict[str, Any]] = {
    "shared": {"expert_basis": "shared"},
    "own": {"expert_basis": "own"},
    "full rank": {"full_rank_budget": 1.0, "energy_threshold": 1.0, "rank": "auto"}
    | {"rank_candidates": [2, 4], "rank_budget": None, "energy_estimate": "in_sample"},
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize(
    "kind", [{}, {"is_transposed": True, "has_bias": True}], ids=["plain", "t"]
)
def test_an_expert_without_tokens_stays_bit_for_bit(kind: dict[str, Any], case: str) -> None:
    """No update, no decay and no rounding."""
    module = experts(torch.float32, "grouped_mm", **kind)
    options = {"lr": 1e-2, "weight_decay": 0.1, "rank": 4, "update_interval": 3, **STEPS[case]}
    options |= {"max_full_gradient_bytes": 2**30, "weight_dtype": "int8"}
    optimizer = low_rank_adamw(module, **options)
    rare, others = 2, [0, 1, 3, 4]
    for step in range(5):
        before = copy.deepcopy(encoded_weights(module))
        index, weights = routes(11, 2, step, torch.float32, of=len(others))
        index = torch.tensor(others)[index] if step else routes(11, 5, 0)[0]
        weights = weights if step else routes(11, 5, 0, torch.float32)[1]
        module(inputs(11, step, torch.float32), index, weights).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in encoded_weights(module).items():
            same = [
                torch.equal(weight.codes[e], before[name].codes[e])
                and torch.equal(weight.scales[e], before[name].scales[e])
                for e in range(E)
            ]
            assert same == [bool(step) and e == rare for e in range(E)], (name, step)
    full = [m.projection is None for m in optimizer.matrices.values()]  # type: ignore[attr-defined]
    assert all(full) == any(full) == (case == "full rank")


# -- checkpoints, copies, the end -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "basis"), [("qwen3", "own"), ("qwen3", "shared"), ("gpt_oss", "auto")]
)
def test_it_resumes_bit_for_bit(family: str, basis: str) -> None:
    model = mixture(family, torch.bfloat16)
    optimizer = low_rank_adamw(model, **INT8, expert_basis=basis)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert not any("master" in state for state in saved[1]["state"].values() if "codes" in state)
    other = mixture(family, torch.bfloat16)
    resumed = low_rank_adamw(other, **INT8, expert_basis=basis)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert train(model, optimizer, range(5, 10)) == train(other, resumed, range(5, 10))
    found = weights_of(other)
    for name, weight in weights_of(model).items():
        assert torch.equal(weight.codes, found[name].codes), name
        assert torch.equal(weight.scales, found[name].scales), name


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_and_saved_models_hold_decoded_weights(family: str, tmp_path: Path) -> None:
    model: Any = mixture(family, torch.bfloat16)
    optimizer = low_rank_adamw(model, **INT8)
    train(model, optimizer, range(3))
    expected = {name: weight.decode() for name, weight in weights_of(model).items()}
    state = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert model.get_parameter(name).isnan().all()
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in expected.items():
        assert torch.equal(plain.get_parameter(name), value), name
    # products of bf16 in another order
    torch.testing.assert_close(logits(model), logits(plain), rtol=2**-5, atol=2**-5)
    tokens = batch(0)[:, :4]
    found = model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert found.shape == (4, 7)
    other = mixture(family, torch.bfloat16)
    kept = low_rank_adamw(other, **INT8)
    other.load_state_dict(state)
    for name, weight in of_experts(other).items():
        assert other.get_parameter(name).isnan().all()
        torch.testing.assert_close(weight.decode(), expected[name], rtol=2**-7, atol=0.002)
    kept.close()


@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen3", "close"), ("gpt_oss", "drop"), ("qwen3", "next optimizer"), ("gpt_oss", "copy")],
)
def test_the_end_restores_real_weights(family: str, how: str) -> None:
    model = mixture(family, torch.bfloat16)
    optimizer = low_rank_adamw(model, **INT8)
    train(model, optimizer, range(2))
    expected = {name: weight.decode() for name, weight in weights_of(model).items()}
    if how == "close":
        optimizer.close()
    elif how == "drop":
        del optimizer
        gc.collect()
    elif how == "next optimizer":
        low_rank_adamw(model, **OPTIONS).close()
    else:
        clone, before = copy.deepcopy(model), logits(model)
        train(model, optimizer, range(2, 4))
        torch.testing.assert_close(logits(clone), before, rtol=2**-5, atol=2**-5)
        model = clone
        low_rank_adamw(model, **OPTIONS).close()
    for name, value in expected.items():
        weight = model.get_parameter(name)
        assert torch.equal(weight, value), name
        assert weight.is_contiguous()
    assert not weights_of(model)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._state_dict_hooks


def test_masters_of_experts_are_not_counted() -> None:
    found = []
    for options in (OPTIONS, INT8):
        rows = low_rank_adamw(mixture("qwen3", torch.bfloat16), **options).describe()
        found.append({row.name: row.state_bytes for row in rows})
    model = mixture("qwen3")
    for name, size in found[0].items():
        numel = model.get_parameter(name).numel() if ".experts." in name else 0
        if numel:
            assert size - found[1][name] == 4 * numel
