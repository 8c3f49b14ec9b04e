"""What the planner predicts for the recipes: ``ds_configs/recipe_*.json`` on named machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import Setting
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.planner.advise.advise import Answer, advise
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.hardware import Machine, named_machine
from hmt_deepspeed.planner.model.models import model_shape, shape_of_architecture
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.run.fpdt import fpdt_bytes
from hmt_deepspeed.planner.run.modes import OptimizerMode

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
VOCABULARY, OPT_VOCABULARY = 32000, 50272
GIB = 2**30
GOALS = {  # of ds_configs/recipe_NAME.json
    "7b_24gb": "7B on one RTX 4090, 64 GiB of host memory",
    "13b_256gb_ram": "13B on one RTX 4090, 256 GiB of host memory",
    "4_cards_pcie": "7B on four RTX 4090",
    "moe_80gb": "Qwen3-30B-A3B on one H100 80 GB",
    "70b_24gb": "70B on one RTX 4090, 192 GiB of host memory",
    "175b_24gb": "175B on one RTX 4090, 384 GiB of host memory",
    "1m_tokens": "7B, sequences of 1,048,576 tokens, two A100 80 GB",
}
COLUMNS = (  # of the table, with the kinds of measurement that they show
    ("tokens/s", ("tokens/s",)),
    ("GPU, GiB each", ("GPU memory",)),
    ("host, GiB", ("host memory", "host memory of a rank")),
    ("longest sequence", ("longest sequence",)),
)
NOTE = "predicted for a named machine, whose rates are taken from data sheets; not measured"


def _json(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"recipe_{name}.json").read_text(encoding="utf-8")))


def _mode(config: dict[str, Any]) -> OptimizerMode:
    return OptimizerMode(**config["hmt"]["optimizer"])


def _mixture() -> ModelShape:
    """Qwen3-30B-A3B, by the sizes of its config."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151936,
        num_hidden_layers=48,
        hidden_size=2048,
        head_dim=128,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    return shape_of_architecture(config)


def _answer(name: str, shape: ModelShape, machine: Machine, seq_length: int) -> tuple[Answer, int]:
    """The recipe's own setup, planned; and its longest sequence."""
    config = _json(name)
    policy = config["hmt"].get("activations", {}).get("policy", {})
    zero, micro_batch = config["zero_optimization"], config["train_micro_batch_size_per_gpu"]
    mode, offloads = _mode(config), "offload_optimizer" in zero
    found = advise(
        Request(
            shape,
            machine,
            seq_length,
            micro_batch,
            micro_batch * machine.num_gpus * config["gradient_accumulation_steps"],
            modes=(mode,),
            cpu_adam=offloads,
            zero_stage=zero["stage"],
            offload_param=zero.get("offload_param", {}).get("device", "none"),
            nvme=False,
            fixed=None if policy == "plan" else PAPER_POLICY | policy,
        )
    )
    order = config["hmt"].get("accumulation") == "vertical"
    (answer,) = [
        a
        for a in found.answers
        if (a.problem.setup.offload_optimizer == "cpu") == offloads
        and a.problem.setup.vertical == order
    ]
    return answer, found.longest_sequence if found.best is answer else 0


def _planned(name: str, answer: Answer, longest: int) -> list[Measurement]:
    label = GOALS[name]
    if answer.plan is None:
        raise RuntimeError(f"{label} does not fit: {answer.estimate.excess()}")
    peak, swapped = answer.estimate.peak, answer.estimate.memory["host"]
    allowed = _json(name)["hmt"].get("activations", {}).get("host_memory", "auto")
    if allowed != "auto" and allowed < (needs := swapped["activations"] + swapped["staging"]):
        raise RuntimeError(f"{label}: activations.host_memory is {allowed}, below {needs:.0f}")
    return [
        Measurement(f"{label}: tokens/s", answer.tokens_per_second, "tokens/s", note=NOTE),
        Measurement(f"{label}: GPU memory", peak("gpu"), "bytes", note=NOTE),
        Measurement(f"{label}: host memory", peak("host"), "bytes", note=NOTE),
        Measurement(f"{label}: longest sequence", longest, "tokens", note=NOTE),
    ]


