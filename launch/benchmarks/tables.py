"""The generated tables of the Markdown files, each between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.gpu_table import gpu_table
from benchmarks.presets import preset_table
from benchmarks.recipes import recipe_table, systems_table
from benchmarks.results import RESULTS, headlines
from benchmarks.suites import SUITES
from comparison.cells import Store
from comparison.headline import headline
from hmt_deepspeed.config import HMTConfig, describe_fields
from hmt_deepspeed.config.codecs import CODECS
from hmt_deepspeed.config.components import WITHOUT_CODEC, legal_choices
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import FAMILIES
from hmt_deepspeed.rules import RULES, Rule, Shape
from papers.zero_fpdt import Row, table
from reliability.results import markdown, read_records

__all__ = ["ROOT", "TABLES", "markdown_files", "results_table", "tables_in", "with_tables"]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_CLOSE = 0.05  # a paper's figure counts as found within this share


def results_table(folder: Path = RESULTS) -> str:
    """Every measurement with a target, of all suites below `folder`.

    Raises:
        ValueError: there is none.
    """
    paths = [path for suite in SUITES for path in sorted(folder.glob(f"*/{suite}.json"))]
    if not paths:
        suites = " or ".join(f"`python launch/bench.py {suite}`" for suite in SUITES)
        raise ValueError(f"no results in {folder}: run {suites}")
    return headlines({path: json.loads(path.read_text(encoding="utf-8")) for path in paths})


def config_table() -> str:
    """Every key of the "hmt" block: one table a section, under the section's sentence."""
    lines: list[str] = []
    rows = [(key.removeprefix("hmt."), *rest) for key, *rest in describe_fields()]
    for section, own in groupby(rows, lambda row: row[0].partition(".")[0]):
        lines += ["", f"### `{section}`", "", HMTConfig.model_fields[section].description or "", ""]
        lines += [
            "| key | legal | default | what it does | who needs it |",
            "|---|---|---|---|---|",
        ]
        for key, legal, default, text, who in own:
            cells = (f"`{key}`", legal, f"`{default}`", text, who)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def codecs_table() -> str:
    """Every choice of a policy: what is held, and what that costs."""
    rows = {name: (row.held, row.costs) for name, row in CODECS.items()} | WITHOUT_CODEC
    lines = ["| choice | between forward and backward | costs |", "|---|---|---|"]
    for name in legal_choices("residual") + legal_choices("projected_inputs")[:1]:
        cells = (f"`{name}`", *rows[name])
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def families_table() -> str:
    """Which families each room knows."""

    def named(known: Callable[[Family], object]) -> str:
        return ", ".join(f"`{name}`" for name, row in FAMILIES.items() if known(row))

    return "\n".join(
        [
            "| who knows it | families (`model_type` of the config) |",
            "|---|---|",
            f"| `activations`, by its modules' names | {named(lambda row: True)} |",
            f"| `fpdt`, in chunks | {named(lambda row: row.layer)} |",
            f"| `planner`, by its config alone | {named(lambda row: row.sizes)} |",
        ]
    )


def rules_table() -> str:
    """Every rule: how it is asked for, what it takes, keeps and sums."""
    lines = ["| `hmt.optimizer` | what it is | gradient | states | summed over rows |"]
    lines += ["|---|---|---|---|---|", *map(_rule_row, RULES.values())]
    return "\n".join(lines)


def _rule_row(rule: Rule) -> str:
    asked = {"method": rule.method, **dict(rule.where)}
    states = [(state.name, state.shape) for state in rule.states]
    if rule.bases == "found":
        states.append(("basis", ("columns", "rank")))
    sums = [(found.name, found.shape) for found in rule.sums]
    cells = (
        f"`{json.dumps(asked)[1:-1]}`",
        rule.text,
        rule.gradient,
        ", ".join(f"`{name}` {_written(shape)}".strip() for name, shape in states),
        ", ".join(f"{name} {_written(shape)}".strip() for name, shape in sums),
    )
    return f"| {' | '.join(cells)} |"


def _written(shape: Shape) -> str:
    """A shape as the field writes it; nothing of a number."""
    letters = {"rows": "m", "columns": "n", "rank": "r", 1: "1"}
    return " x ".join(letters[axis] for axis in shape)


def planner_table() -> str:
    """How many of the papers' figures the planner finds, and those that it does not."""
    path = RESULTS / "planner" / "reproduce.json"
    records = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**{k: v for k, v in own.items() if k != "difference"}) for own in records]
    missed = [row for row in rows if not _found(row)]
    found = f"{len(rows) - len(missed)} of {len(rows)} figures are within {_CLOSE:.0%}, or true. The others:"
    return f"{found}\n\n{table(missed)}"


def _found(row: Row) -> bool:
    if row.difference is None:
        return row.paper == row.ours
    return abs(row.difference) <= _CLOSE


def _store() -> Store:
    return Store(RESULTS / "compare", ROOT / "runs" / "compare")


TABLES: dict[str, Callable[[], str]] = {
    "results": results_table,
    "gpu": lambda: gpu_table(RESULTS),
    "planner": planner_table,
    "stress": lambda: markdown(read_records(RESULTS)),
    "compare": lambda: headline(_store()),
    "presets": lambda: preset_table(RESULTS),
    "recipes": lambda: recipe_table(RESULTS),
    "systems": lambda: systems_table(RESULTS),
    "config": config_table,
    "codecs": codecs_table,
    "families": families_table,
    "rules": rules_table,
}


def markdown_files() -> Iterator[Path]:
    """The project's Markdown files, without those of hidden folders and of runs."""
    for path in sorted(ROOT.rglob("*.md")):
        top = path.relative_to(ROOT).parts[0]
        if not top.startswith(".") and top != "runs":
            yield path


def tables_in(text: str) -> list[tuple[str, str]]:
    """(name, content) of the marked tables of a Markdown text."""
    return [(found[2], found[3].strip()) for found in _BLOCK.finditer(text)]


def with_tables(text: str) -> str:
    """The text with every marked table as the committed results and the models have it now.

    Raises:
        ValueError: a table has a name that no one makes.
    """

    def made(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"table {found[2]}: unknown. Legal: {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[found[2]]()}\n{found[4]}"

    return _BLOCK.sub(made, text)
