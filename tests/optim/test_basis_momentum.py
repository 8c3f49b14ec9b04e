"""Bases that remember past gradients by the energies that second moments hold."""

import pytest
import torch
from test_later_energy import BatchNoise
from test_policy import SHAPE, Source, construct, orthonormal, train
from test_range_finder import check_orthonormal, generator, held, power_law, turned

from hmt_deepspeed.optim.basis import remembered_rows
from hmt_deepspeed.optim.build import build_matrix
from hmt_deepspeed.optim.column_energies import column_energies
from hmt_deepspeed.optim.range_finder import (
    RANGE_FINDERS,
    find_subspace,
    find_subspace_to_energy,
)
from hmt_deepspeed.optim.settings import MatrixSettings

CPU = torch.device("cpu")


# -- finding ----------------------------------------------------------------------------------------


def covariance(gradient, basis, energies, momentum):
    new = gradient.t() @ gradient / gradient.square().sum()
    return momentum * (basis * energies) @ basis.t() + (1 - momentum) * new


@pytest.mark.parametrize("momentum", [0.2, 0.7])
@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
@pytest.mark.parametrize("kind", RANGE_FINDERS)
def test_a_basis_is_the_dominant_one_of_the_mean_covariance(kind, shape, momentum):
    gradient = power_law(*shape)[0]
    old = orthonormal(shape[1], 24, 5)
    energies = torch.arange(1, 25).float() ** -1.0
    energies *= 0.8 / energies.sum()  # the rest was elsewhere
    rows = remembered_rows(gradient, old, energies, momentum)
    found = find_subspace(kind, gradient, 24, generator("s"), old, rows)
    check_orthonormal(found.basis)
    mean = covariance(gradient, old, energies, momentum)
    best = torch.linalg.eigvalsh(mean)[-24:].sum()
    # power iterations from a basis that never saw this gradient find a little less than an SVD
    least = {"svd": 0.9999, "randomized": 0.96, "subspace": 0.93}[kind]
    assert torch.trace(found.basis.t() @ mean @ found.basis) > least * best
    # what is reported is of the gradient alone
    assert held(gradient, found.basis) == pytest.approx(found.captured()[-1].item(), abs=1e-5)
    alone = find_subspace(kind, gradient, 24, generator("s"), old)
    assert held(gradient, found.basis) < held(gradient, alone.basis)


