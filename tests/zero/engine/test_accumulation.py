"""Vertical accumulation: the same run as horizontal, with weights that are gathered twice a step."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    VOCAB,
    assert_same,
    ds_config,
    make_engine,
    mean_over_ranks,
    micro_batches,
    result,
    tiny_llama,
    tiny_mixtral,
)

import hmt_deepspeed
from hmt_deepspeed.memory.errors import PoolFull


def config_with(order: str, gas: int, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    config = ds_config(3, options, gas=gas, **changes)
    # Nothing stays on the device that is not in use.
    config["zero_optimization"] |= {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    config["hmt"]["accumulation"] = order
    return config


def batches(engine: Any, step: int) -> Iterator[dict[str, Any]]:
    """Of a step; the second of three is shorter by a token than the others."""
    for place, rows in enumerate(micro_batches(engine, step)):
        tokens = rows[:, : rows.shape[1] - (place == 1)]
        yield {"input_ids": tokens, "labels": tokens}


def train(engine: Any, steps: int) -> list[float]:
    return [
        mean_over_ranks(engine.train_batch(batches(engine, step)).item()) for step in range(steps)
    ]


EXACT = {
    "layer_input": "swap_host",
    "attention_qkv": "recompute",
    "attention_output": "keep",
    "mlp_intermediate": "recompute",
    "residual": "swap_host",
    "lm_head": "keep",
}
MODELS = {
    "llama": lambda: tiny_llama(3, use_cache=False),
    "mixtral": lambda: tiny_mixtral(output_router_logits=True),
}


def both_orders(kind: str, gas: int, checkpointing: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Five steps in each order, and how often a layer was gathered in the last of them."""
    found: dict[str, Any] = {}
    for order in ("horizontal", "vertical"):
        model: Any = MODELS[kind]()
        config = config_with(order, gas, **changes)
        if checkpointing == "hmt":
            config["hmt"]["activations"] = {"policy": EXACT}
        elif checkpointing == "torch":
            model.gradient_checkpointing_enable()
        elif checkpointing == "chunks":
            config["hmt"]["fpdt"] = {"chunk_size": 5}
            config["hmt"]["activations"] = {"policy": {"layer_input": "swap_host"}}
        engine = make_engine(config, model)
        losses = train(engine, 4)
        gathers = counted_gathers(model)
        if order == "vertical":
            weights = engine.hmt_vertical.weights
            before, present = weights.brought_bytes, watch(weights, model)
        losses += train(engine, 1)
        inner = {id(param) for param in model.model.layers[1].parameters()}
        found[order] = result(engine, losses)
        found[f"{order} gathers"] = max(gathers[key] for key in inner)
        if order == "vertical":
            found["brought"] = weights.brought_bytes - before
            found["layers"] = bytes_of(model.model.layers)
            found["ends"] = 2 * bytes_of(model.model.embed_tokens) + bytes_of(model.lm_head)
            found["present"] = max(present)
        engine.destroy()
    return found


def bytes_of(module: Any) -> int:
    """Of the parameters that do not stay on the device."""
    return sum(
        param.ds_numel * param.element_size()
        for param in module.parameters()
        if not param.ds_persist
    )


def watch(weights: Any, model: Any) -> list[int]:
    """How many layers are on the device whenever one ends its work, in a list that grows."""
    present: list[int] = []
    end = weights.end

    def ending(layer: Any, backward: bool) -> None:
        there = [
            any(p.ds_status.name == "AVAILABLE" and not p.ds_persist for p in one.parameters())
            for one in model.model.layers
        ]
        present.append(sum(there))
        end(layer, backward)

    weights.end = ending
    return present


def counted_gathers(model: Any) -> Counter[int]:
    """How often each parameter will be gathered."""
    counts: Counter[int] = Counter()
    for param in model.parameters():
        gather = param.all_gather_coalesced

        def counting(params: Any, *args: Any, gather: Any = gather, **named: Any) -> Any:
            counts.update(map(id, params))
            return gather(params, *args, **named)

        param.all_gather_coalesced = counting
    return counts


