"""Mixtures of transformers under HMT: the projected backward of experts changes nothing, and what the start table says."""

from __future__ import annotations

import copy

import pytest
import torch
from trained_mixtures import BASES, FAMILIES, OPTIONS, batch, mixture, train

from hmt_deepspeed.optim.hmt import HMT

# All read their experts' weights alike, but gpt-oss stores them transposed and adds biases.
TRAINED = [("mixtral", "shared"), ("qwen3", "own"), ("gpt_oss", "own"), ("gpt_oss", "auto")]


@pytest.mark.parametrize(("family", "basis"), TRAINED)
def test_projected_backward_trains_as_whole_gradients(family: str, basis: str) -> None:
    """In two micro-batches, clipped, through two refreshes."""
    runs, losses = [], []
    for projected in ("auto", False):
        model = mixture(family)
        fields = {**OPTIONS, "expert_basis": basis, "projected_backward": projected}
        optimizer = HMT(model, **fields)
        experts = [s for s in optimizer._bases.slots if s.matrix is not None and s.matrix.count > 1]
        assert len(experts) == 4
        assert all((slot.linear is not None) == (projected == "auto") for slot in experts)
        losses.append(train(model, optimizer, range(10), micro_batches=2))
        runs.append({name: weight.detach() for name, weight in model.named_parameters()})
    assert losses[0][-1] < 0.8 * losses[0][0]
    # fp32 products are summed in another order, which Adam enlarges
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, weight in runs[0].items():
        moved = float((weight - mixture(family).get_parameter(name)).norm())
        assert float((weight - runs[1][name]).norm()) < 1e-2 * moved, name


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_whole_gradient_between_refreshes(family: str, basis: str) -> None:
    model = mixture(family)
    optimizer = HMT(model, **OPTIONS, expert_basis=basis)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    rows = batch(1)
    model(input_ids=rows, labels=rows).loss.backward()
    for slot in optimizer._bases.slots:
        if slot.matrix is not None and slot.matrix.count > 1 and not slot.due:
            assert slot.param.grad is None
            assert slot.linear is not None
            assert slot.linear.pending is not None
            assert slot.linear.pending.shape == (4, slot.matrix.num_rows, slot.matrix.width)


@pytest.mark.parametrize(
    ("family", "basis"), [("qwen3", "own"), ("gpt_oss", "shared"), ("mixtral", "auto")]
)
def test_a_mixture_resumes_bit_for_bit(family: str, basis: str) -> None:
    model = mixture(family)
    optimizer = HMT(model, **OPTIONS, expert_basis=basis)
    train(model, optimizer, range(5))
    other = mixture(family)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = HMT(other, **OPTIONS, expert_basis=basis)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, range(5, 10)) == train(other, resumed, range(5, 10))
    for weight, own in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, own)
