"""Products of the gradients of experts: fp32 sums over each expert's tokens, wherever its rows end."""

import pytest
import torch
from interpreted import EPSILON, run_interpreted, strided

from hmt_deepspeed.kernels import grouped_product as module
from hmt_deepspeed.kernels.grouped_product import add_grouped_product

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# m, width, tokens of each expert; some rows are nobody's
SHAPES = [(130, 70, [0, 40, 1, 0, 99]), (16, 32, [3]), (5, 3, [7, 0]), (1, 1, [0, 1])]
BEYOND = 2


def job(m, width, tokens, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    rows = sum(tokens) + BEYOND
    delta, features = (
        torch.randn(rows, size, generator=generator).to(dtype).to(device) for size in (m, width)
    )
    delta[-BEYOND:] = features[-BEYOND:] = torch.nan  # memory that nobody wrote
    offsets = torch.tensor(tokens, device=device).cumsum(0, dtype=torch.int32)
    return delta, features, offsets


def exact_products(delta, features, offsets):
    """In fp64, and the sums of the magnitudes of what is added up; E x m x width."""
    ends = offsets.tolist()
    spans = [slice(*span) for span in zip([0, *ends], ends, strict=False)]
    delta, features = delta.double().cpu(), features.double().cpu()
    exact = torch.stack([delta[s].t() @ features[s] for s in spans])
    return exact, torch.stack([delta[s].abs().t() @ features[s].abs() for s in spans])


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)  # torch's CPU sums fp16 in fp16
@pytest.mark.parametrize(("m", "width", "tokens"), SHAPES)
def test_products_of_several_backwards_are_summed_in_room(m, width, tokens, dtype):
    operands = job(m, width, tokens, dtype)
    exact, terms = exact_products(*operands)
    room = torch.full(exact.shape, torch.nan)
    first = add_grouped_product(None, *operands, room)
    assert first is room
    # a product is rounded once to its dtype; fp32 sums in any order: each addition is off by half an epsilon
    allowed = torch.finfo(dtype).eps * exact.abs() + sum(tokens) * EPSILON * terms
    assert ((first - exact).abs() <= allowed).all()
    assert add_grouped_product(first, *operands) is first
    assert ((first - 2 * exact).abs() <= 2 * allowed).all()
    assert not first[[t == 0 for t in tokens]].any()
    fresh = add_grouped_product(None, *operands)
    assert fresh.dtype == torch.float32
    assert ((fresh - exact).abs() <= allowed).all()


def check_kernel(device="cpu"):
    for m, width, tokens in SHAPES:
        for dtype in FLOATS:
            delta, features, offsets = job(m, width, tokens, dtype, device)
            exact, terms = exact_products(delta, features, offsets)
            out = torch.full(exact.shape, torch.nan, device=device)
            for times in (1, 2):
                module.add_grouped_product_triton(
                    out, strided(delta), features, offsets, times == 2
                )
                error = (out.cpu() - times * exact).abs()
                # products of 16 bits are exact; each of the additions is off by half an epsilon at most
                assert (error <= times * (sum(tokens) + 2) * EPSILON / 2 * terms).all()
            assert not out[[t == 0 for t in tokens]].any()


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
    # offsets of elements beyond 2^31
    tokens = (1 << 31) // 4096 + 64
    delta = torch.zeros(tokens, 4096, dtype=torch.bfloat16, device="cuda")
    delta[-1] = 1
    features = torch.ones(tokens, 16, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([tokens - 1, tokens], dtype=torch.int32, device="cuda")
    found = add_grouped_product(None, delta, features, offsets)
    assert not found[0].any()
    assert (found[1] == 1).all()
