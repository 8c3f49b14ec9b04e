"""A toy model on toy files, and one finished cell of every kind of variant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compare_runs import OWN, TRAINED, cell

from comparison.cells import Setting, Store
from comparison.corpus import pretraining_text
from comparison.training import train_cell
from comparison.variants import VARIANTS


@pytest.fixture(scope="module", autouse=True)
def own_variants() -> Iterator[None]:
    """In the table as long as these tests run: others read it too."""
    with _own_variants():
        yield


@contextmanager
def _own_variants() -> Iterator[None]:
    before = dict(VARIANTS)
    VARIANTS.update(OWN)
    try:
        yield
    finally:
        VARIANTS.clear()
        VARIANTS.update(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="session")
def setting(folder: Path) -> Setting:
    """Forty small files: their words recur, so that a toy learns something in thirty steps."""
    data = folder / "text"
    data.mkdir()
    for number in range(40):
        lines = [
            f'def f{i}(x):\n    """Add {i}."""\n    return x + {i}\n' for i in range(number, 99)
        ]
        (data / f"{number:02}.py").write_text("\n".join(lines), encoding="utf-8")
    return Setting(
        model="toy",
        data=str(data),
        finetune_data=None,
        vocab_size=320,
        seq_length=32,
        batch_rows=4,
        eval_rows=16,
    )


@pytest.fixture(scope="session")
def data(setting: Setting, folder: Path) -> Any:
    return pretraining_text(setting, str(folder / "cache"))


@pytest.fixture(scope="session")
def store(folder: Path) -> Store:
    return Store(folder / "results", folder / "runs")


@pytest.fixture(scope="session")
def results(setting: Setting, data: Any, store: Store) -> dict[str, dict[str, Any]]:
    """One finished sweep cell of every kind of variant."""
    found = {}
    with _own_variants():
        for name in TRAINED:
            result = train_cell(cell(setting, data, name), data, store)
            assert result is not None
            found[name] = result
    return found
