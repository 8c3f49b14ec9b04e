"""A CUDA device that is not there: CUDA branches run on a machine without a GPU, and compute nothing.

Tensors are fake (torch's ``FakeTensorMode``) on ``cuda:0``. What the CPU build of torch lacks is compiled once
(`device.cpp`) and preloaded; streams, events and properties of Python's ``torch.cuda`` are replaced here; a Triton
kernel is compiled for a chosen architecture, or not at all, and never launched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
_ON_IT = "ON_FAKE_CUDA_DEVICE"
MEMORY = 80 * 2**30
_is_in_place = False


def library() -> Path:
    """Where the compiled part is, in the folder of torch's extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"fake_cuda_device-{version('torch')}" / "fake_cuda_device.so"


def build() -> Path:
    """Compile the library where its source is newer: a few seconds. This process has loaded it then, and is of no
    other use."""
    built = library()
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        import torch
        from torch.utils import cpp_extension

        built.parent.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(
            built.stem,
            [str(SOURCE)],
            build_directory=str(built.parent),
            extra_ldflags=[f"-Wl,-rpath,{Path(torch.__file__).parent / 'lib'}"],
            is_python_module=False,
        )
    return built


def require() -> None:
    """Start this process again with the library preloaded, unless it is; then put the device in place.

    To be called before torch is imported. A fork of a process that has done so has the device.
    """
    global _is_in_place
    if _is_in_place:
        return
    if os.environ.pop(_ON_IT, None) is None:
        environment = {**os.environ, "LD_PRELOAD": str(build()), _ON_IT: "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    del os.environ["LD_PRELOAD"]  # of this process alone: compilers are started too
    _replace_torch_cuda()
    _number_memory()
    _is_in_place = True


class Waits:
    """Who is told that the host waits for the device."""

    listener: Callable[[str], None] = staticmethod(lambda what: None)


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device_index, self.cuda_stream, self.stream_id = 0, 0, id(self)

    def synchronize(self) -> None:
        Waits.listener("Stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Waits.listener("Event.synchronize")

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _replace_torch_cuda() -> None:
    import torch

    default = _Stream()

    @contextmanager
    def scope(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def replace(**made: Any) -> None:
        for name, value in made.items():
            setattr(torch.cuda, name, value)

    def returns(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    replace(Stream=_Stream, Event=_Event, device=scope, stream=scope, device_of=scope)
    replace(current_stream=returns(default), default_stream=returns(default))
    replace(synchronize=lambda device=None: Waits.listener("torch.cuda.synchronize"))
    replace(is_available=returns(True), is_initialized=returns(True), device_count=returns(1))
    replace(current_device=returns(0), is_bf16_supported=returns(True))
    replace(get_device_name=returns("fake"), get_device_capability=returns((9, 0)))
    for name in ("init", "_lazy_init", "set_device", "set_stream", "empty_cache", "ipc_collect"):
        setattr(torch.cuda, name, returns(None))
    for name in (
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
    ):
        setattr(torch.cuda, name, returns(None))
    for name in ("manual_seed", "manual_seed_all", "set_rng_state"):
        setattr(torch.cuda, name, returns(None))
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(torch.cuda, name, returns(0))
    replace(mem_get_info=returns((MEMORY, MEMORY)), memory_stats=returns({}))
    torch.Tensor.record_stream = returns(None)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = returns(None)
    properties = SimpleNamespace(
        name="fake", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, uuid="fake"
    )
    replace(get_device_properties=returns(properties))
    cudart = SimpleNamespace(cudaHostRegister=returns(0), cudaHostUnregister=returns(0))
    replace(cudart=returns(cudart))
    replace(get_rng_state=lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"))


def _number_memory() -> None:
    """Give memory that is not there an address of its own, by which the package knows one input from another; what is let
    go of is given again to what is as large, as torch's allocator does."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    # By number of bytes, addresses and what has them, whose own number does not come again while it is here.
    given: dict[int, dict[int, StorageWeakRef]] = {}
    known: dict[int, int] = {}
    fresh = count(1 << 40, 1 << 40)

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage._cdata not in known:
            alike = given.setdefault(storage.nbytes(), {})
            found = next((a for a, holder in alike.items() if holder.expired()), None)
            if found is None:
                found = next(fresh)
            else:
                del known[alike[found].cdata]
            alike[found] = StorageWeakRef(storage)
            known[storage._cdata] = found
        return known[storage._cdata]

    def address(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return of_storage(storage) + tensor.storage_offset() * tensor.element_size()

    torch.UntypedStorage.data_ptr = of_storage
    torch.Tensor.data_ptr = address


def compile_for(architecture: int) -> None:
    """Let Triton compile for an architecture (90 is sm_90) where kernels are launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", architecture, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        map_python_to_cpp_type=lambda kind: kind,
    )
    driver.set_active(fake)
