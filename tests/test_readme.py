"""The README says what the code does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hmt_deepspeed.config import describe_fields

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = README.parent / "launch" / "results"


def config_rows() -> list[str]:
    """The lines of the README's table of the "hmt" block."""
    return [
        f"| `{key.removeprefix('hmt.')}` | {legal} | `{default}` | {text.replace('|', chr(92) + '|')} |"
        for key, legal, default, text in describe_fields()
    ]


def test_every_field_of_the_block_is_in_the_readme_as_it_is_in_the_model() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    begin = lines.index("<!-- table: config -->")
    end = lines.index("<!-- end -->", begin)
    assert lines[begin + 3 : end] == config_rows()


def test_the_numbers_are_what_the_result_files_say() -> None:
    command = [sys.executable, str(README.parent / "launch" / "bench.py"), "table"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = README.read_text(encoding="utf-8")
    block = text.split("<!-- table: results -->\n")[1].split("<!-- end -->")[0]
    assert block.strip() == printed.strip()


def test_the_figures_of_stress_are_what_the_result_files_say() -> None:
    sys.path.insert(0, str(README.parent / "launch"))
    from reliability.results import markdown, read_records

    records = read_records(RESULTS)
    assert records
    text = README.read_text(encoding="utf-8")
    block = text.split("<!-- table: stress -->\n")[1].split("<!-- end -->")[0]
    assert block.strip() == markdown(records).strip()


def test_the_comparison_is_what_the_cells_say() -> None:
    sys.path.insert(0, str(README.parent / "launch"))
    from comparison.cells import Store
    from comparison.headline import headline

    text = README.read_text(encoding="utf-8")
    block = text.split("<!-- table: compare -->\n")[1].split("<!-- end -->")[0]
    assert block.strip() == headline(Store(RESULTS / "compare", README.parent / "runs")).strip()


def test_the_recipes_predictions_are_what_the_result_file_says() -> None:
    text = README.read_text(encoding="utf-8")
    rows = text.split("<!-- table: recipes -->\n")[1].split("<!-- end -->")[0].splitlines()[2:]
    paths = README.parent.glob("launch/results/*/planner.json")
    cases = [json.loads(path.read_text(encoding="utf-8"))["cases"] for path in paths]
    measured_cases = [own["recipes"] for own in cases if "recipes" in own]
    case = max(measured_cases, key=lambda recipes: recipes["measured_at"])
    found: dict[str, list[str]] = {}
    for measured in case["measurements"]:
        label, what = measured["label"].rsplit(": ", 1)
        value = measured["value"]
        shown = f"{value / 2**30:.1f}" if "memory" in what else f"{value:,.0f}"
        found.setdefault(label, []).append(shown)
    assert len(rows) == len(found) == len(list(README.parent.glob("ds_configs/recipe_*.json")))
    for row, (label, values) in zip(rows, found.items(), strict=True):
        assert row.startswith(f"| {label} | `ds_configs/recipe_")
        assert all(f"| {value} " in row for value in values)
