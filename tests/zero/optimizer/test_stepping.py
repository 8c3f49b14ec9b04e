"""The norm that clips, and the ways to drive a step: they all give the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    global_batch,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    stock_config,
    tiny_llama,
    train,
    train_step,
)

STEPS = 4  # every matrix refreshes in one of the first three, none in the last

# -- the norm -----------------------------------------------------------------------------------------


def norms(stage: int, options: dict[str, Any], gas: int, steps: int) -> dict[str, Any]:
    engine = make_engine(ds_config(stage, options, gas=gas))
    reference, own, true = tiny_llama(), [], []
    for step in range(steps):
        reference.load_state_dict(model_weights(engine), strict=False)
        reference.zero_grad()
        loss_of(reference, global_batch(step)).backward()
        squares = [p.grad.double().square().sum() for p in reference.parameters()]
        true.append(float(torch.stack(squares).sum().sqrt()))
        train_step(engine, step)
        own.append(float(engine.get_global_grad_norm()))
    return {"own": own, "true": true}


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 2)])
def test_grad_norm_of_adamw_is_exact(ranks: Ranks, stage: int, world: int) -> None:
    found = ranks.run(norms, world, stage, {"method": "adamw"}, 2, 3)[0]
    assert found["own"] == pytest.approx(found["true"], rel=1e-5)  # fp32 sums


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
def test_grad_norm_of_low_rank_is_a_good_estimate(ranks: Ranks, stage: int, world: int) -> None:
    """Eight probes of up to 73 missing dimensions: some ten percent a step, no bias over steps."""
    found = ranks.run(norms, world, stage, LOW_RANK, 3 - world, 12)[0]
    ratios = torch.tensor(found["own"]) / torch.tensor(found["true"])
    assert float((ratios - 1).abs().max()) < 0.15
    assert abs(float(ratios.mean()) - 1) < 0.04


def energies(loss_scale: float) -> dict[str, Any]:
    """Of low-rank matrices after four steps in fp16."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    engine = make_engine(ds_config(2, fp16={"enabled": True, "loss_scale": loss_scale}))
    found = result(engine, train(engine, STEPS))
    matrices = [p.matrix for p in engine.optimizer.zero.low_rank]
    return found | {"energies": torch.stack([matrix.energy for matrix in matrices])}


def test_norms_and_energies_are_without_the_loss_scale(ranks: Ranks) -> None:
    plain, scaled = (ranks.run(energies, 1, scale)[0] for scale in (1.0, 256.0))
    # a power of two; small gradients have more digits with it
    assert scaled["norm"] == pytest.approx(plain["norm"], rel=1e-2)
    torch.testing.assert_close(scaled["energies"], plain["energies"], rtol=2e-2, atol=0)


# -- how backward and step are called ---------------------------------------------------------------------


def plain(engine: Any) -> list[float]:
    return train(engine, STEPS)


def torch_style(engine: Any) -> list[float]:
    return train(engine, STEPS, torch_style=True)


def no_sync(engine: Any) -> list[float]:
    """Configured without accumulation; the last of three thirds reduces."""
    for step in range(STEPS):
        thirds = micro_batches(engine, step)[0].chunk(3)
        with engine.no_sync():
            for tokens in thirds[:2]:
                engine.backward(loss_of(engine, tokens) / 3)
        engine.backward(loss_of(engine, thirds[2]) / 3)
        engine.step()
    return []


def evaluated(engine: Any) -> list[float]:
    for step in range(STEPS):
        for tokens in micro_batches(engine, step):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.eval()
            with torch.no_grad():
                loss_of(engine, global_batch(7))
            engine.train()
            with torch.no_grad():
                loss_of(engine, global_batch(8))
            engine.step()
    return []


def boundary(engine: Any) -> list[float]:
    """Two micro-batches under a manually set boundary; one call of step."""
    for step in range(STEPS):
        first, second = micro_batches(engine, step)[0].chunk(2)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss_of(engine, first) / 2)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, second) / 2)
        engine.step()
    return []


def unmanaged(engine: Any) -> list[float]:
    for step in range(STEPS):
        for tokens in micro_batches(engine, step):
            engine.backward(loss_of(engine, tokens))
        engine.step()
    return []


