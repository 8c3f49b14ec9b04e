"""Activations in INT8 and FP8: error bounds, expectation, odd values, and why blocks run along tokens."""

from math import inf, nan
from typing import NamedTuple

import pytest
import torch
from interpreted import run_interpreted, strided

from hmt_deepspeed.kernels import fp8_activation, int8_activation, token_blocks

FLOATS = token_blocks.FLOATS
# tokens, channels, block: odd sizes, short last blocks, one element, nothing.
SHAPES = [(300, 70, 256), (129, 13, 64), (1, 1, 256), (0, 5, 4), (5, 0, 4)]


class Code(NamedTuple):
    module: object
    name: str
    top: float

    def encode(self, value, block, key=5, how=""):
        return getattr(self.module, f"encode_{self.name}{how}")(value, block, key)

    def decode(self, codes, scales, block, out, how=""):
        getattr(self.module, f"decode_{self.name}{how}")(codes, scales, block, out)
        return out

    def round_trip(self, value, block, key=5, dtype=None):
        out = torch.full(value.shape, nan, dtype=dtype or value.dtype)
        return self.decode(*self.encode(value, block, key), block, out)

    def step(self, value, scale):
        """Distance of the codes around a value, in its units (fp64)."""
        if self.name == "int8":
            return scale.double()
        exponent = (value.double() / scale.double()).abs().log2().floor().clamp_min(-6)
        return torch.exp2(exponent - 3) * scale.double()


INT8 = Code(int8_activation, "int8", 127.0)
FP8 = Code(fp8_activation, "fp8", 448.0)
CODES = pytest.mark.parametrize("code", [INT8, FP8], ids=["int8", "fp8"])


def activations(tokens, channels, seed=0):
    """Channels of very different sizes; magnitudes within a channel over some octaves."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-20, 20, (channels,), generator=generator))
    return torch.randn(tokens, channels, generator=generator) * sizes


def wide_scales(scales, block, tokens):
    return scales.float().repeat_interleave(block, dim=0)[:tokens]


@CODES
def test_error_is_within_a_step(code):
    value = activations(300, 70)
    codes, scales = code.encode(value, 256)
    out = code.decode(codes, scales, 256, torch.empty_like(value))
    error = (out.double() - value).abs() / code.step(value, wide_scales(scales, 256, 300))
    assert error.max() <= 1.0 + 2.0**-16  # fp32: x/s of up to 127, to 2^-24 of itself
    assert error.max() > 0.98  # the bound is no guess


@CODES
def test_scales_are_the_smallest_of_bf16_that_hold_the_block(code):
    value = activations(300, 70)
    _, scales = code.encode(value, 64)
    largest = torch.stack([part.abs().amax(0) for part in value.split(64)])
    assert (largest <= scales.float() * code.top * (1 + 2.0**-23)).all()
    below = (scales.view(torch.int16) - 1).view(torch.bfloat16).float()
    assert (largest > below * code.top).all()


@CODES
def test_a_neighbour_with_the_right_expectation(code):
    value = activations(40, 8)
    scales = code.encode(value, 16)[1]
    step = code.step(value, wide_scales(scales, 16, 40))
    keys, total = 400, torch.zeros_like(value, dtype=torch.float64)
    for key in range(keys):
        total += code.round_trip(value, 16, key)
    share = (value.double() / step).frac().abs()
    deviation = step * (share * (1 - share)).sqrt()
    error = (total / keys - value).abs() / (deviation / keys**0.5 + 1e-6 * step)
    # The largest of 320 normal deviates is 3; six leave room for shares near 0 and 1.
    assert error.max() < 6


@CODES
def test_the_mean_of_64_encodings_is_eight_times_as_near(code):
    value = activations(256, 64)
    size = value.norm(dim=0)

    def error(mean):
        return ((mean - value).norm(dim=0) / size).square().mean().sqrt().item()

    one = error(code.round_trip(value, 256, 0))
    mean = error(torch.stack([code.round_trip(value, 256, key) for key in range(64)]).mean(0))
    assert one / mean == pytest.approx(8, rel=0.05)  # of 16384 independent errors


def outlier_job():
    """An input with outlier channels, 1 of 64 and 40 times as large, and an output gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 512, generator=generator)
    x[:, ::64] *= 40
    return x, torch.randn(1024, 96, generator=generator)


