"""Gradients that users read and set between backward and step, and backwards whose reduction is put off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)
from harness import Ranks
from torch import Tensor, nn
from training import bases, ds_config, make_engine, model_weights, stock_config

ADAMW = {"method": "adamw"}
LOW = {"rank": 2, "update_interval": 2, "max_full_gradient_bytes": 10**6, "scale": 1.0}
FROZEN, DENSE, LAST = 0, 1, 3


def small_net() -> nn.Sequential:
    """A frozen linear and two trained ones, none of whose sizes two ranks divide evenly but one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    net[FROZEN].requires_grad_(False)
    return net


def small_engine(stage: int, options: dict[str, Any] | None, gas: int = 1, **changes: Any) -> Any:
    """With stock's AdamW where ``options`` is None."""
    changes = {"gradient_clipping": 0.0, **changes}
    stock = options is None
    config = (
        stock_config(stage, gas, **changes) if stock else ds_config(stage, options, gas, **changes)
    )
    return make_engine(config, small_net())


def batch(number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def backward(engine: Any, number: int) -> None:
    engine.backward(engine(batch(number)).square().mean())


def gradients(weights: dict[str, Tensor], number: int, rank: int | None = None) -> list[Tensor]:
    """Of one rank's batch by torch alone, of the trained parameters; None: the mean over both ranks."""
    if rank is None:
        first, second = (gradients(weights, number, rank) for rank in range(2))
        return [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    net = small_net()
    net.load_state_dict(weights)
    net(batch(number, rank)).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def summed(*parts: list[Tensor], gas: int = 1) -> list[Tensor]:
    return [torch.stack(tensors).sum(0) / gas for tensors in zip(*parts, strict=True)]


def read(engine: Any, get: Any = safe_get_full_grad) -> list[Tensor | None] | str:
    """Of the trained parameters, copied, or what was said instead."""
    try:
        grads = [get(p) for p in engine.module.parameters() if p.requires_grad]
    except ValueError as error:
        return str(error)
    return [None if grad is None else grad.float().clone() for grad in grads]


# -- reading, against stock and torch -------------------------------------------------------------------


def moments(stage: int, options: dict[str, Any] | None) -> dict[str, tuple[Any, list[Tensor]]]:
    """What is read at each moment, and what it is by torch alone."""
    found: dict[str, tuple[Any, list[Tensor]]] = {}
    engine = small_engine(stage, options)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0  # steps leave the weights
    weights = model_weights(engine)
    own = [gradients(weights, number, dist.get_rank()) for number in range(4)]
    mean = [gradients(weights, number) for number in range(4)]
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, 0)
    found["first of two"] = read(engine), own[0] if stage < 2 else mean[0]
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 1)
    found["second of two"] = read(engine), summed(mean[0], mean[1])
    engine.step()
    found["after the step"] = read(engine), []
    if stage < 2:
        with engine.no_sync():
            backward(engine, 0)
            found["no_sync"] = read(engine), own[0]
        backward(engine, 1)
        found["after no_sync"] = read(engine), summed(mean[0], mean[1])
        engine.step()
    if stage > 0 or options is not None:
        with engine.coalesce_grad_reduction():
            backward(engine, 2)
            backward(engine, 3)
            found["coalescing"] = read(engine), summed(own[2], own[3])
        found["coalesced"] = read(engine), summed(mean[2], mean[3])
    engine.destroy()
    return found


def moments_of_all(stages: list[int]) -> dict[Any, Any]:
    return {
        (stage, stock): moments(stage, None if stock else ADAMW)
        for stage in stages
        for stock in (True, False)
    }


# Moments at which stock's stages have no gradient to read, or no such moment.
OURS_ALONE = {0: {"coalescing", "coalesced"}, 1: set(), 2: {"first of two"}, 3: set()}