def interrupted(engine: Any) -> list[float]:
    """Every other step has a backward that dies half-way, in the second of two micro-batches."""
    layer = engine.module.model.layers[0]

    def fail(*_: Any) -> None:
        raise RuntimeError("half-way")

    for step in range(STEPS):
        if step % 2:
            tokens = micro_batches(engine, step)
            engine.backward(loss_of(engine, tokens[0]))
            hook = layer.mlp.register_full_backward_hook(fail)
            with pytest.raises(RuntimeError, match="half-way"):
                engine.backward(loss_of(engine, tokens[1]))
            hook.remove()
            engine.zero_grad()
        train_step(engine, step)
    return []


LOOPS: dict[str, Callable[[Any], list[float]]] = {
    f.__name__: f
    for f in (plain, torch_style, no_sync, evaluated, boundary, unmanaged, interrupted)
}


def driven(stage: int, loop: str, gas: int, **changes: Any) -> dict[str, Any]:
    engine = make_engine(ds_config(stage, gas=gas, **changes))
    return result(engine, LOOPS[loop](engine))


def stock_torch_style(stage: int, gas: int, stock: bool) -> dict[str, Any]:
    config = (
        stock_config(stage, gas=gas) if stock else ds_config(stage, {"method": "adamw"}, gas=gas)
    )
    engine = make_engine(config)
    return result(engine, torch_style(engine))


def no_sync_refused(stage: int) -> str:
    engine = make_engine(ds_config(stage))
    try:
        with engine.no_sync():
            return "no error"
    except AssertionError as error:
        return str(error)


def assert_same_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The loops return no losses to compare."""
    assert_same({**one, "losses": []}, {**other, "losses": []})


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> dict[str, Any]:
    """The step as engine.backward and engine.step give it, without accumulation."""
    return ranks.run(driven, 1, 0, "plain", 1)[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_torch_style_accumulation_is_stocks(ranks: Ranks, stage: int) -> None:
    ours, stock = (ranks.run(stock_torch_style, 2, stage, 2, which)[0] for which in (False, True))
    assert_same(ours, stock)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_is_accumulation(ranks: Ranks, one_rank: dict[str, Any], stage: int) -> None:
    assert_same_step(one_rank, ranks.run(driven, 2, stage, "no_sync", 1)[0])


def test_no_sync_is_refused_where_stock_refuses(ranks: Ranks) -> None:
    for stage in (2, 3):
        assert "no_sync" in ranks.run(no_sync_refused, 1, stage)[0]


@pytest.mark.parametrize(
    ("loop", "stage", "gas", "changes"),
    [("torch_style", 3, 1, {})]
    + [("evaluated", 3, 2, {})]
    + [("boundary", stage, 1, {}) for stage in (0, 3)]
    + [("unmanaged", stage, 3, {"managed_gradient_accumulation": False}) for stage in (1, 2)]
    + [("interrupted", stage, 2, {}) for stage in (0, 3)]
    + [("plain", 2, 1, {"prescale_gradients": True, "gradient_predivide_factor": 2.0})]
    + [("plain", 0, 2, {"prescale_gradients": True})]
    + [("plain", 2, 1, {"gradient_predivide_factor": 2.0})],
)
def test_other_ways_to_drive_the_same_step(
    ranks: Ranks,
    one_rank: dict[str, Any],
    loop: str,
    stage: int,
    gas: int,
    changes: dict[str, Any],
) -> None:
    found = ranks.run(driven, 2, stage, loop, gas, **changes)[0]
    (assert_same if found["losses"] else assert_same_step)(one_rank, found)


def test_predivided_gradients_of_one_rank(ranks: Ranks, one_rank: dict[str, Any]) -> None:
    assert_same(one_rank, ranks.run(driven, 1, 2, "plain", 1, gradient_predivide_factor=2.0)[0])


# -- what a step keeps and holds ------------------------------------------------------------------------


def nobody_shares(steps: int) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 40))
    options = {"rank": 8, "update_interval": 4, "share_basis": True}
    engine = make_engine(ds_config(2, options), model)
    policies = []
    for _ in range(steps):
        engine.backward(engine(torch.randn(12, 40)).square().mean())
        engine.step()
        policies.append(id(engine.optimizer.zero.basis_groups.policy))
    histories = engine.optimizer.zero.basis_groups.policy.histories.values()
    return {
        "policies": len(set(policies[1:])),
        "records": sum(len(history.records) for history in histories),
        "refreshes": sum(engine.optimizer.zero.basis_groups.schedule.num_refreshes),
    }


def test_a_model_in_which_nobody_shares_is_observed_once(ranks: Ranks) -> None:
    """Forming the groups again in every step would forget each rank's history."""
    found = ranks.run(nobody_shares, 1, 8)[0]
    assert found["policies"] == 1
    assert found["records"] == found["refreshes"] > 2


