"""What a training step means: precision, loss scaling, which parameters take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import Tensor, nn
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    matrix_ranks,
    micro_batches,
    result,
    stock_config,
    tiny_llama,
    train,
)

STEPS = 6
ADAMW = {"method": "adamw"}


# -- precision ----------------------------------------------------------------------------------------


def accumulation_dtypes(gas: int) -> dict[Any, dict[str, Any]]:
    """By stage and ``grad_accum_dtype``."""
    found = {}
    for stage in range(4):
        for dtype in ("fp32", None):
            kinds = {} if dtype is None else {"data_types": {"grad_accum_dtype": dtype}}
            engine = make_engine(ds_config(stage, gas=gas, bf16={"enabled": True}, **kinds))
            losses = train(engine, 4)
            for tokens in micro_batches(engine, 0):
                engine.backward(loss_of(engine, tokens))
                gradients = [entry.gradient for entry in engine.optimizer.zero.param_states]
                held = {t.dtype for g in gradients for t in (g.reduced, g.local) if t is not None}
                if not engine.is_gradient_accumulation_boundary():
                    engine.step()
            kind = type(engine.optimizer).__name__
            found[stage, dtype] = {"losses": losses, "dtypes": held, "type": kind}
            engine.destroy()
    return found


def test_grad_accum_dtype(ranks: Ranks) -> None:
    runs = ranks.run(accumulation_dtypes, 1, 3)[0]
    for stage in range(4):
        found, plain = runs[stage, "fp32"], runs[stage, None]
        # In stock, stage 1 with these types is BF16_Optimizer.
        assert found["type"] == "HMTZeroOptimizer"
        assert found["dtypes"] == {torch.float32}
        assert plain["dtypes"] == {torch.bfloat16}
        assert found["losses"] == pytest.approx(plain["losses"], rel=2e-2)  # bf16 has three digits


def growing_scale(growth_interval: int) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": growth_interval}
    engine = make_engine(ds_config(2, fp16=fp16, gradient_clipping=0.1))
    norms = []
    for step in range(6):
        train(engine, 1, first=step)
        norms.append(float(engine.get_global_grad_norm()))
    return {"norms": norms, "scale": engine.optimizer.cur_scale}


def test_fp16_gradients_are_divided_by_the_scale_they_were_multiplied_by(ranks: Ranks) -> None:
    """The step after which the scale doubles too."""
    constant, growing = (ranks.run(growing_scale, 1, interval)[0] for interval in (100, 2))
    assert constant["scale"] < growing["scale"]
    assert growing["norms"] == pytest.approx(constant["norms"], rel=1e-2)  # fp16 rounds otherwise


def cast_inputs(auto_cast: bool) -> list[float]:
    """Losses of a regression on fp32 inputs, cast by the engine or by hand."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    fp16 = {"enabled": True, "auto_cast": auto_cast, "initial_scale_power": 8}
    engine = make_engine(ds_config(2, fp16=fp16), model)
    inputs, losses = torch.randn(4, 16), []
    for _ in range(STEPS):
        loss = engine(inputs if auto_cast else inputs.half()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def test_fp16_auto_cast_casts_what_enters_the_model(ranks: Ranks) -> None:
    """Accelerate asks for it where a JSON has no fp16 section and the run is in fp16."""
    losses = ranks.run(cast_inputs, 1, True)[0]
    assert losses == ranks.run(cast_inputs, 1, False)[0]
    assert losses[-1] < losses[0]


# -- which parameters take part --------------------------------------------------------------------------


def frozen_and_tied(stage: int) -> dict[str, Any]:
    model = tiny_llama(tie_word_embeddings=True)
    for name, param in model.named_parameters():
        param.requires_grad = "layers.0.mlp" not in name and "layers.1.input" not in name
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = make_engine(ds_config(stage, gas=2), model)
    found = result(engine, train(engine, STEPS))
    found["frozen"] = max(float((found["weights"][n] - w).abs().max()) for n, w in frozen.items())
    found["names"] = [e.name for e in engine.optimizer.zero.param_states]
    return found


def test_frozen_and_tied_parameters(ranks: Ranks) -> None:
    one = ranks.run(frozen_and_tied, 1, 0)[0]
    assert "model.embed_tokens.weight" in one["names"]
    assert not any("lm_head" in name or "layers.0.mlp" in name for name in one["names"])
    for stage, world in [(2, 2), (3, 2)]:
        other = ranks.run(frozen_and_tied, world, stage)[0]
        assert one["frozen"] == other["frozen"] == 0
        assert_same(one, other)


class Branches(nn.Module):
    """``y = out(tanh(a x))``, plus ``b`` on demand: a linear that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(21, 33), nn.Linear(21, 33), nn.Linear(33, 1)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        hidden = self.a(x) + (self.b(x) if use_b else 0)
        return (self.out(torch.tanh(hidden)) - x.sum(1, keepdim=True)).square().mean()


def branches(stage: int, gas: int, usage: str) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"rank": 4, "update_interval": 3, "scale": 1.0, "module_rules": {"out": ADAMW}}
    engine = make_engine(ds_config(stage, options, gas=gas), Branches())
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(8):
        parts = torch.randn(12, 21, generator=generator).split(6)
        for a in range(gas):
            part = a * world + rank  # the first half of the batch or the second
            uses = {"first half": part == 0, "even steps": step % 2 == 0, "never": False}[usage]
            loss = engine(parts[part], uses)
            engine.backward(loss)
            engine.step()
        losses.append(0.0)
    found = result(engine, losses)
    found["held"] = [e.gradient.arrived is None for e in engine.optimizer.zero.param_states]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameter_unused_on_one_rank(ranks: Ranks, stage: int) -> None:
    """Two ranks of which one uses the branch are two micro-batches of which one does."""
    alone = ranks.run(branches, 1, 0, 2, "first half")[0]
    both = ranks.run(branches, 2, stage, 1, "first half")
    assert_same(alone, both[0])
    assert furthest(both[0]["weights"], both[1]["weights"]) == 0


@pytest.mark.parametrize(("stage", "usage"), [(2, "even steps"), (3, "even steps"), (3, "never")])
def test_parameter_unused_on_all_ranks(ranks: Ranks, stage: int, usage: str) -> None:
    assert_same(ranks.run(branches, 1, 0, 2, usage)[0], ranks.run(branches, 2, stage, 1, usage)[0])


class Twice(nn.Module):
    """One linear in two reentrant checkpoints: its gradient hook fires twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.out = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 1)

    def forward(self, x: Tensor, reentrant: bool, times: int = 2) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for _ in range(times):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=reentrant))
        return (self.out(x) - 1).square().mean()


