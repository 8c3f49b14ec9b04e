"""Kernels run on the device of their tensors, not on the one that happens to be current."""

from __future__ import annotations

import ast
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import hmt_deepspeed.kernels as kernels
from hmt_deepspeed.kernels.launching import device_table, on_its_device, tile_for
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


def test_the_device_of_a_sequence(monkeypatch):
    entered = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or nullcontext()
    )
    on_its_device(lambda tensors, number: None)([torch.zeros(1).as_subclass(OnCuda)] * 2, 3)
    assert entered == [torch.device("cuda", 1)]


def test_the_tile_of_the_nearest_older_architecture():
    tiles = {80: "ampere", 90: "hopper"}
    assert [tile_for(tiles, c) for c in (75, 80, 89, 90, 120)] == ["ampere"] * 3 + ["hopper"] * 2


def test_addresses_are_uploaded_once_until_one_changes(monkeypatch):
    uploads = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: uploads.append(t.tolist()) or t)
    moved = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, device, non_blocking: (t, device, non_blocking)
    )
    device_table.cache_clear()
    device = torch.device("cuda", 0)
    first = device_table((1 << 40, 3), device)
    assert first[1:] == (device, True)  # pinned, so the host does not wait
    assert device_table((1 << 40, 3), device) is first
    device_table((1 << 40, 4), device)
    assert uploads == [[1 << 40, 3], [1 << 40, 4]]
    device_table.cache_clear()
    monkeypatch.setattr(torch.Tensor, "to", moved)
    assert device_table((5, 6), torch.device("cpu")).tolist() == [5, 6]
