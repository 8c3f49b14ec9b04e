"""8-bit optimizer states: error bounds, expectation, odd values, and what rounding does to a mean."""

from math import inf, nan

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels import int8_state
from hmt_deepspeed.kernels.int8_state import (
    decode_state,
    decode_states,
    decode_states_reference,
    encode_state,
    encode_states,
    encode_states_reference,
    levels,
)
from hmt_deepspeed.kernels.noise import step_keys

OCTAVES = {True: 16, False: 24}
RATIO = {True: 2 ** (16 / 126), False: 2 ** (24 / 254)}  # of neighbouring levels
LARGEST = torch.finfo(torch.float32).max
CPU = torch.device("cpu")


def round_trip(value, signed, key=None, offset=0):
    return decode_state(*encode_state(value, signed, key, offset), signed, value.shape)


def wide_values(signed, blocks=400, seed=0, octaves=None):
    """Magnitudes uniform in the logarithm over the range of the code; each block's largest is 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, 256)
    value = torch.exp2(-(octaves or OCTAVES[signed]) * torch.rand(shape, generator=generator))
    value[:, 0] = 1.0
    if signed:
        value *= torch.rand(shape, generator=generator).sub_(0.5).sign_()
    return value


def relative_bound(signed, key):
    rho = RATIO[signed]
    return (rho - 1) / (rho + 1) if key is None else rho - 1


@pytest.mark.parametrize("size", [1.0, 3e38, 1e-20, 2.0**-110])
@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("signed", [True, False])
def test_relative_error(signed, key, size):
    value = wide_values(signed) * size
    error = (round_trip(value, signed, key).double() - value).abs() / value.abs()
    bound = relative_bound(signed, key)
    # 4 roundings of fp32; fp32's own grid where the levels are subnormal.
    assert (error <= bound + 2.0**-22 + 2.0**-149 / value.abs().double()).all()
    assert error.max() > 0.98 * bound  # the bound is no guess


@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("signed", [True, False])
def test_absolute_error_below_the_lowest_level(signed, key):
    value, lowest = wide_values(signed, octaves=60), 2.0 ** -OCTAVES[signed]
    out = round_trip(value, signed, key)
    small = value.abs() < lowest
    assert ((out - value).abs()[small] <= lowest).all()
    if signed:
        assert set(out[small].abs().unique().tolist()) == {0.0, lowest}
    else:
        assert (out[small] == lowest).all()  # not one second moment became zero


def test_positive_second_moments_stay_positive():
    value = torch.full((512,), 1e-40)
    value[::256] = LARGEST  # the ratio of the two is zero in fp32
    assert (round_trip(value, False, 1) > 0).all()
    assert (round_trip(value, False) > 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_a_neighbour_with_the_right_expectation(signed):
    value = wide_values(signed, blocks=2)
    table = levels(signed, CPU)[: 128 if signed else 256]
    above = torch.bucketize(value.abs(), table)  # the lowest level that is not below
    low, high = table[(above - 1).clamp_min(0)], table[above]
    total, keys = torch.zeros_like(value, dtype=torch.float64), 1000
    for key in range(keys):
        magnitude = round_trip(value, signed, key) * (value.sign() if signed else 1)
        assert ((magnitude == low) | (magnitude == high)).all()
        total += magnitude
    share = (value.abs() - low) / (high - low)
    deviation = (high - low).double() * (share * (1 - share)).sqrt()
    error = (total / keys - value.abs()).abs() / (deviation / keys**0.5 + 1e-9 * high)
    # The largest of 512 normal deviates is 3.1; six leave room for shares near 0 and 1.
    assert error.max() < 6


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("key", [None, 5])
def test_exact_values(signed, key):
    table = levels(signed, CPU)
    for size in (1.0, 2.0**100, 2.0**-90):
        value = table * size
        assert torch.equal(round_trip(value, signed, key), value)
    zeros = torch.zeros(600)
    codes, scales = encode_state(zeros, signed, key)
    assert not codes.any()
    assert not scales.any()
    assert torch.equal(round_trip(zeros, signed, key), zeros)
    for largest in (LARGEST, 1.0, 1e-30, 1e-40, 2.0**-149):
        value = torch.zeros(300)
        value[7] = largest
        value[299] = -largest if signed else largest
        assert torch.equal(round_trip(value, signed, key), value)


@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("signed", [True, False])
def test_a_block_with_a_value_that_is_not_finite_is_nan(signed, bad):
    value = wide_values(signed, blocks=3).abs()
    value[1, 17], value[1, 20] = bad, 0.0
    for key in (None, 5):
        out = round_trip(value, signed, key)
        assert out[1].isnan().all()
        assert torch.equal(out[0], round_trip(value[0], signed, key))
        assert torch.equal(out[2], round_trip(value[2], signed, key, offset=512))


@pytest.mark.parametrize("shape", [(), (1,), (255,), (3, 257), (1000,), (0,), (2, 0)])
def test_shapes_and_shards(shape):
    value = torch.randn(shape)
    codes, scales = encode_state(value, True, 3, 100)
    numel = value.numel()
    assert codes.shape == (numel,)
    assert scales.shape == ((numel + 255) // 256,)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
    assert decode_state(codes, scales, True, value.shape).shape == value.shape
    head, tail = value.view(-1)[:256], value.view(-1)[256:]
    parts = encode_state(head, True, 3, 100), encode_state(tail, True, 3, 356)
    assert torch.equal(codes, torch.cat([part[0] for part in parts]))
    assert torch.equal(scales, torch.cat([part[1] for part in parts]))


def test_internal_chunks_and_offsets(monkeypatch):
    value = torch.randn(5000)
    offset = (1 << 32) - 2000
    whole, scales = encode_state(value, True, 3, offset)
    assert not torch.equal(whole, encode_state(value, True, 3, offset + 1)[0])
    assert not torch.equal(whole, encode_state(value, True, 4, offset)[0])
    decoded = decode_state(whole, scales, True, value.shape)
    monkeypatch.setattr(int8_state, "_CHUNK", 512)
    assert torch.equal(encode_state(value, True, 3, offset)[0], whole)
    assert torch.equal(decode_state(whole, scales, True, value.shape), decoded)


def empty_codes(members, numel, device="cpu"):
    codes = torch.zeros(members, numel, dtype=torch.uint8, device=device)
    return codes, torch.zeros(members, -(-numel // 256), device=device)


@pytest.mark.parametrize(("members", "numel"), [(1, 5), (4, 300), (3, 512), (2, 4097)])
def test_a_stack_is_coded_as_its_members(members, numel, monkeypatch):
    values, keys = torch.randn(members, numel), step_keys(torch.arange(members), 3, 1)
    pairs = zip(values, keys.tolist(), strict=True)
    expected = [
        torch.stack(x)
        for x in zip(*(encode_state(v, True, tuple(k)) for v, k in pairs), strict=True)
    ]
    for chunk in (1 << 20, 512):
        monkeypatch.setattr(int8_state, "_CHUNK", chunk)
        out = empty_codes(members, numel)
        encode_states(values, True, keys, *out)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        decoded = decode_states(*out, True, (members, numel, 1))
        alone = [decode_state(*pair, True, (numel, 1)) for pair in zip(*out, strict=True)]
        assert torch.equal(decoded, torch.stack(alone))


def test_members_that_are_not_active_are_not_written():
    codes, scales = empty_codes(3, 300)
    active = torch.tensor([1.0, 0.0, -2.0])
    keys = step_keys(torch.arange(3), 3, 1)
    encode_states(torch.full((3, 300), nan), False, keys, codes, scales, active)
    assert scales.isnan().all(dim=1).tolist() == [True, False, True]
    assert not codes[1].any()
    assert not scales[1].any()


@pytest.mark.parametrize(
    "change",
    [
        {"values": torch.ones(2, 300).double()},
        {"values": torch.ones(300, 2).t()},
        {"codes": torch.zeros(2, 299).byte()},
        {"scales": torch.zeros(2, 1)},
        {"key": torch.ones(1, 2).int()},
        {"active": torch.ones(3)},
    ],
)
def test_a_stack_refuses(change):
    codes, scales = empty_codes(2, 300)
    arguments = {"values": torch.ones(2, 300), "codes": codes, "scales": scales}
    arguments |= {"key": torch.ones(2, 2).int(), "active": torch.ones(2), "signed": True}
    encode_states(**arguments)
    with pytest.raises(ValueError):
        encode_states(**(arguments | change))
    if "codes" in change or "scales" in change:
        arguments |= change
        with pytest.raises(ValueError):
            decode_states(arguments["codes"], arguments["scales"], True, (2, 300))


def running_mean(squares, start, beta, keys):
    """EMA stored in 8 bits between steps; without keys rounded to nearest."""
    mean = start.clone()
    for step, square in enumerate(squares):
        mean = round_trip(mean.lerp(square, 1 - beta), False, step if keys else None)
    return mean


def test_nearest_rounding_stalls_a_running_mean():
    steps, beta = 1500, 0.999
    start = torch.ones(32, 256)
    target = torch.full_like(start, 0.25)
    start[:, 0] = target[:, 0] = 64.0  # holds the scale, which is exact and would follow
    exact = 0.25 + 0.75 * beta**steps
    stalled = running_mean([target] * steps, start, beta, keys=False)[:, 1:]
    # One step is 0.1 % of the way, half a level is 3.3 %: nothing moves.
    assert torch.equal(stalled, round_trip(start, False)[:, 1:])
    mean = running_mean([target] * steps, start, beta, keys=True)[:, 1:]
    # 8160 elements that each scatter by 0.17: their mean by 0.002, five of them.
    assert abs(mean.mean().item() / exact - 1) < 0.01
    assert (mean / exact - 1).std() < 0.2


def test_stochastic_rounding_follows_a_running_mean_of_noise():
    steps, beta = 2000, 0.999
    generator = torch.Generator().manual_seed(0)
    size = wide_values(False, blocks=16, octaves=12)
    squares = [torch.randn(16, 256, generator=generator).square() * size for _ in range(steps)]
    exact = size.clone()
    for square in squares:
        exact.lerp_(square, 1 - beta)
    error = running_mean(squares, size, beta, keys=True) / exact - 1
    assert abs(error.mean().item()) < 5 * 0.2 / 4096**0.5
    # The formula of the file says sqrt(4/pi (rho - 1)/2) = 0.208.
    assert 0.17 < error.std() < 0.23


@pytest.mark.parametrize(
    "value", [torch.ones(4).double(), torch.ones(4).bfloat16(), torch.ones(4, 4).t()[:2]]
)
def test_encode_refuses(value):
    with pytest.raises(ValueError):
        encode_state(value, True, 0)


@pytest.mark.parametrize(
    ("codes", "scales", "shape"),
    [
        (torch.zeros(300).char(), torch.ones(2), (300,)),
        (torch.zeros(300).byte(), torch.ones(2).half(), (300,)),
        (torch.zeros(300).byte(), torch.ones(2), (299,)),
        (torch.zeros(300).byte(), torch.ones(3), (300,)),
        (torch.zeros(600).byte()[::2], torch.ones(2), (300,)),
        (torch.zeros(300).byte(), torch.ones(4)[::2], (300,)),
    ],
)
def test_decode_refuses(codes, scales, shape):
    with pytest.raises(ValueError):
        decode_state(codes, scales, True, shape)


def check_kernel(device="cpu"):
    torch.manual_seed(0)
    size = 10.0 ** torch.randint(-44, 38, (34,)).repeat_interleave(300)
    cases = [torch.randn(numel) * size[:numel] for numel in (0, 1, 255, 257, 4096, 10_001)]
    for signed in (True, False):
        special = wide_values(signed, blocks=9, octaves=60)
        special[0, 3], special[1, 4], special[2, 5], special[3] = inf, -inf, nan, 0.0
        special[4], special[5, 6], special[6, 7] = 1e-40, 1e-44, LARGEST
        table = levels(signed, CPU)
        edges = torch.cat([table, *(table.nextafter(torch.tensor(to)) for to in (-2.0, 2.0))])
        edges = edges.clamp(-1 if signed else 0, 1)
        check_rough_logarithm(signed, device)
        for value in (*cases, special, edges):
            value = value if signed else value.abs()
            for key, offset in ((None, 0), (1, 1), ((1 << 63) - 5, (1 << 33) + 3)):
                codes, scales = encode_state(value, signed, key, offset)
                out = empty_codes(1, value.numel(), device)
                flat = value.to(device).view(1, -1)
                int8_state.encode_states_triton(flat, signed, key, *out, None, offset)
                out = out[0][0], out[1][0]
                assert torch.equal(out[0].cpu(), codes), (signed, value.shape, key)
                assert torch.equal(out[1].cpu().view(torch.int32), scales.view(torch.int32))
                decoded = decode_state(codes, scales, signed, value.shape)
                out = int8_state.decode_states_triton(
                    out[0][None], out[1][None], signed, value.shape
                )
                assert torch.equal(out.cpu().nan_to_num(7.0), decoded.nan_to_num(7.0))

    check_stacks(device)


def check_stacks(device):
    for members, numel in ((1, 3), (3, 300), (2, 5000), (2, 4096)):
        values, keys = torch.randn(members, numel), step_keys(torch.arange(members), 5, 1)
        active = torch.ones(members)
        active[1:2] = 0
        for taken in (None, active):
            expected, out = empty_codes(members, numel), empty_codes(members, numel, device)
            encode_states_reference(values, True, keys, *expected, taken)
            taken = None if taken is None else taken.to(device)
            inputs = values.to(device), True, keys.to(device)
            int8_state.encode_states_triton(*inputs, *out, taken)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(out, expected, strict=True))
            decoded = int8_state.decode_states_triton(*out, True, values.shape)
            shape = values.shape
            assert torch.equal(decoded.cpu(), decode_states_reference(*expected, True, shape))


def check_rough_logarithm(signed, device):
    """A GPU's log2 is approximate. The kernel's result does not depend on it: here it is off by up to
    0.4 levels."""
    top, per_octave = int8_state.CODE_RANGE[signed]
    value = wide_values(signed, blocks=20)
    expected, out = encode_state(value, signed, 9), empty_codes(1, value.numel(), device)
    levels(signed, torch.empty(0, device=device).device)  # what the kernel looks up stays as it is
    for slant in (1 - 0.4 / top, 1 + 0.4 / top):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(int8_state.CODE_RANGE, signed, (top, per_octave * slant))
            int8_state.encode_states_triton(value.to(device).view(1, -1), signed, 9, *out)
        assert torch.equal(out[0][0].cpu(), expected[0]), (signed, slant)


def test_kernel():
    """Bit-equal: both look levels up in one table and divide exactly."""
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
