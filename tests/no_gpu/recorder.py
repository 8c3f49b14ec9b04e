"""What a device would be asked to do: launches, host waits, copies from unpinned memory.

A launch is an aten operation on the device that is no view and no allocation, or a launch of a Triton kernel. A foreach
operation counts as often as torch launches its kernel, a ``cat`` as often as its inputs need; any other operation counts
once, though a factorisation launches more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from device import Waits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEEPSPEED = "deepspeed/"
_PLACES = {
    str(Path(__file__).resolve().parents[2] / "hmt_deepspeed"): "",
    str(Path(deepspeed.__file__).parent): DEEPSPEED,
}
_THIN = tuple(
    f"deepspeed/{name}.py"
    for name in ("utils/nvtx", "accelerator/cuda_accelerator", "comm/torch", "comm/comm")
)
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Metadata alone, though their schemas name no view.
_NOTHING = {"detach", "lift_fresh", "set_", "resize_", "record_stream", "device", "_assert_async"}
_NOTHING |= {"is_pinned", "is_same_size", "_unsafe_view", "_reshape_alias", "lift"}
# The host reads a size, or whether a factorisation failed.
_WAITING = {"masked_select", "_unique2", "bincount", "equal", "repeat_interleave"}
_WAITING |= {"_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "_linalg_check_errors"}
# torch's MultiTensorApply.cuh: tensors of one launch by number of lists; blocks of one launch, their elements.
_FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_FOREACH_BLOCKS, _FOREACH_ELEMENTS = 320, 65536
_CAT_INPUTS = 128


@dataclass
class Counts:
    """What was asked of the device, by (operation, source line).

    numbers: how often, by (operation, source line of a launch, the numbers that the host gave it). Where a later step has
    others, a CUDA graph of the earlier one would do something else.
    """

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    triton: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    unpinned: Counter[tuple[str, str]] = field(default_factory=Counter)
    numbers: Counter[tuple[str, str, tuple[float, ...]]] = field(default_factory=Counter)

    @property
    def all_launches(self) -> Counter[tuple[str, str]]:
        return self.launches + self.triton

    def totals(self) -> dict[str, int]:
        """Numbers without their places; what DeepSpeed itself waits for is no wait of ours."""
        foreign = sum(n for (_, line), n in self.waits.items() if line.startswith(DEEPSPEED))
        return {
            "launches": self.all_launches.total(),
            "triton": self.triton.total(),
            "waits": self.waits.total() - foreign,
            "deepspeed_waits": foreign,
            "unpinned": self.unpinned.total(),
        }


class Recorder(TorchDispatchMode):
    """Counts into :attr:`counts`; to be entered inside of a ``FakeTensorMode``.

    Args:
        compiles: whether Triton kernels are compiled, see :func:`device.compile_for`.
    """

    def __init__(self, compiles: bool = False) -> None:
        super().__init__()
        self.counts, self.compiles = Counts(), compiles
        self._pinned: dict[
            int, Any
        ] = {}  # storages by address; kept, so that no address comes twice

    def __enter__(self) -> Recorder:
        Waits.listener = self._waited
        self._jit = _replaced_launch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        from triton.runtime.jit import JITFunction

        JITFunction.run = self._jit

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """What is asked within, counted apart."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    # -- pinned memory --------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Counts the memory of a host tensor as page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    # -- operations -----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            return self._scalar(args[0])
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            pinned = torch.empty_like(args[0])
            self.pin(pinned)
            return pinned
        self._note_copy(name, args, kwargs)
        if name == "nonzero":  # how many nobody knows: none
            if args[0].is_cuda:
                self._waited(name)
            return torch.empty(0, args[0].dim(), dtype=torch.long, device=args[0].device)
        if name == "index" and _has_mask(args[1]):
            self._waited("index by a mask")
            args = (args[0], _without_masks(args[1]))
        pins = kwargs.pop("pin_memory", False) if name in ALLOCATIONS else False
        if name == "_fused_adamw_":
            _check_fused(args[:4])
            # nothing but this overload knows shapes alone
            func, kwargs = torch.ops.aten._fused_adamw_.default, {**kwargs, "lr": 0.0}
        out = func(*args, **kwargs)
        if pins:
            self.pin(out)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        if not any(t.is_cuda for t in tensors):
            return out
        if name in _WAITING:
            self._waited(name)
        count = _num_launches(func, name, args)
        if count:
            line = where()
            self.counts.launches[name, line] += count
            self._note_numbers(name, line, (args, kwargs))
        return out

    def _note_numbers(self, name: str, line: str, given: Any) -> None:
        numbers = tuple(n for n in tree_leaves(given) if isinstance(n, (int, float)))
        if numbers:
            self.counts.numbers[name, line, numbers] += 1

    def _scalar(self, value: Tensor) -> bool | int | float:
        """What the host reads: no overflow, and otherwise a number that lets it go on."""
        if value.is_cuda:
            self._waited("item")
        if value.dtype == torch.bool:
            return False
        number = 0 if any("overflow" in function for function in _functions()) else 1
        return float(number) if value.dtype.is_floating_point else number

    def _note_copy(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A copy between host and device: does the host wait, is the host's memory page-locked?"""
        if name == "copy_":
            target, source = args[0], args[1]
            device = target.device
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name == "_to_copy":
            target, source = None, args[0]
            device = torch.device(kwargs.get("device") or source.device)
            blocking = not kwargs.get("non_blocking", False)
        else:
            return
        if device.type == source.device.type:
            return
        if device.type == "cpu":
            # torch gives a copy to the host that may not block page-locked memory by itself
            if blocking or (target is not None and not self.is_pinned(target)):
                self._waited(f"{name} to host")
        elif not self.is_pinned(source):
            self.counts.unpinned[name, where()] += 1
        elif blocking:
            self._waited(f"{name} to device")

    def _waited(self, what: str) -> None:
        self.counts.waits[what, where()] += 1

    def launch_triton(self, kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Counts a launch.

        Raises:
            RuntimeError: a tensor is where the kernel cannot read it.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not value.is_cuda and not self.is_pinned(value):
                raise RuntimeError(
                    f"{kernel.__name__} was launched with a tensor on {value.device}"
                )
        name, line = kernel.__name__, where()
        self.counts.triton[name, line] += 1
        self._note_numbers(name, line, (args, kwargs))


class _Pointer:
    """Stands for a tensor where Triton asks for its type and alignment."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = 4096 + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def _replaced_launch(recorder: Recorder) -> Any:
    from triton.runtime.jit import JITFunction

    real = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        recorder.launch_triton(kernel, args, kwargs)
        if not recorder.compiles:
            return None
        stand_ins = [_Pointer(a) if isinstance(a, Tensor) else a for a in args]
        named = {k: _Pointer(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        return real(kernel, *stand_ins, grid=grid, warmup=True, **named)

    JITFunction.run = run
    return real


def _check_fused(lists: Sequence[Sequence[Tensor]]) -> None:
    """Weights, gradients and moments as the fused kernel of a GPU wants them; a CPU's takes others too.

    Raises:
        RuntimeError: those of a parameter differ.
    """
    for tensors in zip(*lists, strict=True):
        kinds = {(t.shape, t.stride(), t.dtype, t.device) for t in tensors}
        if len(kinds) > 1:
            raise RuntimeError(f"a fused step takes tensors of one kind, got {kinds}")


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(i is not None and i.dtype == torch.bool for i in indices)


def _without_masks(indices: Sequence[Any]) -> list[Any]:
    """The same with no element chosen by a mask."""
    chosen: list[Any] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            none = torch.empty(0, dtype=torch.long, device=index.device)
            chosen += [none] * index.dim()
        else:
            chosen.append(index)
    return chosen


def _num_launches(func: Any, name: str, args: Sequence[Any]) -> int:
    if name in ALLOCATIONS or name in _NOTHING or func.is_view:
        return 0
    if name.startswith(("_foreach_", "_fused_")):
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        if name.startswith("_fused_"):  # counts of steps are no part of the tensors that are cut
            lists = [tensors for tensors in lists if any(t.dim() for t in tensors)]
        returned = 0 if name.endswith("_") else 1
        return _num_foreach_launches(name, lists, returned)
    if name == "cat":
        return -(-len(args[0]) // _CAT_INPUTS)
    return 1


def _num_foreach_launches(name: str, lists: Sequence[Sequence[Tensor]], returned: int) -> int:
    """Of a foreach operation, as torch cuts its lists; one a tensor where it falls back to single operations."""
    kinds = [{(t.dtype, t.device) for t in tensors} for tensors in lists]
    alike = all(len(kind) == 1 for kind in kinds)
    if alike and name not in ("_foreach_copy_", "_foreach_norm"):
        alike = len(set.union(*kinds)) == 1
    same_strides = all(len({t.stride() for t in row}) == 1 for row in zip(*lists, strict=False))
    if not (alike and same_strides):
        return len(lists[0])
    most = _FOREACH_TENSORS[min(len(lists) + returned, 5)]
    launches = tensors = blocks = 0
    for tensor in lists[0]:
        tensors += 1
        left = -(-tensor.numel() // _FOREACH_ELEMENTS)
        while blocks + left >= _FOREACH_BLOCKS:
            launches, left = launches + 1, left - (_FOREACH_BLOCKS - blocks)
            tensors, blocks = (1 if left else 0), 0
        blocks += left
        if tensors == most and blocks:
            launches, tensors, blocks = launches + 1, 0, 0
    return launches + (1 if blocks else 0)


def _functions() -> Iterator[str]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def where() -> str:
    """The innermost line of the package or of DeepSpeed that is at work, and the one that called its file."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    last_file = ""
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if name != last_file and not name.endswith(_THIN):
            for folder, short in _PLACES.items():
                if name.startswith(folder):
                    found.append(f"{short}{name[len(folder) + 1 :]}:{frame.f_lineno}")
                    last_file = name
        frame = frame.f_back
    return " < ".join(found) or "(model, autograd)"
