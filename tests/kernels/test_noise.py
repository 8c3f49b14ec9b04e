"""Keys and normals: host and device alike, their statistics, the kernel against its twin."""

import hashlib
import subprocess
import sys
from math import sqrt

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels import noise
from hmt_deepspeed.kernels.noise import (
    Stream,
    base_key,
    host_step_key,
    normal_quantiles,
    normals,
    normals_reference,
    step_keys,
)

CPU = torch.device("cpu")
SHAPES = [(1, 1, 1), (1, 1, 3), (3, 7, 11), (2, 64, 32), (5, 1, 2049), (1, 33, 128), (4, 0, 3)]


def bases(count, seed=0):
    return torch.tensor([base_key(seed, f"layers.{i}.weight") for i in range(count)])


def keys(count, step=0, stream=Stream.PROBES):
    return step_keys(bases(count), step, stream)


def test_base_keys_are_of_names_in_every_process():
    assert base_key(0, "a", 1) != base_key(0, "a", 2) != base_key(1, "a", 2)
    assert 0 <= base_key(0, "a") < 1 << 63
    code = "from hmt_deepspeed.kernels.noise import base_key; print(base_key(7, 'w', 'x', 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == base_key(7, "w", "x", 3)


@pytest.mark.parametrize("step", [0, 1, 12_345, (1 << 31) + 7, (1 << 57) - 1])
@pytest.mark.parametrize("stream", [Stream.WEIGHT_ROUNDING, Stream.SKETCH, 63])
def test_keys_of_a_step_equal_those_of_the_host(step, stream):
    names = torch.cat((bases(5), torch.tensor([0, 1, (1 << 63) - 1])))
    expected = [host_step_key(base, step, stream) for base in names.tolist()]
    for given in (step, torch.tensor(step)):
        made = step_keys(names, given, stream)
        assert made.dtype == torch.int32
        assert [tuple(halves) for halves in made.tolist()] == expected


def test_keys_have_nothing_in_common():
    """Half of the bits differ between neighbours in name, step and stream: 16 of 32, of variance 8."""
    drawn = torch.stack(
        [torch.stack([step_keys(bases(64), t, s) for s in Stream]) for t in range(16)]
    )
    assert len(drawn.view(-1, 2).unique(dim=0)) == drawn.numel() // 2
    for dim in range(3):
        changed = drawn ^ drawn.roll(1, dim)
        flips = torch.stack([(changed >> bit) & 1 for bit in range(32)]).double()
        assert abs(flips.mean() - 0.5) < 5 * 0.5 / sqrt(flips.numel())
        bound = 6 * 0.5 / sqrt(flips[0].numel())
        assert (flips.mean(dim=(1, 2, 3, 4)) - 0.5).abs().max() < bound


