"""Run a check of a test file under Triton's interpreter, and bounds that several checks share."""

import os
import subprocess
import sys
from pathlib import Path

import torch

EPSILON = 2.0**-23  # of fp32


def run_interpreted(file, check):
    """Call ``check()`` of a test file in a process of its own: Triton reads TRITON_INTERPRET at import."""
    folder, module = Path(file).parent, Path(file).stem
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(folder)!r}); import {module}; "
            f"{module}.{check}(); print('checked')",
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "checked\n", done.stderr


def assert_as_accurate(kernel, twin, exact, terms):
    """The kernel's error against float64 is at most the torch twin's times a small factor.

    Errors are measured elementwise in ``terms``, the sum of the magnitudes of what is added up (fp64).
    Both round the same fp32 terms in different orders, so their errors are draws of one size: measured
    here, root mean squares differ by up to 1.13 where there are some hundred elements. Of a few
    elements they may be anything below a rounding error, hence a quarter epsilon (one for the largest).
    """
    assert kernel.dtype == twin.dtype == torch.float32
    terms = terms.clamp_min(torch.finfo(torch.float64).tiny)
    error, allowed = (((out.double() - exact) / terms).abs() for out in (kernel, twin))
    for statistic, factor, slack in ((_rms, 1.5, EPSILON / 4), (torch.amax, 2.0, EPSILON)):
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
