"""The r x r core: what is in it, what its update spans, what becomes of the rest."""

import copy
from math import inf

import alone
import pytest
import torch
from hmt_runs import PAPERS_RULE, settings_of
from low_rank_adamw import low_rank_adamw
from torch import nn
from twins import LOW_RANK, TALL, WIDE, assert_same_steps

from hmt_deepspeed.optim.rules.two_sided import TwoSidedMatrix

M, N, RANK = 24, 32, 6
BETAS, EPS = (0.9, 0.99), 1e-12


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthonormal(rows, columns, seed=0):
    return torch.linalg.qr(randn(rows, columns, seed=seed)).Q


def new_matrix(residual="none", probes=0, m=M, n=N, rank=RANK, **settings):
    fields = settings_of(
        projection="two_sided", rank=rank, residual=residual, probes=probes, scale=1.0, **settings
    )
    return TwoSidedMatrix("w", (m, n), (0, m), fields, torch.float32, torch.device("cpu"))


def step(matrix, gradient):
    """Change of the weight per unit of learning rate, m x n."""
    columns = matrix.projection
    return alone.step(matrix, gradient @ columns, betas=BETAS, eps=EPS) @ columns.t()


def one_step(gradient, **options):
    """Weight moved from zero by one step of lr 1 and scale 1, and the bases used."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = low_rank_adamw(
        [weight], lr=1.0, eps=EPS, rank=RANK, projection="two_sided", scale=1.0, **options
    )
    weight.grad = gradient.clone()
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    return weight.detach(), state["left_basis"], state["basis"], state


def test_update_lies_in_the_span_of_both_bases_and_the_core_is_projected_twice():
    gradient = randn(M, N)
    moved, left, right, state = one_step(gradient, residual="none")
    torch.testing.assert_close(left.t() @ left, torch.eye(RANK), atol=1e-5, rtol=0)
    torch.testing.assert_close(right.t() @ right, torch.eye(RANK), atol=1e-5, rtol=0)
    torch.testing.assert_close(left @ (left.t() @ moved @ right) @ right.t(), moved)
    core = left.t() @ gradient @ right
    torch.testing.assert_close(state["exp_avg"], 0.1 * core)  # 1 - beta1 of the default
    torch.testing.assert_close(left.t() @ moved @ right, -core.sign(), atol=1e-3, rtol=0)
    assert state["exp_avg"].shape == state["evidence"].shape == (RANK, RANK)


@pytest.mark.parametrize("max_norm", [inf, 1.0])
@pytest.mark.parametrize("residual", ["none", "probe"])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_steps_are_the_twins(shape, residual, max_norm):
    options = {**LOW_RANK, "residual": residual, "probes": 4}
    twin = assert_same_steps(shape, max_norm, projection="two_sided", **options)
    limited = sum(growth > 1.01 for growth in twin.growths)
    assert limited >= 4 if residual == "probe" else not twin.growths


def test_residual_of_a_gradient_the_core_misses_is_bounded():
    """The core sees a thousandth: ``||S||`` takes its place, and the residual is ``c ||U||`` long."""
    matrix = new_matrix("probe", probes=4)
    matrix.measured = True
    alone.draw_probes(matrix)
    left, right = matrix.left_basis, matrix.basis
    outside = randn(M, N, seed=1)
    outside -= outside @ right @ right.t()
    core = 1e-3 * randn(RANK, RANK, seed=2).sign()
    moved = step(matrix, outside + left @ core @ right.t())
    inside = left @ (left.t() @ moved @ right) @ right.t()
    length = matrix.residual_scale * RANK  # |U| = 1 in each of r x r entries
    assert (moved - inside).norm() == pytest.approx(length, rel=1e-2)


def test_captured_energy_is_the_cores():
    matrix = new_matrix("probe", probes=N - RANK)  # the whole complement: the norm is exact
    alone.draw_probes(matrix)
    gradient = randn(M, N)
    core = matrix.left_basis.t() @ gradient @ matrix.basis
    one = alone.Alone(matrix)
    sums = one.measure(gradient @ matrix.projection)
    torch.testing.assert_close(one.square_norm(sums), gradient.square().sum())
    one.observe(sums)
    expected = core.square().sum() / gradient.square().sum()
    torch.testing.assert_close(matrix.smoothed_energy(), expected)
    image = (gradient @ matrix.basis).square().sum() / gradient.square().sum()
    assert matrix.smoothed_energy() < 0.6 * image  # far from the one-sided share


def test_rows_sum_to_the_whole():
    """Holders of rows add up their sums and take parts of the same step."""
    whole = new_matrix("probe", probes=4)
    parts = [copy.deepcopy(whole) for _ in range(2)]
    bounds = ((0, 9), (9, M))
    basis = torch.cat((orthonormal(N, RANK, 1), orthonormal(M, RANK, 2)))
    for matrix, rows in zip(parts, bounds, strict=True):
        matrix.rows = rows
    for matrix in (whole, *parts):
        matrix.adopt(basis)
    for i in range(4):
        gradient = randn(M, N, seed=i)
        if i == 2:
            new = torch.cat((orthonormal(N, RANK, 3), orthonormal(M, RANK, 4)))
            whole.adopt(new, whole.overlap_sum(new, slice(None)))
            overlap = sum(matrix.overlap_sum(new, slice(None)) for matrix in parts)
            for matrix in parts:
                matrix.adopt(new, overlap)
        for matrix in (whole, *parts):
            alone.draw_probes(matrix, i)
        expected = step(whole, gradient)
        slices = [gradient[begin:end] @ whole.projection for begin, end in bounds]
        holders = [alone.Alone(matrix, betas=BETAS, eps=EPS) for matrix in parts]
        sums = sum(h.measure(s) for h, s in zip(holders, slices, strict=True))
        for holder in holders:
            holder.observe(sums)
        steps = [h.advance(s) for h, s in zip(holders, slices, strict=True)]
        squares = sum(part for _, part in steps)
        updates = [h.finish(u, squares) for h, (u, _) in zip(holders, steps, strict=True)]
        found = torch.cat(updates) @ whole.projection.t()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_first_step_after_the_first_refresh_does_not_blow_up_noise():
    """A diagonal core would have Adam scale the rounding off the diagonal up to full size."""
    rank, m, n = 16, 48, 64
    sigma = 0.8 ** torch.arange(rank)
    gradient = orthonormal(m, rank, 1) * sigma @ orthonormal(n, rank, 2).t()
    weight = nn.Parameter(torch.zeros(m, n))
    optimizer = low_rank_adamw(
        [weight], rank=rank, projection="two_sided", residual="none", range_finder="svd"
    )
    weight.grad = gradient.clone()
    optimizer.step()
    cosine = -torch.cosine_similarity(weight.detach().flatten(), gradient.flatten(), dim=0)
    # sign of a dense core against the core; of a diagonal one in rounding noise it is .16
    assert cosine > 0.4
    core = optimizer.state_dict()["state"][0]["exp_avg"]
    away = core[~torch.eye(rank, dtype=torch.bool)].abs().median()
    assert away > 0.1 * core.diagonal().abs().median()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_evidence_is_what_both_old_bases_spanned(share):
    matrix = new_matrix()
    right, left = orthonormal(N, 2 * RANK, 1), orthonormal(M, 2 * RANK, 2)
    matrix.adopt(torch.cat((right[:, :RANK], left[:, :RANK])))
    for i in range(5):
        step(matrix, randn(M, N, seed=i))
    before = matrix.moments.evidence.clone()
    kept = int(share * RANK)
    new = torch.cat((right[:, RANK - kept : 2 * RANK - kept], left[:, :RANK]))
    matrix.adopt(new, matrix.overlap_sum(new, slice(None)))
    evidence = matrix.moments.evidence
    torch.testing.assert_close(evidence[:, :kept], before[:, :kept])
    assert (evidence[:, kept:] < 1e-5).all()


def rotated(matrix, new):
    matrix.adopt(new, matrix.overlap_sum(new, slice(None)))


def unrotated(matrix, new):
    """The old moments, read in the directions of the new bases."""
    before = [state.read() for state in matrix.moments.states().values()]
    evidence = matrix.moments.evidence
    rotated(matrix, new)
    for state, value in zip(matrix.moments.states().values(), before, strict=True):
        state.write(value, None)
    matrix.moments.evidence = evidence


def restarted(matrix, new):
    rotated(matrix, new)
    matrix.moments = new_matrix(rank=matrix.rank).moments


def converged_steps(share_kept, rules, seed):
    """By rule: cosine and norm ratio of the first step in new bases to that of a core that always had them."""
    size, rank = torch.logspace(0, -2, N), 8
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(M, N, generator=generator) * size
    turn = torch.linalg.qr(torch.randn(N, N, generator=generator)).Q
    keep = int(share_kept * rank)
    frames = [orthonormal(side, 2 * rank, seed + 10 + side) for side in (N, M)]

    def turned(frame):
        mixed = frame[:, :keep] @ orthonormal(keep, keep, seed + 50)
        return torch.cat((mixed, frame[:, rank : 2 * rank - keep]), dim=1)

    old = torch.cat([frame[:, :rank] for frame in frames])
    new = torch.cat([turned(frame) for frame in frames])
    trained, target = (new_matrix(rank=rank) for _ in range(2))
    trained.adopt(old)
    target.adopt(new)
    for _ in range(200):
        gradient = (mean + torch.randn(M, N, generator=generator) * size) @ turn
        step(trained, gradient)
        step(target, gradient)
    expected, found = step(target, gradient).flatten(), []
    for adopt in rules:
        moved = copy.deepcopy(trained)
        adopt(moved, new)
        one = step(moved, gradient).flatten()
        found.append((torch.cosine_similarity(one, expected, dim=0), one.norm() / expected.norm()))
    return found


def means_over_seeds(share_kept, *rules):
    runs = [converged_steps(share_kept, rules, seed) for seed in range(5)]
    return torch.tensor(runs).mean(0).tolist()


def test_rotated_bases_keep_the_step():
    moved, old, new = means_over_seeds(1.0, rotated, unrotated, restarted)
    assert moved[0] > 0.9
    assert 0.85 < moved[1] < 1.15
    assert old[0] < 0.5
    assert new[0] < moved[0] - 0.1


def test_half_new_span_stays_bounded():
    moved, old = means_over_seeds(0.5, rotated, unrotated)
    assert moved[0] > old[0] + 0.1
    assert moved[1] < 1.2


@pytest.mark.parametrize("new_rank", [4, 8])
def test_growing_and_shrinking_keep_evidence(new_rank):
    matrix = new_matrix()
    right, left = orthonormal(N, 8, 1), orthonormal(M, 8, 2)
    matrix.adopt(torch.cat((right[:, :RANK], left[:, :RANK])))
    for i in range(5):
        step(matrix, randn(M, N, seed=i))
    before, mean = matrix.moments.evidence[0, 0].item(), matrix.moments.exp_avg.read().clone()
    new = torch.cat((right[:, :new_rank], left[:, :new_rank]))
    matrix.adopt(new, matrix.overlap_sum(new, slice(None)))
    shared = min(RANK, new_rank)
    evidence = matrix.moments.evidence
    assert evidence.shape == (new_rank, new_rank)
    torch.testing.assert_close(evidence[:shared, :shared], torch.full((shared, shared), before))
    assert (evidence[shared:] < 1e-3 * before).all()
    assert (evidence[:, shared:] < 1e-3 * before).all()
    found = matrix.moments.exp_avg.read()[:shared, :shared]
    torch.testing.assert_close(found, mean[:shared, :shared], atol=1e-5, rtol=1e-4)
    assert step(matrix, randn(M, N)).abs().max() < 10


@pytest.mark.parametrize("options", [{"rank": 16}, {**PAPERS_RULE, "rank_candidates": (8, 16, 64)}])
def test_rank_of_the_whole_side(options):
    """A core of as many columns as the weight is still a core: it never falls back to full rank."""
    weight = nn.Parameter(torch.zeros(20, 16))
    optimizer = low_rank_adamw([weight], projection="two_sided", update_interval=2, **options)
    for i in range(5):
        weight.grad = randn(20, 16, seed=i)
        optimizer.step()
    matrix = optimizer.matrices["param_0"]
    assert (matrix.rank, matrix.full_rank) == (16, False)
    assert matrix.left_basis.shape == (20, 16)
    assert weight.isfinite().all()


def test_bytes():
    matrix = new_matrix()
    # r (m + n) of bases and 2 r^2 of moments, as the paper counts, and as much evidence as one of the second, and a number of
    # the first.
    assert matrix.state_bytes() == 4 * (RANK * (M + N) + 3 * RANK * RANK + 1)
    assert matrix.moment_bytes_at(RANK) == 4 * 2 * RANK * RANK
    assert matrix.basis_bytes_at(RANK) == 4 * RANK * (M + N)
