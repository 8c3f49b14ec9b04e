"""Stochastic rounding: the reference on its promises, the kernel against the reference."""

import os
import subprocess
import sys
from math import inf, nan

import pytest
import torch

from hmt_deepspeed.kernels import stochastic_rounding as module
from hmt_deepspeed.kernels.noise import step_keys
from hmt_deepspeed.kernels.stochastic_rounding import (
    stochastic_round,
    stochastic_round_reference,
    stochastic_rounds,
)


def rounded(value, key=1, offset=0):
    out = torch.empty(value.shape, dtype=torch.bfloat16)
    stochastic_round(value, out, key, offset)
    return out


def test_unbiased_and_always_a_neighbour():
    low, step, count = 1.0, 2.0**-7, 200_000
    for share in (0.0625, 0.5, 0.9):
        out = rounded(torch.full((count,), low + share * step)).float()
        assert set(out.unique().tolist()) <= {low, low + step}
        mean = ((out - low) / step).mean().item()
        # Binomial: sqrt(.25 / 200000) = .0011, four of them; 16 bits of noise add 1e-5 at most.
        assert abs(mean - share) < 0.0045
        assert abs((rounded(-torch.full((count,), low + share * step)).float() + out).sum()) == 0


def test_keys_and_places_draw_independently():
    value = torch.full((100_000,), 1.0 + 2.0**-8)  # halfway
    up = [(rounded(value, key) > 1).double() for key in (1, 2, 1 << 40, 3 << 40)]
    for i, first in enumerate(up):
        assert torch.equal(first, (rounded(value, (1, 2, 1 << 40, 3 << 40)[i]) > 1).double())
        for second in (*up[i + 1 :], first.roll(1), first.roll(64)):
            # The correlation of independent fair coins: 1/sqrt(100000) = .0032, four of them.
            assert torch.corrcoef(torch.stack((first, second)))[0, 1].abs() < 0.013


def test_exact_on_representable_values():
    value = torch.randn(10_000).bfloat16()
    value[:4] = torch.tensor([0.0, -0.0, torch.finfo(torch.bfloat16).max, 1e-40]).bfloat16()
    out = rounded(value.float())
    assert torch.equal(out.view(torch.int16), value.view(torch.int16))


def test_infinities_and_nans_are_kept():
    value = torch.tensor([inf, -inf, nan, -nan, 1.0]).repeat(1000)
    value.view(torch.int32)[7::5] = 0x7F800001  # a NaN whose payload is lost in bf16
    for key in range(5):
        out = rounded(value, key).float()
        assert torch.equal(out.isnan(), value.isnan())
        assert torch.equal(out.isinf(), value.isinf())
        assert torch.equal(out[::5], value[::5])


@pytest.mark.parametrize("cut", [1, 333, 999])
def test_sharding_does_not_matter(cut):
    value = torch.randn(1000)
    whole = rounded(value, key=77, offset=5)
    parts = torch.cat((rounded(value[:cut], 77, 5), rounded(value[cut:], 77, 5 + cut)))
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, rounded(value, 77, 6))


def test_internal_chunks_do_not_matter(monkeypatch):
    value = torch.randn(1000)
    whole = rounded(value)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert torch.equal(rounded(value), whole)


def test_offsets_beyond_32_bits():
    value = torch.full((5000,), 1.0 + 2.0**-8)
    beyond = rounded(value, offset=(1 << 31) - 2500)
    halves = (rounded(value[:2500], offset=(1 << 31) - 2500), rounded(value[2500:], offset=1 << 31))
    assert torch.equal(beyond, torch.cat(halves))
    assert 0.45 < (rounded(value, offset=(1 << 33) + 7) > 1).float().mean() < 0.55


@pytest.mark.parametrize(("members", "numel"), [(1, 5), (4, 300), (3, 4097)])
def test_a_stack_rounds_as_its_members(members, numel, monkeypatch):
    values, keys = torch.randn(members, numel), step_keys(torch.arange(members), 3, 0)
    expected = [rounded(v, tuple(k), 7) for v, k in zip(values, keys.tolist(), strict=True)]
    for chunk in (1 << 20, 100):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        out = torch.zeros(members, numel, dtype=torch.bfloat16)
        stochastic_rounds(values, out, keys, offset=7)
        assert torch.equal(out, torch.stack(expected))


