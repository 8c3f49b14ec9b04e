"""INT8 weights: error bounds, expectation, odd values and shapes."""

from math import inf, nan

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels import chunks, int8_weight
from hmt_deepspeed.kernels.int8_weight import (
    decode_weight,
    decode_weight_reference,
    encode_rows,
    encode_weight,
    encode_weight_reference,
)

SHAPES = [(1, 1), (3, 257), (65, 130), (17, 256), (2, 1000), (0, 5), (5, 0)]
LARGEST = torch.finfo(torch.float32).max


def weights(rows, n, seed=0, size=1.0):
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * size


def encoded(value, key, offset=0):
    """Stochastic with a key: of all rows in one piece, as the update encodes the few that it holds."""
    if key is None:
        return encode_weight(value)
    codes, scales = encode_rows(value, key, offset)
    return codes.contiguous(), scales


def round_trip(value, key=None, dtype=torch.float32):
    return decode_weight(*encoded(value, key), dtype)


def scale_of(value):
    """The documented scale of every element, fp64."""
    blocks = value.double().abs().split(256, dim=1)
    largest = [block.amax(dim=1, keepdim=True).expand_as(block) for block in blocks]
    return (torch.cat(largest, dim=1) / 127).clamp_min(2.0**-126)


@pytest.mark.parametrize("size", [1.0, 1e37, 1e-30, 1e-36, 1e-40])
@pytest.mark.parametrize(("key", "bound"), [(None, 0.5), (5, 1.0)])
def test_error(size, key, bound):
    value = weights(65, 1000, size=size)
    scale = scale_of(value)
    error = (round_trip(value, key).double() - value).abs() / scale
    assert error.max() <= bound + 2.0**-16
    assert error.max() > 0.98 * bound or size < 1e-38  # there all codes are zero or one
    out = round_trip(value, key, torch.bfloat16).double()
    assert ((out - value).abs() <= (bound + 2.0**-16) * scale + 2.0**-8 * out.abs()).all()


def test_a_neighbour_with_the_right_expectation():
    value, keys = weights(2, 300), 1000
    value[:, 5] = 1e-37
    scale = scale_of(value)
    low = (value / scale).floor()
    total = torch.zeros_like(value, dtype=torch.float64)
    for key in range(keys):
        code = round_trip(value, key) / scale
        assert ((code - low).round().abs() <= 1).all()
        total += code
    share = value / scale - low
    deviation = (share * (1 - share)).clamp_min(1e-5).sqrt() / keys**0.5
    # The largest of 600 normal deviates is 3.2; six leave room for shares near 0 and 1.
    assert ((total / keys - value / scale).abs() / deviation).max() < 6


@pytest.mark.parametrize("key", [None, 5])
def test_exact_values(key):
    codes = torch.arange(-127, 128).float()[None]
    for size in (2.0**-10, 1.0, 2.0**-126):
        assert torch.equal(round_trip(codes * size, key), codes * size)
    assert not round_trip(torch.zeros(3, 257), key).any()
    out = round_trip(torch.full((1, 3), LARGEST), key)
    assert out.isfinite().all()
    assert (out / LARGEST - 1).abs().max() < 2.0**-22


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_a_block_with_a_value_that_is_not_finite_is_nan(bad, key):
    value = weights(2, 600)
    value[0, 300] = bad
    out = round_trip(value, key)
    assert out[0, 256:512].isnan().all()
    value[0, 256:512] = 0.0
    out[0, 256:512] = 0.0
    assert torch.equal(out, round_trip(value, key))


@pytest.mark.parametrize(("rows", "n"), SHAPES)
def test_blocks_end_with_their_row(rows, n):
    value = weights(rows, n)
    codes, scales = encode_weight(value)
    assert codes.shape == (rows, n)
    assert scales.shape == (rows, (n + 255) // 256)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row in range(rows):
        part = encode_weight(value[row : row + 1])
        assert torch.equal(codes[row : row + 1], part[0])
        assert torch.equal(scales[row : row + 1], part[1])
    assert decode_weight(codes, scales, torch.bfloat16).shape == value.shape


def test_keys_and_offsets_draw_anew():
    value, offset = weights(65, 130), (1 << 32) - 2000
    whole, _ = encode_rows(value, 3, offset)
    assert not torch.equal(whole, encode_rows(value, 3, offset + 1)[0])
    assert not torch.equal(whole, encode_rows(value, 4, offset)[0])
    rows = [encode_rows(value[i : i + 1], 3, offset + i * 130)[0] for i in range(65)]
    assert torch.equal(whole, torch.cat(rows))


def test_internal_chunks(monkeypatch):
    value = weights(65, 130)
    whole, scales = encode_weight(value)
    decoded = decode_weight(whole, scales, torch.float32)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 300)
    assert torch.equal(encode_weight(value)[0], whole)
    assert torch.equal(decode_weight(whole, scales, torch.float32), decoded)


@pytest.mark.parametrize(
    "value", [torch.ones(4), torch.ones(2, 2).bfloat16(), torch.ones(3, 4).t()]
)
def test_encode_refuses(value):
    with pytest.raises(ValueError):
        encode_weight(value)


@pytest.mark.parametrize(
    ("codes", "scales", "dtype"),
    [
        (torch.zeros(2, 300).byte(), torch.ones(2, 2), torch.float32),
        (torch.zeros(2, 300).char(), torch.ones(2, 2).half(), torch.float32),
        (torch.zeros(2, 300).char(), torch.ones(2, 1), torch.float32),
        (torch.zeros(2, 300).char(), torch.ones(3, 2), torch.float32),
        (torch.zeros(600).char(), torch.ones(3), torch.float32),
        (torch.zeros(300, 2).char().t(), torch.ones(2, 2), torch.float32),
        (torch.zeros(2, 300).char(), torch.ones(2, 2).t(), torch.float32),
        (torch.zeros(2, 300).char(), torch.ones(2, 2), torch.float16),
    ],
)
def test_decode_refuses(codes, scales, dtype):
    with pytest.raises(ValueError):
        decode_weight(codes, scales, dtype)


def check_kernel(device="cpu"):
    special = weights(20, 600, size=1.0)
    special[0, 3], special[1, 300], special[2, 599] = inf, -inf, nan
    special[3], special[4] = 0.0, 1e-40
    special[5:10] *= 10.0 ** torch.arange(-40, 35, 15)[:, None]
    special[10] = LARGEST
    for value in (*(weights(*shape, seed=7) for shape in SHAPES), special):
        codes, scales = encode_weight_reference(value)
        out = int8_weight.encode_weight_triton(value.to(device))
        assert torch.equal(out[0].cpu(), codes), value.shape
        assert torch.equal(out[1].cpu().nan_to_num(7.0), scales.nan_to_num(7.0))
        for dtype in (torch.float32, torch.bfloat16):
            expected = decode_weight_reference(codes, scales, dtype)
            decoded = int8_weight.decode_weight_triton(*out, dtype).cpu()
            assert decoded.dtype == dtype
            assert torch.equal(decoded.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))


def test_kernel():
    """Bit-equal: products, quotients and roundings are IEEE's in both."""
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
