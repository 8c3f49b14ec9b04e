"""INT8 weights of single linears: bytes, conversion, updates, products."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.kernels import chunks
from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.noise import base_key, step_keys
from hmt_deepspeed.optim.backward.int8_linear import (
    Int8Weight,
    dequantize,
    quantize,
    update_together_,
)
from hmt_deepspeed.optim.backward.linear import patch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs

DTYPES = [torch.float32, torch.bfloat16]


def linear(dtype=torch.float32, m=30, n=300):
    torch.manual_seed(2)
    return nn.Linear(n, m).to(dtype)


def update_(encoded, left, right, lr, weight_decay):
    """``W <- (1 - lr wd) W - lr left right^T``."""
    keys = step_keys(torch.tensor([base_key(0, "w")]), 0, 0)
    how = {"rank": left.shape[1], "column_scale": torch.ones(1, 2), "keys": keys}
    update_together_([encoded], left.unsqueeze(0), [right], lr, weight_decay, **how)


def whole_update_(encoded, update, lr, weight_decay, step=0, scale=1.0):
    """``W <- (1 - lr wd) W - lr scale update``."""
    (m, n), beside = update.shape, ScaledRows([update], torch.full((1, len(update)), scale))
    how = {"rank": 0, "column_scale": torch.full((1, 2), scale), "beside": beside}
    how["keys"] = step_keys(torch.tensor([base_key(0, "w")]), step, 0)
    none = torch.empty(1, m, 0), [torch.empty(n, 0)]
    update_together_([encoded], *none, lr, weight_decay, **how)


# -- storage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [256, 1024, 300])
def test_bytes_are_about_half_of_bf16(n):
    encoded = Int8Weight(torch.randn(64, n).bfloat16())
    assert encoded.nbytes == 64 * n + 4 * 64 * -(-n // 256)
    assert encoded.nbytes < 0.52 * 2 * 64 * n


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_is_freed_and_what_is_left_reads_as_nan(dtype):
    module = linear(dtype)
    freed = StorageWeakRef(module.weight.data.untyped_storage())
    assert not freed.expired()
    encoded = quantize(module)
    assert freed.expired()
    assert module.weight.untyped_storage().nbytes() == dtype.itemsize
    assert (module.weight.shape, module.weight.dtype) == ((30, 300), dtype)
    assert module.weight.isnan().all()
    for write in (lambda w: w.copy_(torch.ones(30, 300)), lambda w: w.add_(1), nn.init.normal_):
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            write(module.weight)
    dequantize(module)
    assert torch.equal(module.weight, encoded.decode())


def test_conversion_is_to_the_nearest_code():
    module = linear()
    weight = module.weight.detach().clone()
    error = (quantize(module).decode() - weight).abs()
    step = torch.cat([b.abs().amax(1, keepdim=True) for b in weight.split(256, 1)], 1) / 127
    limit = step.repeat_interleave(256, 1)[:, :300] / 2
    assert (error <= limit * 1.001).all()
    assert error.max() > 0


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            known = any(
                isinstance(a, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and a.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
                for a in args
            )
            if isinstance(value, torch.Tensor) and not known:
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return out


def test_conversion_and_updates_hold_a_few_rows_at_a_time(monkeypatch):
    chunk = 1 << 14
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    m, n = 12 * chunk // 1024, 1024
    value = torch.randn(m, n).bfloat16()
    left, right, whole = torch.randn(m, 4), torch.randn(n, 4), torch.randn(m, n)
    with Allocations() as seen:
        encoded = Int8Weight(value)
    assert seen.largest <= max(m * n, 8 * chunk)  # the codes, or a chunk in eight bytes
    with Allocations() as seen:
        update_(encoded, left, right, 1e-3, 0.1)
        whole_update_(encoded, whole, 1e-3, 0.1)
    assert seen.largest <= 8 * chunk < m * n
    with Allocations() as seen:
        encoded.decode_rows(0, m)
    assert seen.largest == 4 * m * n  # so the measure sees a whole copy


@pytest.mark.parametrize("whole", [False, True])
def test_update_is_the_formula_up_to_one_code(whole):
    encoded = Int8Weight(torch.randn(40, 300))
    left, right = torch.randn(40, 4), torch.randn(300, 4)
    expected = 0.999 * encoded.decode() - 1e-2 * (left @ right.t())
    if whole:
        whole_update_(encoded, left @ right.t(), 1e-2, 0.1)
    else:
        update_(encoded, left, right, 1e-2, 0.1)
    step = encoded.scales.repeat_interleave(256, 1)[:, :300]
    error = (encoded.decode() - expected).abs()
    assert (error <= 1.001 * step).all()
    assert (error > 0.6 * step).any()  # stochastic: nearest stays below half


def test_a_whole_update_of_scale_zero_changes_no_bit():
    """Values as rounding leaves them, of very different size: once more encoded they are the same."""
    value = torch.randn(64, 300) * torch.logspace(-6, 3, 64).unsqueeze(1)
    encoded = Int8Weight(value)
    whole_update_(encoded, torch.randn(64, 300), 1e-3, 0.1)
    codes, scales = encoded.codes.clone(), encoded.scales.clone()
    for step in range(20):
        whole_update_(encoded, torch.randn(64, 300), 1e-3, 0.1, step, scale=0.0)
    assert torch.equal(encoded.scales, scales)
    assert torch.equal(encoded.codes, codes)


def test_rounding_does_not_depend_on_the_chunks(monkeypatch):
    value, update = torch.randn(64, 300), torch.randn(64, 300)
    found = []
    for chunk in (1 << 20, 1 << 10):
        monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
        encoded = Int8Weight(value)
        whole_update_(encoded, update, 1e-3, 0.1)
        found.append(encoded)
    assert torch.equal(found[0].codes, found[1].codes)
    assert torch.equal(found[0].scales, found[1].scales)


# -- products ---------------------------------------------------------------------------------------


def results(module, x, site=None):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    out = {"y": y.detach(), "dx": x.grad, "db": module.bias.grad, "dw": module.weight.grad}
    return {**out, "projected": None if site is None else site.take()}


def patched(module, side):
    site = ProjectedLinear("weight", side == "left")
    shared = SharedInputs([site])
    patch_linear(module, site, shared)
    generator = torch.Generator().manual_seed(4)
    rows = 30 if side == "left" else 300
    columns = torch.randn(rows, 5, generator=generator).to(module.weight.dtype)
    site.projection = None if side == "full" else columns
    shared.lay_out()
    module.kept = shared  # who shares lives as long as the module
    return site


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["right", "left", "full"])
def test_products_are_those_of_the_decoded_weight(dtype, side):
    module, twin = linear(dtype), linear(dtype)
    site, other = patched(module, side), patched(twin, side)
    encoded = quantize(module)
    twin.weight.data = encoded.decode()
    x = torch.randn(2, 7, 300).to(dtype)
    fired = []
    module.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
    found, expected = results(module, x, site), results(twin, x, other)
    assert fired == [side == "full"]
    for key, value in expected.items():
        assert (found[key] is None) == (value is None), key
        # the order of dW's sums is torch's own in an ordinary linear
        if key == "dw" and value is not None:
            torch.testing.assert_close(found[key], value)
        elif value is not None:
            assert torch.equal(found[key], value), key
    with torch.no_grad():
        assert torch.equal(module(x), twin(x))


@pytest.mark.parametrize("side", ["right", "left", "full"])
def test_no_decoded_weight_is_saved_for_backward(side):
    module = linear()
    patched(module, side)
    quantize(module)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        module(torch.randn(7, 300, requires_grad=True))
    assert saved
    assert all(t.untyped_storage().nbytes() < 4 * 30 * 300 for t in saved)


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradients_of_inputs_alone_leave_nothing_of_the_weight(side):
    module = linear()
    site = patched(module, side)
    quantize(module)
    x = torch.randn(7, 300).requires_grad_()
    (dx,) = torch.autograd.grad(module(x).square().sum(), x)
    assert site.take() is None
    module(x).square().sum().backward()
    assert torch.equal(x.grad, dx)
    assert site.take() is not None


def test_an_update_between_forward_and_backward_is_an_error():
    module = linear()
    encoded = quantize(module)
    patched(module, "right")
    y = module(torch.randn(7, 300, requires_grad=True))
    update_(encoded, torch.randn(30, 2), torch.randn(300, 2), 1e-2, 0.0)
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        y.sum().backward()
