"""One owner at a time: engines that are destroyed, dropped, failed or taken over leave a model as it was before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from footprints import changed, error_of, footprint, warned
from harness import Ranks
from torch import Tensor, nn
from training import (
    LOW_RANK,
    ds_config,
    global_batch,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    stock_config,
    tiny_llama,
    train,
    weights,
)

from hmt_deepspeed import HMT
from hmt_deepspeed.optim.backward.int8_linear import encoded_weight
from hmt_deepspeed.zero.engine import engine as engine_module

BF16 = {"bf16": {"enabled": True}}
HELD = {"policy": {"lm_head": "int8", "mlp_intermediate": "recompute", "residual": "keep"}}


def config_of(name: str) -> dict[str, Any]:
    """One for each thing that an engine puts on a model."""
    kind, stage = name.rsplit(" ", 1)
    config = stock_config(int(stage)) if kind.startswith("stock") else ds_config(int(stage))
    if kind.startswith("stock"):
        config["hmt"] = {}
    if "activations" in kind:
        config["hmt"]["activations"] = HELD
    if "fpdt" in kind:
        config["hmt"]["fpdt"] = {"chunk_size": 8}
    if "int8" in kind:
        config["hmt"]["optimizer"] = {**LOW_RANK, "weight_dtype": "int8"}
    if "overlap" in kind:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["hmt"]["offload"] = {"overlap": "forward"}
    return config


@contextmanager
def collected_by_count() -> Iterator[None]:
    """Nothing is collected but what nobody refers to: no luck with the garbage collector's timing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- what is left on a model ----------------------------------------------------------------------------------

# Where an engine fails that is not built: in DeepSpeed's part, at the end of our optimizer's, and of all.
FAULTS: dict[str, tuple[Any, str]] = {
    "failed early": (DeepSpeedEngine, "_configure_lr_scheduler"),
    "failed in the optimizer": (engine_module.HMTZeroOptimizer, "_begin_window"),
    "failed late": (engine_module, "StepMetrics"),
}
WAYS = ("destroyed", "dropped", *FAULTS)
NAMES = (
    "plain 0",
    "plain 2",
    "plain 3",
    "stock activations 1",
    "activations 2",
    "fpdt 3",
    "int8 2",
    "overlap 2",
    "overlap 3",
)


def left_behind() -> dict[str, dict[str, Any]]:
    gc.collect()
    gc.freeze()  # what is imported by now takes no part in later collections
    return {name: left_by(name) for name in NAMES}


def left_by(name: str) -> dict[str, Any]:
    """By how the engine ends: what differs on the model; and whose gradients an ordinary loop misses then."""
    config, model = config_of(name), tiny_llama(layers=1)
    stage, stock = config["zero_optimization"]["stage"], name.startswith("stock")
    if stage == 3:
        make_engine(
            deepcopy(config), model
        ).destroy()  # its parameters are in parts, now and ever after
    found: dict[str, Any] = {}
    for way in WAYS:
        before = footprint(model, stock)
        with collected_by_count():
            if way in FAULTS:
                fail(way, config, model)
            else:
                engine = make_engine(deepcopy(config), model)
                assert changed(before, footprint(model, stock))
                train(engine, 1)
                if way == "destroyed":
                    engine.destroy()
                    engine.destroy()  # once more is nothing more
                del engine
            if way == "dropped" and "overlap" in name:
                use_one_weight(model)
            found[way] = changed(before, footprint(model, stock))
    if stage < 3:
        model.train()
        model(input_ids=global_batch(), labels=global_batch()).loss.backward()
        found["without gradient"] = [n for n, p in model.named_parameters() if p.grad is None]
    return found


def use_one_weight(model: Any) -> None:
    """Which ranks do together: only then are updates that were under way finished, and the engine with them."""
    embedding = model.model.embed_tokens
    with deepspeed.zero.GatheredParameters([embedding.weight]), torch.no_grad():
        embedding(global_batch())


def fail(way: str, config: dict[str, Any], model: nn.Module) -> None:
    def fault(*_: Any, **__: Any) -> None:
        raise ArithmeticError("a fault")

    place, name = FAULTS[way]
    before = getattr(place, name)
    setattr(place, name, fault)
    try:
        make_engine(deepcopy(config), model)
    except ArithmeticError:
        pass
    finally:
        setattr(place, name, before)