def test_dense_gradients_are_stocks_at_every_moment(ranks: Ranks) -> None:
    for found in ranks.run(moments_of_all, 2, [0, 1, 2, 3]):
        for stage, alone in OURS_ALONE.items():
            ours, stock = found[stage, False], found[stage, True]
            after, _ = ours.pop("after the step")
            assert "no gradient of 1.weight now: no backward has run since the last step" in after
            for moment, (read_now, expected) in ours.items():
                others = [expected] if moment in alone else [expected, stock[moment][0]]
                for other in others:
                    for one, two in zip(read_now, other, strict=True):
                        # fp32 sums in another order
                        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def low_rank_moments(stage: int, options: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """As :func:`moments`, of the two matrices, after which of them refresh in that step."""
    engine = small_engine(stage, options, gas=2)
    rank, found = dist.get_rank(), {}

    def expected(grads: list[Tensor]) -> list[Tensor]:
        matrices, whole = grads[::2], []
        for entry, grad in zip(engine.optimizer.zero.low_rank, matrices, strict=True):
            basis = projections[entry.name] @ projections[entry.name].t()
            projected = basis @ grad if options.get("projection") == "left" else grad @ basis
            whole.append(grad if entry.gradient.refreshing else projected)
        return whole

    for step in range(3):
        weights, projections = model_weights(engine), bases(engine)
        due = [entry.gradient.refreshing for entry in engine.optimizer.zero.low_rank]
        own, mean = ([gradients(weights, number, of) for number in range(2)] for of in (rank, None))
        backward(engine, 0)
        first = own[0] if stage < 2 else mean[0]
        found[f"first of {step}"] = due, read(engine)[::2], expected(summed(first, gas=2))
        engine.step()
        backward(engine, 1)
        both = expected(summed(*mean, gas=2))
        found[f"second of {step}"] = due, read(engine)[::2], both
        if stage == 3:
            local = read(engine, safe_get_local_grad)[::2]
            found[f"local, {step}"] = due, local, [part_of(grad) for grad in both]
        engine.step()
    engine.destroy()
    return found


def part_of(whole: Tensor) -> Tensor:
    """This rank's of two flat parts, padded."""
    flat = whole.reshape(-1)
    size = -(-flat.numel() // 2)
    return nn.functional.pad(flat, (0, 2 * size - flat.numel()))[dist.get_rank() * size :][:size]


def low_rank_moments_of_all() -> dict[Any, Any]:
    # stage 3 with a refresh is where bases lie in parts; stage 0 where one rank's sum is all there is
    cases = [(0, LOW), (2, LOW), (3, LOW), (3, {**LOW, "projection": "left"})]
    cases += [(3, {**LOW, "projected_backward": False})]
    return {f"{stage} {options}": low_rank_moments(stage, options) for stage, options in cases}


def test_low_rank_gradients_are_whole_in_a_refresh_and_else_inside_the_basis(ranks: Ranks) -> None:
    for found in ranks.run(low_rank_moments_of_all, 2):
        assert len(found) == 5
        for case, by_moment in found.items():
            assert {is_due for due, *_ in by_moment.values() for is_due in due} == {True, False}
            for moment, (_, read_now, expected) in by_moment.items():
                for one, other in zip(read_now, expected, strict=True):
                    message = f"{case}, {moment}"
                    assert one.shape == other.shape, message
                    # products of fp32 in another order
                    assert torch.allclose(one, other, rtol=1e-4, atol=1e-6), message


def test_one_rank_reads_the_sum_across_no_sync(ranks: Ranks) -> None:
    value, expected, unused = ranks.run(across_no_sync, 1)[0]
    torch.testing.assert_close(value, expected)
    assert torch.equal(unused, torch.zeros(5))


def across_no_sync() -> tuple[Tensor, Tensor, Tensor]:
    engine = small_engine(1, ADAMW)
    own = [gradients(model_weights(engine), number, 0) for number in range(2)]
    backward(engine, 0)
    with engine.no_sync():
        backward(engine, 1)
        value = read(engine)[0]
    engine.zero_grad()
    engine.backward(engine.module[: LAST - 1](batch(0)).square().mean())
    unused = safe_get_full_grad(engine.module[LAST].bias)
    return value, summed(*own)[0], unused


# -- errors and frozen parameters ---------------------------------------------------------------------------


def said() -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = small_engine(3, LOW)
    dense, matrix = engine.module[DENSE].bias, engine.module[DENSE].weight
    frozen = engine.module[FROZEN].weight

    def note(name: str, action: Any) -> None:
        try:
            found[name] = action()
        except ValueError as error:
            found[name] = str(error)

    note("before", lambda: safe_get_full_grad(dense))
    hook = engine.module[DENSE].register_full_backward_hook(
        lambda *_: note("within", lambda: safe_get_full_grad(engine.module[LAST].bias))
    )
    backward(engine, 0)
    hook.remove()
    note("set low rank", lambda: safe_set_full_grad(matrix, torch.zeros(7, 9)))
    note("set local low rank", lambda: safe_set_local_grad(matrix, torch.zeros(32)))
    note("set size", lambda: safe_set_local_grad(dense, torch.zeros(2)))
    before = safe_get_full_grad(dense)
    note(
        "vectorized", lambda: safe_update_full_grad_vectorized([dense, matrix], lambda g, _: g * 2)
    )
    found["unchanged"] = torch.equal(before, safe_get_full_grad(dense))
    found["unused"] = safe_get_full_grad(frozen), safe_get_local_grad(frozen)
    found["frozen"] = [safe_get_full_fp32_param(frozen), safe_get_local_fp32_param(frozen)]
    found["frozen"] += [safe_get_full_optimizer_state(frozen, "exp_avg")]
    safe_set_full_grad(frozen, torch.zeros(9, 6))
    safe_set_local_fp32_param(frozen, torch.zeros(27))
    with engine.coalesce_grad_reduction():
        backward(engine, 1)
        note("two parts", lambda: safe_get_full_grad(dense))
    engine.zero_grad()
    with engine.coalesce_grad_reduction():
        backward(engine, 1)
        note("no part", lambda: safe_get_local_grad(dense))
    engine.step()
    engine.destroy()
    found["left"] = [n for n in ("_z3_optimizer", "_hp_mapping") if hasattr(frozen, n)]
    return found


def test_what_cannot_be_read_or_set_says_so(ranks: Ranks) -> None:
    for found in ranks.run(said, 2):
        assert "no gradient of 1.bias now: no backward has run" in found["before"]
        assert "a backward is under way" in found["within"]
        assert "engine.zero_grad()" in found["within"]
        for name in ("set low rank", "set local low rank", "vectorized"):
            assert "1.weight is a low-rank matrix" in found[name]
            assert "module_rules" in found[name]
        assert "given 2 elements; legal is 4" in found["set size"]
        assert found["unchanged"]
        assert found["unused"] == (None, None)
        assert found["frozen"] == [None] * 3
        assert "in two parts" in found["two parts"]
        assert "before gradients are reduced" in found["no part"]
        assert found["left"] == []


# -- setting ----------------------------------------------------------------------------------------------


def set_at_all_moments(stage: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(what there is, what there should be) after a gradient was set."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    engine = small_engine(stage, ADAMW, gas=2)
    param = engine.module[DENSE].weight
    second = gradients(model_weights(engine), 1)[0] / 2
    value = torch.full((7, 9), float(dist.get_rank() if stage < 2 else 1))
    mean = torch.full((7, 9), 0.5 if stage < 2 else 1.0)
    backward(engine, 0)
    safe_set_full_grad(param, value)
    found["first"] = safe_get_full_grad(param), value
    engine.step()
    backward(engine, 1)
    found["second"] = safe_get_full_grad(param), mean + second
    safe_update_full_grad_vectorized([param], lambda gradient, _: gradient - second)
    found["vectorized"] = safe_get_full_grad(param), mean
    if stage == 3:
        safe_set_local_grad(param, 2 * safe_get_local_grad(param))
        found["local"] = safe_get_full_grad(param), 2 * mean
        weight = safe_get_local_fp32_param(param).clone()
        safe_set_local_fp32_param(param, weight + 1)
        found["local weight"] = (
            safe_get_local_fp32_param(param).clone(),
            part_of(part_to_whole(weight) + 1),
        )
    safe_set_full_grad(param, torch.zeros(7, 9))
    before = safe_get_full_optimizer_state(param, "exp_avg")
    engine.step()
    found["moment"] = safe_get_full_optimizer_state(param, "exp_avg"), 0.9 * before
    engine.destroy()
    return found


def part_to_whole(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part)
    return torch.cat(parts)[:63]


def set_in_all_stages() -> dict[int, Any]:
    return {stage: set_at_all_moments(stage) for stage in (1, 2, 3)}


def test_set_gradients_are_those_that_are_read_reduced_and_stepped(ranks: Ranks) -> None:
    for found in ranks.run(set_in_all_stages, 2):
        for stage, by_moment in found.items():
            for moment, (value, expected) in by_moment.items():
                assert torch.allclose(value, expected, atol=1e-6), (stage, moment)


# -- coalesce_grad_reduction ----------------------------------------------------------------------------------


def coalesced(stage: int, coalesce: bool, **changes: Any) -> dict[str, Any]:
    """Three backwards a step. At stage 2 the second rank has five: nothing inside communicates there."""
    engine = small_engine(stage, LOW, gradient_clipping=0.5, **changes)
    reducer, launches = engine.optimizer.reducer, []
    for step in range(3):
        reducer.events = []
        count = 5 if stage == 2 and dist.get_rank() and coalesce else 3
        with engine.coalesce_grad_reduction() if coalesce else nullcontext():
            for number in range(count):
                engine.set_gradient_accumulation_boundary(number == count - 1)
                engine.backward(engine(batch(step + min(number, 2))).square().mean() * (number < 3))
        launches.append(sum(event == "launch" for event, _ in reducer.events))
        engine.step()
    weights = model_weights(engine)
    return {"launches": launches, "weights": weights, "norm": float(engine.get_global_grad_norm())}


@pytest.mark.parametrize(("stage", "on_host"), [(0, False), (1, False), (2, True), (3, False)])
def test_coalescing_reduces_once_to_the_same_gradients(
    ranks: Ranks, stage: int, on_host: bool
) -> None:
    changes: dict[str, Any] = {}
    if on_host:
        zero = {"offload_optimizer": {"device": "cpu"}}
        changes = {"zero_optimization": zero}
    one, other = (ranks.run(coalesced, 2, stage, coalesce, **changes) for coalesce in (False, True))
    reductions = 3 if stage >= 2 else 1  # at 0 and 1 the boundary alone reduces
    for each, once in zip(one, other, strict=True):
        assert each["launches"] == [reductions * count for count in once["launches"]]
        assert each["norm"] == pytest.approx(once["norm"], rel=1e-5)
        for name, weight in each["weights"].items():
            torch.testing.assert_close(weight, once["weights"][name], rtol=1e-4, atol=1e-5)


class Tiled(nn.Module):
    """A linear in slices of the rows, each with a backward of its own; then a whole one."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sliced, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.shards = shards

    def forward(self, x: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        weights = list(self.sliced.parameters())
        hidden = self.first(x)
        if self.shards > 1:
            hidden = TiledMLP.apply(
                lambda self, part: self.sliced(part), self, hidden, self.shards, weights
            )
        else:
            hidden = self.sliced(hidden)
        return self.last(torch.tanh(hidden))


def tiled() -> dict[str, Any]:
    found = {}
    for stage, options in ((2, ADAMW), (3, LOW)):
        for shards in (1, 4):
            engine = make_engine(ds_config(stage, options), Tiled(shards))
            for number in range(2):
                engine.optimizer.reducer.events = []
                backward(engine, number)
                events = [event for event, _ in engine.optimizer.reducer.events]
                found[f"{stage}, {number}, {shards}"] = events.count("launch"), read(engine)
                engine.step()
    return found


def test_a_linear_in_slices_is_reduced_once(ranks: Ranks) -> None:
    for found in ranks.run(tiled, 2):
        for case in ("2, 0", "2, 1", "3, 0", "3, 1"):
            launches, whole = found[f"{case}, 1"]
            sliced_launches, sliced = found[f"{case}, 4"]
            assert sliced_launches == launches, case
            for one, other in zip(whole, sliced, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# -- what else stock's stages have ------------------------------------------------------------------------------


def scales_and_rates() -> dict[str, Any]:
    found: dict[str, Any] = {"norms": []}
    for scale in (None, 256.0):
        engine = small_engine(2, ADAMW)
        if scale is not None:
            engine.optimizer.override_loss_scale(scale)
        backward(engine, 0)
        found["scaled"] = float(safe_get_full_grad(engine.module[LAST].bias).norm())
        engine.step()
        found["norms"].append(float(engine.get_global_grad_norm()))
    found["scale"] = engine.optimizer.cur_scale, engine.optimizer.loss_scale
    engine.optimizer.set_lr(0.0)
    found["rates"] = [engine.optimizer.get_lr(), *engine.get_lr()]
    before = model_weights(engine)
    backward(engine, 1)
    engine.step()
    found["moved"] = any(not torch.equal(w, before[n]) for n, w in model_weights(engine).items())
    return found


def test_loss_scales_and_learning_rates_of_the_caller(ranks: Ranks) -> None:
    found = ranks.run(scales_and_rates, 1)[0]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
    assert found["scaled"] > found["norms"][1]  # the scale is still in what is read, as in stock
    assert found["scale"] == (256.0, 256.0)
    assert found["rates"] == [0.0, 0.0]
    assert not found["moved"]
