"""The weight gradient from an encoded input: exact products, sums of fp32, never the decoded input."""

from math import nan

import pytest
import torch
from interpreted import EPSILON, assert_as_accurate, run_interpreted, strided
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.kernels import dequant_matmul as module
from hmt_deepspeed.kernels.dequant_matmul import dequant_matmul, dequant_matmul_reference
from hmt_deepspeed.kernels.fp8_activation import decode_fp8, encode_fp8
from hmt_deepspeed.kernels.int8_activation import decode_int8, encode_int8

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# tokens, m, n, block
SHAPES = [(300, 130, 70, 256), (129, 20, 131, 50), (40, 3, 5, 7), (1, 1, 1, 256), (0, 3, 4, 8)]
CODES = pytest.mark.parametrize(
    ("encode", "decode"),
    [(encode_int8, decode_int8), (encode_fp8, decode_fp8)],
    ids=["int8", "fp8"],
)


def job(tokens, m, n, dtype, encode, block, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, n, generator=generator)
    delta = torch.randn(tokens, m, generator=generator).to(dtype)
    codes, scales = encode(x.to(device), block, 3)
    return delta.to(device), codes, scales


def exact_product(delta, codes, scales, block):
    """In fp64, and the sum of the magnitudes of what is added up."""
    wide = scales.double().repeat_interleave(block, dim=0)[: len(codes)]
    x = codes.double() * wide
    return delta.double().t() @ x, delta.double().abs().t() @ x.abs()


@CODES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("tokens", "m", "n", "block"), SHAPES)
def test_equals_decoding_and_multiplying(encode, decode, dtype, tokens, m, n, block):
    delta, codes, scales = job(tokens, m, n, dtype, encode, block)
    x = torch.empty(tokens, n)
    decode(codes, scales, block, x)
    found = dequant_matmul(delta, codes, scales, block, torch.float32)
    assert found.shape == (m, n)
    exact, terms = exact_product(delta, codes, scales, block)
    # fp32 in any order: each of `tokens` additions, and the product, is off by half an epsilon at most.
    for product in (found, delta.float().t() @ x):
        assert ((product - exact).abs() <= (tokens + 2) * EPSILON / 2 * terms).all()
    for out in (torch.bfloat16, torch.float16):
        narrow = dequant_matmul(strided(delta), codes, scales, block, out)
        assert torch.equal(narrow, found.to(out))  # rounded once, at the end


@CODES
def test_the_decoded_input_is_never_whole(encode, decode, monkeypatch):
    delta, codes, scales = job(1024, 16, 32, torch.bfloat16, encode, 64)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            storage = out.untyped_storage()
            if storage.data_ptr() != delta.untyped_storage().data_ptr() and out.itemsize > 1:
                self.numel = max(self.numel, storage.nbytes() // out.itemsize)
            return out

    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64 * 32)
    with Largest() as largest:
        found = dequant_matmul_reference(delta, codes, scales, 64, torch.bfloat16)
    assert largest.numel == 64 * 32  # one block of tokens
    exact, terms = exact_product(delta, codes, scales, 64)
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 1024 * EPSILON * terms).all()


@CODES
def test_what_is_not_finite_spoils_its_channel_only(encode, decode):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    x[20, 3] = nan
    delta = torch.ones(40, 4)
    found = dequant_matmul(delta, *encode(x, 16, 3), 16, torch.float32)
    assert found[:, 3].isnan().all()
    assert found[:, [0, 1, 2, 4, 5]].isfinite().all()


def test_refuses():
    codes, scales = encode_int8(torch.ones(10, 4), 4, 3)
    delta, dtype = torch.ones(10, 3), torch.float32
    for wrong in (
        (delta, codes.view(torch.uint8), scales, 4, dtype),
        (delta, codes, scales, 5, dtype),
        (delta[:9], codes, scales, 4, dtype),
        (delta[:, 0], codes, scales, 4, dtype),
        (delta.double(), codes, scales, 4, dtype),
        (delta, codes, scales, 4, torch.float64),
    ):
        with pytest.raises(ValueError):
            dequant_matmul(*wrong)


def check_kernel(device="cpu"):
    for tokens, m, n, block in [(100, 130, 70, 48), *SHAPES[2:]]:
        for dtype in FLOATS:
            for encode in (encode_int8, encode_fp8):
                delta, codes, scales = job(tokens, m, n, dtype, encode, block, device)
                arguments = strided(delta), codes, scales, block
                found = module.dequant_matmul_triton(*arguments, torch.float32)
                exact, terms = exact_product(delta.cpu(), codes.cpu(), scales.cpu(), block)
                if tokens > 1:
                    twin = dequant_matmul_reference(*arguments, torch.float32)
                    assert_as_accurate(found.cpu(), twin.cpu(), exact, terms)
                else:  # no statistics of one element: two roundings
                    assert ((found.cpu() - exact).abs() <= EPSILON * terms).all()
            if dtype != torch.float32:
                narrow = module.dequant_matmul_triton(*arguments, dtype)
                assert torch.equal(narrow, found.to(dtype))
    x = torch.randn(40, 6, device=device)
    x[20, 3] = nan
    spoilt = module.dequant_matmul_triton(
        torch.ones(40, 4, device=device), *encode_int8(x, 16, 3), 16, torch.float32
    )
    assert spoilt.isnan().sum(0).tolist() == [0, 0, 0, 4, 0, 0]


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_decoded_input_is_never_whole_on_gpu():
    delta, codes, scales = job(4096, 64, 4096, torch.bfloat16, encode_int8, 256, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = dequant_matmul(delta, codes, scales, 256, torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 1024