def gradient_error(x, decoded, delta):
    """Relative error of dW on the channels without outliers."""
    normal = torch.arange(x.shape[1]) % 64 != 0
    exact = (delta.double().t() @ x.double())[:, normal]
    found = (delta.double().t() @ decoded.double())[:, normal]
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("code", "expected"),
    # The largest of 256 Gaussians is 3.0, a step 3.0 / 127: errors of it / sqrt(6). e4m3: steps of |x| / 16 to
    # |x| / 8.
    [(INT8, 0.0098), (FP8, 0.037)],
    ids=["int8", "fp8"],
)
def test_outlier_channels_do_not_spoil_their_neighbours(code, expected):
    x, delta = outlier_job()
    error = gradient_error(x, code.round_trip(x, 256), delta)
    assert error == pytest.approx(expected, rel=0.05)


def test_blocks_along_channels_would_be_spoilt():
    """The reason for the geometry: the same code on the transposed matrix."""
    x, delta = outlier_job()
    assert gradient_error(x, INT8.round_trip(x.t(), 256).t(), delta) > 0.1
    assert gradient_error(x, INT8.round_trip(x, 256), delta) < 0.011


# All ones: a NaN whose pattern overflows when it is rounded up; what the memory room scrubs with.
ONES = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)


@CODES
@pytest.mark.parametrize("bad", [inf, -inf, nan, ONES], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_spoils_its_block_only(code, bad, dtype):
    value = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = code.round_trip(value, 16)
    value[20, 3] = bad
    assert code.encode(value, 16)[1].isnan().nonzero().tolist() == [[1, 3]]
    out = code.round_trip(value, 16)
    assert out[16:32, 3].isnan().all()
    out[16:32, 3] = clean[16:32, 3]
    assert torch.equal(out, clean)


@CODES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_values_stay_finite(code, dtype):
    largest = torch.finfo(dtype).max
    value = torch.linspace(0.5, 1.0, 64, dtype=torch.float64)[:, None].expand(64, 300)
    value = (value * torch.linspace(0.9, 1.0, 300, dtype=torch.float64) * largest).to(dtype)
    value[-1, -1] = largest
    for signed in (value, -value):
        out = code.round_trip(signed, 64)
        assert out.isfinite().all()
        assert (
            out.double() / signed.double() - 1
        ).abs().max() < 0.13  # a step of e4m3, if stochastic


@pytest.mark.parametrize("sign", [1, -1])
def test_a_quotient_above_the_largest_code_stays_it(sign):
    """fp32 may round ``a / t`` down to a bf16 number, and then ``a / s`` exceeds t by a little."""
    for code, pattern in ((INT8, 127 if sign > 0 else 129), (FP8, 126 if sign > 0 else 254)):
        scaled = torch.tensor([sign * code.top * (1 + 2.0**-22)])
        # The noise for which the code above would be taken (of a negative int8, the one below).
        noise = 0.0 if sign > 0 else 1.0 - 2.0**-24
        assert code.module._to_codes(scaled, torch.tensor(noise)).item() == pattern
        assert code.module._to_codes(scaled, torch.tensor(0.0)).item() == pattern


@CODES
def test_zeros_and_denormals(code):
    assert not code.round_trip(torch.zeros(20, 4), 16).any()
    value = torch.zeros(64, 3)
    value[:, 0] = torch.linspace(-1e-39, 1e-39, 64)  # below the smallest normal number
    value[5, 1] = 2.0**-149
    value[:, 2] = torch.linspace(-1, 1, 64) * 1e-30
    codes, scales = code.encode(value, 64)
    assert scales[0, 0] == scales[0, 1] == 2.0**-126
    out = code.decode(codes, scales, 64, torch.empty_like(value))
    step = code.step(value, wide_scales(scales, 64, 64)).float()
    assert ((out - value).abs() <= step * (1 + 2.0**-16)).all()
    assert not out[:, 1][value[:, 1] == 0].any()


@CODES
def test_denormals_are_right_on_average(code):
    value = torch.full((4096, 1), 1e-39)
    step = code.step(value, torch.tensor(2.0**-126)).max()
    out = code.round_trip(value, 4096, 3).double()
    assert (out.mean() - 1e-39).abs() < 5 * step / 4096**0.5


def test_fp8_is_the_standard_e4m3():
    patterns = torch.arange(256, dtype=torch.uint8)
    numbers = patterns.view(torch.float8_e4m3fn).float()
    finite = ~numbers.isnan()
    out = torch.empty(256, 1)
    FP8.decode(numbers.to(torch.float8_e4m3fn)[:, None], torch.ones(1, 1).bfloat16(), 256, out)
    assert torch.equal(out[finite, 0], numbers[finite])
    # Each number is its own code when 448 is in the block.
    codes, scales = FP8.encode(numbers[finite, None], 256)
    assert (scales == 1).all()
    expected = patterns[finite].clone()
    expected[numbers[finite] == 0] = 0  # of two zeros
    assert torch.equal(codes.view(torch.uint8)[:, 0], expected)
    value = torch.linspace(-448, 448, 5001)[:, None]  # 448 / 2500 is on no tie
    nearest = fp8_activation._to_codes(value, torch.tensor(0.5)).view(torch.float8_e4m3fn)
    assert torch.equal(nearest.float(), value.to(torch.float8_e4m3fn).float())


@CODES
@pytest.mark.parametrize(("tokens", "channels", "block"), SHAPES)
def test_geometry(code, tokens, channels, block, monkeypatch):
    value = activations(tokens, channels)
    codes, scales = code.encode(value, block)
    assert codes.shape == (tokens, channels)
    assert scales.shape == (-(-tokens // block), channels)
    assert codes.itemsize == 1
    assert scales.dtype == torch.bfloat16
    for other in (strided(value), value.t().contiguous().t()):
        found = code.encode(other, block)
        assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found[1], scales)
    out = code.decode(codes, scales, block, torch.full_like(value, nan))
    into = strided(torch.full_like(value, nan))
    assert torch.equal(code.decode(codes, scales, block, into), out)
    monkeypatch.setattr(token_blocks, "_TILE_ELEMENTS", 150)  # many tiles
    found = code.encode(value, block)
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found[1], scales)
    assert torch.equal(code.decode(codes, scales, block, torch.empty_like(value)), out)


@CODES
def test_keys_and_blocks_are_independent(code):
    value = activations(64, 40)
    first, second = (code.encode(value, 64, key)[0].view(torch.uint8) for key in (1, 2))
    assert 0.2 < (first != second).float().mean() < 0.8
    alone = code.encode(value[:32], 32, 1)
    both = code.encode(value, 32, 1)
    assert torch.equal(alone[0].view(torch.uint8), both[0][:32].view(torch.uint8))
    assert torch.equal(alone[1], both[1][:1])


@CODES
@pytest.mark.parametrize(
    ("value", "block"),
    [
        (torch.ones(4, 4).double(), 4),
        (torch.ones(4, 4).int(), 4),
        (torch.ones(4), 4),
        (torch.ones(4, 4), 0),
    ],
)
def test_encode_refuses(code, value, block):
    with pytest.raises(ValueError):
        code.encode(value, block)


@CODES
def test_decode_refuses(code):
    codes, scales = code.encode(torch.ones(10, 4), 4)
    out = torch.empty(10, 4)
    for wrong in (
        (codes.view(torch.uint8), scales, 4, out),
        (codes, scales.float(), 4, out),
        (codes, scales, 5, out),
        (codes, scales, 0, out),
        (codes[:, 0], scales, 4, out),
        (codes.t(), scales, 4, out),
        (codes, scales, 4, out.t()),
        (codes, scales, 4, out.double()),
    ):
        with pytest.raises(ValueError):
            code.decode(*wrong)


def kernel_cases(device):
    """Several tiles of 32 x 64 in blocks of one and a half, many short blocks, one element, nothing."""
    shapes = [(70, 66, 48), (20, 3, 7), (1, 1, 256), (0, 5, 4), (5, 0, 4)]
    for index, (tokens, channels, block) in enumerate(shapes):
        value = activations(tokens, channels)
        if index == 0:
            value[3, 0], value[4, 1], value[5, 2], value[:, 3], value[6, 7] = (
                inf,
                nan,
                -inf,
                0.0,
                ONES,
            )
            value[:, 4] = torch.linspace(-1e-39, 1e-39, tokens)
            value[:, 5] = torch.linspace(0.9, 1.0, tokens) * torch.finfo(torch.float32).max
        for dtype in FLOATS:
            typed = value.to(dtype).to(device)
            yield (typed if index % 2 else strided(typed)), block


def check_kernel(device="cpu"):
    for value, block in kernel_cases(device):
        for code in (INT8, FP8):
            key = (1 << 63) - 5
            expected = code.encode(value.cpu(), block, key, "_reference")
            found = code.encode(value, block, key, "_triton")
            case = code.name, tuple(value.shape), value.dtype
            assert torch.equal(*(c[0].cpu().view(torch.uint8) for c in (found, expected))), case
            assert_equal(found[1], expected[1], case)
            out = torch.full(value.shape, nan, dtype=value.dtype)
            decoded = strided(out.to(device))
            code.decode(*expected, block, out, "_reference")
            code.decode(*found, block, decoded, "_triton")
            assert_equal(decoded, out, case)


def assert_equal(found, expected, case):
    assert torch.equal(found.cpu().float().nan_to_num(7.0), expected.float().nan_to_num(7.0)), case


def test_kernel():
    """Bit-equal: quotients are IEEE's in both, and all the rest is exact."""
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