@pytest.fixture(scope="module")
def all_left(ranks: Ranks) -> dict[str, dict[str, Any]]:
    return ranks.run(left_behind, 1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_on_a_model(all_left: dict[str, dict[str, Any]], name: str) -> None:
    found = dict(all_left[name])
    assert found.pop("without gradient", []) == []
    assert found == {way: [] for way in WAYS}


# -- the next engine ------------------------------------------------------------------------------------------


def continued(stage: int, overlap: bool) -> dict[str, Any]:
    """Losses and weights of a second engine, by how the first one ended; and of one on a model of its own."""
    config = config_of(f"overlap {stage}" if overlap else f"plain {stage}") | BF16

    def first() -> Any:
        engine = make_engine(deepcopy(config), tiny_llama(layers=1))
        train(engine, 2)
        return engine

    def second(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
        engine = make_engine(deepcopy(config), model)
        losses = train(engine, 2, first=2)
        return losses, model_weights(engine)

    # its engine casts it to what the first engine's masters are rounded to
    fresh = tiny_llama(layers=1)
    fresh.load_state_dict(weights(first()))
    found: dict[str, Any] = {"on a model of its own": second(fresh)}
    for way in ("destroyed", "dropped", "taken over"):
        engine: Any = first()
        model = engine.module
        if way == "destroyed":
            engine.destroy()
        if way != "taken over":
            del engine
        with warned() as said:
            found[way] = second(model)
        assert len(said) == (way == "taken over" and torch.distributed.get_rank() == 0), said
    return found


@pytest.mark.parametrize(
    ("world", "stage", "overlap"),
    [(1, 0, False), (2, 2, True), (2, 3, True)],
)
def test_a_second_engine_trains_from_the_weights_of_the_first(
    ranks: Ranks, world: int, stage: int, overlap: bool
) -> None:
    """Bit for bit as if it had the model to itself: nothing is lost, and nothing of the first is in its way."""
    for found in ranks.run(continued, world, stage, overlap):
        losses, expected = found.pop("on a model of its own")
        for way, (others, other_weights) in found.items():
            assert others == losses, way
            assert all(torch.equal(expected[n], other_weights[n]) for n in expected), way


def used_later(folder: str) -> dict[str, Any]:
    engine = make_engine(ds_config(1), tiny_llama(layers=1))
    train(engine, 1)
    with warned() as said:
        newer = make_engine(ds_config(2), engine.module)
    batch = micro_batches(engine, 0)[0]
    loss = loss_of(newer, batch)
    found = {
        "said": said,
        "forward": error_of(loss_of, engine, batch),
        "backward": error_of(engine.backward, loss),
        "step": error_of(engine.step),
        "save": error_of(engine.save_checkpoint, folder),
        "load": error_of(engine.load_checkpoint, folder),
    }
    engine.eval()
    found["evaluation"] = error_of(loss_of, engine, batch)
    newer.train()
    newer.backward(loss)
    engine.destroy()  # has nothing of the newer one's
    newer.step()
    found["norm"] = float(newer.get_global_grad_norm())
    return found


def test_an_engine_that_was_taken_over_says_so(ranks: Ranks, tmp_path: Any) -> None:
    found = ranks.run(used_later, 1, str(tmp_path))[0]
    (said,) = found.pop("said")
    assert (
        "a new engine (LlamaForCausalLM, ZeRO stage 2) takes the place of an earlier engine" in said
    )
    assert found.pop("norm") > 0
    assert found.pop("evaluation") == ""
    for what, message in found.items():
        assert message.startswith("RuntimeError: "), what
        assert (
            "taken apart when a new engine (LlamaForCausalLM, ZeRO stage 2) was built" in message
        ), what


def in_the_middle() -> dict[str, Any]:
    config = ds_config(1, gas=2)
    losses = train(make_engine(config, tiny_llama(layers=1)), 2)
    engine = make_engine(ds_config(1, gas=2), tiny_llama(layers=1))
    found: dict[str, Any] = {"errors": [], "losses": [], "expected": losses}
    for step in range(2):
        total = 0.0
        for batch in micro_batches(engine, step):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            for other in (
                ds_config(2),
                stock_config(1),
                {**stock_config(0), "hmt": {"activations": HELD}},
            ):
                found["errors"].append(error_of(make_engine, other, engine.module))
            engine.step()
            total += loss.item() / 2
        found["losses"].append(total)
    engine.backward(loss_of(engine, micro_batches(engine, 0)[0]))
    engine.zero_grad()
    found["after zero_grad"] = error_of(make_engine, ds_config(2), engine.module)
    return found


def test_an_engine_in_the_middle_of_a_window_is_left_alone(ranks: Ranks) -> None:
    found = ranks.run(in_the_middle, 1)[0]
    assert found["losses"] == found["expected"]
    assert found["after zero_grad"] == ""
    for message in found["errors"]:
        assert message.startswith("ValueError: ")
        assert "has accumulated gradients that no step() has used" in message
        assert "an earlier engine (LlamaForCausalLM, ZeRO stage 1" in message
        assert "destroy()" in message


# -- who shares what ------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """A head of its own on a trunk that others may have too."""

    def __init__(self, trunk: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.trunk(x)))
        return y


def side_by_side() -> dict[str, Any]:
    def config(**options: Any) -> dict[str, Any]:
        return ds_config(1, {"rank": 4, "update_interval": 3, "scale": 1.0, **options})

    def steps(engine: Any) -> float:
        before = engine.module.head.weight.detach().clone()
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 16)).square().mean())
            engine.step()
        return float((engine.module.head.weight - before).abs().max())

    trunk = nn.Linear(16, 16)
    first, second, third = Headed(trunk), Headed(trunk), Headed(trunk)
    with warned() as apart:
        one = make_engine(
            config(weight_dtype="int8", module_rules={"head": {"method": "adamw"}}), first
        )
        other = make_engine(config(), second, model_parameters=list(second.head.parameters()))
        plain = make_engine(stock_config(1), third, model_parameters=list(third.head.parameters()))
        moved = [steps(engine) for engine in (one, other, plain, one)]
    encoded = encoded_weight(trunk) is not None
    with warned() as shared:
        last = make_engine(
            config(), third
        )  # with the trunk of the first, and the head of the plain one
        moved.append(steps(last))
    return {
        "moved": moved,
        "apart": apart,
        "encoded": encoded,
        "shared": shared,
        "first": error_of(one.step),
        "other": steps(other),
    }


