"""Compile a kernel for an architecture that is not here, and read what it takes of one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that one block may use, in bytes: CUDA C++ programming guide, table of compute capabilities.
SHARED_MEMORY = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Figures(NamedTuple):
    """Of a thread: registers and bytes of local memory, where spilled registers are. Of a block: bytes shared."""

    registers: int
    local: int
    shared: int


def compiled(kernel, types, constants, capability=90, specialised=True):
    """For sm_``capability``; ``specialised``: of aligned pointers, sizes that 16 divides and inner strides of
    one, as a launch with ordinary tensors compiles it.

    types: of the arguments in their order, in one string; ``none`` for those that are None. constants: of the
    constexpr arguments, and the launch's options.
    """
    constants = dict(constants)
    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True))
    constants |= {name: None for name, kind in signature.items() if kind == "none"}
    kept = {
        kernel.params[i].name
        for i in range(len(kernel.params))
        if kernel.params[i].do_not_specialize
    }
    attributes = {}
    for name, kind in signature.items() if specialised else ():
        if name.endswith("_column"):
            constants[name] = 1
        elif name not in kept and (kind.startswith("*") or kind in ("i32", "i64")):
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def figures(made) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Figures(found["REG"], found["STACK"] + found["LOCAL"], made.metadata.shared)