def made_of_updates(stage: int, bucket: int, of_a_stack: int) -> dict[str, Any]:
    """Most elements that updates of whole gradients make at once; the gradients themselves stay where they are."""
    from hmt_deepspeed.zero.optimizer import step as module
    from hmt_deepspeed.zero.optimizer.step import ZeroStep

    module.MOST_ALIVE = of_a_stack
    most = 0
    advance = ZeroStep._advance

    def watched(self: ZeroStep, *args: Any) -> Any:
        nonlocal most
        gradients = [p.gradient.reduced for part in args[0] for p in part.members]
        updates = advance(self, *args)
        changes = [change for pieces in updates.values() for change in pieces.values()]
        held = [matrix for change in changes for matrix in change.beside.matrices]
        assert [matrix.data_ptr() for matrix in held] == [g.data_ptr() for g in gradients]
        made = (c.update.numel() + c.beside.scale.numel() for c in changes)
        most = max(most, sum(made))
        return updates

    ZeroStep._advance = watched  # type: ignore[method-assign]
    zero = {"allgather_bucket_size": bucket}
    options = {"method": "apollo", "update_interval": 3}
    engine = make_engine(ds_config(stage, options, zero_optimization=zero))
    found = result(engine, train(engine, 4))
    reduced = [entry.matrix for entry in engine.optimizer.zero.low_rank]
    return found | {"rows": sum(matrix.num_rows for matrix in reduced), "made": most}


def test_updates_of_whole_gradients_are_not_made(ranks: Ranks) -> None:
    """A number for each row, whatever the parts of stacks and the portions of a step."""
    alone = ranks.run(made_of_updates, 1, 1, 10**6, 1)[0]
    for other in (
        ranks.run(made_of_updates, 1, 1, 10**6, 10**6)[0],
        ranks.run(made_of_updates, 2, 2, 5_000, 1)[0],
        ranks.run(made_of_updates, 2, 2, 10**6, 10**6)[0],
    ):
        assert_same(alone, other)
        assert 0 < other["made"] <= other["rows"]


def portions() -> list[list[list[list[str]]]]:
    """Of a step, by size of the bucket: names of the parameters of each unit."""
    from hmt_deepspeed.zero.optimizer.step import ZeroStep

    found = []
    update = ZeroStep.update

    def watched(self: ZeroStep, *args: Any) -> None:
        settings = self.settings
        for elements in range(500, 20_000, 500):
            self.settings = replace(settings, gather_elements=elements)
            (holders,) = self._holders
            units = [
                [getattr(unit, "members", [unit]) for unit in portion]
                for portion in self._portions(holders, args[0])
            ]
            found.append([[[p.name for p in unit] for unit in portion] for portion in units])
        self.settings = settings
        update(self, *args)

    ZeroStep.update = watched  # type: ignore[method-assign]
    options = {**LOW_RANK, "residual": "full"}  # whose updates take memory of their own
    train(make_engine(ds_config(2, options)), 1)
    return found


def test_ranks_with_unequal_shards_take_the_same_portions_of_a_step(ranks: Ranks) -> None:
    """Each ends with an all-reduce."""
    one, *others = ranks.run(portions, 3)
    assert {len(parts) for parts in one} == {1, 2, 3}  # of three stacks
    assert all(other == one for other in others)


def rows_held(stage: int) -> list[tuple[int, int]]:
    """Elements of gradient rows that refreshed matrices of whole gradients keep, and of what holds them."""
    from hmt_deepspeed.zero.optimizer.clipping import Clipping

    found = []
    decide = Clipping.decide

    def watched(self: Clipping, *args: Any) -> Any:
        low_rank = [e for e in self._zero.param_states if e.matrix is not None]
        rows = [e.gradient.reduced for e in low_rank if e.gradient.reduced is not None]
        found.extend((part.numel(), part.untyped_storage().nbytes() // 4) for part in rows)
        return decide(self, *args)

    Clipping.decide = watched  # type: ignore[method-assign]
    options = {**LOW_RANK, "residual": "full", "max_full_gradient_bytes": 10**7}
    train(make_engine(ds_config(stage, options)), 1)
    return found


def test_after_a_refresh_a_rank_holds_its_own_rows_alone(ranks: Ranks) -> None:
    for found in ranks.run(rows_held, 2, 2):
        assert found
        assert all(own == held for own, held in found)
