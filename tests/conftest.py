from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

# Before torch is loaded: test workers and ranks share the cores, where threads that wait for each other's
# turns cost up to a hundred times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_operators_are_there = False


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start import what pyproject.toml's ``pythonpath`` lets tests import."""
    paths = [*map(str, config.getini("pythonpath")), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    """DeepSpeed's operators, once for all workers and before the first test.

    Compiling takes minutes, which no test's time limit allows for. The controller does it while its other
    workers collect; with ``-n0`` the first test that needs an operator compiles it.
    """
    global _operators_are_there
    if _operators_are_there:
        return
    _operators_are_there = True
    terminal = node.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line("DeepSpeed's operators: loading; compiling takes minutes, the first time")
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "operators"], env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    if done.returncode:
        pytest.exit("DeepSpeed's operators do not build here, see above", returncode=1)
    terminal.write_line(f"DeepSpeed's operators: there after {time.monotonic() - begin:.0f} s")


@pytest.fixture(scope="session")
def async_io_builds() -> None:
    """Skips where DeepSpeed's ``async_io`` does not; asked once, and not by every rank that imports a test."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io does not build here: libaio's headers are missing")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Runs cases on real gloo ranks, see ``zero/harness.py``; one zygote for the whole session."""
    from harness import Ranks

    client = Ranks()
    yield client
    client.close()