def test_16_bit_gradients_give_the_same_basis():
    gradient = power_law(160, 96)[0].bfloat16()
    old = orthonormal(96, 16, 5)
    rows = remembered_rows(gradient, old, torch.ones(16), 0.5)
    wide = remembered_rows(gradient.float(), old, torch.ones(16), 0.5)
    torch.testing.assert_close(rows, wide)
    narrow, wide = (
        find_subspace("randomized", g, 16, generator("s"), old, rows)
        for g in (gradient, gradient.float())
    )
    torch.testing.assert_close(narrow.basis, wide.basis, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", RANGE_FINDERS)
def test_widening_keeps_what_is_remembered(kind):
    """The directions remembered are not in the gradient at all: only the memory can keep them."""
    basis = orthonormal(SHAPE[1], 20, 3)
    old, new = basis[:, :4], basis[:, 4:]
    gradient = torch.randn(SHAPE[0], 16, generator=generator("g")) @ new.t()
    rows = remembered_rows(gradient, old, torch.ones(4), 0.5)
    found = find_subspace_to_energy(
        kind, gradient, (4, 8, 16), 0.5, generator("s"), old, rows, first=4
    )
    assert found.basis.shape[1] > 4
    assert (old.t() @ found.basis).square().sum() == pytest.approx(4, abs=1e-2)
    assert held(gradient, found.basis) == pytest.approx(found.captured()[-1].item(), abs=1e-5)


def test_momentum_weighs_a_gradient_of_any_size_alike():
    gradient, right, _ = power_law(96, 160)
    old = turned(right[:, :16], 1.0)
    found = [
        find_subspace(
            "svd",
            g,
            16,
            generator("s"),
            None,
            remembered_rows(g, old, torch.ones(16), 0.5),
        )
        for g in (gradient, gradient * 1e-3)
    ]
    overlap = found[0].basis.t() @ found[1].basis
    assert overlap.square().sum() == pytest.approx(16, abs=1e-3)


# -- energies of second moments ---------------------------------------------------------------------


def stepped(rows=(0, SHAPE[0]), name="a", seed=0, **settings):
    """A matrix that has a basis from a gradient and has taken some steps; its gradients."""
    made = MatrixSettings(basis_momentum=0.5, **settings)
    matrix = build_matrix(name, SHAPE, rows, made, torch.float32, CPU)
    basis = matrix.seeded_basis(8, 0)
    matrix.adopt(basis)
    found = []
    for step in range(4):
        draw = torch.Generator().manual_seed(100 * seed + step)
        gradient = torch.randn(SHAPE, generator=draw) * torch.arange(1, SHAPE[1] + 1) ** -0.5
        found.append(gradient)
        whole = gradient @ matrix.projection
        matrix.observe(matrix.measure(whole, slice(None)))
        own = whole[rows[0] : rows[1]].clone()
        update, sums = matrix.advance(own, 1.0, betas=(0.9, 0.9), eps=1e-8)
        matrix.finish(update, sums.sum(0))
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


@pytest.mark.parametrize("kind", ["full", "factored"])
def test_shards_add_up(kind):
    half = SHAPE[0] // 2
    shards = [
        stepped(rows, second_moment=kind)[0] for rows in ((0, half), (half - 2, SHAPE[0]))
    ]  # two rows are held twice and counted once
    parts = [
        column_energies([matrix], [rows])
        for matrix, rows in zip(shards, (slice(None), slice(2, None)), strict=True)
    ]
    whole = column_energies([stepped(second_moment=kind)[0]], [slice(None)])
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


def test_nothing_is_remembered_before_there_is_something():
    matrix, _ = stepped()
    for change in ({"measured": False}, {"full_rank": True}):
        assert column_energies([matrix], [slice(None)]) is not None
        before = {name: getattr(matrix, name) for name in change}
        for name, value in change.items():
            setattr(matrix, name, value)
        assert column_energies([matrix], [slice(None)]) is None
        for name, value in before.items():
            setattr(matrix, name, value)
    matrix.moments.reset(8)
    assert column_energies([matrix], [slice(None)]) is None


# -- in a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"projection": "two_sided"},
        {"second_moment": "factored"},
        {"residual": "full"},
        {"residual": "none", "probes": 0},
        {"range_finder": "subspace"},
        {"state_dtype": "bf16"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "default",
)
def test_a_basis_that_remembers_holds_more_of_noisy_gradients(options):
    """Half of every gradient is noise of its own, in as many directions as lasting ones have."""
    shares = {}
    # Only right sides last here, of which a core holds a sixth: its memory weighs as much less.
    remembering = 0.95 if options.get("projection") == "two_sided" else 0.8
    for momentum in (0.0, remembering):
        sources = [BatchNoise(8, 0.5, 8)]
        weights, optimizer = construct(
            sources, rank_candidates=(8,), update_interval=6, basis_momentum=momentum, **options
        )
        for _ in train(weights, optimizer, sources, 60):
            pass
        basis = optimizer.matrices["param_0"].basis
        later = [sources[0]() for _ in range(8)]
        shares[momentum] = sum(held(g, basis) for g in later) / len(later)
    assert shares[0.0] < 0.35
    assert shares[remembering] > 0.45  # nine tenths of what lasts, which is half


def test_a_basis_that_the_gradients_have_left_is_not_remembered():
    """As many directions as columns: whatever of the old basis is kept takes the place of a new direction."""
    sources = [Source(4, 0.05)]
    weights, optimizer = construct(
        sources,
        rank_candidates=(4,),
        update_interval=40,
        basis_momentum=0.8,
    )
    for _ in train(weights, optimizer, sources, 100):
        pass
    refreshes = optimizer._schedule.num_refreshes[0]
    sources[0].turn(seed=77)
    for _ in train(weights, optimizer, sources, 80):
        pass
    assert optimizer._schedule.num_refreshes[0] == refreshes + 2
    # with a memory of as much as gradients had there when it was new, less than 0.1
    assert optimizer.matrices["param_0"].smoothed_energy() > 0.7
