"""The small model, data, configs and training loop that the tests of the engine share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_rank_adamw import LOW_RANK_ADAMW
from torch import Tensor, nn

import hmt_deepspeed

VOCAB, HIDDEN, INTERMEDIATE, GLOBAL_BATCH, LENGTH = 61, 40, 77, 12, 16
# Ranks as the HMT paper chooses them: by what a basis holds of the gradient that it is made from.
PAPERS_RULE = {"energy_estimate": "in_sample", "rank_budget": None}
LOW_RANK = {
    **PAPERS_RULE,
    "rank_candidates": [4, 8, 16],
    "energy_threshold": 0.6,
    "update_interval": 4,
    "max_full_gradient_bytes": 60_000,  # five or six matrices refresh in one step
    "scale": 1.0,
}

# Sums over ranks, micro-batches and shards are taken in another order, which costs 1e-7 a step;
# Adam's division by sqrt(v) amplifies it where v is small. Ten steps stay two digits below these.
LOSS = 1e-5
NORM = 1e-3
WEIGHT = 2e-3  # of weights that moved by up to ten steps of lr, 3e-2
ANGLE = 1e-2  # sine between subspaces; another basis of the same gradient would be near 1


def tiny_llama(layers: int = 2, seed: int = 0, **changes: Any) -> nn.Module:
    """Grouped-query Llama; 77 and 61 rows divide by neither 2 nor 3, 40 not by 3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **changes,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def tiny_mixtral(layers: int = 2, **changes: Any) -> nn.Module:
    """Four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 28,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_cache": False,
            **changes,
        }
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def ds_config(
    stage: int, options: dict[str, Any] | None = None, gas: int = 1, **changes: Any
) -> dict[str, Any]:
    """A DeepSpeed JSON with HMT; ``options`` replace those of ``hmt.optimizer``, low-rank AdamW's where they name no method."""
    micro = GLOBAL_BATCH // dist.get_world_size() // gas
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "optimizer": {
            "type": "HMT",
            "params": {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
        },
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "hmt": {"optimizer": {**LOW_RANK_ADAMW, **(LOW_RANK if options is None else options)}},
        "steps_per_print": 10**9,
    }
    zero = changes.pop("zero_optimization", {})
    config["zero_optimization"] |= zero
    config.update(changes)
    return config


def stock_config(stage: int, gas: int = 1, **changes: Any) -> dict[str, Any]:
    """The same JSON for DeepSpeed's own AdamW (torch's, which compiles nothing)."""
    config = ds_config(stage, gas=gas, **changes)
    del config["hmt"]
    config["optimizer"]["type"] = "AdamW"
    config["optimizer"]["params"]["torch_adam"] = True
    return config


def make_engine(config: dict[str, Any], model: nn.Module | None = None, **keyword: Any) -> Any:
    model = tiny_llama() if model is None else model
    keyword.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    engine, *_ = hmt_deepspeed.initialize(model=model, config=config, **keyword)
    return engine


def global_batch(step: int = 0) -> Tensor:
    """GLOBAL_BATCH x LENGTH tokens, the same on every rank; steps repeat after three."""
    generator = torch.Generator().manual_seed(100 + step % 3)
    return torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH), generator=generator)


def micro_batches(engine: Any, step: int) -> list[Tensor]:
    """This rank's micro-batches of a step, whatever world size and accumulation."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = engine.train_micro_batch_size_per_gpu()
    parts = global_batch(step).split(size)
    return [parts[a * world + rank] for a in range(engine.gradient_accumulation_steps())]


def loss_of(engine: Any, tokens: Tensor) -> Tensor:
    return engine(input_ids=tokens, labels=tokens).loss


def train_step(engine: Any, step: int, torch_style: bool = False) -> float:
    """One optimizer step on the global batch of ``step``; the mean loss over ranks."""
    total = 0.0
    batches = micro_batches(engine, step)
    for tokens in batches:
        loss = loss_of(engine, tokens)
        if torch_style:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        total += loss.item() / len(batches)
    return mean_over_ranks(total)


def train(engine: Any, steps: int, first: int = 0, **keyword: Any) -> list[float]:
    return [train_step(engine, first + step, **keyword) for step in range(steps)]


def mean_over_ranks(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor / dist.get_world_size())


def weights(engine: Any) -> dict[str, Tensor]:
    """Whole fp32 weights (masters) by name."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "state_access"):
        return {
            e.name: optimizer.state_access.get_full_hp_param(e.gradient.param).clone()
            for e in optimizer.zero.param_states
        }
    return model_weights(engine)


def model_weights(engine: Any) -> dict[str, Tensor]:
    """Whole model weights as the forward sees them, in their own dtype."""
    import deepspeed

    result = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            result[name] = param.detach().clone()
    return result


def bases(engine: Any) -> dict[str, Tensor]:
    """Whole bases by name; gathered where stage 3 deals their rows over ranks."""
    found = {}
    for entry in engine.optimizer.zero.low_rank:
        with engine.optimizer.zero.bases.whole(entry):
            found[entry.name] = entry.matrix.basis.clone()
    return found


def matrix_ranks(engine: Any) -> dict[str, int]:
    return {e.name: e.matrix.rank for e in engine.optimizer.zero.low_rank}


def subspace_distance(first: Tensor, second: Tensor) -> float:
    """Sine of the largest principal angle between two bases."""
    overlap = torch.linalg.svdvals(first.double().t() @ second.double())
    return float((1 - overlap.min().clamp(max=1).square()).sqrt())


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors of two dicts with the same keys."""
    assert first.keys() == second.keys()
    return max(float((first[n].double() - second[n].double()).abs().max()) for n in first)


def wait_for(condition: Callable[[], bool]) -> None:
    """For what other threads do."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def result(engine: Any, losses: list[float]) -> dict[str, Any]:
    """What :func:`assert_same` compares."""
    norm = engine.get_global_grad_norm()  # None from stock's stage 0 in fp32
    norm = None if norm is None else float(norm)
    return {"losses": losses, "weights": model_weights(engine), "norm": norm}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same run up to the order of summation.

    Adam forgives a gradient that is off by a factor; the norm does not.
    """
    assert one["losses"] == pytest.approx(other["losses"], rel=LOSS)
    if None not in (one["norm"], other["norm"]):
        assert one["norm"] == pytest.approx(other["norm"], rel=NORM)
    assert furthest(one["weights"], other["weights"]) < WEIGHT


def assert_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Every step's loss and norm, the weights, and of low-rank matrices ranks, refreshes and bases, up to the order of
    summation."""
    assert one["losses"] == pytest.approx(other["losses"], rel=LOSS)
    assert one["norms"] == pytest.approx(other["norms"], rel=NORM)
    assert furthest(one["weights"], other["weights"]) < WEIGHT
    if "ranks" in one:
        assert one["ranks"] == other["ranks"]
        assert one["refreshes"] == other["refreshes"]
        for name, basis in one["bases"].items():
            assert subspace_distance(basis, other["bases"][name]) < ANGLE, name
