"""INT8 weights as a model is placed: one matrix at a time, before DeepSpeed places the rest."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from low_rank_adamw import low_rank_adamw
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from training import LOW_RANK, ds_config, make_engine, model_weights, tiny_llama

from hmt_deepspeed.kernels.chunks import CHUNK_ELEMENTS
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight, encoded_weight, release
from hmt_deepspeed.zero.engine import engine
from hmt_deepspeed.zero.weights import int8_weight as encoded
from hmt_deepspeed.zero.weights.int8_weight import encode_placed

INT8 = {**LOW_RANK, "weight_dtype": "int8"}
BF16 = {"bf16": {"enabled": True}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """What the options above encode, by the name of the weight."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {f"{name}.weight": m for name, m in layers if name != "lm_head"}


def held(model: nn.Module) -> dict[str, Int8Weight]:
    found = {name: encoded_weight(module) for name, module in linears(model).items()}
    return {name: weight for name, weight in found.items() if weight is not None}


# -- cases --------------------------------------------------------------------------------------------


def watched(changes: dict[str, Any]) -> dict[str, Any]:
    """Weights alive at each conversion and at DeepSpeed's ``module.to(device)``."""
    model = tiny_llama()
    originals = [StorageWeakRef(m.weight.untyped_storage()) for m in linears(model).values()]
    arrived: list[StorageWeakRef] = []
    found: dict[str, Any] = {"originals": [], "arrived": [], "placed": [], "count": len(originals)}
    quantize, to = encoded.quantize, nn.Module.to

    # one that is cast leaves its original before it is converted
    own = 0 if changes else 1

    def alive(references: list[StorageWeakRef], expected: int) -> int:
        """Gloo's thread lets go of a tensor some time after its broadcast: more than expected are waited for."""
        deadline = time.monotonic() + 120
        while True:
            count = sum(not reference.expired() for reference in references)
            if count <= expected or time.monotonic() > deadline:
                return count
            time.sleep(0.01)

    def watching_quantize(module: nn.Linear, name: str) -> Int8Weight:
        arrived.append(StorageWeakRef(module.weight.untyped_storage()))
        found["originals"].append(alive(originals, len(originals) - len(arrived) + own))
        found["arrived"].append(alive(arrived, 1))
        return quantize(module, name)

    def watching_to(module: nn.Module, *args: Any, **keyword: Any) -> nn.Module:
        if module is model:
            weights = [m.weight for m in linears(model).values()]
            real = [w for w in weights if w.untyped_storage().nbytes() > w.element_size()]
            found["placed"].append((len(real), alive(originals, 0), alive(arrived, 0)))
        return to(module, *args, **keyword)

    encoded.quantize, nn.Module.to = watching_quantize, watching_to  # type: ignore[assignment]
    made = make_engine(ds_config(2, INT8, **changes), model)
    found["nan"] = all(bool(m.weight.isnan().all()) for m in linears(made.module).values())
    found["marked"] = any(hasattr(p, "ds_optim_param") for p in model.parameters())
    return found


def started(stage: int, kind: str, changes: dict[str, Any], backend: bool) -> dict[str, Any]:
    """Codes before and after ``initialize``, of weights that differ between ranks."""
    from deepspeed.accelerator import get_accelerator

    if not backend:
        get_accelerator().communication_backend_name = lambda: None
    model = tiny_llama(seed=dist.get_rank()).to(DTYPES[kind])
    cast = torch.bfloat16 if changes else None
    own = {n: Int8Weight(m.weight.data.to(cast)) for n, m in linears(model).items()}
    made = make_engine(ds_config(stage, INT8, **changes), model)

    def values(weights: dict[str, Int8Weight]) -> dict[str, tuple[Tensor, Tensor, torch.dtype]]:
        return {name: (w.codes, w.scales, w.dtype) for name, w in weights.items()}

    rest = {n: w for n, w in model_weights(made).items() if n not in own}
    return {"own": values(own), "held": values(held(model)), "rest": rest}


def encoded_for(given: str) -> list[str]:
    """Names of the INT8 weights, with ``model_parameters`` of one kind."""
    model = tiny_llama(layers=1)
    kept = {n: p for n, p in model.named_parameters() if "mlp" not in n}
    config = ds_config(2, INT8)
    forms: dict[str, Any] = {
        "list": list(kept.values()),
        "generator": (p for p in kept.values()),
        "names": list(kept.items()),
        "groups": [{"params": (p for p in kept.values()), "lr": 1e-3}],
        "frozen": None,
        "none": None,
    }
    keyword: dict[str, Any] = {"model_parameters": forms.get(given)}
    if given == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_(name in kept)
    if given == "client":
        keyword["optimizer"] = low_rank_adamw([{"params": list(kept.items())}], **LOW_RANK)
        keyword["optimizer"].options["weight_dtype"] = (
            "int8"  # refused of a client without a module
        )
        del config["hmt"], config["optimizer"]
    made = make_engine(config, model, **keyword)
    names = list(held(model))
    assert names == [entry.name for entry in made.optimizer.zero.low_rank]
    assert sum(len(group["params"]) for group in made.optimizer.param_groups) in (
        len(kept),
        len(list(model.parameters())),
    )
    return names


