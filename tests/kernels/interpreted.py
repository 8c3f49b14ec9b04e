"""Run a check of a test file under Triton's interpreter, and bounds that several checks share."""

import importlib
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import torch

EPSILON = 2.0**-23  # of fp32


def run_interpreted(file, check):
    """Call ``check()`` of a test file under the interpreter, in a fork of a process that has imported it."""
    server = _server()
    server.stdin.write(f"{Path(file).stem} {check}\n")
    server.stdin.flush()
    said = json.loads(server.stdout.readline() or '"the interpreter is gone"')
    # NumPy may warn before it, where a value overflows as it should.
    assert said.endswith("checked\n"), said


@cache
def _server():
    """Triton reads TRITON_INTERPRET at import, and importing takes longer than most checks."""
    return subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,  # whose end ends it
        stdout=subprocess.PIPE,
        text=True,
    )


def _patch_once():
    """Triton patches its language at every call of a device function, a fifth of the interpreter's time. Here nobody
    else uses the language, which may stay patched."""
    from triton import language
    from triton.runtime import interpreter

    from hmt_deepspeed.kernels.noise import noise_bits_jit

    if hasattr(interpreter, "_LangPatchScope"):  # what a patch is undone by
        for function in (noise_bits_jit, language.zeros):  # Triton's own see its core alone
            interpreter._patch_lang(function.fn)
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _serve():
    """A fork for every check: what one patches, no other sees."""
    for line in sys.stdin:
        module, check = line.split()
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            for descriptor in (1, 2):
                os.dup2(writing, descriptor)
            code = 1
            try:
                getattr(importlib.import_module(module), check)()
                print("checked", flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        os.close(writing)
        with open(reading) as output:
            said = output.read()
        os.waitpid(pid, 0)
        print(json.dumps(said), flush=True)


def assert_as_accurate(kernel, twin, exact, terms):
    """The kernel's error against float64 is at most the torch twin's times a small factor.

    Errors are measured elementwise in ``terms``, the sum of the magnitudes of what is added up (fp64).
    Both round the same fp32 terms in different orders, so their errors are draws of one size: measured
    here, root mean squares differ by up to 1.13 where there are some hundred elements. Of a few
    elements they may be anything below a rounding error, hence a quarter epsilon (one for the largest, and for one
    element, which is both).
    """
    assert kernel.dtype == twin.dtype == torch.float32
    terms = terms.clamp_min(torch.finfo(torch.float64).tiny)
    error, allowed = (((out.double() - exact) / terms).abs() for out in (kernel, twin))
    few = EPSILON / 4 if error.numel() > 1 else EPSILON
    for statistic, factor, slack in ((_rms, 1.5, few), (torch.amax, 2.0, EPSILON)):
        assert statistic(error) <= factor * statistic(allowed) + slack


def _rms(error):
    return error.square().mean().sqrt()


def strided(tensor):
    """The same values behind other strides: every second row of a transposed, wider buffer."""
    rows, columns = tensor.shape
    shape = columns + 3, 2 * rows
    buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = buffer.t()[::2, 1 : columns + 1]
    view.copy_(tensor)
    return view


if __name__ == "__main__":
    import pytest  # noqa: F401  what every check's file imports
    import triton  # noqa: F401

    from hmt_deepspeed.kernels import chunks, token_blocks  # noqa: F401

    _patch_once()
    _serve()
