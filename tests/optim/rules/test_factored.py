"""A factored second moment: Adafactor's product, of all rows wherever they are held, across changes of basis."""

import copy
from dataclasses import replace

import alone
import pytest
import torch
from hmt_runs import settings_of
from twins import LOW_RANK, TALL, assert_same_steps

from hmt_deepspeed.optim.rules.build import build_matrix

M, N, RANK = 48, 32, 8
BETAS, EPS = (0.9, 0.999), 1e-8
SETTINGS = settings_of(rank=RANK, residual="none", probes=0, scale=1.0, second_moment="factored")


def new_matrix(basis=None, rows=(0, M), **changes):
    settings = replace(SETTINGS, **changes)
    matrix = build_matrix("w", (M, N), rows, settings, torch.float32, torch.device("cpu"))
    if basis is not None:
        matrix.adopt(basis)
    return matrix


def step(matrix, gradient, factor=1.0):
    reduced = gradient if matrix.takes_whole else gradient @ matrix.projection
    return alone.step(matrix, reduced, factor, betas=BETAS, eps=EPS)


def basis(generator, columns=RANK):
    return torch.linalg.qr(torch.randn(N, columns, generator=generator)).Q


def gradients(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(0, -1, M).unsqueeze(1) * torch.logspace(0, -1, N)
    return [torch.randn(M, N, generator=generator) * size for _ in range(count)]


@pytest.mark.parametrize("residual", ["none", "probe", "full"])
@pytest.mark.parametrize("projection", ["right", "left"])
def test_steps_are_the_twins(projection, residual):
    options = {**LOW_RANK, "projection": projection, "residual": residual}
    if residual != "full":
        options["probes"] = 4
    assert_same_steps(TALL, 1.0, second_moment="factored", **options)


@pytest.mark.parametrize("full_rank", [False, True])
def test_squares_of_rank_one_take_adams_own_step(full_rank):
    """Where |A_ij| is a product of something of the row and something of the column, nothing is lost."""
    q = None if full_rank else torch.eye(N)[:, :RANK]
    factored, full = new_matrix(q), new_matrix(q, second_moment="full")
    for matrix in (factored, full):
        matrix.adopt(q)
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(1, -3, M).unsqueeze(1) * torch.logspace(0, -4, N)
    for t in range(30):
        sign = torch.randn(M, N, generator=generator).sign()
        gradient = (1 + t % 3) * size * sign
        torch.testing.assert_close(
            step(factored, gradient), step(full, gradient), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("residual", ["none", "probe", "full"])
def test_holders_of_rows_see_one_second_moment(residual):
    """Rows 18 to 20 are held twice and counted once, as where a shard ends within a row."""
    q = basis(torch.Generator().manual_seed(1))
    changes = {"residual": residual, "probes": None if residual == "probe" else 0}
    whole = new_matrix(q, **changes)
    parts = [new_matrix(q, rows=rows, **changes) for rows in ((0, 20), (18, M))]
    counted = (slice(None), slice(2, None))
    for number, gradient in enumerate(gradients(6)):
        for matrix in (whole, *parts):
            alone.draw_probes(matrix, number)
        update = step(whole, gradient)
        columns = whole.projection
        reduced = [gradient[slice(*p.rows)].clone() for p in parts]
        reduced = [g if columns is None else g @ columns for g in reduced]
        holders = [alone.Alone(part, betas=BETAS, eps=EPS) for part in parts]
        sums = sum(h.measure(g, c) for h, g, c in zip(holders, reduced, counted, strict=True))
        for holder in holders:
            holder.observe(sums)
        found = [h.advance(g, c) for h, g, c in zip(holders, reduced, counted, strict=True)]
        over_all = sum(sums for _, sums in found)
        for holder, (own, _) in zip(holders, found, strict=True):
            expected = update[slice(*holder.matrix.rows)]
            torch.testing.assert_close(holder.finish(own, over_all), expected, rtol=1e-4, atol=1e-5)


def test_a_loss_scale_and_clipping_are_in_the_squares_too():
    q = basis(torch.Generator().manual_seed(1))
    plain, scaled = new_matrix(q), new_matrix(q)
    for gradient in gradients(5):
        expected = step(plain, gradient * 0.25)
        found = step(scaled, gradient * 1024, 0.25 / 1024)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def converged_and_moved(seed):
    """First steps in a basis turned within its span: of a matrix that had it from the start, of one that rotates its
    moments, and of one whose old moments are read in the directions of the new basis."""
    generator = torch.Generator().manual_seed(seed)
    old = basis(generator)
    new = old @ torch.linalg.qr(torch.randn(RANK, RANK, generator=generator)).Q
    turn = torch.linalg.qr(torch.randn(N, N, generator=generator)).Q
    trained, converged = new_matrix(old), new_matrix(new)
    *seen, last = gradients(300, seed)
    for gradient in seen:
        for matrix in (trained, converged):
            step(matrix, gradient @ turn)
    rotated, unrotated = (copy.deepcopy(trained) for _ in range(2))
    rotated.adopt(new)
    before = trained.moments
    unrotated.adopt(new)
    unrotated.moments.exp_avg.write(before.exp_avg.read(), None)
    unrotated.moments.exp_avg_sq.write(before.exp_avg_sq.read(), None)
    unrotated.moments.evidence = before.evidence
    return [step(matrix, last @ turn).flatten() for matrix in (converged, rotated, unrotated)]


def test_a_turned_basis_keeps_the_step_only_by_rotation():
    triples = [converged_and_moved(seed) for seed in range(6)]
    for which, keeps in ((1, True), (2, False)):
        pairs = [(triple[which], triple[0]) for triple in triples]
        cosine = sum(float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs) / 6
        norms = sum(float(a.norm() / b.norm()) for a, b in pairs) / 6
        # rotated .99 and 1.00 here, else -.02 and 1.01
        assert 0.95 < norms < 1.05
        assert (cosine > 0.95) == keeps


@pytest.mark.parametrize("rank", [RANK // 2, 2 * RANK, N])
def test_directions_that_a_new_rank_adds_start_without_evidence(rank):
    generator = torch.Generator().manual_seed(0)
    frame = basis(generator, N)
    matrix = new_matrix(frame[:, :RANK])
    *seen, last = gradients(50)
    for gradient in seen:
        step(matrix, gradient)
    before, rows = matrix.moments.evidence.clone(), matrix.moments.row_means.read().clone()
    matrix.adopt(None if rank == N else frame[:, :rank])
    after = matrix.moments.evidence
    assert after.shape == (rank,)
    assert torch.equal(matrix.moments.row_means.read(), rows)
    if rank < N:
        torch.testing.assert_close(after[:RANK], before[:rank])
        assert float(after[RANK:].sum()) < 1e-6
    update = step(matrix, last)
    assert update.isfinite().all()
    assert float(update.abs().max()) < 30


def test_bytes_are_rows_and_columns():
    q = basis(torch.Generator().manual_seed(0))
    matrix = new_matrix(q)
    assert matrix.moments.nbytes == 4 * (M * RANK + M + RANK + 1) + 4 * (RANK + 1)  # and evidence
    assert matrix.moment_bytes_at(RANK) == 4 * (M * RANK + M + RANK + 1)
    large = settings_of(rank=128, state_dtype="int8", second_moment="factored")
    held = build_matrix("w", (512, 512), (0, 512), large, torch.float32, torch.device("cpu"))
    assert held.moments.nbytes - 4 * 129 == held.moment_bytes_at(128)
    assert held.moment_bytes_at(128) < 0.14 * 2 * 4 * 512 * 128
