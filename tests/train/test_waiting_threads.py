"""How long threads of the main job spin where they wait for one another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "launch" / "run.py"
# Ends where torch is first asked for: libgomp reads its environment when it is loaded.
PROBE = f"""
import os, runpy, sys
class Probe:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            os._exit(sys.stdout.flush() or 7)
sys.meta_path.insert(0, Probe())
runpy.run_path({str(RUN)!r})
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_it_is_short_before_torch_is_loaded_unless_one_is_given(
    given: dict[str, str], expected: str
) -> None:
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env={**environment, **given}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (7, expected), done.stderr[-2000:]
