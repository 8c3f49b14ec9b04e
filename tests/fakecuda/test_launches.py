"""What one step asks of a device; see `count.py` for the table behind a number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COUNT = Path(__file__).with_name("count.py")
LAYERS = 2


def counted(mode: str, layers: int = LAYERS) -> dict:
    done = subprocess.run(
        [sys.executable, str(COUNT), mode, str(layers), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_ordinary_step_waits_for_nothing():
    found = counted("right")
    for phase in found["ordinary"].values():
        assert phase["waits"] == 0
        assert phase["unpinned"] == 0
    assert found["first"]["step"]["waits"] > 0
    assert found["ordinary"]["step"]["launches"] < found["refresh"]["step"]["launches"]
