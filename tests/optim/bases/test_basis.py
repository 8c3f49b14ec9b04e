"""Range finder against an SVD, probe columns, keyed seeds."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hmt_deepspeed.kernels.noise import Stream, base_key, base_keys, normals, step_keys
from hmt_deepspeed.optim.bases import basis as module
from hmt_deepspeed.optim.bases.basis import (
    HeldRows,
    keyed_generator,
    probe_columns,
    random_basis,
    transfer_second_moment,
)
from hmt_deepspeed.optim.bases.range_finder import range_finder

CPU = torch.device("cpu")


def generator(*labels):
    return keyed_generator(CPU, 0, *labels)


def decaying(m, n, decay=0.9, seed=0):
    """A matrix with singular values decay^i and random singular vectors."""
    g = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, min(m, n), generator=g)).Q
    right = torch.linalg.qr(torch.randn(n, min(m, n), generator=g)).Q
    return left * decay ** torch.arange(min(m, n)) @ right.t()


def overlap(first, second):
    """Mean squared cosine of the principal angles, 1 when the subspaces are equal."""
    return ((first.t() @ second).square().sum() / first.shape[1]).item()


@pytest.mark.parametrize("shape", [(96, 64), (48, 100)])
def test_range_finder_matches_svd(shape):
    gradient, rank = decaying(*shape), 12
    found = range_finder(gradient, rank, generator("sketch"))
    _, sigma, right = torch.linalg.svd(gradient, full_matrices=False)
    eye = torch.eye(rank)
    torch.testing.assert_close(found.basis.t() @ found.basis, eye, atol=1e-5, rtol=0)
    # Two power iterations damp the next direction beyond the oversampling by 0.9^(8*5) ~ 1e-2.
    assert overlap(found.basis, right[:rank].t()) > 0.99
    torch.testing.assert_close(found.energies, sigma[:rank].square(), rtol=2e-2, atol=0)
    torch.testing.assert_close(found.total, gradient.square().sum())
    exact = (sigma[:rank].square().cumsum(0) / sigma.square().sum())[-1]
    assert found.captured()[-1] <= exact + 1e-5  # no subspace captures more than the SVD's
    assert found.captured()[-1] > exact - 5e-3
    # The energies are what the columns capture, and the true norm is below them.
    measured = (gradient @ found.basis).square().sum(0)
    torch.testing.assert_close(found.energies, measured, rtol=1e-3, atol=1e-6)
    assert (found.energies.diff() <= 0).all()


def test_energy_divides_by_the_true_norm():
    """Of white noise a rank-8 basis of 64 directions captures little, not everything."""
    gradient = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    assert range_finder(gradient, 8, generator("x")).captured()[-1] < 0.35


def test_warm_start_beats_cold_start():
    """A slow spectrum: one warm iteration from a nearby basis finds what one cold one does not."""
    gradient = decaying(200, 160, decay=0.985)
    _, _, right = torch.linalg.svd(gradient, full_matrices=False)
    exact = right[:16].t()
    near = torch.linalg.qr(exact + 0.02 * torch.randn(160, 16, generator=generator("n"))).Q
    warm = range_finder(gradient, 16, generator("s"), start=near)
    cold = range_finder(gradient, 16, generator("s"), power_iterations=0)
    assert overlap(warm.basis, exact) > overlap(cold.basis, exact) + 0.05
    # A start of another rank is taken as far as it goes.
    grown = range_finder(gradient, 24, generator("s"), start=near)
    assert grown.basis.shape == (160, 24)
    assert overlap(exact, grown.basis) > 0.9


def test_rank_deficient_gradient_and_legal_ranks():
    thin = torch.randn(40, 3) @ torch.randn(3, 30)
    found = range_finder(thin, 10, generator("thin"))
    torch.testing.assert_close(found.basis.t() @ found.basis, torch.eye(10), atol=1e-5, rtol=0)
    assert found.captured()[2] > 0.999
    for rank in (0, 31):
        with pytest.raises(ValueError, match=r"legal is 1\.\.30"):
            range_finder(thin, rank, generator("thin"))


def keys(step=0, count=1):
    return step_keys(base_keys(0, [f"w{i}" for i in range(count)], CPU), step, Stream.PROBES)


def test_random_bases_are_orthonormal_and_of_their_keys():
    drawn = random_basis(40, 12, keys(count=3))
    torch.testing.assert_close(drawn.mT @ drawn, torch.eye(12).expand(3, 12, 12), atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn[1], random_basis(40, 12, keys(count=3)[1:2])[0])
    assert not torch.allclose(drawn, random_basis(40, 12, keys(1, 3)), atol=0.1)


@pytest.mark.parametrize("num_probes", [0, 1, 4, 16, 21, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_are_orthonormal_and_in_the_complement(num_probes, dtype):
    """As many columns as the complement has, too, some of 200 draws of which are nearly dependent."""
    count, n, rank = 200, 32, 8
    wide = torch.empty(count, n, rank + 3, dtype=dtype)
    basis = wide[..., :rank].copy_(random_basis(n, rank, keys(1, count)))
    before, probes = basis.clone(), probe_columns(basis, num_probes, keys(2, count))
    assert probes.shape == (count, n, num_probes)
    eye = torch.eye(num_probes).expand(count, -1, -1)
    torch.testing.assert_close(probes.mT @ probes, eye, atol=1e-5, rtol=0)
    # Two passes leave the square of a bf16 basis' own error (2^-8), one of fp32 rounding.
    left = (basis.float().mT @ probes).abs().amax() if num_probes else 0
    assert left < (1e-4 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(basis, before)
    with pytest.raises(ValueError, match="do not fit"):
        probe_columns(basis, n - rank + 1, keys(2, count))


def test_a_nearly_dependent_draw_still_gives_orthonormal_probes(monkeypatch):
    """Three columns equal to six digits, and two that are all but zero outside the basis."""
    basis = random_basis(64, 40, keys())
    drawn = normals(keys(5), 64, 24)
    drawn[..., 1:3] = drawn[..., :1] + 1e-5 * drawn[..., 1:3]
    drawn[..., 7:9] = basis[..., 7:9] + 1e-3 * drawn[..., 7:9]
    monkeypatch.setattr(module, "normals", lambda *_: drawn.clone())
    probes = probe_columns(basis, 24, keys())
    torch.testing.assert_close(probes[0].t() @ probes[0], torch.eye(24), atol=1e-4, rtol=0)
    assert (basis.mT @ probes).abs().max() < 1e-4


def test_members_of_a_stack_are_drawn_alike_in_parts(monkeypatch):
    basis = random_basis(48, 16, keys(1, 5)).bfloat16()
    whole = probe_columns(basis, 8, keys(2, 5))
    monkeypatch.setitem(module._WIDENED, False, 2 * 48 * 16)
    torch.testing.assert_close(probe_columns(basis, 8, keys(2, 5)), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("holders", [2, 4])
@pytest.mark.parametrize(("n", "num_probes"), [(48, 8), (50, 30), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_holders_of_rows_draw_theirs_of_the_same_probes(holders, n, num_probes, dtype, monkeypatch):
    """In parts of two matrices; of 5 rows the last of 4 holders has none."""
    rank = min(16, n - num_probes)
    basis = random_basis(n, rank, keys(1, 5)).to(dtype)
    whole = probe_columns(basis, num_probes, keys(2, 5))
    most, parts = -(-n // holders), [torch.empty(0)] * holders
    monkeypatch.setitem(module._WIDENED, False, 2 * most * rank)
    meet = threading.Barrier(holders, timeout=600)

    def draw(holder):
        def add_up(product):
            parts[holder] = product.clone()
            meet.wait()
            product.copy_(torch.stack(parts).sum(0))
            meet.wait()

        begin = min(holder * most, n)
        held = HeldRows(begin, most, n, add_up)
        return probe_columns(basis[:, begin : begin + most], num_probes, keys(2, 5), held)

    with ThreadPoolExecutor(holders) as pool:
        drawn = torch.cat(list(pool.map(draw, range(holders))), dim=1)
    torch.testing.assert_close(drawn, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_probes", [4, 9])
def test_probes_are_uniform_in_the_complement(num_probes):
    n, rank, draws = 24, 6, 3000
    basis = random_basis(n, rank, keys())
    probes = probe_columns(basis.expand(draws, n, rank), num_probes, keys(1, draws))
    share = num_probes / (n - rank)
    expected = share * (torch.eye(n) - basis[0] @ basis[0].t())
    # An entry's standard deviation is at most sqrt(share)/sqrt(draws) = .013; four of them.
    mean = (probes @ probes.mT).mean(dim=0)
    torch.testing.assert_close(mean, expected, atol=0.05, rtol=0)
    assert abs(mean.trace().item() - num_probes) < 1e-3


def test_seeds_are_keyed_by_labels_in_every_process():
    assert base_key(0, "a", 1) != base_key(0, "a", 2) != base_key(1, "a", 2)
    assert 0 <= base_key(0, "a") < 1 << 63
    code = "from hmt_deepspeed.kernels.noise import base_key; print(base_key(7, 'w', 'probes', 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == base_key(7, "w", "probes", 3)
    first, again = (torch.randn(4, generator=generator("w", 3)) for _ in range(2))
    assert torch.equal(first, again)


def test_second_moment_is_floored():
    """LDAdam's absolute value can come out near zero; the floor is relative to the row."""
    mean = torch.tensor([[1.0, -1.0]])
    second = torch.tensor([[1.0, 1.0]])  # no variance, and (m R) cancels in the first direction
    half = 0.5**0.5
    moved = transfer_second_moment(mean, second, torch.tensor([[half, half], [half, -half]]))
    torch.testing.assert_close(moved[0, 1], torch.tensor(2.0))
    torch.testing.assert_close(moved[0, 0], torch.tensor(1e-3))
