"""Energies along the directions of a basis that second moments, or a momentum, hold."""

import pytest
import torch
from alone import Alone
from hmt_runs import settings_of
from rank_sources import SHAPE

from hmt_deepspeed.optim.decisions.column_energies import column_energies
from hmt_deepspeed.optim.rules.build import build_matrix

CPU = torch.device("cpu")


def stepped(rows=(0, SHAPE[0]), name="a", seed=0, **settings):
    """A matrix that has a basis from a gradient and has taken some steps; its gradients."""
    made = settings_of(**settings)
    matrix = build_matrix(name, SHAPE, rows, made, torch.float32, CPU)
    basis = matrix.seeded_basis(8, 0)
    matrix.adopt(basis)
    found = []
    for step in range(4):
        draw = torch.Generator().manual_seed(100 * seed + step)
        gradient = torch.randn(SHAPE, generator=draw) * torch.arange(1, SHAPE[1] + 1) ** -0.5
        found.append(gradient)
        whole = gradient @ matrix.projection
        alone = Alone(matrix, betas=(0.9, 0.9), eps=1e-8)
        alone.observe(alone.measure(whole))
        alone.advance(whole[rows[0] : rows[1]])
    return matrix, found


def mean_squares(matrix, gradients):
    """Running mean of the squared norms along each direction, bias-corrected."""
    total, weight = torch.zeros(matrix.rank), 0.0
    for gradient in gradients:
        total = 0.9 * total + 0.1 * (gradient @ matrix.basis).square().sum(0)
        weight = 0.9 * weight + 0.1
    return total / weight


@pytest.mark.parametrize("kind", ["full", "factored"])
def test_second_moments_say_what_each_direction_has_held(kind):
    matrix, gradients = stepped(second_moment=kind)
    sums = column_energies([matrix], [slice(None)])
    torch.testing.assert_close(sums, mean_squares(matrix, gradients))


def test_a_momentum_says_what_each_direction_has_held_all_the_time():
    matrix, gradients = stepped(method="muon")
    momentum = sum(0.05 * 0.95 ** (3 - t) * g @ matrix.basis for t, g in enumerate(gradients))
    sums = column_energies([matrix], [slice(None)])
    torch.testing.assert_close(sums, momentum.square().sum(0))


KINDS = [{}, {"second_moment": "factored"}, {"method": "muon"}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shards_add_up(kind):
    half = SHAPE[0] // 2
    shards = [
        stepped(rows, **kind)[0] for rows in ((0, half), (half - 2, SHAPE[0]))
    ]  # two rows are held twice and counted once
    parts = [
        column_energies([matrix], [rows])
        for matrix, rows in zip(shards, (slice(None), slice(2, None)), strict=True)
    ]
    whole = column_energies([stepped(**kind)[0]], [slice(None)])
    torch.testing.assert_close(sum(parts), whole)


def test_matrices_that_share_a_basis_are_one():
    (one, first), (other, second) = stepped(), stepped(name="b", seed=7)
    other.share(one)
    other.moments = stepped(seed=7)[0].moments
    sums = column_energies([one, other], [slice(None)] * 2)
    torch.testing.assert_close(sums, mean_squares(one, first) + mean_squares(one, second))


def test_a_core_tells_its_directions_apart():
    matrix, gradients = stepped(projection="two_sided", rank=8)
    sums = column_energies([matrix], [slice(3)])
    cores = [matrix.left_basis.t() @ g for g in gradients]
    torch.testing.assert_close(sums, mean_squares(matrix, cores))


def test_there_are_none_before_a_basis_from_a_gradient_and_a_step():
    matrix, _ = stepped()
    for change in ({"measured": False}, {"full_rank": True}):
        assert column_energies([matrix], [slice(None)]) is not None
        before = {name: getattr(matrix, name) for name in change}
        for name, value in change.items():
            setattr(matrix, name, value)
        assert column_energies([matrix], [slice(None)]) is None
        for name, value in before.items():
            setattr(matrix, name, value)
    new = build_matrix("a", SHAPE, (0, SHAPE[0]), settings_of(), torch.float32, CPU)
    new.adopt(new.seeded_basis(8, 0))
    assert new.measured
    assert column_energies([new], [slice(None)]) is None
