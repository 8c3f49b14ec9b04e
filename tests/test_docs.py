"""The Markdown files: generated tables are current, links lead somewhere, examples are legal."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.tables import TABLES, markdown_files, tables_in
from hmt_deepspeed.config import HMTConfig

ROOT = Path(__file__).resolve().parents[1]

FILES = [str(path.relative_to(ROOT)) for path in markdown_files()]
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(markdown: str) -> set[str]:
    """As GitHub makes them of headings."""
    counted: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _FENCED.sub("", markdown), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{counted[slug]}" if counted[slug] else slug)
        counted[slug] += 1
    return found


def test_every_table_stands_somewhere_and_is_current() -> None:
    found = [own for name in FILES for own in tables_in(text_of(name))]
    assert sorted(name for name, _ in found) == sorted(TABLES)
    for name, content in found:
        advice = f"{name}: run `python launch/bench.py table --write`"
        assert content == TABLES[name]().strip(), advice


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    for link in _LINK.findall(_FENCED.sub("", text_of(name))):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_pages_that_the_code_names_are_there() -> None:
    named = set()
    for folder in ("hmt_deepspeed", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"[\w/]+/README\.md", path.read_text(encoding="utf-8")))
    assert named
    assert {page for page in named if not (ROOT / page).exists()} == set()


@pytest.mark.parametrize("name", FILES)
def test_blocks_that_are_shown_are_legal(name: str) -> None:
    """What stands in a file as `"hmt": {...}`, inline or as a fenced JSON."""
    text = text_of(name)
    fenced = re.findall(r"^ *```json\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`(\"hmt\": \{[^`]*\})`", _FENCED.sub("", text))
    problems = []
    for shown in [*inline, *(block.strip() for block in fenced)]:
        found = json.loads(shown if shown.startswith("{") else f"{{{shown}}}")
        try:
            HMTConfig.from_block(found.get("hmt", {}))
        except ValueError as error:
            problems.append(str(error))
    assert problems == []


def test_every_config_is_listed() -> None:
    folder = ROOT / "ds_configs"
    listed = set(re.findall(r"\]\((\w+\.(?:json|yaml))\)", text_of("ds_configs/README.md")))
    assert listed == {path.name for path in folder.iterdir() if path.suffix in (".json", ".yaml")}
