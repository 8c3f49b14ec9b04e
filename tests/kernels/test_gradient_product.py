"""Products of a backward: sums of several, and fp32 results of 16-bit operands on CUDA."""

import pytest
import torch

from hmt_deepspeed.kernels.gradient_product import add_gradient_product


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_of_several(dtype):
    pairs = [(torch.randn(9, 4).to(dtype), torch.randn(9, 3).to(dtype)) for _ in range(3)]
    total = None
    for delta, features in pairs:
        total = add_gradient_product(total, delta, features)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    exact = sum(delta.double().t() @ features.double() for delta, features in pairs)
    # each product is rounded to its dtype once, entries are below 16
    assert (total - exact).abs().max() < 3 * 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "fits"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_first_product_lies_in_the_room_of_its_dtype(dtype, fits):
    delta, features = torch.randn(9, 4).bfloat16(), torch.randn(9, 3).bfloat16()
    room = torch.zeros(4, 3, dtype=dtype)
    product = add_gradient_product(None, delta, features, room)
    assert (product.data_ptr() == room.data_ptr()) is fits
    assert torch.equal(product, delta.t() @ features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_cuda_no_partial_sum_has_16_bits(dtype, monkeypatch):
    asked = []

    def mm(first, second, out, out_dtype):
        assert out is None
        asked.append(out_dtype)
        return torch.matmul(first.float(), second.float())

    def addmm(total, first, second, out_dtype, out):
        asked.append(out_dtype)
        return out.add_(torch.matmul(first.float(), second.float()))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    delta, features = torch.randn(9, 4).to(dtype), torch.randn(9, 3).to(dtype)
    on_cuda = delta.as_subclass(OnCuda), features.as_subclass(OnCuda)
    total = add_gradient_product(None, *on_cuda)
    assert add_gradient_product(total, *on_cuda) is total
    assert asked == [torch.float32] * 2
    assert torch.allclose(total, 2 * delta.float().t() @ features.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_gpu(dtype):
    delta, features = (torch.randn(8192, size, device="cuda").to(dtype) for size in (64, 48))
    total = add_gradient_product(add_gradient_product(None, delta, features), delta, features)
    exact = 2 * (delta.double().t() @ features.double())
    # fp32 sums of 8192 terms of about one, in blocks: far from the 2^-9 of a bf16 result
    assert (total - exact).abs().max() < 1e-2
