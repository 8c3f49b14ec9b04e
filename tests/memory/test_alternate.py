"""Pieces that change all together or not at all, and files of them that are kept."""

import errno
import os
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, pattern

from hmt_deepspeed.memory import checksum as checksum_module
from hmt_deepspeed.memory.alternate import AlternateSlots, Piece, Record, read_kept
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.memory.pool import whole_pages
from hmt_deepspeed.memory.slots import SlotFolder

SIZES = [5, PAGE, PAGE + 1, 3 * PAGE]


def buffer(nbytes: int, seed: int) -> torch.Tensor:
    return pattern(whole_pages(nbytes), dtype=torch.uint8, seed=seed)


@pytest.fixture
def slots(tmp_path: Path) -> AlternateSlots:
    (tmp_path / "slots").mkdir()
    return AlternateSlots(SlotFolder(str(tmp_path / "slots"), PositionalIO()))


@pytest.fixture
def pieces() -> list[Piece]:
    return [Piece(f"piece {number}", nbytes) for number, nbytes in enumerate(SIZES)]


def write(slots: AlternateSlots, pieces: list[Piece], seed: int) -> None:
    for piece in pieces:
        slots.write(piece, buffer(piece.nbytes, seed))


def holds(slots: AlternateSlots, piece: Piece, seed: int) -> bool:
    memory = torch.ones(whole_pages(piece.nbytes), dtype=torch.uint8)
    slots.read(piece, memory)
    return torch.equal(memory[: piece.nbytes], buffer(piece.nbytes, seed)[: piece.nbytes])


def on_disk(slots: AlternateSlots) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(slots.folder.path).glob("*.bin")}


def test_zeros_before_the_first_write(slots: AlternateSlots, pieces: list[Piece]) -> None:
    memory = torch.ones(PAGE, dtype=torch.uint8)
    assert slots.read(pieces[0], memory) == 0
    assert memory[:5].tolist() == [0] * 5
    with pytest.raises(StoreError, match="piece 0 cannot be kept: it was never written"):
        slots.keep(pieces[0], "anywhere")


def test_what_was_committed_is_not_touched_before_the_next_commit(
    slots: AlternateSlots, pieces: list[Piece]
) -> None:
    write(slots, pieces, seed=1)
    slots.commit()
    committed = on_disk(slots)
    write(slots, pieces, seed=2)
    assert all(holds(slots, piece, 2) for piece in pieces)  # one's own writes are seen
    later = on_disk(slots)
    assert {name: later[name] for name in committed} == committed
    slots.roll_back(pieces[:2])
    assert [holds(slots, piece, 1) for piece in pieces] == [True, True, False, False]
    slots.commit()
    assert [holds(slots, piece, 1) for piece in pieces] == [True, True, False, False]
    assert [holds(slots, piece, 2) for piece in pieces] == [False, False, True, True]


def test_files_alternate(slots: AlternateSlots, pieces: list[Piece]) -> None:
    for step in range(10):
        write(slots, pieces, step)
        write(slots, pieces, step + 100)  # once more before the commit: to the same files
        slots.commit()
    assert slots.folder.file_bytes == 2 * sum(map(whole_pages, SIZES))


def test_a_write_that_fails_changes_nothing(
    slots: AlternateSlots, pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(slots, pieces, seed=1)
    slots.commit()

    def broken(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError, match=r"^piece 2: .*No space left"):
        slots.write(pieces[2], buffer(PAGE, 2))
    monkeypatch.undo()
    slots.commit()
    assert all(holds(slots, piece, 1) for piece in pieces)


@pytest.mark.parametrize("code", [None, errno.EXDEV, errno.EPERM])
def test_what_is_kept_stays_as_it_is(
    slots: AlternateSlots,
    pieces: list[Piece],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int | None,
) -> None:
    def refuse(*_: object) -> None:
        assert code is not None
        raise OSError(code, os.strerror(code))

    write(slots, pieces, seed=1)
    slots.commit()
    if code is not None:
        monkeypatch.setattr(os, "link", refuse)
    records = [slots.keep(p, str(tmp_path / p.name)) for p in pieces]
    assert (tmp_path / "piece 0").stat().st_nlink == (2 if code is None else 1)
    for step in range(2, 5):
        write(slots, pieces, step)
        slots.commit()
    for piece, record in zip(pieces, records, strict=True):
        found = read_kept(str(tmp_path / piece.name), record)
        assert torch.equal(found, buffer(piece.nbytes, 1)[: piece.nbytes])
        assert holds(slots, piece, 4)
    assert slots.folder.file_bytes == 2 * sum(map(whole_pages, SIZES))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_held_is_not_written(
    slots: AlternateSlots, pieces: list[Piece], tmp_path: Path, keeps: bool
) -> None:
    """Commits go on; a third file of each piece is there as long as the first is held, and no longer."""
    write(slots, pieces, seed=1)
    slots.commit()
    held = [slots.hold(piece) for piece in pieces]
    both = [slots.hold(piece) for piece in pieces]
    for step in range(2, 5):
        write(slots, pieces, step)
        slots.commit()
    assert slots.folder.file_bytes == 3 * sum(map(whole_pages, SIZES))
    records = [h.keep(str(tmp_path / p.name)) for h, p in zip(held, pieces, strict=True) if keeps]
    for one, other in zip(held, both, strict=True):
        one.release()
        other.release()
    for step in range(5, 8):
        write(slots, pieces, step)
        slots.commit()
    for piece, record in zip(pieces, records, strict=keeps):
        found = read_kept(str(tmp_path / piece.name), record)
        assert torch.equal(found, buffer(piece.nbytes, 1)[: piece.nbytes])
    assert all(holds(slots, piece, 7) for piece in pieces)
    write(slots, pieces, seed=8)
    files = 2 if keeps else 3  # the third is used in turn; a linked one is given up
    assert slots.folder.file_bytes <= files * sum(map(whole_pages, SIZES))


def test_a_link_that_fails_otherwise_is_an_error(
    slots: AlternateSlots, pieces: list[Piece], tmp_path: Path
) -> None:
    write(slots, pieces, seed=1)
    slots.commit()
    with pytest.raises(StoreError, match=r"piece 1: cannot link .*No such file"):
        slots.keep(pieces[1], str(tmp_path / "no" / "folder"))


def test_reading_what_is_kept(slots: AlternateSlots, pieces: list[Piece], tmp_path: Path) -> None:
    write(slots, pieces, seed=1)
    slots.commit()
    path = tmp_path / "kept"
    record = slots.keep(pieces[2], str(path))
    with pytest.raises(StoreError, match="No such file"):
        read_kept(str(tmp_path / "other"), record)
    with pytest.raises(StoreError, match="does not match its checksum"):
        read_kept(str(path), Record(record.file_bytes, record.nbytes, "xxh3:0123456789abcdef"))
    os.truncate(path, PAGE)
    with pytest.raises(StoreError, match=rf"has {PAGE} bytes instead of {2 * PAGE}"):
        read_kept(str(path), record)


def test_checksums_are_of_the_kind_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    data = buffer(100, 1)
    monkeypatch.setattr(checksum_module, "_xxhash", None)
    crc = checksum_module.checksum(data)
    with pytest.raises(StoreError, match="pip install xxhash"):
        checksum_module.checksum(data, like="xxh3:0123456789abcdef")
    monkeypatch.undo()
    assert checksum_module.checksum(data, like=crc) == crc