def test_owners_of_different_parameters_live_side_by_side(ranks: Ranks) -> None:
    found = ranks.run(side_by_side, 1)[0]
    assert min(found["moved"]) > 0
    assert found["apart"] == []
    assert found[
        "encoded"
    ]  # the second engine, for which the trunk is frozen, has left its codes to the first
    assert len(found["shared"]) == 2
    assert "taken apart" in found["first"]
    assert found["other"] > 0


def without_deepspeed() -> dict[str, Any]:
    """An HMT optimizer and an engine on one model, either first; and an engine of stage 3 before one of stage 2."""
    model = tiny_llama(layers=1)
    bare = HMT(model, rank=4)
    with warned() as engine_said:
        engine = make_engine(ds_config(1), model)
    train(engine, 1)
    with pytest.warns(
        UserWarning, match="a new HMT optimizer takes the place of an earlier engine"
    ):
        again = HMT(list(model.parameters()), lr=1e-2, rank=4)
    model(input_ids=global_batch(), labels=global_batch()).loss.backward()
    again.step()
    make_engine(ds_config(3), model).destroy()
    return {
        "said": engine_said,
        "bare": error_of(bare.step),
        "engine": error_of(engine.step),
        "gradients": sum(p.grad is not None for p in again.param_groups[0]["params"]),
        "in parts": error_of(make_engine, ds_config(2), model),
    }


def test_an_optimizer_and_an_engine_take_over_from_each_other(ranks: Ranks) -> None:
    found = ranks.run(without_deepspeed, 1)[0]
    assert len(found["said"]) == 1
    assert "was taken apart when a new engine" in found["bare"]
    assert "was taken apart when a new HMT optimizer" in found["engine"]
    assert found["gradients"] == len(list(tiny_llama(layers=1).parameters()))
    assert "lies in parts on all ranks" in found["in parts"]