def _in_chunks(label: str, machine: Machine, shape: ModelShape, length: int) -> list[Measurement]:
    """Memory of the recipe for long sequences: the states of its setup, and what its chunks need."""
    config = _json("1m_tokens")
    fpdt = config["hmt"]["fpdt"]
    ranks = fpdt["sequence_parallel_size"]
    stage = config["zero_optimization"]["stage"]
    request = Request(
        shape, machine, 2048, modes=(_mode(config),), cpu_adam=False, zero_stage=stage,
        offload_param="none",
    )  # fmt: skip
    kinds = ("weights", "optimizer states", "gradients", "gathered weights", "probes")
    held = advise(request).best.estimate.memory["gpu"]
    needed = fpdt_bytes(
        shape,
        length,
        fpdt["chunk_size"],
        sequence_parallel=ranks,
    )
    inputs = (shape.layers + 1) * (length // ranks) * shape.hidden * 2  # bf16, swapped to the host
    gpu = sum(held.get(kind, 0.0) for kind in kinds) + needed.device - inputs
    return [
        Measurement(f"{label}: GPU memory", gpu, "bytes", note=NOTE),
        Measurement(f"{label}: host memory of a rank", needed.host + inputs, "bytes", note=NOTE),
    ]


def recipes(setting: Setting) -> CaseResult:
    result = CaseResult({"recipes": sorted(path.name for path in CONFIGS.glob("recipe_*.json"))})
    one = named_machine("rtx4090", num_gpus=1, host_memory=64 * GIB)
    large = named_machine("rtx4090", num_gpus=1, host_memory=256 * GIB)
    four = named_machine("rtx4090", num_gpus=4, host_memory=256 * GIB)
    roomy, roomiest = (
        named_machine("rtx4090", num_gpus=1, host_memory=size * GIB) for size in (192, 384)
    )
    two = named_machine("a100-80g", num_gpus=2, host_memory=1024 * GIB)
    h100 = named_machine("h100", num_gpus=1, host_memory=64 * GIB)
    small, medium, huge = (model_shape(size, VOCABULARY) for size in ("7b", "13b", "70b"))
    asked: list[tuple[str, ModelShape, Machine, int]] = [
        ("7b_24gb", small, one, 2048),
        ("13b_256gb_ram", medium, large, 2048),
        ("4_cards_pcie", small, four, 4096),
        ("moe_80gb", _mixture(), h100, 2048),
        ("70b_24gb", huge, roomy, 1024),
        ("175b_24gb", model_shape("gpt-175b", OPT_VOCABULARY), roomiest, 1024),
    ]
    for name, shape, machine, seq_length in asked:
        result.measurements += _planned(name, *_answer(name, shape, machine, seq_length))
    result.measurements += _in_chunks(GOALS["1m_tokens"], two, small, 2**20)
    return result


def _newest(results: Path) -> dict[str, float]:
    """The newest predictions among the results, by label.

    Raises:
        ValueError: `results`/MACHINE/planner.json has none.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in results.glob("*/planner.json")]
    cases = [report["cases"]["recipes"] for report in reports if "recipes" in report["cases"]]
    if not cases:
        raise ValueError(f"no recipes in {results}: run `python launch/bench.py planner`")
    newest = max(cases, key=lambda case: str(case["measured_at"]))
    return {measured["label"]: measured["value"] for measured in newest["measurements"]}


def recipe_table(results: Path) -> str:
    """One line a recipe; ValueError as of :func:`_newest`."""
    found = _newest(results)
    headers = ("goal", "JSON", *(header for header, _ in COLUMNS))
    lines: list[Sequence[str]] = [headers, ["---"] * len(headers)]
    for name, goal in GOALS.items():
        path = f"recipe_{name}.json"
        cells = [_cell(found, goal, kinds) for _, kinds in COLUMNS]
        lines.append((goal, f"[{path}]({path})", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What other systems report of themselves: model and card, host memory, SSDs, speed.
SYSTEMS = (
    (
        "LoHan",
        "175B, RTX 4090",
        "256 GB (its machine: 768)",
        "16 bytes a parameter, 2.8 TB on 12",
        "86.9 TFLOPS: 83 tokens/s at 6 FLOPs a parameter and token, 62 at 8",
    ),
    (
        "ZeRO-Infinity, as LoHan ran it",
        "up to 135B, RTX 4090",
        "768 GB",
        "16 bytes a parameter",
        "13B: 1 / 3.46 of LoHan's 155.8 TFLOPS",
    ),
    (
        "GreedySnake",
        "65B and 175B, A100",
        "not known",
        "states on SSDs",
        "1.96 and 2.53 times ZeRO-Infinity",
    ),
    (
        "MegaTrain",
        "up to 120B, H200",
        "1.5 TB",
        "none",
        "14B: 1.84 times ZeRO-3 with offload; 120B: not known",
    ),
)


def systems_table(results: Path) -> str:
    """Other systems beside the recipes of models that no card holds; ValueError as of :func:`_newest`."""
    found = _newest(results)
    rows = [("system", "model, card", "host memory", "SSD", "reached"), ("---",) * 5, *SYSTEMS]
    for name in ("70b_24gb", "175b_24gb"):
        goal = GOALS[name]
        memory, speed = (_cell(found, goal, (kind,)) for kind in ("host memory", "tokens/s"))
        model = f"{goal.partition(' on ')[0]}, RTX 4090"
        rows.append(
            (
                f"[HMT](ds_configs/recipe_{name}.json)",
                model,
                f"{memory} GiB",
                "none",
                f"{speed} tokens/s, predicted",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(found: Mapping[str, float], goal: str, kinds: tuple[str, ...]) -> str:
    for kind in kinds:
        if (value := found.get(f"{goal}: {kind}")) is not None:
            shown = f"{value / GIB:.1f}" if "memory" in kind else f"{value:,.0f}"
            return shown + (" a rank" if kind.endswith("of a rank") else "")
    return "-"


CASES: dict[str, Callable[[Setting], CaseResult]] = {"recipes": recipes}
