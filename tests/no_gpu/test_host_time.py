"""`host_time.py` runs with the kernels of today."""

import re
from pathlib import Path

import pytest
from harness import Ranks

SCRIPT = str(Path(__file__).with_name("host_time.py"))


@pytest.mark.parametrize("option", ["rank=16", "method=muon"])
def test_a_step_with_stubs_for_kernels_takes_time(ranks: Ranks, option: str) -> None:
    done = ranks.command(SCRIPT, "--layers", "1", "--option", option)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^(\w+) +([0-9.]+) ms$", done.stdout, re.MULTILINE)
    assert [phase for phase, _ in found] == ["forward", "backward", "step"]
    assert all(float(ms) > 0 for _, ms in found)
