"""Bases, probes and energies are fp32's also where the user lets products be TF32, which is emulated here."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.kernels.noise import base_keys, step_keys
from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.bases.basis import (
    keyed_generator,
    probe_columns,
    transfer_second_moment,
    widened,
)
from hmt_deepspeed.optim.bases.range_finder import RANGE_FINDERS, find_subspace

aten = torch.ops.aten
FACTORS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
FACTORS |= {aten.addmm_: (1, 2), aten.baddbmm_: (1, 2)}


def tf32(tensor):
    """The 10 bits of a mantissa that matrix units keep of fp32, to nearest."""
    bits = tensor.contiguous().view(torch.int32)
    return (bits + 0x0FFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)


class MatrixUnits(TorchDispatchMode):
    """Products of fp32 matrices as a GPU makes them: of TF32 numbers where torch's setting lets it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = FACTORS.get(func.overloadpacket, ())
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = tuple(
                tf32(arg) if place in places and arg.dtype == torch.float32 else arg
                for place, arg in enumerate(args)
            )
        return func(*args, **kwargs or {})


@pytest.fixture
def allowed():
    """The setting that half of the recipes on the web begin with."""
    torch.set_float32_matmul_precision("high")
    with MatrixUnits():
        yield
    torch.set_float32_matmul_precision("highest")


def decaying(m, n, exponent):
    generator = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(m, m, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(n, m, generator=generator)).Q
    return (left * torch.arange(1, m + 1.0) ** -exponent) @ right.t()


def orthogonality(columns):
    """Largest entry of ``C^T C - I``, in float64."""
    columns = columns.double()
    return (columns.mT @ columns - torch.eye(columns.shape[-1])).abs().max().item()


@pytest.mark.parametrize("kind", RANGE_FINDERS)
@pytest.mark.parametrize("exponent", [0.6, 3.0])
def test_bases_and_energies(kind, exponent, allowed):
    gradient = decaying(96, 160, exponent)
    start = torch.linalg.qr(torch.randn(160, 16)).Q
    found = find_subspace(kind, gradient, 24, keyed_generator(torch.device("cpu"), 0), start)
    assert orthogonality(found.basis) < 1e-5
    exact = (gradient.double() @ found.basis.double()).square().sum(0)
    if kind != "subspace":  # whose energies are lower bounds
        assert (found.energies - exact).abs().max() < 1e-5 * exact.max()


def test_probes_and_what_widens_a_basis(allowed):
    basis = torch.linalg.qr(torch.randn(2, 96, 24)).Q
    keys = step_keys(base_keys(0, ["a", "b"], torch.device("cpu")), 0, 3)
    for held in (basis, basis.bfloat16()):
        probes = probe_columns(held, 8, keys)
        assert orthogonality(probes) < 1e-5
        assert (held.double().mT @ probes.double()).abs().max() < 1e-5
    assert orthogonality(widened(basis[0], torch.linalg.qr(torch.randn(96, 32)).Q)) < 1e-5


def test_moments_of_a_previous_basis(allowed):
    mean, second = torch.randn(40, 16), torch.rand(40, 16) + 1
    overlap = torch.linalg.qr(torch.randn(16, 16)).Q
    wide = [tensor.double() for tensor in (mean, second, overlap)]
    difference = transfer_second_moment(mean, second, overlap) - transfer_second_moment(*wide)
    assert difference.abs().max() < 1e-5  # of numbers of about one


def test_the_emulation_is_what_it_stands_for(allowed):
    columns = torch.linalg.qr(torch.randn(160, 24)).Q
    product = columns.t() @ columns
    assert 1e-5 < (product - torch.eye(24)).abs().max() < 2e-3
    with fp32_products():
        assert (columns.t() @ columns - torch.eye(24)).abs().max() < 1e-6