def fires_twice(stage: int, reentrant: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"rank": 4, "update_interval": 3, "scale": 1.0, "module_rules": {"out": ADAMW}}
    zero = {"reduce_bucket_size": 100}  # the shared linear's bucket leaves before it fires again
    engine = make_engine(ds_config(stage, options, zero_optimization=zero), Twice())
    losses = []
    for step in range(8):
        x = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
        part = x.chunk(dist.get_world_size())[dist.get_rank()]
        loss = engine(part, reentrant)
        engine.backward(loss)
        engine.step()
        losses.append(0.0)
    return result(engine, losses)


@pytest.mark.parametrize("stage", [0, 2])
def test_parameter_that_fires_twice(ranks: Ranks, stage: int) -> None:
    once = ranks.run(fires_twice, 1, 0, False)[0]
    twice = ranks.run(fires_twice, 2, stage, True)
    assert_same(once, twice[0])


def fires_differently(stage: int, gas: int, reentrant: bool) -> dict[str, Any]:
    """The first half of the batch calls the shared linear once, the second three times."""
    torch.manual_seed(0)
    options = {"rank": 4, "update_interval": 3, "scale": 1.0, "module_rules": {"out": ADAMW}}
    zero = {"reduce_bucket_size": 100}
    engine = make_engine(ds_config(stage, options, gas=gas, zero_optimization=zero), Twice())
    for step in range(8):
        parts = torch.randn(12, 20, generator=torch.Generator().manual_seed(step)).split(6)
        for a in range(gas):
            part = a * dist.get_world_size() + dist.get_rank()
            engine.backward(engine(parts[part], reentrant, 1 + 2 * part))
            engine.step()
    return result(engine, [0.0])


@pytest.mark.parametrize("stage", [0, 2])
def test_parameter_that_fires_more_often_on_one_rank(ranks: Ranks, stage: int) -> None:
    one = ranks.run(fires_differently, 1, 0, 2, False)[0]
    for other in ranks.run(fires_differently, 2, stage, 1, True):
        assert_same(one, other)


