"""Low-rank updates of INT8 weights: one step, the drift of many, the kernel against its twin."""

from functools import partial

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted

from hmt_deepspeed.kernels import chunks
from hmt_deepspeed.kernels.int8_low_rank_update import (
    int8_low_rank_updates_,
    int8_low_rank_updates_triton_,
)
from hmt_deepspeed.kernels.int8_weight import decode_weight, encode_rows, encode_weight
from hmt_deepspeed.kernels.launching import matrices_in
from hmt_deepspeed.kernels.low_rank_factors import Factors, ScaledRows
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_, new_keys

SHAPES = [(1, 1, 1), (3, 257, 1), (65, 130, 33), (16, 256, 16), (5, 600, 7)]


def inputs(rows, n, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, n), (rows, width), (n, width))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exact_inputs(rows, n, width):
    """Codes 1/8 apart and updates of 1/64: fp32 holds every sum, whatever the order of its terms."""
    weight, update, projection = inputs(rows, n, width)
    codes = (40 * weight).round().clamp(-127, 127).to(torch.int8)
    codes[:, ::256] = 127
    scales = torch.full((rows, -(-n // 256)), 0.125)
    return codes, scales, (4 * update).round() / 64, (4 * projection).round()


def stack(update, projection, key):
    """Arguments of a stack of one matrix."""
    return {
        "update": update[None],
        "projections": [projection],
        "rank": update.shape[1],
        "column_scale": torch.ones(1, 2, device=update.device),
        "keys": new_keys(key, update.device),
    }


def int8_update_(codes, scales, update, projection, lr, weight_decay, key, offset=0):
    given = stack(update, projection, key)
    int8_low_rank_updates_(
        [codes], [scales], **given, lr=lr, weight_decay=weight_decay, offset=offset
    )


def exact_update_(weight, update, projection, lr, weight_decay):
    low_rank_updates_([weight], **stack(update, projection, None), lr=lr, weight_decay=weight_decay)


def kernel(codes, scales, update, projection, lr, weight_decay, key, offset=0):
    given = stack(update, projection, key)
    keys = given.pop("keys")
    int8_low_rank_updates_triton_(
        [codes], [scales], Factors(**given), lr, weight_decay, keys, offset
    )


def padded(tensor):
    """The same values in rows that are further apart."""
    rows, columns = tensor.shape
    buffer = torch.full((rows, columns + 3), float("nan"), dtype=tensor.dtype, device=tensor.device)
    buffer[:, 1 : columns + 1] = tensor
    return buffer[:, 1 : columns + 1]


@pytest.mark.parametrize(("key", "bound"), [(None, 0.5), (5, 1.0)])
@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
def test_one_step(rows, n, width, key, bound):
    weight, update, projection = inputs(rows, n, width)
    codes, scales = encode_weight(weight)
    expected = decode_weight(codes, scales, torch.float32)
    exact_update_(expected, update, projection, 0.3, 0.1)
    int8_update_(codes, scales, padded(update), padded(projection), 0.3, 0.1, key)
    out = decode_weight(codes, scales, torch.float32)
    step = scales.repeat_interleave(256, dim=1)[:, :n]
    # The codes' bound, and the rounding of sums of width + 1 terms below 16.
    assert ((out - expected).abs() <= (bound + 2.0**-16) * step + 16 * (width + 3) * 2.0**-23).all()


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_internal_chunks_and_held_rows_do_not_matter(chunk, monkeypatch):
    codes, scales, update, projection = exact_inputs(65, 130, 33)
    offset = (1 << 33) - 700
    value = decode_weight(codes, scales, torch.float32)
    value = 0.9375 * value - 0.125 * (update @ projection.t())
    expected = encode_rows(value, 7, offset)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    halves = codes.clone(), scales.clone()
    int8_update_(codes, scales, update, projection, 0.125, 0.5, 7, offset)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    for rows in (slice(0, 20), slice(20, 65)):
        parts = halves[0][rows], halves[1][rows], update[rows]
        int8_update_(*parts, projection, 0.125, 0.5, 7, offset + rows.start * 130)
    assert torch.equal(halves[0], expected[0])
    assert torch.equal(halves[1], expected[1])


def drift(key_of_step, steps=500):
    """Movement of an INT8 weight and of its fp32 twin, and the documented deviation of the former.

    Rank-2 updates with a constant and a random part, 0.03 codes a step.
    """
    start, update, projection = inputs(32, 512, 2)
    codes, scales = encode_weight(start)
    first = decode_weight(codes, scales, torch.float32)
    exact, path = first.clone(), torch.zeros_like(first)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        now = update + torch.randn(update.shape, generator=generator)
        before = exact.clone()
        exact_update_(exact, now, projection, 4e-4, 0.1)
        path += (exact - before).abs()
        key = key_of_step(step)
        int8_update_(codes, scales, now, projection, 4e-4, 0.1, key)
    largest = path.view(32, 2, 256).amax(dim=2).repeat_interleave(256, dim=1)
    step = scales.repeat_interleave(256, dim=1)
    deviation = (step.square() / 4 + step * (path + largest)).sqrt()
    return decode_weight(codes, scales, torch.float32) - first, exact - first, deviation


def slope(moved, target):
    return ((moved * target).sum() / target.square().sum()).item()


def test_drift_follows_fp32_with_stochastic_rounding_only():
    moved, target, deviation = drift(lambda step: step)
    error = (moved - target) / deviation
    assert error.square().mean().sqrt() < 1.0  # the documented bound
    assert abs(error.mean().item()) < 5 / error.numel() ** 0.5
    # Unbiased: five deviations of the fit of 16384 independent errors.
    allowed = 5 * (deviation * target).norm() / target.square().sum()
    assert abs(slope(moved, target) - 1) < allowed < 0.1
    moved, target, _ = drift(lambda step: None)
    assert abs(slope(moved, target)) < 0.5


def members(transposed, beside=None, width=21):
    """Four encoded weights and all that their step takes; the second takes none. Exact as `exact_inputs` are.

    beside: dtype of rows beside, None of none.
    """
    generator = torch.Generator().manual_seed(2)
    rows, n = 37, 300

    def whole(*shape):
        return (4 * torch.randn(shape, generator=generator)).round()

    codes, scales = zip(*(exact_inputs(rows, n, 1)[:2] for _ in range(4)), strict=True)
    height = n if transposed else rows
    update = whole(4, height, width) / 64
    update[1, 0, :1] = float("nan")
    rows_beside = None
    if beside is not None:
        matrices = whole(4, height, rows if transposed else n).to(beside)
        matrices[1] = float("nan")
        rows_beside = ScaledRows(list(matrices), whole(4, height) / 8)
    return (
        list(codes),
        list(scales),
        {
            "update": update,
            "projections": whole(4, rows if transposed else n, width),
            "rank": min(9, width),
            "beside": rows_beside,
            "column_scale": torch.tensor([[0.5, 2.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]),
            "keys": torch.randint(-(2**31), 2**31, (4, 2), generator=generator).int(),
            "transposed": transposed,
        },
    )


def check_stack(codes, scales, given, run):
    after = [code.clone() for code in codes], [scale.clone() for scale in scales]
    run(*after, given)
    for b, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        if b != 1:
            factor = given["column_scale"][b, 1].repeat(given["update"].shape[2])
            factor[: given["rank"]] = given["column_scale"][b, 0]
            product = (given["update"][b] * factor) @ given["projections"][b].t()
            if given["beside"] is not None:
                product += given["beside"].whole(b)
            product = product.t() if given["transposed"] else product
            value = 0.9375 * decode_weight(code, scale, torch.float32) - 0.125 * product
            code, scale = encode_rows(value, tuple(given["keys"][b].tolist()), 5)
        assert torch.equal(after[0][b], code)
        assert torch.equal(after[1][b], scale)


def in_tensors(tensors):
    """Four matrices as two tensors of two."""
    return [torch.stack(tensors[:2]), torch.stack(tensors[2:])]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("beside", "width"), [(None, 21), (torch.bfloat16, 21), (torch.float32, 0)]
)
def test_stack(beside, width, transposed, several, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1000)

    def run(codes, scales, given):
        weights = [in_tensors(tensors) if several else tensors for tensors in (codes, scales)]
        int8_low_rank_updates_(*weights, **given, lr=0.125, weight_decay=0.5, offset=5)
        if several:
            codes[:], scales[:] = ([*tensors[0], *tensors[1]] for tensors in weights)

    check_stack(*members(transposed, beside, width), run)


def test_refuses():
    def arguments(**change):
        codes, scales = encode_weight(torch.ones(4, 6))
        usual = {"codes": [codes], "scales": [scales], "keys": None, "rank": 1}
        usual |= {"update": torch.ones(1, 4, 2), "projections": torch.ones(1, 6, 2)}
        return usual | {"column_scale": torch.ones(1, 2)} | change

    int8_low_rank_updates_(**arguments(), lr=0.1, weight_decay=0)
    for change in (
        {"codes": []},
        {"codes": [torch.zeros(4, 6)]},
        {"codes": [torch.zeros(2, 4, 6).char()], "scales": [torch.ones(2, 4, 1)]},
        {"codes": [torch.zeros(6, 4).char().t()]},
        {"scales": [torch.zeros(4, 2)]},
        {"scales": []},
        {"keys": torch.ones(1, 2)},
        {"update": torch.ones(1, 3, 2)},
        {"update": torch.ones(1, 4, 2).double()},
        {"projections": torch.ones(1, 5, 2)},
        {"projections": torch.ones(1, 6, 2).int()},
        {"beside": ScaledRows([torch.ones(6, 4)], torch.ones(1, 4))},
    ):
        with pytest.raises(ValueError):
            int8_low_rank_updates_(**arguments(**change), lr=0.1, weight_decay=0)


def check_kernel(device="cpu"):
    for rows, n, width in SHAPES:
        codes, scales, update, projection = exact_inputs(rows, n, width)
        for key, offset in ((None, 0), (1, 1), ((1 << 63) - 5, (1 << 33) + 3), (7, (1 << 31) - 9)):
            on_device = projection.to(device)
            for columns in (on_device, padded(on_device), on_device.bfloat16()):
                first = codes.clone(), scales.clone()
                second = codes.to(device, copy=True), scales.to(device, copy=True)
                # The twin rounds a bf16 product, the kernel does not: bf16 holds these factors exactly.
                exact = columns.cpu().float()
                int8_update_(*first, update, exact, 0.125, 0.5, key, offset)
                kernel(*second, padded(update.to(device)), columns, 0.125, 0.5, key, offset)
                assert torch.equal(second[0].cpu(), first[0]), (rows, n, width, key, offset)
                assert torch.equal(second[1].cpu(), first[1]), (rows, n, width, key, offset)
        check_scales(rows, n, width, device)
    for transposed in (False, True):
        for several in (False, True):
            check_stack(*members(transposed), partial(run_kernel, device, several))
        for beside, width in ((torch.bfloat16, 21), (torch.float32, 0)):
            check_stack(*members(transposed, beside, width), partial(run_kernel, device, False))
    empty = torch.zeros(0, 5, device=device)
    kernel(empty.char(), empty[:, :1], empty[:, :2], empty.new_ones(5, 2), 0.1, 0.0, 1)


def run_kernel(device, several, codes, scales, given):
    given = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    keys, lr = given.pop("keys"), torch.tensor(0.125, device=device)
    beside = given.pop("beside")
    if beside is not None:
        matrices = [matrix.to(device) for matrix in beside.matrices]
        beside = ScaledRows(matrices, beside.scale.to(device))
    weights = [in_tensors(tensors) if several else tensors for tensors in (codes, scales)]
    on_device = [[tensor.to(device) for tensor in tensors] for tensors in weights]
    int8_low_rank_updates_triton_(*on_device, Factors(**given), lr, 0.5, keys, 5, beside)
    codes[:], scales[:] = ([one.cpu() for one in matrices_in(tensors)] for tensors in on_device)


def check_scales(rows, n, width, device):
    """Scales are an fp32 result of the update: as accurate as the twin's against float64."""
    weight, update, projection = inputs(rows, n, width, seed=3)
    codes, scales = encode_weight(weight)
    start = codes.double() * scales.double().repeat_interleave(256, dim=1)[:, :n]
    change = 0.3 * (update.double() @ projection.double().t())
    terms = (0.97 * start).abs() + 0.3 * (update.double().abs() @ projection.double().abs().t())
    exact, terms = (
        torch.stack([b.abs().amax(dim=1) / 127 for b in t.split(256, dim=1)], dim=1)
        for t in (0.97 * start - change, terms)
    )
    first = codes.clone(), scales.clone()
    second = codes.to(device, copy=True), scales.to(device, copy=True)
    int8_update_(*first, update, projection, 0.3, 0.1, 1)
    kernel(*second, update.to(device), projection.to(device), 0.3, 0.1, 1)
    assert_as_accurate(second[1].cpu(), first[1], exact, terms)
    # A sum that differs in its last bit may round to the other neighbour, one in 10^4.
    difference = (second[0].cpu().int() - first[0]).abs()
    assert difference.max() <= 1
    assert difference.sum() <= max(1, 1e-3 * rows * n)


def test_kernel():
    """Bit-equal where fp32 holds every sum; else scales are as accurate as the twin's."""
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
