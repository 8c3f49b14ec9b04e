"""Imports point one way, files import one another in no circle, and importing the package has no side effects.

A room is a top-level file or folder of the package; `__init__` is the package itself. Rooms that are large have
inner rooms, which lie on floors. An import for type checkers only is an import.
"""

import ast
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "hmt_deepspeed"
REPO = Path(__file__).resolve().parent.parent

ALLOWED: dict[str, set[str]] = {  # room -> the other rooms it may import
    "sites": {"config"},
    "ownership": set(),
    "rules": set(),  # a leaf without torch: who need not run a rule asks its row
    "config": {"rules"},  # what may be set is declared there and nowhere else
    "architectures": set(),
    "families": set(),
    "attribution": {"config", "families"},
    "version": set(),
    "kernels": set(),
    "memory": set(),
    "report": set(),
    "planner": {"sites", "rules", "architectures", "families", "attribution", "config", "optim"},
    "optim": {"kernels", "sites", "rules", "config", "ownership"},
    "activations": {
        "config",
        "sites",
        "attribution",
        "kernels",
        "memory",
        "planner",
        "ownership",
    },
    "fpdt": {"kernels", "memory", "ownership", "families"},
    "train": {"__init__", "architectures", "config", "report"},
    "__init__": {"zero", "optim", "config", "version"},
    "doctor": {"zero", "architectures", "config", "report", "train"},
    "__main__": {"zero", "optim", "config", "version", "doctor"},
}
ALLOWED["zero"] = set(ALLOWED) - {"train", "doctor", "__init__", "__main__"}
# Of the planner one file reads a model, which takes torch; the others are numbers.
READS_MODELS, OF_READING = "structure.py", {"optim", "attribution"}
MAY_IMPORT_DEEPSPEED = {"zero", "train", "doctor"}
FORBIDDEN_LIBRARIES = {
    "optim": ("torch.distributed",),
    "config": ("torch",),
    "families": ("torch",),
    "rules": ("torch", "pydantic"),
}


# Of a room with inner rooms: these by floors, the lowest first. An inner room imports those on lower floors only.
FLOORS: dict[str, tuple[str, ...]] = {
    "zero": (
        "settings compat operator_locks",
        "sharding",
        "weights",
        "offload",
        "gradients",
        "parameters",
        "bases",
        "state",
        "interfaces",
        "saving",
        "optimizer",
        "activations",
        "planning",
        "engine",
        "registration",
        "dry_run",
    ),
    "optim": ("bases", "settings", "rules", "backward", "slot", "decisions", "hmt"),
    "planner": ("hardware model", "run", "solve", "timeline", "advise", "command"),
}


def room_of(module: str) -> str:
    """`hmt_deepspeed.optim.hmt` is in room `optim`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def package_of(module: str, path: Path) -> str:
    """The package that relative imports in `module` start from."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def absolute(name: str, level: int, package: str) -> str:
    """Resolve `level` leading dots of an import in `package`."""
    if level == 0:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def dotted_name(node: ast.expr) -> str:
    """`torch.distributed.get_rank` of an attribute chain on a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all a file imports anywhere in it, functions included.

    `from a import b` yields `a.b`, whether b is a module or a name in a. Calls of import_module
    and __import__ on a literal count; so does use of a submodule as an attribute of torch or of
    the package.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            if (name := dotted_name(node)).partition(".")[0] in ("torch", PACKAGE):
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            function = dotted_name(node.func).rpartition(".")[2]
            literal = node.args[0] if node.args else None
            if function in ("import_module", "__import__") and isinstance(literal, ast.Constant):
                name = str(literal.value)
                tail = name.lstrip(".")
                yield node.lineno, absolute(tail, len(name) - len(tail), package)


def inner_room_of(module: str) -> str:
    """`hmt_deepspeed.zero.engine.metrics` is in inner room `engine`; empty for what is no inner room."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 else ""


def floor_violation(importing: str, imported: str) -> str:
    """Why an import between inner rooms of one room is against the order of floors; empty if it is not.

    Args:
        importing: dotted name of the module. imported: of what it imports.
    """
    room = room_of(importing)
    own, other = inner_room_of(importing), inner_room_of(imported)
    if room not in FLOORS or room_of(imported) != room or not own or own == other:
        return ""
    floors = {name: n for n, names in enumerate(FLOORS[room]) for name in names.split()}
    if own not in floors:
        return f"inner room {own!r} of {room} is on no floor: add it to FLOORS here"
    if not other or other not in floors:  # a name defined in the room's __init__
        return f"{room}/{own} imports from {room} itself ({imported})"
    if floors[other] < floors[own]:
        return ""
    order = "\n".join(f"  {n}. {names}" for n, names in reversed(list(enumerate(FLOORS[room]))))
    return (
        f"{room}/{own} on floor {floors[own]} may not import {room}/{other} on floor {floors[other]} ({imported}); "
        f"the floors of {room}, highest first:\n{order}"
    )


def is_within(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def violations(source: str, module: str, path: Path) -> list[str]:
    """What a file imports against the rules, one text each."""
    room = room_of(module)
    if room not in ALLOWED:
        return [f"{path}: room {room!r} is not in the import table: add it to DESIGN and here"]
    forbidden = FORBIDDEN_LIBRARIES.get(room, ())
    if room not in MAY_IMPORT_DEEPSPEED:
        forbidden += ("deepspeed",)
    found = []
    for line, name in imported_names(source, package_of(module, path)):
        if is_within(name, PACKAGE):
            target = room_of(name)
            if target not in ALLOWED:  # a name defined in the package's __init__
                target = "__init__"
            elsewhere = path.name != READS_MODELS and target in OF_READING
            if target != room and (
                target not in ALLOWED[room] or (room == "planner" and elsewhere)
            ):
                found.append(f"{path}:{line}: {room} may not import {target} ({name})")
            if reason := floor_violation(module, name):
                found.append(f"{path}:{line}: {reason}")
        elif any(is_within(name, library) for library in forbidden):
            found.append(f"{path}:{line}: {room} may not import {name}")
    return found


def package_files() -> list[Path]:
    return sorted((REPO / PACKAGE).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    # the package's own __init__ is the package; `hmt_deepspeed/__main__.py` keeps its name
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_walk_finds_the_package():
    assert REPO / PACKAGE / "config" / "optimizer.py" in package_files()


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_imports_point_one_way(path):
    found = violations(path.read_text(encoding="utf-8"), module_name(path), path.relative_to(REPO))
    assert not found, "\n".join(found)


def module_imports(files: dict[str, Path], sources: dict[str, str]) -> dict[str, list[str]]:
    """By module the modules of the package that it imports anywhere in it."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        names = (name for _, name in imported_names(source, package_of(module, files[module])))
        known = (
            next((n for n in (name, name.rpartition(".")[0]) if n in sources), "") for name in names
        )
        found[module] = sorted({name for name in known if name and name != module})
    return found


def circles(imports: dict[str, list[str]]) -> list[list[str]]:
    """Shortest circle through each module that is in one, each circle once, from its first module by name."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(imports):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            if start in imports[path[-1]]:
                found.setdefault(frozenset(path), path)
                break
            further = [name for name in imports[path[-1]] if name not in seen]
            seen.update(further)
            paths += [[*path, name] for name in further]
    return list(found.values())


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
