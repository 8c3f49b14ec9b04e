"""Gradients that users read and set between backward and step."""

from __future__ import annotations

from typing import Any

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
from small_engines import (
    ADAMW,
    DENSE,
    FROZEN,
    LAST,
    LOW,
    backward,
    batch,
    gradients,
    read,
    small_engine,
    summed,
)
from torch import Tensor, nn
from training import bases, model_weights

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