def test_table_of_quantiles():
    table = normal_quantiles(CPU)
    assert (table.diff() > 0).all()
    assert torch.equal(table, -table.flip(0))
    assert abs(table.double().square().mean() - 1) < 1e-8
    half = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    torch.testing.assert_close(table.double() / table[-1], half / half[-1], rtol=1e-6, atol=1e-7)
    # Another digest is another table: what this machine draws, no other one does.
    digest = hashlib.blake2b(table.numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == "7013eb3e874e925f"


def test_normals_are_normal_and_independent():
    drawn = normals(keys(4, stream=Stream.BASIS), 512, 256).double()
    count = drawn.numel()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        # Five deviations of the mean of a power; the table's finite range takes 0.002 of the kurtosis.
        bound = 5 * sqrt(variance / count) + 0.003 * (power == 4)
        assert abs((drawn**power).mean() - expected) < bound, power
    ordered = drawn.flatten().sort().values
    ideal = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    distance = (torch.special.ndtr(ordered) - ideal).abs().max()
    assert (
        distance < 1.95 / sqrt(count) + 1 / 65536
    )  # Kolmogorov's bound that 0.1 % of draws exceed
    for other in (drawn.roll(1, 2), drawn.roll(2, 2), drawn.roll(1, 1), drawn.roll(1, 0)):
        for power in (1, 2):
            product = (drawn**power - power + 1) * (other**power - power + 1)
            assert abs(product.mean()) < 5 * power / sqrt(count)
    later = normals(keys(4, 1, Stream.BASIS), 512, 256).double()
    assert abs((drawn * later).mean()) < 5 / sqrt(count)


def test_gram_matrices_are_those_of_independent_columns():
    """Eigenvalues of X^T X / n within Marchenko and Pastur's edges (1 +- sqrt(k/n))^2."""
    drawn = normals(keys(8), 4096, 64).double()
    values = torch.linalg.eigvalsh(drawn.mT @ drawn / 4096)
    ratio = sqrt(64 / 4096)
    assert values.max() < (1 + ratio) ** 2 * 1.03
    assert values.min() > (1 - ratio) ** 2 * 0.97


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_is_its_matrices(shape, monkeypatch):
    members, rows, columns = shape
    drawn = normals(keys(members), rows, columns)
    assert drawn.shape == shape
    alone = [normals(key[None], rows, columns)[0] for key in keys(members)]
    assert torch.equal(drawn, torch.stack(alone))
    monkeypatch.setattr(noise, "_PAIRS", 16)
    assert torch.equal(drawn, normals(keys(members), rows, columns))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pairs", [1 << 15, 16])
def test_some_rows_are_those_of_the_whole(shape, pairs, monkeypatch):
    members, rows, columns = shape
    monkeypatch.setattr(noise, "_PAIRS", pairs)
    whole = normals(keys(members), rows, columns)
    for begin in {0, min(1, rows), rows // 2, max(rows - 1, 0), rows}:
        drawn = normals(keys(members), rows - begin, columns, begin)
        assert torch.equal(drawn, whole[:, begin:])
        one = normals(keys(members), 1, columns, begin)
        assert torch.equal(one[:, : rows - begin], whole[:, begin : begin + 1])


def test_elements_are_halves_of_hashes():
    table, index = normal_quantiles(CPU), torch.arange(3, dtype=torch.int32)
    halves = host_step_key(bases(1)[0].item(), 9, Stream.PROBES)
    bits = [value & 0xFFFFFFFF for value in noise.noise_bits(index, halves).tolist()]
    expected = [table[part] for value in bits for part in (value & 0xFFFF, value >> 16)]
    assert torch.equal(normals(keys(1, 9), 5, 1).flatten(), torch.stack(expected[:5]))


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, 2), torch.zeros(2).int(), torch.zeros(3, 3).int(), torch.zeros(2, 3).int().t()],
)
def test_refuses(wrong):
    with pytest.raises(ValueError, match="keys"):
        normals(wrong, 2, 2)


def check_keys_of_a_step(device="cpu"):
    names = torch.cat((bases(300), torch.tensor([0, 1, (1 << 63) - 1]))).to(device)
    every_other = torch.stack((names, names), dim=1)[:, 1]  # with strides
    for step in (0, 12_345, (1 << 31) + 7, (1 << 57) - 1):
        expected = [host_step_key(base, step, 63) for base in names.tolist()]
        on_device = torch.tensor(step, device=device)
        for given in (step, on_device, on_device.repeat(len(names))):
            for base in (names, every_other):
                made = noise.step_keys_triton(base, given, 63)
                assert made.dtype == torch.int32
                assert [tuple(halves) for halves in made.tolist()] == expected
    steps = torch.arange(len(names), device=device)
    expected = noise.step_keys_reference(names, steps, Stream.PROBES)
    assert torch.equal(noise.step_keys_triton(names, steps, Stream.PROBES), expected)
    assert noise.step_keys_triton(names[:0], 1, 0).shape == (0, 2)


def check_kernel(device="cpu"):
    for members, rows, columns in SHAPES:
        made = step_keys(bases(members).to(device), torch.tensor(3, device=device), Stream.PROBES)
        assert torch.equal(made.cpu(), keys(members, 3))
        for first in (0, 7):
            drawn = noise.normals_triton(made, rows, columns, first)
            expected = normals_reference(keys(members, 3), rows, columns, first)
            assert torch.equal(drawn.cpu(), expected)


@pytest.mark.parametrize("check", ["check_kernel", "check_keys_of_a_step"])
def test_kernel(check):
    pytest.importorskip("triton")
    run_interpreted(__file__, check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
    check_keys_of_a_step("cuda")
