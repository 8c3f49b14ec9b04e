"""Cells and queues of the toy that the tests of `launch/compare.py` train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.cells import Cell, Setting, Store
from comparison.stages import Plan
from comparison.training import Run
from comparison.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
TRAINED = ("adamw", "galore", "fira", "apollo", "apollo_mini", "hmt_d4")


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
