"""Moments in bf16 and int8: bytes, training against fp32, checkpoints."""

import alone
import pytest
import torch
from hmt_runs import assert_same_state, settings_of, through_a_file
from low_rank_adamw import low_rank_adamw
from torch import nn

from hmt_deepspeed.kernels.int8_state import encode_state
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.rules.state import StateTensor

N, M, RANK = 48, 256, 16  # M RANK = 4096, the least for int8
RULES = [
    {"rank": RANK},
    {"rank": RANK, "projection": "left"},
    {"rank": 64, "projection": "two_sided"},
    {"method": "apollo", "rank": RANK},
    {"method": "adamw"},
]


def model(rule, seed=0):
    """One linear whose moments have at least 4096 elements under the rule."""
    shapes = {"left": (N, M), "two_sided": (80, 72)}
    m, n = shapes.get(rule.get("projection"), (M, N))
    torch.manual_seed(seed)
    return nn.Linear(n, m, bias=False)


def batches(layer, count):
    generator = torch.Generator().manual_seed(5)
    m, n = layer.weight.shape
    teacher = torch.randn(n, m, generator=generator) / n**0.5
    for _ in range(count):
        x = torch.randn(32, n, generator=generator)
        yield x, x @ teacher


def train(layer, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def construct(layer, rule, dtype):
    fields = {"update_interval": 10, "scale": 1.0, **rule}
    if rule.get("method") == "adamw":
        fields = rule
    return low_rank_adamw(layer, lr=1e-2, state_dtype=dtype, **fields)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_bytes(rule, dtype):
    sizes = {}
    for kind in ("fp32", dtype):
        layer = model(rule)
        optimizer = construct(layer, rule, kind)
        train(layer, optimizer, batches(layer, 2))
        sizes[kind] = optimizer.describe()[0].state_bytes
    elements = M * N
    if rule.get("method") != "adamw":
        elements = optimizer.matrices["weight"].moments.exp_avg.shape.numel()
    # fp32 scales of blocks of 256
    each = 2 * elements if dtype == "bf16" else elements + elements // 256 * 4
    assert elements >= 4096
    assert sizes["fp32"] - sizes[dtype] == 2 * (4 * elements - each)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_training_follows_fp32(rule, dtype):
    moved, losses = {}, {}
    for kind in ("fp32", dtype):
        layer = model(rule)
        start = layer.weight.detach().clone()
        # One basis: near-equal singular vectors would turn by any rounding, and Adam with them.
        once = {} if rule.get("method") == "adamw" else {"update_interval": 100}
        fixed = {**rule, **once}
        losses[kind] = train(layer, construct(layer, fixed, kind), batches(layer, 60))
        moved[kind] = layer.weight.detach() - start
    assert losses["fp32"][-1] < 0.6 * losses["fp32"][0]
    # Rounding noise of single steps averages out: the path stays within a tenth of its length.
    error = (moved[dtype] - moved["fp32"]).norm() / moved["fp32"].norm()
    assert 0 < error < (0.05 if dtype == "bf16" else 0.15)
    assert abs(losses[dtype][-1] / losses["fp32"][-1] - 1) < 0.1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_resume_is_bit_exact(rule, dtype):
    straight, resumed = model(rule), model(rule, seed=1)
    data = list(batches(straight, 25))
    optimizer = construct(straight, rule, dtype)
    train(straight, optimizer, data[:13])
    resumed.load_state_dict(straight.state_dict())
    saved = through_a_file(optimizer.state_dict())
    fresh = construct(resumed, rule, dtype)
    fresh.load_state_dict(saved)
    assert_same_state(saved["state"][0], fresh.state_dict()["state"][0])
    train(straight, optimizer, data[13:])
    train(resumed, fresh, data[13:])
    assert torch.equal(straight.weight, resumed.weight)
    assert_same_state(optimizer.state_dict()["state"][0], fresh.state_dict()["state"][0])


def test_dense_states_of_vectors_and_small_matrices_stay_fp32():
    shapes = (4096,), (65, 63), (64, 64)
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = low_rank_adamw(params, method="adamw", state_dtype="int8")
    found = [row.state_bytes for row in optimizer.describe()]
    assert found == [8 * 4096, 8 * 4095, 2 * (4096 + 16 * 4)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_stored_state_is_written_back_unchanged(dtype, signed):
    state = StateTensor((64, 80), dtype, signed, torch.device("cpu"))
    value = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    state.write(value if signed else value.square(), 7)
    read = state.read().clone()
    again = StateTensor((64, 80), dtype, signed, torch.device("cpu"))
    again.write(read.clone(), None)
    assert torch.equal(again.read(), read)
    assert torch.equal(again.data, state.data)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_running_mean_below_the_spacing_still_decays(dtype):
    """v <- .999 v moves by less than half a unit in the last place: rounding to nearest would stall."""
    state = StateTensor((64, 64), dtype, False, torch.device("cpu"))
    state.write(torch.ones(64, 64), None)
    for step in range(500):
        state.write(state.read() * 0.999, step)
    torch.testing.assert_close(state.read().mean(), torch.tensor(0.999**500), rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_moments_decay_as_in_fp32(dtype):
    """One column goes on seeing gradients and keeps the scale of every int8 block where it is."""
    settings = settings_of(rank=64, residual="none", probes=0, state_dtype=dtype)
    matrix = LowRankMatrix("w", (64, 80), (0, 64), settings, torch.float32, torch.device("cpu"))
    alone.step(matrix, torch.ones(64, 64), betas=(0.9, 0.999), eps=1e-8)
    gradient = torch.zeros(64, 64)
    gradient[:, 0] = 1
    for _ in range(300):
        alone.step(matrix, gradient, betas=(0.9, 0.999), eps=1e-8)
    moments = matrix.moments
    assert moments.exp_avg.dtype == moments.exp_avg_sq.dtype == dtype
    expected = torch.tensor(1e-3 * 0.999**300)
    second = moments.exp_avg_sq.read()
    torch.testing.assert_close(second[:, 1:].mean(), expected, rtol=0.05, atol=0)
    torch.testing.assert_close(second[:, 0].mean(), torch.tensor(1 - 0.999**301), rtol=0.05, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_a_new_int8_state_is_what_zeros_encode_to(signed):
    state = StateTensor((3, 100), "int8", signed, torch.device("cpu"))
    codes, scales = encode_state(torch.zeros(300), signed, None)
    assert torch.equal(state.data, codes)
    assert torch.equal(state.scales, scales)
