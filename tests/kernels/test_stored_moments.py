"""Moments stored in 16 and 8 bits: the update is that of their fp32 values, read before and rounded after."""

from math import nan

import pytest
import torch
from interpreted import run_interpreted

from hmt_deepspeed.kernels import factored_moment_update, moment_update
from hmt_deepspeed.kernels.factored_moment_update import factored_moment_update_
from hmt_deepspeed.kernels.int8_state import decode_states, encode_states
from hmt_deepspeed.kernels.moment_update import moment_update_
from hmt_deepspeed.kernels.noise import Stream, step_keys
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_rounds
from hmt_deepspeed.kernels.stored_state import StoredState

# members, rows, r, k: blocks of 256 end within rows, at their ends, and beyond the last row
SHAPES = [(1, 3, 5, 2), (3, 40, 24, 8), (2, 9, 320, 40), (2, 70, 80, 0), (2, 1, 33 * 33, 0)]
STORED = ["bf16", "int8"]
UPDATES = ["adam", "factored"]
CONSTANTS = (0.9, 0.99, 1e-8)


def keys_of(members, stream):
    return step_keys(torch.arange(members), 4, stream)


def empty_state(members, rows, rank, kind, signed, stream):
    keys = keys_of(members, stream)
    if kind == "bf16":
        data = torch.zeros(members, rows, rank, dtype=torch.bfloat16)
        return StoredState(data, signed, keys)
    codes = torch.zeros(members, rows * rank, dtype=torch.uint8)
    return StoredState(codes, signed, keys, torch.zeros(members, -(-rows * rank // 256)))


def store(state, value, active=None):
    flat = value.reshape(len(value), -1)
    if state.scales is None:
        stochastic_rounds(flat, state.data.view(flat.shape), state.keys, active)
    else:
        encode_states(flat, state.signed, state.keys, state.data, state.scales, active)


def values_of(state, shape):
    if state.scales is None:
        return state.data.float()
    return decode_states(state.data, state.scales, state.signed, shape)


def moved(state, place):
    return StoredState(*(place(x) if isinstance(x, torch.Tensor) else x for x in state))


class Case:
    """Inputs of one of the updates, with states of an earlier step."""

    def __init__(self, shape, kind, rule):
        self.shape, (members, rows, rank, probes) = shape, shape
        generator = torch.Generator().manual_seed(rows)
        draw = lambda *sizes: torch.randn(members, *sizes, generator=generator)  # noqa: E731
        self.gradient, number = draw(rows, rank + probes), torch.arange(members) % 3
        self.first = empty_state(members, rows, rank, kind, True, Stream.FIRST_STATE)
        store(self.first, draw(rows, rank))
        if rule == "adam":
            self.second = empty_state(members, rows, rank, kind, False, Stream.SECOND_STATE)
            store(self.second, draw(rows, rank).square())
            self.columns = draw(rank).abs() + 0.1
        else:
            self.second, self.columns = draw(rows).square(), draw(rank).abs() + 0.1
        self.first_evidence = torch.full((members,), 0.7)
        self.scales = {"factor": 1.5 - number, "residual_scale": 2.0 + number}
        self.adam = rule == "adam"

    def copy(self, place=torch.clone):
        other = object.__new__(Case)
        vars(other).update(vars(self))
        for name in ("gradient", "first", "second", "columns", "first_evidence"):
            value = vars(self)[name]
            tensor = isinstance(value, torch.Tensor)
            vars(other)[name] = place(value) if tensor else moved(value, place)
        other.scales = {name: place(value) for name, value in self.scales.items()}
        return other

    def run(self, update, first=None, second=None):
        states = self.first if first is None else first, self.second if second is None else second
        vectors = self.columns, self.first_evidence
        return update(self.gradient, *states, *vectors, *CONSTANTS, **self.scales)

    def by_hand(self):
        """Read all, update, write all."""
        members, rows, rank, _ = self.shape
        mean, second = values_of(self.first, (members, rows, rank)), self.second
        if self.adam:
            second = values_of(self.second, (members, rows, rank))
        squares = self.run(moment_update_ if self.adam else factored_moment_update_, mean, second)
        store(self.first, mean, self.scales["factor"])
        if self.adam:
            store(self.second, second, self.scales["factor"])
        return squares

    def results(self, squares):
        stored = [self.first.data, self.first.scales]
        stored += [self.second.data, self.second.scales] if self.adam else [self.second]
        return [self.gradient, squares, *(x for x in stored if x is not None)]


@pytest.mark.parametrize("rule", UPDATES)
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_update_of_stored_moments(shape, kind, rule, monkeypatch):
    case = Case(shape, kind, rule)
    case.scales["factor"][1:2] = 0.0
    case.gradient[1:2] = nan
    expected = case.copy()
    wanted = expected.results(expected.by_hand())
    update = moment_update_ if rule == "adam" else factored_moment_update_
    for cached in (1 << 18, 100):
        monkeypatch.setattr(moment_update, "CACHED", cached)
        monkeypatch.setattr(factored_moment_update, "CACHED", cached)
        own = case.copy()
        found = own.results(own.run(update))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": None},
        {"keys": torch.zeros(3, 2).int()},
        {"scales": torch.zeros(2, 3)},
        {"scales": None},
        {"data": torch.zeros(2, 4, 100).byte()},
    ],
)
def test_refuses(change):
    case = Case((2, 4, 100, 8), "int8", "adam")
    case.copy().run(moment_update_)
    with pytest.raises(ValueError):
        case.run(moment_update_, first=case.first._replace(**change))


def check_kernels(device="cpu"):
    kernels = (
        moment_update.moment_update_triton_,
        factored_moment_update.factored_moment_update_triton_,
    )
    for rule, kernel in zip(UPDATES, kernels, strict=True):
        for kind in STORED:
            for shape in SHAPES:
                case = Case(shape, kind, rule)
                case.scales["factor"][1:2] = 0.0
                case.gradient[1:2] = nan
                expected, own = case.copy(), case.copy(lambda x: x.to(device, copy=True))
                twin = moment_update_ if rule == "adam" else factored_moment_update_
                wanted = expected.results(expected.run(twin))
                for mine, theirs in zip(own.results(own.run(kernel)), wanted, strict=True):
                    assert_alike(mine.cpu(), theirs)


def assert_alike(mine, theirs):
    """fp32 up to rounding; where a rounding error moves a value across its threshold, the neighbouring code."""
    if mine.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        return
    bits = [x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in (mine, theirs)]
    apart = (bits[0].int() - bits[1].int()).abs()
    assert apart.max() <= 1
    assert apart.sum() <= 2 + 0.002 * apart.numel()


def test_kernels():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernels")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_gpu():
    check_kernels("cuda")