def fails_later(kind: str) -> tuple[str, float, bool]:
    model = tiny_llama(layers=1)
    before = {name: m.weight.detach().clone() for name, m in linears(model).items()}
    options = dict(INT8)
    if kind == "options":
        options["max_full_gradient_bytes"] = 100
    elif kind == "model":
        model.model.embed_tokens.sparse = True
    else:

        def metrics(_: Any) -> None:
            raise ValueError("after the optimizer")

        engine.StepMetrics = metrics  # type: ignore[assignment,misc]
    try:
        make_engine(ds_config(2, options), model)
    except ValueError as error:
        message = str(error)
    assert not held(model)
    furthest = max(
        float((linear.weight - before[n]).abs().max()) for n, linear in linears(model).items()
    )
    return message, furthest, all(p.isfinite().all() for p in model.parameters())


# -- tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_a_matrix_arrives_when_the_one_before_has_gone(
    ranks: Ranks, changes: dict[str, Any]
) -> None:
    found = ranks.run(watched, 1, changes)[0]
    count = found["count"]
    assert found["arrived"] == [1] * count
    own = 0 if changes else 1  # as above
    assert found["originals"] == [count - 1 - i + own for i in range(count)]
    assert found["placed"]
    assert set(found["placed"]) == {(0, 0, 0)}
    assert found["nan"]
    assert not found["marked"]


@pytest.mark.parametrize(
    ("stage", "world", "kind", "changes"),
    [
        (0, 2, "fp32", {}),
        (1, 2, "fp32", BF16),
        (2, 2, "bf16", BF16),
        (2, 2, "bf16", {}),
        (2, 1, "fp32", {}),
        (2, 1, "fp16", BF16),
    ],
)
def test_codes_are_those_of_the_first_ranks_cast_weights(
    ranks: Ranks, stage: int, world: int, kind: str, changes: dict[str, Any]
) -> None:
    found = ranks.run(started, world, stage, kind, changes, True)
    expected = found[0]["own"]
    for rank in found:
        assert rank["held"].keys() == expected.keys()
        for name, (codes, scales, dtype) in expected.items():
            assert torch.equal(rank["held"][name][0], codes)
            assert torch.equal(rank["held"][name][1], scales)
            assert rank["held"][name][2] == dtype
        assert rank["rest"]
        assert all(torch.equal(w, rank["rest"][n]) for n, w in found[0]["rest"].items())
    if world > 1:
        name = next(iter(expected))
        assert not torch.equal(found[1]["own"][name][0], expected[name][0])


def test_without_a_backend_every_rank_keeps_its_own(ranks: Ranks) -> None:
    for rank in ranks.run(started, 2, 2, "fp32", {}, False):
        for name, (codes, _, _) in rank["own"].items():
            assert torch.equal(rank["held"][name][0], codes)


@pytest.mark.parametrize(
    "given", ["list", "generator", "names", "groups", "frozen", "client", "none"]
)
def test_what_is_trained_is_encoded(ranks: Ranks, given: str) -> None:
    names = ranks.run(encoded_for, 1, given)[0]
    assert len(names) == (7 if given == "none" else 4)
    assert any("mlp" in name for name in names) == (given == "none")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("options", "max_full_gradient_bytes is 100"),
        ("model", "sparse=True"),
        ("parts", "after the optimizer"),
    ],
)
def test_a_failure_puts_real_weights_back(ranks: Ranks, kind: str, words: str) -> None:
    message, furthest, finite = ranks.run(fails_later, 1, kind)[0]
    assert words in message
    assert finite
    assert 0 < furthest < 2e-3  # half a code of weights up to .1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_never_holds_two_16_bit_matrices() -> None:
    m, n, count = 4096, 2048, 6
    device = torch.device("cuda", torch.cuda.current_device())
    layers = [nn.Linear(n, m, bias=False) for _ in range(count)]
    expected = [Int8Weight(layer.weight.data.to(torch.bfloat16).to(device)) for layer in layers]
    codes = sum(weight.nbytes for weight in expected)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encode_placed([(layer, "weight") for layer in layers], torch.bfloat16, device, lambda _: None)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < codes + 2 * m * n + 8 * CHUNK_ELEMENTS < count * 2 * m * n
    for layer, one in zip(layers, expected, strict=True):
        kept = encoded_weight(layer)
        assert kept is not None
        assert torch.equal(kept.codes, one.codes)
        assert torch.equal(kept.scales, one.scales)
        assert (layer.weight.device, layer.weight.stride()) == (device, (0, 0))
        assert layer.to(device).weight.stride() == (0, 0)
    release(nn.ModuleList(layers), torch.device("cpu"))
    assert {layer.weight.device.type for layer in layers} == {"cpu"}
