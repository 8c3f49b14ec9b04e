"""Importing the room touches no device and no library that only some users have."""

import json
import subprocess
import sys
from pathlib import Path

import hmt_deepspeed.memory

PROBE = """
import importlib, json, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(f"hmt_deepspeed.memory.{name}")
import torch
print(json.dumps([
    torch.cuda.is_initialized(), "deepspeed" in sys.modules, threading.active_count()
]))
"""


def test_importing_does_nothing():
    folder = Path(hmt_deepspeed.memory.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert {"transfer", "host", "nvme"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [False, False, 1]
