"""Kernels run on the device of their tensors, not on the one that happens to be current."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hmt_deepspeed.kernels as kernels
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.noise import key_halves

FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))


def test_every_launch_is_on_the_device_of_its_tensors():
    launchers = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and launches(node):
                launchers += 1
                names = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
                assert names == ["on_its_device"], f"{path.name}: {node.name}"
    assert launchers >= 11


def launches(function: ast.FunctionDef) -> bool:
    """Whether it calls something by ``kernel[grid](...)``."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(c.func, ast.Subscript) and "kernel" in ast.unparse(c.func) for c in calls)


class OnCuda(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.mark.parametrize("tensor", [torch.zeros(1), torch.zeros(1).as_subclass(OnCuda)])
def test_that_device_is_current_in_the_launcher(monkeypatch, tensor):
    current = []

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)

    @on_its_device
    def launcher(name, value, *, key):
        assert (name, key) == ("x", 3)
        assert current == ([torch.device("cuda", 1)] if value.is_cuda else [])
        return "launched"

    assert launcher("x", tensor, key=3) == "launched"
    assert launcher("x", value=tensor, key=3) == "launched"
    assert not current


def test_a_new_key_compiles_no_kernel_anew():
    """Triton types an integer by its value: 32 bits where it fits, else 64."""
    halves = [half for key in range(-500, 500) for half in key_halves(key * 0x1234567)]
    assert -(2**31) <= min(halves) < 0 < max(halves) < 2**31
    assert len(set(halves)) == len(halves)
