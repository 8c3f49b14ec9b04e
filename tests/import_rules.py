"""Who may import whom in the package, and what a file imports against it.

A room is a top-level file or folder of the package; `__init__` is the package itself. Rooms that are large have
inner rooms, which lie on floors. An import for type checkers only is an import.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "hmt_deepspeed"
REPO = Path(__file__).resolve().parent.parent

ALLOWED: dict[str, set[str]] = {  # room -> the other rooms it may import
    "sites": {"config"},
    "ownership": set(),
    "interleave": set(),
    "rules": set(),  # a leaf without torch: who need not run a rule asks its row
    "config": {"rules"},  # what may be set is declared there and nowhere else
    "architectures": set(),
    "families": set(),
    "attribution": {"config", "families", "sites"},
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
    "train": {"__init__", "architectures", "config", "memory", "report"},
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
    "optim": ("bases", "settings", "rules", "backward", "slot", "stacked_step", "decisions", "hmt"),
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
        return [
            f"{path}: room {room!r} is not in the import table: add it here and to hmt_deepspeed/README.md"
        ]
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
