"""hmt.activations from the JSON to training: every stage, the optimizers, swapping, and the way back."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_runs import checkpointing_flags, with_activations
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from harness import Ranks
from torch import nn
from training import (
    HIDDEN,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    stock_config,
    tiny_llama,
    train,
)

from hmt_deepspeed.report.metrics import monitor_events

LOSSLESS = {
    "policy": {"attention_output": "keep", "mlp_intermediate": "recompute", "residual": "recompute"}
}
SWAPPED = (
    "layer_input",
    "attention_qkv",
    "attention_output",
    "mlp_intermediate",
    "residual",
    "lm_head",
)
TO_HOST = {"policy": dict.fromkeys(SWAPPED, "swap_host"), "host_memory": 2**20}
STEPS = 3


def to_ssd(folder: Path) -> dict[str, Any]:
    """Host memory for a quarter of what is swapped."""
    return {
        "policy": dict.fromkeys(SWAPPED, "swap_ssd"),
        "host_memory": 2**20,
        "nvme_path": str(folder),
    }


# -- the same training, whatever holds the activations ------------------------------------------------


def runs(jobs: list[tuple[int, bool, Iterable[str]]], sections: dict[str, Any]) -> dict[str, Any]:
    """A few steps at each (stage, with a stock optimizer, names of sections); None: without a section."""
    found: dict[str, Any] = {}
    for stage, stock, names in jobs:
        for name in names:
            section = sections[name]
            config = (stock_config if stock else ds_config)(stage, gas=2)
            engine = make_engine(with_activations(config, section))
            entered = len(FWD_MODULE_STACK)
            run = result(engine, train(engine, STEPS)) | {"metrics": engine.hmt_metrics.read()}
            run["still entered"] = len(FWD_MODULE_STACK) - entered
            found.setdefault(f"{stage}{' stock' * stock}", {})[name] = run
            engine.destroy()
    return found


HELD_PRODUCTS = {"policy": {**LOSSLESS["policy"], "projected_inputs": "project"}}
EIGHT_BITS = {"policy": {"lm_head": "int8", "residual": "fp8", "attention_qkv": "int8"}}
SECTIONS = {"without": None, "lossless": LOSSLESS, "paper": {}, "host": TO_HOST}
PROJECTED = {"without": None, "lossless": LOSSLESS, "held": HELD_PRODUCTS}


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks) -> dict[str, Any]:
    jobs = [(0, False, ("without", "lossless", "paper")), (2, False, ("without", "host", "paper"))]
    jobs += [(3, False, tuple(SECTIONS)), (1, True, ("without", "lossless", "paper"))]
    return ranks.run(runs, 2, jobs, SECTIONS)[0]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(runs, 1, [(3, False, ("without", "lossless", "paper"))], SECTIONS)[0]


@pytest.mark.parametrize(
    "stage", [0, 2, 3]
)  # stage 1, which differs from 2 in gradients alone, with a stock optimizer
def test_training_is_the_same_at_every_stage(two_ranks: dict[str, Any], stage: int) -> None:
    check_training(two_ranks[str(stage)])


def test_training_is_the_same_on_one_rank(one_rank: dict[str, Any]) -> None:
    check_training(one_rank["3"])


def check_training(found: dict[str, Any]) -> None:
    """Bit for bit where nothing is lost: what is run again is the same operations on the same numbers."""
    exact = found["without"]
    for name in found.keys() - {"without", "paper"}:
        assert found[name]["losses"] == exact["losses"]
        assert furthest(found[name]["weights"], exact["weights"]) == 0
        assert found[name]["still entered"] == 0  # a list that grew would hold on to the model
    # INT8 with stochastic rounding: the forward of the first step is exact, gradients err by about 1 %.
    assert found["paper"]["losses"][0] == exact["losses"][0]
    assert found["paper"]["losses"] == pytest.approx(exact["losses"], rel=2e-3)
    assert found["paper"]["losses"] != exact["losses"]
    metrics = found["paper"]["metrics"]
    assert set(metrics["activation_rerun_flops_per_component"]) == {
        "attention_qkv",
        "projected_inputs",
    }
    assert "projected_inputs" not in metrics["activation_bytes_per_component"]


def test_projected_inputs_are_held_where_that_is_asked(ranks: Ranks) -> None:
    found = ranks.run(runs, 1, [(2, False, tuple(PROJECTED))], PROJECTED)[0]["2"]
    for name in ("lossless", "held"):
        assert found[name]["losses"] == found["without"]["losses"]
        assert furthest(found[name]["weights"], found["without"]["weights"]) == 0
    again, held = (found[name]["metrics"] for name in ("lossless", "held"))
    products = held["activation_bytes_per_component"]["projected_inputs"]  # X [Q | P]
    assert products > 0
    assert held["activation_bytes"] == again["activation_bytes"] + products
    assert "projected_inputs" not in held["activation_rerun_flops_per_component"]
    assert "projected_inputs" in again["activation_rerun_flops_per_component"]


def test_a_stock_optimizer_goes_with_a_block_of_activations(two_ranks: dict[str, Any]) -> None:
    found = two_ranks["1 stock"]
    assert found["lossless"]["losses"] == found["without"]["losses"]
    assert furthest(found["lossless"]["weights"], found["without"]["weights"]) == 0
    assert "optimizer_state_bytes" not in found["paper"]["metrics"]
    held = found["paper"]["metrics"]["activation_bytes_per_component"]
    assert "projected_inputs" not in held
    without = found["without"]["metrics"]
    assert not [name for name in without if name.startswith(("activation_", "optimizer_state"))]


def test_codes_that_linears_save_where_weights_are_gathered(ranks: Ranks) -> None:
    """The head and the output projections form their weights' gradients from codes; at stage 3 of weights
    that have been given up in between."""
    jobs = [(stage, True, ("8 bits",)) for stage in (0, 3)]
    found = ranks.run(runs, 1, jobs, {"8 bits": EIGHT_BITS})[0]
    whole, gathered = (found[f"{stage} stock"]["8 bits"] for stage in (0, 3))
    # the same codes; sums in another order
    assert gathered["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    held = gathered["metrics"]["activation_bytes_per_component"]
    assert held == whole["metrics"]["activation_bytes_per_component"]
    tokens = 6 * 16
    # one micro-batch: a byte an element, and a bf16 scale for each channel of its one block
    assert held["lm_head"] == tokens * HIDDEN + 2 * HIDDEN


def test_half_precision(ranks: Ranks) -> None:
    for found in ranks.run(half_precision, 1)[0].values():
        assert found["lossless"] == found["without"]
        # INT8's gradients err by about 1 %; a bf16 loss has 3 digits
        assert found["paper"] == pytest.approx(found["without"], rel=5e-3)


def half_precision() -> dict[str, dict[str, list[float]]]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    found: dict[str, dict[str, list[float]]] = {"bf16": {}, "fp16": {}}
    for dtype, losses in found.items():
        for name in ("without", "lossless", "paper"):
            config = ds_config(2, **{dtype: {"enabled": True}})
            engine = make_engine(with_activations(config, SECTIONS[name]))
            losses[name] = train(engine, STEPS)
            engine.destroy()
    return found


# -- swapping -----------------------------------------------------------------------------------------


AIO = {"block_size": 2**16, "queue_depth": 4, "intra_op_parallelism": 2}


def swapped(folder: str, through: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, section in {"without": None, "ssd": to_ssd(Path(folder))}.items():
        config = with_activations(ds_config(2), section)
        if through == "async_io":
            config["aio"] = AIO
        engine = make_engine(config, tiny_llama(layers=6))
        if section is not None:
            files = engine.hmt_activations.memory.files
            found["through"] = type(files.slots.io).__name__
            engine.register_forward_hook(lambda *_, files=files: files.flush())
        losses = train(engine, STEPS)
        sizes = [os.path.getsize(path) for path in glob.glob(f"{folder}/*/*.bin")]
        found[name] = {"losses": losses, "metrics": engine.hmt_metrics.read(), "files": sum(sizes)}
        engine.destroy()
    found["left"] = os.listdir(folder)
    return found


@pytest.mark.parametrize("through", ["threads", "async_io"])
def test_swap_to_ssd_beyond_a_megabyte_of_host_memory(
    ranks: Ranks, tmp_path: Path, through: str
) -> None:
    if through == "async_io":
        from ssd_io import async_io

        async_io()  # or skip
    found = ranks.run(swapped, 1, str(tmp_path), through)[0]
    assert found["through"] == {"threads": "PositionalIO", "async_io": "AsyncIO"}[through]
    assert found["ssd"]["losses"] == found["without"]["losses"]
    metrics = found["ssd"]["metrics"]
    assert metrics["activation_host_bytes"] <= 2**20
    assert metrics["activation_bytes_to_ssd"] > 0
    # Forward waited until all was written: what is read before that comes from pinned memory.
    assert metrics["activation_bytes_from_ssd"] >= metrics["activation_bytes_to_ssd"]
    assert found["ssd"]["files"] >= metrics["activation_bytes_to_ssd"]
    assert [name for name in found["left"] if not name.startswith(".")] == []  # closed: no files


def too_little(section: dict[str, Any]) -> str:
    engine = make_engine(with_activations(ds_config(0), section), tiny_llama(layers=6))
    with pytest.raises(Exception) as caught:
        train(engine, 1)
    engine.destroy()
    return str(caught.value)


def test_too_little_host_memory_names_the_key(ranks: Ranks) -> None:
    text = ranks.run(too_little, 1, TO_HOST)[0]
    assert "hmt.activations.host_memory is" in text


# -- numbers and the table ----------------------------------------------------------------------------


def reported() -> dict[str, Any]:
    section = {"overrides": {r"layers\.1$": {"mlp_intermediate": "fp8"}}}
    engine = make_engine(with_activations(stock_config(2, gas=3), section))
    metrics = []
    for step in range(3):
        train(engine, 1, first=step)
        metrics.append(engine.hmt_metrics.read())
    engine.eval()
    with torch.no_grad():
        loss_of(engine, micro_batches(engine, 0)[0])
    held = engine.hmt_activations.backend.held_bytes
    found = {"metrics": metrics, "held_in_eval": held}
    found["table"] = engine.hmt_activations.describe()
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def one_run(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(reported, 1)[0]


def test_the_numbers_of_a_step(one_run: dict[str, Any]) -> None:
    found = one_run
    first, *_, last = found["metrics"]
    # of one step: the same in each, although micro-batches and steps add up
    for name in ("activation_bytes", "activation_rerun_flops"):
        assert first[name] == last[name] > 0
    layers = last["activation_bytes_per_layer"]
    assert sum(layers.values()) == last["activation_bytes"]
    assert sum(last["activation_bytes_per_component"].values()) == last["activation_bytes"]
    assert found["held_in_eval"] == 0
    names = {name for name, *_ in monitor_events(last, 8)}
    assert {"HMT/activation_bytes", "HMT/activation_bytes_per_layer/model.layers.0"} <= names


def test_the_start_table(one_run: dict[str, Any]) -> None:
    lines = one_run["table"].splitlines()
    assert lines[0] == "hmt: activations of 2 layers, model.layers.0 to model.layers.1"
    rows = {cells[0]: cells[1:] for line in lines if (cells := line.split())}
    assert rows["attention_qkv"] == ["recompute", "6"]
    assert rows["mlp_intermediate"] == ["int8", "4"]
    (exception,) = (line for line in lines if line.startswith("but "))
    assert exception.startswith("but 'layers\\\\.1$': ")
    assert "mlp_intermediate fp8" in exception
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith("swap") for line in lines)


def warned() -> list[str]:
    from deepspeed.utils import logger

    texts: list[str] = []
    logger.warning = lambda text, *args: texts.append(text % args)
    wrong = {"input_layernorm$": "mlp_intermediate", "(gate|up)_proj": "residual"}
    engine = make_engine(with_activations(ds_config(0), {"components": wrong}))
    train(engine, 3)
    engine.destroy()
    return [text for text in texts if "hmt.activations" in text]


def test_a_policy_on_operations_that_are_not_there_is_told(ranks: Ranks) -> None:
    (text,) = ranks.run(warned, 1)[0]
    assert "no operation was found for model.layers.*: mlp_intermediate." in text


# -- resume -------------------------------------------------------------------------------------------


def resumed(folder: str) -> dict[str, Any]:
    config = with_activations(ds_config(2, gas=2), EIGHT_BITS)
    whole = make_engine(config)
    train(whole, 3)
    whole.save_checkpoint(folder)
    losses = train(whole, 2, first=3)
    again = make_engine(config)
    again.load_checkpoint(folder)
    found = {"losses": losses, "again": train(again, 2, first=3)}
    found["apart"] = furthest(model_weights(whole), model_weights(again))
    return found


def test_a_resumed_run_rounds_as_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(resumed, 1, str(tmp_path))[0]
    assert found["again"] == found["losses"]
    assert found["apart"] == 0


# -- Hugging Face's own, and the way back -------------------------------------------------------------


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _tiny_llama(checkpointed: bool) -> Any:
    model: Any = tiny_llama()
    if checkpointed:
        model.activation_checkpointing_enable()
    return model


def taken_over(enabled: bool) -> dict[str, Any]:
    plain, model = (_tiny_llama(enabled) for _ in range(2))
    make_engine(ds_config(0), plain).destroy()
    before = checkpointing_flags(model)
    engine = make_engine(with_activations(ds_config(0), {}), model)
    during = checkpointing_flags(model)
    train(engine, 1)
    rerun = engine.hmt_metrics.read()["activation_rerun_flops_per_component"]
    engine.destroy()
    return {
        "ours": during != before,
        "back": checkpointing_flags(model) == before,
        "hooks": num_hooks(model) - num_hooks(plain),  # DeepSpeed leaves some of its own
        "rerun": set(rerun),
        "forwards": [n for n, m in model.named_modules() if "forward" in vars(m)],
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_ours_takes_over_and_everything_is_put_back(ranks: Ranks, enabled: bool) -> None:
    found = ranks.run(taken_over, 1, enabled)[0]
    assert found["ours"]
    assert found["rerun"] <= {
        "attention_qkv",
        "projected_inputs",
    }  # not all, as with Hugging Face's
    assert found["back"]
    assert found["hooks"] == 0
    assert found["forwards"] == []
