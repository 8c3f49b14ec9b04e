"""Imports point one way, files import one another in no circle, and importing the package has no side effects."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import (
    FLOORS,
    PACKAGE,
    REPO,
    circles,
    inner_room_of,
    module_imports,
    module_name,
    package_files,
    violations,
)


def test_the_walk_finds_the_package():
    assert REPO / PACKAGE / "config" / "optimizer.py" in package_files()


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_imports_point_one_way(path):
    found = violations(path.read_text(encoding="utf-8"), module_name(path), path.relative_to(REPO))
    assert not found, "\n".join(found)


def test_no_files_import_one_another_in_a_circle():
    files = {module_name(path): path for path in package_files()}
    sources = {module: path.read_text(encoding="utf-8") for module, path in files.items()}
    found = circles(module_imports(files, sources))
    text = "\n".join(" -> ".join([*circle, circle[0]]) for circle in found)
    assert not found, f"these import one another in a circle:\n{text}"


@pytest.mark.parametrize("room", FLOORS)
def test_every_inner_room_is_on_one_floor(room):
    there = {inner_room_of(module_name(path)) for path in (REPO / PACKAGE / room).rglob("*.py")}
    assert sorted(" ".join(FLOORS[room]).split()) == sorted(there - {""})


# --- the checker itself -----------------------------------------------------------------------

OPTIM, ZERO, MAIN = "optim/hmt.py", "zero/engine/engine.py", "__main__.py"


def check(file: str, source: str) -> list[str]:
    path = REPO / PACKAGE / file
    return violations(source, module_name(path), path.relative_to(REPO))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("rules.py", "import torch"),
        ("rules.py", "from .config import fields"),
        ("config/optimizer.py", "from .. import version"),
        ("config/optimizer.py", "import torch"),
        ("config/optimizer.py", "from torch import nn"),
        ("config/optimizer.py", "from hmt_deepspeed import sites"),
        ("config/optimizer.py", "from ..optim.settings import MatrixSettings"),
        ("sites.py", "from .optim import settings"),
        ("sites.py", "import hmt_deepspeed"),
        ("kernels/__init__.py", "from ..optim import basis"),
        ("kernels/op.py", "import deepspeed"),
        ("planner/solve/cost.py", "from ...kernels import op"),
        ("planner/solve/cost.py", "from ...optim import assign"),
        (OPTIM, "from .. import HMT"),
        (OPTIM, "from .. import zero"),
        (OPTIM, "from ..zero.engine import HMTEngine"),
        (OPTIM, "def f():\n    from ..memory import host"),
        (OPTIM, "import torch.distributed as dist"),
        (OPTIM, "from torch import distributed"),
        (OPTIM, "from torch.distributed import all_reduce"),
        (OPTIM, "import torch\nranks = torch.distributed.get_world_size()"),
        (OPTIM, "from deepspeed.runtime import utils"),
        (OPTIM, "import importlib\nimportlib.import_module('deepspeed')"),
        (OPTIM, "from importlib import import_module\nimport_module('..zero')"),
        (OPTIM, "__import__('deepspeed.comm')"),
        ("optim/inner/deep.py", "from ... import zero"),
        ("activations/codecs.py", "from ..optim import basis"),
        ("fpdt/block.py", "from ..planner import cost"),
        (ZERO, "from ...train import loop"),
        (ZERO, "from hmt_deepspeed import HMT"),
        ("train/loop.py", "from hmt_deepspeed.zero import engine"),
        ("train/loop.py", "from ..optim.hmt import HMT"),
        ("train/loop.py", "import hmt_deepspeed\nhmt_deepspeed.zero.registration.register()"),
        ("__init__.py", "import deepspeed"),
        ("__init__.py", "def initialize():\n    import deepspeed"),
        ("__init__.py", "from .kernels import op"),
        ("__init__.py", "from .train import loop"),
        (MAIN, "def main():\n    import deepspeed"),
        ("unheard_of/room.py", "import math"),
        ("zero/weights/weight.py", "from hmt_deepspeed.zero.offload import states"),
        ("zero/weights/weight.py", "from ..offload.states import RamStates"),
        (
            "zero/saving/checkpoint.py",
            "if TYPE_CHECKING:\n    from ..engine.engine import HMTEngine",
        ),
        ("zero/compat.py", "from .settings import ZeroSettings"),
        ("zero/cellar/box.py", "from ..settings import ZeroSettings"),
        ("planner/solve/cost.py", "def f():\n    from ..advise import setups"),
        ("optim/settings/matrix.py", "from ..rules.state import stored_bytes"),
    ],
)
def test_checker_refuses(file, source):
    assert check(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config/optimizer.py", "import pydantic"),
        ("config/optimizer.py", "from ..rules import RULES"),
        ("planner/solve/cost.py", "from ... import sites"),
        (
            OPTIM,
            "from .bases import basis\nfrom .rules.state import stored\nfrom ..kernels.op import op",
        ),
        (OPTIM, "import torch\nfrom torch import nn\nx = torch.distributions"),
        ("optim/__init__.py", "from .hmt import HMT\nfrom ..kernels import op"),
        ("optim/rules/deep.py", "from ..bases.basis import new\nfrom ...kernels import op"),
        ("optim/rules/__init__.py", "from ..bases.basis import new\nfrom ...kernels import op"),
        (OPTIM, "import deepspeed_kernels"),
        (
            ZERO,
            "import deepspeed\nfrom ... import config, optim, memory\nfrom .support import refuse",
        ),
        ("train/loop.py", "import deepspeed\nimport hmt_deepspeed\nfrom hmt_deepspeed import HMT"),
        ("train/loop.py", "from ..config import read_json_config\nfrom ..report import page"),
        ("__init__.py", "from .version import __version__\ndef f():\n    from .zero import engine"),
        (MAIN, "from .zero.registration import register"),
        (
            "zero/offload/weight.py",
            "from ..weights.weight import Weight\nfrom .states import ChunkStates",
        ),
        ("planner/solve/cost.py", "from ..run import problem\nfrom ..model.flops import flops"),
    ],
)
def test_checker_accepts(file, source):
    assert check(file, source) == []


def test_checker_says_the_floors_and_the_edge():
    (message,) = check("zero/weights/weight.py", "import torch\nfrom ..offload import states")
    assert "zero/weights/weight.py:2: zero/weights on floor 2" in message
    assert "may not import zero/offload on floor 3 (hmt_deepspeed.zero.offload.states)" in message
    assert message.endswith("2. weights\n  1. sharding\n  0. settings compat operator_locks")


def test_checker_finds_circles():
    imports = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": [], "e": ["f"], "f": ["e"], "g": ["a"]}
    assert circles(imports) == [["a", "b", "c"], ["e", "f"]]
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []


def test_checker_resolves_imports_of_files():
    files = {f"{PACKAGE}.{name}": Path(f"{name}.py") for name in ("one", "two", "three")}
    sources = {
        f"{PACKAGE}.one": "if TYPE_CHECKING:\n    from .two import Thing",
        f"{PACKAGE}.two": "from . import three",
        f"{PACKAGE}.three": "import torch",
    }
    assert module_imports(files, sources) == {
        f"{PACKAGE}.one": [f"{PACKAGE}.two"],
        f"{PACKAGE}.two": [f"{PACKAGE}.three"],
        f"{PACKAGE}.three": [],
    }


# --- side effects -----------------------------------------------------------------------------

PROBE = """
import json, sys
import hmt_deepspeed
effects = {
    "version": hmt_deepspeed.__version__,
    "deepspeed": [name for name in sys.modules if name.partition(".")[0] == "deepspeed"],
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
}
import torch
effects["torch_optim_HMT"] = hasattr(torch.optim, "HMT")
print(json.dumps(effects))
"""


def test_importing_has_no_side_effects():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version = runpy.run_path(str(REPO / PACKAGE / "version.py"))["__version__"]
    assert json.loads(done.stdout) == {
        "version": version,
        "deepspeed": [],
        "cuda": False,
        "torch_optim_HMT": False,
    }
