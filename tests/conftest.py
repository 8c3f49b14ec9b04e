from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded: test workers and ranks share the cores, where threads that wait for each other's
# turns cost up to a hundred times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent / "zero"))  # harness and training


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Runs cases on real gloo ranks, see ``zero/harness.py``; one zygote for the whole session."""
    from harness import Ranks

    client = Ranks()
    yield client
    client.close()
