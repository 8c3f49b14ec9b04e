"""Cells and queues of the toy that the tests of `launch/compare.py` train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.cells import Cell, Setting, Store
from comparison.stages import Plan
from comparison.training import Run
from comparison.variants import VARIANTS, Variant

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
TRAINED = ("adamw", "galore", "fira", "apollo", "apollo_mini", "hmt_d4")
_RATES = (1e-2, 5e-3, 2e-2)


def _hmt(**fields: Any) -> Variant:
    own = {"method": "lowrank_adamw", "rank": "d/4", "scale": 0.25, "update_interval": 50, **fields}
    return Variant("hmt", {"optimizer": own}, _RATES)


def with_activations(variant: Variant, block: dict[str, Any]) -> Variant:
    return replace(variant, options={**variant.options, "activations": block})


# What these tests train beside the table's, while they run: every kind of variant, with a basis for the whole of a toy's run.
OWN = {
    "galore": Variant(
        "galore", {"rank": "d/4", "update_proj_gap": 50, "scale": 0.25, "proj_type": "std"}, _RATES
    ),
    "fira": Variant(
        "fira",
        {"rank": "d/4", "update_proj_gap": 50, "scale": 0.25, "norm_growth_limit": 1.01},
        _RATES,
    ),
    **{
        name: Variant(
            "apollo",
            {"update_proj_gap": 50, "proj": "random", "proj_type": "std", **options},
            _RATES,
        )
        for name, options in {
            "apollo": {"rank": "d/4", "scale": 1.0, "scale_type": "channel"},
            "apollo_mini": {"rank": 1, "scale": 128.0, "scale_type": "tensor"},
        }.items()
    },
    "hmt_d4": _hmt(),
    "hmt_auto_side_d4": _hmt(projection="auto"),
    "hmt_left_d4": _hmt(projection="left"),
    "hmt_two_sided_d2": _hmt(projection="two_sided", rank="d/2"),
    "hmt_full_residual_d4": _hmt(residual="full"),
    "hmt_unpatched": _hmt(projected_backward=False),
    "hmt_int8_weights_d4": _hmt(weight_dtype="int8"),
    "hmt_energy": _hmt(rank="auto", rank_candidates=["d/8", "d/4", "d/2"]),
    "hmt_apollo": Variant("hmt", {"optimizer": {"method": "apollo"}}, _RATES),
    "hmt_apollo_mini": Variant("hmt", {"optimizer": {"method": "apollo_mini"}}, _RATES),
    "hmt_apollo_head": _hmt(
        projection="auto",
        module_rules={"embed_tokens": {"method": "apollo"}, "lm_head": {"method": "apollo"}},
    ),
}
_ENCODED = {"policy": {"projected_inputs": "project"}}
OWN["hmt_activations"] = with_activations(OWN["hmt_auto_side_d4"], _ENCODED)
OWN["hmt_energy_activations"] = with_activations(
    _hmt(projection="auto", rank="auto", rank_candidates=["d/8", "d/4", "d/2"]), _ENCODED
)
TABLE = dict(VARIANTS)  # of the command, without those of tests


def cell(setting: Setting, data: Any, variant: str, lr: float | None = None) -> Cell:
    lr = lr or VARIANTS[variant].learning_rates[0]
    tokens = STEPS * setting.step_tokens
    return Cell("sweep", variant, lr, 0, tokens, setting, data.digest)


def two_steps(variant: str, setting: Setting, data: Any, store: Store) -> Run:
    run = Run(replace(cell(setting, data, variant), tokens=2 * setting.step_tokens), data, store)
    run.train_step()
    run.train_step()
    return run


def plan(setting: Setting, folder: Path, stage: str, **more: Any) -> Plan:
    return Plan(stage, setting, 1000, (0,), cache=str(folder / "cache"), base_tokens=500, **more)


def markdown_rows(text: str) -> dict[str, dict[str, str]]:
    """Rows of a Markdown table by their first cell; each must have as many cells as the headers."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([word.strip() for word in line] for line in lines)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}
