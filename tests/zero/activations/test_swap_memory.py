"""``swap_ssd`` with little host memory: tensors of several times that leave, and come back or raise."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.file_io import AsyncIO, PositionalIO
from hmt_deepspeed.zero.activations.swap import SwapMemory
from hmt_deepspeed.zero.offload import ssd

LIMIT, WIDTH, TOKENS, LAYERS = 2**18, 64, 2048, 3
INPUT = TOKENS * WIDTH * 4  # twice the limit
INTERMEDIATE = 2 * INPUT
AIO = {
    "block_size": 2**16,
    "queue_depth": 4,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 2,
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SwapMemory]]:
    made: list[SwapMemory] = []

    def factory(aio: dict[str, Any] | None = None, limit: int = LIMIT) -> SwapMemory:
        made.append(SwapMemory(torch.device("cpu"), limit, str(tmp_path), aio))
        return made[-1]

    yield factory
    for memory in made:
        memory.close()


@pytest.fixture(params=["threads", "async_io"])
def memory(request: pytest.FixtureRequest, make: Callable[..., SwapMemory]) -> SwapMemory:
    if request.param == "async_io":
        from ssd_io import async_io

        async_io()  # or skip
        made = make(AIO)
        assert isinstance(made.files.slots.io, AsyncIO)
        return made
    made = make()
    assert isinstance(made.files.slots.io, PositionalIO)
    return made


class Training:
    """A stack whose inputs and intermediates go to ``memory``, and its exact gradients."""

    def __init__(self) -> None:
        from backends import batch, stack, stack_gradients

        self.model, self.x = stack(LAYERS, width=WIDTH), batch(TOKENS, WIDTH)
        self._gradients = stack_gradients
        self.expected = stack_gradients(self.model, self.x)

    @contextmanager
    def swapping(self, memory: SwapMemory) -> Iterator[None]:
        """To the stores of ``memory``."""
        from backends import attribution_of, installed

        policy = dict.fromkeys(("layer_input", "residual", "mlp_intermediate"), "swap_ssd")
        attribution, store = attribution_of(self.model), memory.host_then_files
        with installed(self.model, policy, attribution=attribution, store=store):
            yield

    def gradients(
        self, memory: SwapMemory, between: Callable[[], None] = lambda: None
    ) -> dict[str, torch.Tensor]:
        """``between`` forward, all of it written where it can be, and backward."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.model(x)
            with suppress(StoreError):  # raised again in backward
                memory.files.flush()
            between()
            return y

        return self._gradients(self.model, self.x, forward)

    def wrong(self) -> list[str]:
        """Parameters with a gradient that is not the exact one."""
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return [name for name, grad in found.items() if not torch.equal(grad, self.expected[name])]


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


def test_gradients_with_a_host_limit_smaller_than_each_tensor(
    memory: SwapMemory, training: Training
) -> None:
    with training.swapping(memory):
        for _ in range(2):
            memory.begin_step()
            training.gradients(memory)
            assert training.wrong() == []
    numbers = memory.numbers()
    assert numbers["activation_bytes_to_ssd"] == LAYERS * (INPUT + INTERMEDIATE)
    assert numbers["activation_bytes_from_ssd"] == LAYERS * (INPUT + INTERMEDIATE)
    assert numbers["activation_host_bytes"] <= LIMIT
    assert 0 < memory.engine.pool.peak_bytes + memory.host.peak_bytes <= LIMIT
    assert numbers["activation_ssd_bytes"] == LAYERS * (INPUT + INTERMEDIATE)  # used again


def test_a_limit_that_is_not_of_whole_pages_is_kept(make: Callable[..., SwapMemory]) -> None:
    memory = make(limit=LIMIT + 4095)
    memory.host_then_files.put("x", torch.ones(LIMIT))
    assert torch.equal(memory.host_then_files.get("x"), torch.ones(LIMIT))
    assert memory.engine.pool.nbytes + memory.host.max_bytes <= LIMIT + 4095


def test_async_io_that_does_not_build_is_refused(
    make: Callable[..., SwapMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd.AsyncIOBuilder, "is_compatible", lambda *_, **__: False)
    with pytest.raises(ValueError, match="aio section, but DeepSpeed's async_io does not build"):
        _ = make(AIO).files


# -- an SSD that fails: an error that says where, and no gradient from what it gave --------------------


def _files(memory: SwapMemory) -> list[Path]:
    return sorted(Path(memory.files.slots.path).glob("*.bin"))


def _corrupt(memory: SwapMemory) -> None:
    for path in _files(memory)[::7]:
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))


def _cut(memory: SwapMemory) -> None:
    os.truncate(_files(memory)[5], 4096)


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAILURES: dict[str, tuple[str, Any, str]] = {
    "full disk": ("posix_fallocate", _full, "No space left on device"),
    "write of nothing": ("pwrite", lambda *_: 0, "then no more"),
    "missing folder": ("", lambda m: shutil.rmtree(m.files.slots.path), "No such file"),
    "file cut short": ("", _cut, "found 4096"),
    "corrupted block": ("", _corrupt, "not what was written"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_ssd_gives_an_error_and_never_a_wrong_gradient(
    failure: str,
    make: Callable[..., SwapMemory],
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, cause, words = FAILURES[failure]
    memory = make()
    with monkeypatch.context() as patch:
        if call:
            patch.setattr(os, call, cause)
        with (
            training.swapping(memory),
            pytest.raises(StoreError, match=rf"^'layers\.\d: .*#\d+': /.*{words}"),
        ):
            training.gradients(memory, lambda: None if call else cause(memory))
    assert training.wrong() == []
    if call:  # the disk has room again
        with training.swapping(memory):
            training.gradients(memory)
        assert training.wrong() == []