def test_members_that_are_not_active_are_not_written():
    values, keys = torch.full((3, 50), nan), step_keys(torch.arange(3), 3, 0)
    out = torch.ones(3, 50, dtype=torch.bfloat16)
    stochastic_rounds(values, out, keys, torch.tensor([1.0, 0.0, -2.0]))
    assert out.isnan().all(dim=1).tolist() == [True, False, True]
    assert (out[1] == 1).all()


@pytest.mark.parametrize(
    "change",
    [
        {"values": torch.ones(8)},
        {"values": torch.ones(4, 2)},
        {"out": torch.ones(4, 2).bfloat16().t()},
        {"keys": torch.ones(2, 2)},
        {"keys": torch.ones(1, 2).int()},
        {"active": torch.ones(3)},
        {"active": torch.ones(2).bool()},
    ],
)
def test_a_stack_refuses(change):
    arguments = {"values": torch.ones(2, 4), "out": torch.ones(2, 4).bfloat16()}
    arguments |= {"keys": torch.ones(2, 2).int(), "active": torch.ones(2)}
    stochastic_rounds(**arguments)
    with pytest.raises(ValueError):
        stochastic_rounds(**(arguments | change))


@pytest.mark.parametrize(
    ("value", "out"),
    [
        (torch.ones(4).double(), torch.ones(4).bfloat16()),
        (torch.ones(4), torch.ones(4).half()),
        (torch.ones(4), torch.ones(5).bfloat16()),
        (torch.ones(4, 4).t()[:2], torch.ones(2, 4).bfloat16()),
    ],
)
def test_refuses(value, out):
    with pytest.raises(ValueError):
        stochastic_round(value, out, 0)


INTERPRETED = """
import torch
from hmt_deepspeed.kernels.stochastic_rounding import (
    stochastic_round_reference as reference, stochastic_round_triton as kernel)
for numel in (0, 1, 7, 4095, 4096, 4097, 10_001):
    for key, offset in ((0, 0), (1, 1), ((1 << 63) - 5, 12_345), (0xFFFFFFFF, (1 << 33) + 3),
                        (1 << 62, (1 << 31) - 9)):
        value = torch.randn(numel) * 10.0 ** torch.randint(-38, 38, (numel,))
        value[::97] = float("inf")
        value[1::97] = -float("nan")
        value.view(torch.int32)[2::97] = 0x7F800001
        first, second = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
        reference(value, first, key, offset)
        kernel(value, second, key, offset)
        assert torch.equal(first.view(torch.int16), second.view(torch.int16)), (numel, key, offset)
from hmt_deepspeed.kernels.noise import step_keys
from hmt_deepspeed.kernels.stochastic_rounding import (
    stochastic_rounds_reference, stochastic_rounds_triton)
for members, numel in ((1, 3), (4, 5000), (2, 4096)):
    values, active = torch.randn(members, numel), torch.ones(members)
    active[1:2] = 0
    for taken in (None, active):
        first, second = (torch.zeros(members, numel, dtype=torch.bfloat16) for _ in range(2))
        arguments = values, step_keys(torch.arange(members), 5, 1), taken, (1 << 31) - 9
        stochastic_rounds_reference(values, first, *arguments[1:])
        stochastic_rounds_triton(values, second, *arguments[1:])
        assert torch.equal(first, second), (members, numel)
print("equal")
"""


def test_kernel_is_bit_equal_to_the_reference():
    """Triton reads TRITON_INTERPRET at import, hence a process of its own."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu_is_bit_equal_to_the_reference():
    value = torch.randn(1_000_003)
    expected = torch.empty(value.shape, dtype=torch.bfloat16)
    stochastic_round_reference(value, expected, (1 << 40) + 3, (1 << 33) + 1)
    out = torch.empty(value.shape, dtype=torch.bfloat16, device="cuda")
    stochastic_round(value.cuda(), out, (1 << 40) + 3, (1 << 33) + 1)
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