def fires_twice_later(reentrant: bool) -> dict[str, Any]:
    """Ranks call the linear twice, but not in the first backwards; how often each backward asked other ranks."""
    torch.manual_seed(0)
    zero = {"reduce_bucket_size": 100}
    engine = make_engine(ds_config(2, {"rank": 4}, zero_optimization=zero), Twice())
    collectives, asked, counts, refused = engine.optimizer.collectives, [], [], ""
    ask = collectives.all_reduce
    collectives.all_reduce = lambda *args, **kw: (asked.append(args), ask(*args, **kw))[1]
    for times in (1, 1, 1, 2):
        loss = engine(torch.randn(6, 20), reentrant, times)
        asked.clear()
        try:
            engine.backward(loss)
        except RuntimeError as error:
            refused = str(error)
            break
        counts.append(len(asked))
        engine.step()
    return {"asked": counts, "refused": refused}


def test_ranks_ask_for_late_gradients_in_the_first_backward_only(ranks: Ranks) -> None:
    for found in ranks.run(fires_twice_later, 2, False):
        assert found == {"asked": [1, 0, 0, 0], "refused": ""}


def test_gradients_that_come_late_for_the_first_time_are_refused(ranks: Ranks) -> None:
    """Other ranks need not have any: this one would wait for them for good."""
    for found in ranks.run(fires_twice_later, 2, True):
        assert found["asked"] == [1, 0, 0]
        assert found["refused"].startswith("shared.")
        assert "use_reentrant=False" in found["refused"]


def group_run(stage: int, stock: bool) -> dict[str, Any]:
    model = tiny_llama()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "layers.0" in n], "lr": 0.0},
        {
            "params": [p for n, p in named.items() if "layers.1" in n],
            "lr": 6e-3,
            "betas": (0.8, 0.95),
        },
        {"params": [p for n, p in named.items() if "layers" not in n], "weight_decay": 0.5},
    ]
    config = stock_config(stage) if stock else ds_config(stage, {"method": "adamw"})
    engine = make_engine(config, model, model_parameters=groups)
    return result(engine, train(engine, STEPS))


def low_rank_groups(stage: int) -> dict[str, Any]:
    model = tiny_llama()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    still = [p for n, p in model.named_parameters() if "layers.0" in n]
    rest = [p for n, p in model.named_parameters() if "layers.0" not in n]
    groups = [{"params": still, "lr": 0.0}, {"params": rest, "weight_decay": 0.0, "eps": 1e-6}]
    engine = make_engine(ds_config(stage), model, model_parameters=groups)
    found = result(engine, train(engine, STEPS))
    moved = {n: float((w - start[n]).abs().max()) for n, w in found["weights"].items()}
    return found | {"moved": moved}


def test_parameter_groups_are_stocks(ranks: Ranks) -> None:
    stock = ranks.run(group_run, 1, 1, True)[0]
    for world, stage in ((1, 0), (2, 2), (2, 3)):
        assert_same(ranks.run(group_run, world, stage, False)[0], stock)


def test_low_rank_parameter_groups(ranks: Ranks) -> None:
    one, other = ranks.run(low_rank_groups, 1, 0)[0], ranks.run(low_rank_groups, 2, 3)[0]
    assert_same(one, other)
    assert all((change == 0) == ("layers.0" in name) for name, change in one["moved"].items())


def conv1d(stage: int) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=40, n_layer=1, n_head=4, n_positions=32)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    engine = make_engine(ds_config(stage, LOW_RANK, gas=2), GPT2LMHeadModel(config))
    found = result(engine, train(engine, STEPS))
    low_rank = engine.optimizer.zero.low_rank
    found["matrices"] = {e.name: e.gradient.linear is None for e in low_rank}
    found["ranks"] = matrix_ranks(engine)
    return found


def test_conv1d_is_low_rank_with_the_full_gradient(ranks: Ranks) -> None:
    one = ranks.run(conv1d, 1, 0)[0]
    assert len(one["matrices"]) == 4
    assert all(one["matrices"].values())
    for stage, world in [(2, 2), (3, 2)]:
        other = ranks.run(conv1d, world, stage)[0]
        assert_same(one, other)
        assert one["ranks"] == other["ranks"]
