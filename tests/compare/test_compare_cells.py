"""The file of finished cells: order, bytes, several processes, damage; and the committed one."""

from __future__ import annotations

import hashlib
import json
import lzma
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare_runs import ROOT, TABLE

from comparison import frontier
from comparison.cells import Cell, Setting, Store, add_cells, read_cells
from comparison.report import newest_speed, report_text, summaries

COMMITTED = ROOT / "launch" / "results" / "compare"
KILLED = 9


def record(key: str, **more: Any) -> dict[str, Any]:
    return {"key": key, "lr": 1e-3, "curve": [0.1 + 0.2, 1e-8], **more}


def in_a_process(act: Callable[..., None], *args: Any) -> Any:
    """Forked: the child needs what this process has imported, and starts no thread."""
    process = multiprocessing.get_context("fork").Process(target=act, args=args)
    process.start()
    return process


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_lines_are_sorted_by_key_and_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "results" / "cells.jsonl.xz"
    assert read_cells(path) == {}
    for key in ("c", "a", "b"):
        add_cells(path, [record(key)])
    assert list(read_cells(path).items()) == [(key, record(key)) for key in "abc"]
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    assert lines == [json.dumps(record(key)) for key in "abc"]


def test_the_same_cells_are_the_same_bytes(tmp_path: Path) -> None:
    for name, keys in (("one", "abc"), ("other", "cbab")):
        for key in keys:
            add_cells(tmp_path / name, [record(key)])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    add_cells(tmp_path / "one", [record("b", lr=2e-3)])
    assert read_cells(tmp_path / "one") == {
        "a": record("a"),
        "b": record("b", lr=2e-3),
        "c": record("c"),
    }


def test_a_store_finds_the_cells_it_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "results", tmp_path / "runs")
    setting = Setting("toy", "text", None, 320)
    finished, skipped, absent = (
        Cell("sweep", "adamw", lr, 0, 1000, setting, "digest") for lr in (1e-3, 2e-3, 4e-3)
    )
    store.write(finished, {"val_loss": 2.0})
    store.write(skipped, {"skipped": "no CUDA"})
    found = [store.is_finished(own) for own in (finished, skipped, absent)]
    assert found == [True, False, False]
    assert [own["lr"] for own in store.records()] == [1e-3, 2e-3]
    store.write(skipped, {"val_loss": 3.0})  # on a machine that can
    assert store.is_finished(skipped)


def test_another_machines_cells_are_merged_and_finished_ones_stay(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "results", tmp_path / "runs"), tmp_path / "other.jsonl.xz"
    add_cells(store.cells, [record("a"), record("b", skipped="no CUDA"), record("c")])
    theirs = [record("b"), record("c", lr=2e-3), record("d"), record("a", skipped="no CUDA")]
    add_cells(other, theirs)
    assert store.merge(other) == ["b", "d"]
    assert store.records() == [record(key) for key in "abcd"]
    assert store.merge(other) == []
    with pytest.raises(ValueError, match=r"absent\.jsonl\.xz is no file"):
        store.merge(tmp_path / "absent.jsonl.xz")


def _add_many(path: Path, prefix: str) -> None:
    for number in range(20):
        add_cells(path, [record(f"{prefix}{number:02}")])


def test_two_processes_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl.xz"
    processes = [in_a_process(_add_many, path, prefix) for prefix in "ab"]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert list(read_cells(path)) == [f"{prefix}{n:02}" for prefix in "ab" for n in range(20)]


def _die_before_the_replacement(path: Path) -> None:
    os.replace = lambda *_: os._exit(KILLED)
    add_cells(path, [record("b")])


def test_a_process_killed_before_the_replacement_loses_nothing_finished(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl.xz"
    add_cells(path, [record("a")])
    before = path.read_bytes()
    process = in_a_process(_die_before_the_replacement, path)
    process.join(60)
    assert process.exitcode == KILLED
    assert path.read_bytes() == before
    # Its lock went with it, and what it left beside the file is written over.
    assert ".cells.jsonl.xz.tmp" in names(tmp_path)
    add_cells(path, [record("c")])
    assert list(read_cells(path)) == ["a", "c"]
    assert names(tmp_path) == {"cells.jsonl.xz", ".cells.jsonl.xz.lock"}


def test_a_damaged_file_is_one_error_and_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl.xz"
    add_cells(path, [record("a")])
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    no_key = lzma.compress(b'{"lr": 0.001}\n')
    half_a_line = lzma.compress(b'{"key": "a", "lr":')
    damaged = (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        bytes(flipped),
        b"{}",
        no_key,
        half_a_line,
    )
    for content in (*damaged, lzma.compress(b"[1]\n"), lzma.compress(b"\xff\n")):
        path.write_bytes(content)
        for act in (lambda: read_cells(path), lambda: add_cells(path, [record("b")])):
            with pytest.raises(ValueError, match="git checkout") as error:
                act()
            assert str(path) in str(error.value)
        assert path.read_bytes() == content


# -- the committed results --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, Any]]:
    return read_cells(COMMITTED / "cells.jsonl.xz")


def test_every_committed_cell_is_under_the_key_of_what_decides_it(
    committed: dict[str, dict[str, Any]],
) -> None:
    assert len(committed) >= 242
    assert list(committed) == sorted(committed)
    decides = ("stage", "variant", "lr", "seed", "tokens", "setting", "text", "start")
    swept = ("embedding_lr_scale", "decay")  # in no cell that has the variant's and the setting's
    for key, own in committed.items():
        names = (*decides, *(name for name in swept if name in own), "kind", "options")
        fields = {name: own[name] for name in names}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:10]
        words = zip(("-embeddings", "-decay"), swept, strict=True)
        beside = "".join(f"{word}{own[name]:g}" for word, name in words if name in own)
        name = f"{own['stage']}-{own['variant']}-lr{own['lr']:g}{beside}-seed{own['seed']}"
        assert own["key"] == key == f"{name}-{digest}"
        assert "skipped" in own or own["val_loss"] is not None or own["diverged"]


def test_the_committed_file_is_what_adding_its_cells_writes(
    committed: dict[str, dict[str, Any]],
) -> None:
    """So that the next cell changes its own line alone."""
    lines = lzma.decompress((COMMITTED / "cells.jsonl.xz").read_bytes()).decode().splitlines()
    assert lines == [json.dumps(own) for own in committed.values()]


def test_every_variant_that_the_texts_name_has_cells(
    committed: dict[str, dict[str, Any]],
) -> None:
    pages = (COMMITTED / "findings.md", ROOT / "launch" / "README.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`(hmt_\w+)`", text)) - {"hmt_deepspeed"}
    assert named
    finished = {own["variant"] for own in committed.values() if "skipped" not in own}
    assert named - finished == set()


def test_the_report_is_what_the_cells_say(
    committed: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python launch/compare.py report` writes it."""
    monkeypatch.setattr(frontier, "VARIANTS", TABLE)
    experiments = summaries(list(committed.values()), newest_speed(COMMITTED))
    assert (COMMITTED / "report.md").read_text(encoding="utf-8") == report_text(experiments)