@pytest.mark.parametrize(
    ("kind", "world", "gas", "checkpointing", "changes"),
    [
        ("llama", 1, 3, "torch", {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
        ("llama", 2, 3, "hmt", {}),
        ("llama", 1, 3, "chunks", {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
        ("mixtral", 1, 2, "none", {}),
    ],
)
def test_the_same_run(
    ranks: Ranks, kind: str, world: int, gas: int, checkpointing: str, changes: dict[str, Any]
) -> None:
    for found in ranks.run(both_orders, world, kind, gas, checkpointing, changes):
        assert_same(found["horizontal"], found["vertical"])
        assert found["horizontal gathers"] >= 2 * gas  # of a checkpointed layer 3
        assert found["present"] == 1
        if "zero_optimization" in changes:  # one rank's, in host memory
            assert found["vertical gathers"] == 0
            assert found["brought"] == 2 * found["layers"] + found["ends"]
        else:
            assert found["vertical gathers"] == 2


def norms_in_bf16(order: str) -> list[float]:
    """Gradient norms of a step and of one by hand, neither of which changes the weights."""
    wide = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    changes: dict[str, Any] = {"bf16": {"enabled": True}, **wide}
    config = config_with(order, 3, {"method": "adamw"}, **changes)
    config["optimizer"]["params"]["lr"] = 0.0
    engine = make_engine(config, tiny_llama(1))
    train(engine, 1)
    norms = [float(engine.get_global_grad_norm())]
    for batch in batches(engine, 1):
        engine.backward(engine(**batch).loss)
        engine.step()
    return [*norms, float(engine.get_global_grad_norm())]


def test_gradients_of_several_uses_are_summed_in_fp32(ranks: Ranks) -> None:
    (expected,) = ranks.run(norms_in_bf16, 1, "horizontal")
    (found,) = ranks.run(norms_in_bf16, 1, "vertical")
    # The same numbers in bf16, in another order: rounding each sum to bf16 costs 1e-3.
    assert found == pytest.approx(expected, rel=1e-6)


def ordinary_calls() -> dict[str, Any]:
    """Steps by hand, and an evaluation, of an engine that accumulates vertically; then one after an error."""
    found = {}
    for order in ("horizontal", "vertical"):
        engine = make_engine(config_with(order, 3), tiny_llama(2, use_cache=False))
        losses = []
        for step in range(3):
            for batch in batches(engine, step):
                loss = engine(**batch).loss
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        with torch.no_grad():
            losses.append(engine(**next(batches(engine, 0))).loss.item())
        bad = [*batches(engine, 3)]
        bad[1] = {"input_ids": bad[1]["input_ids"] + 10**6}
        if order == "vertical":
            with pytest.raises(IndexError):
                engine.train_batch(bad)
            engine.zero_grad()
        losses += train(engine, 2)
        found[order] = result(engine, losses)
        engine.destroy()
    return found


def test_calls_by_hand_take_micro_batches_one_by_one(ranks: Ranks) -> None:
    for found in ranks.run(ordinary_calls, 1):
        assert_same(found["horizontal"], found["vertical"])


def refused(changes: dict[str, Any], model: Any = None) -> str:
    """The error of an engine that would accumulate vertically."""
    config = config_with("vertical", 1)
    config["zero_optimization"] |= changes.pop("zero_optimization", {})
    config |= changes
    with pytest.raises(ValueError, match="vertical") as error:
        make_engine(config, tiny_llama(1) if model is None else model)
    return str(error.value)


def refusals() -> list[str]:
    nvme = {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}, "stage": 3}
    return [
        refused({"zero_optimization": {"stage": 2}}),
        refused({"zero_optimization": nvme, "bf16": {"enabled": True}}),
        refused(
            {"hmt": {"accumulation": "vertical", "activations": {"policy": {"lm_head": "int8"}}}}
        ),
        refused({}, torch.nn.Sequential(torch.nn.Linear(8, 8))),
    ]


def test_refusals_say_what_is_legal(ranks: Ranks) -> None:
    ((stage, nvme, head, plain),) = ranks.run(refusals, 1)
    assert "zero_optimization.stage 2" in stage
    assert '"nvme"' in nvme
    assert "lm_head" in head
    assert "nn.ModuleList" in plain
    for message in (stage, nvme, head, plain):
        assert '"horizontal"' in message or '"cpu"' in message or '"keep"' in message


def too_little_host_memory() -> list[str]:
    """Errors of weights that find no host memory, and of layers' inputs that do not."""
    found = []
    usual = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    wide = torch.nn.Linear(8192, 8192, device="meta").to_empty(device="cpu")  # 256 MiB
    config = config_with("horizontal", 1, zero_optimization={"offload_param": {"device": "cpu"}})
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28 + 2**27, usual[1]))
    try:
        make_engine(config, wide)
    except MemoryError as error:
        found.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    config = config_with("vertical", 3)
    config["hmt"]["activations"] = {"policy": EXACT, "host_memory": 2**20}
    engine = make_engine(config, tiny_llama(2, use_cache=False))
    tokens = torch.zeros(300, 16, dtype=torch.long)
    with pytest.raises(PoolFull) as full:
        engine.train_batch([{"input_ids": tokens, "labels": tokens}] * 3)
    return [*found, str(full.value)]


def test_too_little_host_memory_says_for_what_and_what_to_lower(ranks: Ranks) -> None:
    ((weights, inputs),) = ranks.run(too_little_host_memory, 1)
    assert f"offload_param takes {4 * (8192**2 + 8192)} bytes" in weights
    assert "268435456 bytes" in weights  # of the one that found none
    assert "pin_memory" in weights
    assert "needs 768000 bytes of host memory, but hmt.activations.host_memory is" in inputs
    assert "fewer or shorter sequences" in inputs


def own_data() -> tuple[float, str]:
    """The mean loss of a step on the engine's own data; what an engine without any says."""
    model = tiny_llama(1, use_cache=False)
    tokens = torch.arange(16).expand(8, 16) % 61
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = config_with("vertical", 2)
    engine, _, loader, _ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=rows
    )
    assert loader is not None
    losses = [engine.train_batch().item() for _ in range(3)]  # 12 rows each, of 8
    engine.training_dataloader = None
    with pytest.raises(ValueError, match="data_iter") as error:
        engine.train_batch()
    return losses[0] - losses[-1], str(error.value)


def test_train_batch_takes_the_engines_own_data(ranks: Ranks) -> None:
    ((gain, message),) = ranks.run(own_data, 1)
    assert gain > 0
    assert "training_data" in message


def widths_held(order: str) -> tuple[list[int], bool]:
    """Last dimensions of what forward holds for backward; whether the output has logits."""
    engine = make_engine(config_with(order, 3), tiny_llama(2, use_cache=False))
    widths: set[int] = set()
    logits: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:  # no backward computes it again
            widths.add(tensor.shape[-1] if tensor.dim() > 1 else 0)
        return tensor

    def loss_of(output: Any, _: int) -> torch.Tensor:
        logits.append(output.logits)
        return output.loss

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.train_batch(batches(engine, 0), loss_of)
    return sorted(widths), all(one is None for one in logits)


def test_logits_do_not_wait_for_backward(ranks: Ranks) -> None:
    ((widths, has_none),) = ranks.run(widths_held, 1, "horizontal")
    assert VOCAB in widths
    assert not has_none
    ((widths, has_none),) = ranks.run(widths_held, 1, "vertical")
    assert VOCAB not in widths
    assert has_none
