"""DeepSpeed's private names are looked for before anything is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

import hmt_deepspeed
from hmt_deepspeed.zero.compat import PRIVATE, check_deepspeed


def test_every_private_name_in_use_is_listed() -> None:
    listed = {f"_{name}__{one}" for (_, name), hidden in PRIVATE.items() for one in hidden}
    files = Path(hmt_deepspeed.__file__).parent.rglob("*.py")
    used = {m for f in files for m in re.findall(r"\b_[A-Z][A-Za-z]+__\w+", f.read_text("utf-8"))}
    assert used == listed


def test_a_deepspeed_without_one_of_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = PartitionedParameterCoordinator
    check_deepspeed()
    with monkeypatch.context() as changes:
        changes.setattr(owner, "__init__", lambda self: None)
        with pytest.raises(ImportError, match=r"Coordinator\.__prefetch_bucket_sz"):
            check_deepspeed()
    monkeypatch.delattr(owner, "_PartitionedParameterCoordinator__release_param")
    with pytest.raises(ImportError, match=r"Coordinator\.__release_param"):
        check_deepspeed()
