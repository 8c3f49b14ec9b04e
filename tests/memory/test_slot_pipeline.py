"""Reads, updates and writes at once, through a few buffers, in an order that nobody has to think about."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from memory_cases import PAGE

from hmt_deepspeed.memory.alternate import AlternateSlots, Piece
from hmt_deepspeed.memory.counters import Counters
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.memory.slot_pipeline import SlotPipeline
from hmt_deepspeed.memory.slots import SlotFolder
from hmt_deepspeed.memory.transfer import TransferEngine

NUM_BUFFERS = 3


class SlowIO(PositionalIO):
    """Counts what is under way."""

    def __init__(self) -> None:
        self.seconds, self.reads, self.writes, self.fails = 1e-3, 0, 0, False

    def write(self, path: str, memory: Any) -> None:
        time.sleep(self.seconds)
        self.writes += 1
        if self.fails:
            raise OSError(5, "broken")
        super().write(path, memory)

    def read(self, path: str, memory: Any) -> None:
        time.sleep(self.seconds)
        self.reads += 1
        super().read(path, memory)


class Case:
    def __init__(self, folder: Path, read_ahead: bool, write_behind: bool) -> None:
        self.io, self.failures = SlowIO(), []
        self.engine = TransferEngine("cpu", PAGE)
        slots = AlternateSlots(SlotFolder(str(folder), self.io))
        pool = self.engine.new_pool(NUM_BUFFERS * PAGE, "pool of the test")
        self.pipeline = SlotPipeline(
            slots, pool, read_ahead, write_behind, lambda *said: self.failures.append(said)
        )
        self.pieces = [Piece(f"piece {number}", PAGE) for number in range(8)]

    def fill(self, value: int) -> None:
        for piece in self.pieces:
            with self.pipeline.lease(piece) as memory:
                memory.fill_(value)
        self.pipeline.drain()
        self.pipeline.commit()

    def values(self) -> list[int]:
        found = []
        for piece in self.pieces:
            with self.pipeline.lease(piece, writes=False) as memory:
                found.append(int(memory[7]))
        return found


@pytest.fixture(params=[(True, True), (False, False), (True, False), (False, True)])
def case(request: Any, tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path, *request.param)
    yield case
    case.pipeline.close()
    case.engine.close()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path, True, True)
    yield case
    case.pipeline.close()
    case.engine.close()


def test_leases_of_a_piece_see_each_other(case: Case) -> None:
    """Made at once, before any of them has begun."""
    case.fill(1)
    leases = [case.pipeline.lease(piece) for _ in range(3) for piece in case.pieces[:2]]
    for lease in leases:
        with lease as memory:
            memory.add_(1)
    case.pipeline.drain()
    assert case.values() == [4, 4, 1, 1, 1, 1, 1, 1]
    case.pipeline.roll_back(case.pieces[1:])
    case.pipeline.commit()
    assert case.values() == [4, 1, 1, 1, 1, 1, 1, 1]


def test_reads_ahead_stop_at_the_buffers(beside: Case) -> None:
    beside.fill(1)
    reads = beside.io.reads
    leases = [beside.pipeline.lease(piece) for piece in beside.pieces]
    deadline = time.monotonic() + 120
    while beside.io.reads < reads + NUM_BUFFERS and time.monotonic() < deadline:
        time.sleep(1e-3)
    time.sleep(0.05)
    assert beside.io.reads == reads + NUM_BUFFERS
    for lease in leases:
        with lease:
            pass
    beside.pipeline.drain()
    assert beside.pipeline.pool.peak_bytes == NUM_BUFFERS * PAGE


def test_a_block_that_raises_writes_nothing(case: Case) -> None:
    case.fill(1)
    writes = case.io.writes
    with suppress(KeyError), case.pipeline.lease(case.pieces[0]) as memory:
        memory.fill_(9)
        raise KeyError
    case.pipeline.drain()
    assert case.io.writes == writes
    assert case.values() == [1] * 8


def test_what_is_cancelled_gives_its_buffer_back(case: Case) -> None:
    case.fill(1)
    for lease in [case.pipeline.lease(piece) for piece in case.pieces]:
        lease.cancel()
        lease.cancel()
    case.pipeline.drain()
    assert case.values() == [1] * 8
    assert case.pipeline.pool.used_bytes == 0


def test_a_write_that_fails_behind_names_its_piece(beside: Case) -> None:
    beside.fill(1)
    beside.io.fails = True
    with beside.pipeline.lease(beside.pieces[3]) as memory:
        memory.fill_(2)
    beside.pipeline.drain()
    assert [name for name, _ in beside.failures] == ["piece 3"]
    assert beside.values() == [1] * 8


def test_a_read_that_fails_is_raised_where_the_block_begins(case: Case) -> None:
    case.fill(1)
    for file in Path(case.pipeline.slots.folder.path).glob("*.bin"):
        file.unlink()
    lease = case.pipeline.lease(case.pieces[0])
    with pytest.raises(StoreError, match=r"^piece 0: .*No such file"):
        lease.__enter__()
    case.pipeline.drain()  # nothing waits for the block that never began


def test_bytes_are_counted(case: Case) -> None:
    case.fill(1)
    counters = case.pipeline.counters
    assert (counters.bytes_in, counters.bytes_out) == (0, 8 * PAGE)  # zeros are not read
    case.fill(2)
    assert (counters.bytes_in, counters.bytes_out) == (8 * PAGE, 16 * PAGE)


def test_seconds_of_reads_and_writes_are_counted(case: Case) -> None:
    case.fill(1)
    counters = case.pipeline.counters
    # a sleep is never shorter than asked for, and each way has one thread
    assert counters.seconds_out >= 8 * case.io.seconds
    case.values()
    assert counters.seconds_in >= 8 * case.io.seconds


def test_what_moves_at_once_counts_once() -> None:
    counters, both = Counters(), threading.Barrier(2)

    def move() -> None:
        with counters.moving("in"):
            both.wait()
            time.sleep(0.02)
            both.wait()

    begin = time.perf_counter()
    threads = [threading.Thread(target=move) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    assert 0.02 <= counters.seconds_in <= took
    assert counters.seconds_out == 0


def test_reads_and_writes_run_beside_the_blocks(beside: Case) -> None:
    """Each block waits for a read of a later piece, and for the write of the one before."""
    beside.fill(1)
    began = [threading.Event() for _ in beside.pieces]
    written = [threading.Event() for _ in beside.pieces]
    read, write = beside.pipeline.slots.read, beside.pipeline.slots.write

    def reading(piece: Piece, memory: Any) -> int:
        began[beside.pieces.index(piece)].set()
        return read(piece, memory)

    def writing(piece: Piece, memory: Any) -> None:
        write(piece, memory)
        written[beside.pieces.index(piece)].set()

    beside.pipeline.slots.read, beside.pipeline.slots.write = reading, writing  # type: ignore[method-assign]
    leases = [beside.pipeline.lease(piece) for piece in beside.pieces]
    for number, lease in enumerate(leases):
        with lease as memory:
            memory.add_(1)
            if number + 1 < len(leases):
                assert began[number + 1].wait(120)
            if number:
                assert written[number - 1].wait(120)
    beside.pipeline.drain()
    assert beside.values() == [2] * 8


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert condition()


def test_what_is_expected_is_read_before_it_is_leased(beside: Case) -> None:
    beside.fill(1)
    reads = beside.io.reads
    beside.pipeline.expect(beside.pieces)
    _until(lambda: beside.io.reads == reads + NUM_BUFFERS)
    for piece in beside.pieces:
        with beside.pipeline.lease(piece) as memory:
            memory.add_(1)
    beside.pipeline.drain()
    assert beside.io.reads == reads + len(beside.pieces)  # none of them twice
    assert beside.values() == [2] * 8


@pytest.mark.parametrize("surprise", ["lease", "roll_back", "drain"])
def test_what_is_expected_in_vain_holds_nothing_up(beside: Case, surprise: str) -> None:
    """Buffers full of what nobody asks for are given back when somebody asks for something else."""
    beside.fill(1)
    beside.pipeline.expect(beside.pieces)
    _until(lambda: beside.pipeline.pool.used_bytes == NUM_BUFFERS * PAGE)
    if surprise == "roll_back":
        with beside.pipeline.lease(beside.pieces[0]) as memory:
            memory.fill_(9)
        beside.pipeline.roll_back(beside.pieces[:1])
    if surprise == "drain":
        beside.pipeline.drain()
    for piece in reversed(beside.pieces):
        with beside.pipeline.lease(piece) as memory:
            memory.add_(1)
    beside.pipeline.drain()
    assert beside.values() == [2] * 8
    _until(lambda: beside.pipeline.pool.used_bytes == 0)


def test_an_expected_read_sees_the_write_before_it(beside: Case) -> None:
    beside.fill(1)
    with beside.pipeline.lease(beside.pieces[0]) as memory:
        memory.fill_(5)
        beside.pipeline.expect(beside.pieces[:1])
    with beside.pipeline.lease(beside.pieces[0]) as memory:
        assert int(memory[0]) == 5


EXIT = """
import sys
from pathlib import Path
from hmt_deepspeed.memory.alternate import AlternateSlots, Piece
from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.memory.pool import GRANULE as PAGE
from hmt_deepspeed.memory.slot_pipeline import SlotPipeline
from hmt_deepspeed.memory.slots import SlotFolder
from hmt_deepspeed.memory.transfer import TransferEngine

engine = TransferEngine("cpu", PAGE)
slots = AlternateSlots(SlotFolder(sys.argv[1], PositionalIO()))
pipeline = SlotPipeline(slots, engine.new_pool(2 * PAGE, "pool"), True, True, print)
pieces = [Piece(f"piece {number}", PAGE) for number in range(6)]
for piece in pieces:
    with pipeline.lease(piece) as memory:
        memory.fill_(1)
pipeline.drain()
pipeline.commit()
pipeline.expect(pieces)  # for work that does not come: two are read, the others wait for room
print("ends")
"""


def test_a_process_ends_that_has_read_ahead(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("ends\n", 0), done.stderr
