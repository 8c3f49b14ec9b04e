"""`launch/bench.py` as a command of an interpreter that has imported its suites: contenders are forks too."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

BENCH = str(Path(__file__).resolve().parents[1] / "launch" / "bench.py")

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import forked

    from benchmarks import gpu

    gpu.subprocess = SimpleNamespace(run=forked.run)
    sys.argv[0] = BENCH
    runpy.run_path(BENCH, run_name="__main__")
