"""Slot files: reuse, verification, every failure of a disk."""

import errno
import os
import re
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, pattern
from ssd_io import make_io

from hmt_deepspeed.memory import checksum as checksum_module
from hmt_deepspeed.memory import file_io
from hmt_deepspeed.memory.checksum import checksum
from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.memory.file_io import AsyncIO, PositionalIO
from hmt_deepspeed.memory.pool import whole_pages
from hmt_deepspeed.memory.slots import SlotFolder, size_class


def buffer(nbytes, seed=0):
    """Page-aligned, whole pages, random."""
    size = whole_pages(nbytes)
    whole = pattern(size + PAGE, dtype=torch.uint8, seed=seed)
    return whole[-whole.data_ptr() % PAGE :][:size]


def new_folder(base):
    path = base / "slots"
    path.mkdir(mode=0o700)
    return str(path)


@pytest.fixture(params=["positional", "async_io"])
def folder(request, tmp_path):
    return SlotFolder(new_folder(tmp_path), make_io(request.param))


@pytest.fixture
def plain(tmp_path):
    return SlotFolder(new_folder(tmp_path), PositionalIO())


def written(folder, nbytes=3 * PAGE + 5, seed=0):
    slot, memory = folder.take(nbytes), buffer(nbytes, seed)
    return slot, memory, folder.write(slot, memory, nbytes)


def failure(folder, slot, digest, nbytes=3 * PAGE + 5):
    """The message of a read, which must leave no doubt about the file."""
    with pytest.raises(StoreError, match=re.escape(slot.path)) as caught:
        folder.read(slot, buffer(nbytes), nbytes, digest)
    return str(caught.value)


# -- round trip and space ------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 1_000_003])
def test_round_trip(folder, nbytes):
    slot, memory, digest = written(folder, nbytes)
    target = buffer(nbytes).zero_()
    folder.read(slot, target, nbytes, digest)
    assert torch.equal(target[:nbytes], memory[:nbytes])
    assert os.path.getsize(slot.path) == slot.capacity == folder.file_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 10**5, 10**6, 2**30, 2**30 + 1, 10**10])
def test_size_classes(nbytes):
    capacity = size_class(nbytes)
    assert capacity % PAGE == 0
    assert nbytes <= capacity <= nbytes * 9 // 8 + PAGE
    assert size_class(capacity) == capacity


def test_files_are_used_again(plain):
    for round_number in range(20):
        slots = [
            written(plain, nbytes, round_number)[0] for nbytes in (5 * PAGE, 5 * PAGE, 40 * PAGE)
        ]
        for slot in slots:
            plain.give_back(slot)
    assert (
        plain.file_bytes
        == 50 * PAGE
        == sum(f.stat().st_size for f in Path(plain.path).glob("*.bin"))
    )


def test_a_slot_is_never_given_out_twice(plain):
    paths = [plain.take(10).path for _ in range(5)]
    assert len(set(paths)) == 5


def test_only_the_owner_may_read(plain):
    assert stat.S_IMODE(os.stat(written(plain)[0].path).st_mode) == 0o600


def test_a_linked_file_survives_being_discarded(plain, tmp_path):
    slot, memory, _ = written(plain, 100)
    plain.sync(slot)
    os.link(slot.path, tmp_path / "kept")
    plain.discard(slot)
    assert plain.file_bytes == 0
    plain.write(slot, buffer(100, seed=9), 100)
    assert (tmp_path / "kept").read_bytes()[:100] == memory[:100].numpy().tobytes()


def test_sync_reaches_file_and_folder(plain, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (synced.append(os.fstat(d).st_ino), fsync(d)))
    slot = written(plain)[0]
    assert synced == []
    plain.sync(slot)
    assert synced == [os.stat(slot.path).st_ino, os.stat(plain.path).st_ino]
    os.unlink(slot.path)
    with pytest.raises(StoreError, match=re.escape(slot.path)):
        plain.sync(slot)


def test_checksums_with_and_without_xxhash(monkeypatch):
    data = buffer(100)
    monkeypatch.setattr(checksum_module, "_xxhash", None)
    assert re.fullmatch(r"crc32:[0-9a-f]{8}", checksum(data))
    changed = data.clone()
    changed[50] ^= 1
    assert checksum(changed) != checksum(data)


# -- failures, on both ways to the file ------------------------------------------------------------------


def test_truncated(folder):
    slot, _, digest = written(folder)
    os.truncate(slot.path, PAGE)
    message = failure(folder, slot, digest)
    assert f"expected a file of {slot.capacity} bytes, found {PAGE}" in message
    with pytest.raises(StoreError, match=f"found {PAGE}"):
        folder.write(slot, buffer(9), 9)


def test_grown(folder):
    slot, _, digest = written(folder)
    os.truncate(slot.path, 9 * PAGE)
    assert f"found {9 * PAGE}" in failure(folder, slot, digest)


@pytest.mark.parametrize("position", [0, 3 * PAGE + 4])
def test_flipped_bit(folder, position):
    slot, _, digest = written(folder)
    with open(slot.path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))
    message = failure(folder, slot, digest)
    assert f"expected checksum {digest}, found " in message


def test_another_tensor_s_file(folder):
    (one, _, digest), (other, _, _) = written(folder, seed=1), written(folder, seed=2)
    os.replace(other.path, one.path)
    assert "expected checksum" in failure(folder, one, digest)


def test_folder_gone(folder):
    slot, _, digest = written(folder)
    for file in Path(folder.path).iterdir():
        file.unlink()
    os.rmdir(folder.path)
    assert "No such file or directory" in failure(folder, slot, digest)
    for target in (slot, folder.take(50)):
        with pytest.raises(StoreError, match=r"cannot write.*No such file"):
            folder.write(target, buffer(50), 50)
    assert folder.file_bytes == 0


@pytest.fixture
def nobody():
    """For the test, a user whom permissions bind."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_permission_lost(folder, request):
    slot, _, digest = written(folder)
    fresh = folder.take(50)
    os.chmod(slot.path, 0)
    os.chmod(folder.path, 0o500)
    request.getfixturevalue("nobody")
    try:
        assert "Permission denied" in failure(folder, slot, digest)
        with pytest.raises(StoreError, match="Permission denied"):
            folder.write(fresh, buffer(50), 50)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        os.chmod(folder.path, 0o700)


def no_space(calls=None):
    def fallocate(descriptor, offset, length):
        if calls is not None:
            calls.append(length)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fallocate


def test_disk_full(folder, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_space())
    with pytest.raises(
        StoreError, match=r"cannot write 8192 bytes: .*No space left.*bytes are free"
    ):
        written(folder, 5000)
    monkeypatch.undo()
    assert not list(Path(folder.path).glob("*.bin"))
    written(folder, 5000)  # and goes on when there is space


def test_a_full_disk_gives_up_unused_files_first(plain, monkeypatch):
    slot = written(plain, 9 * PAGE)[0]
    plain.give_back(slot)
    fallocate = os.posix_fallocate

    def limited(descriptor, offset, length):
        if os.path.exists(slot.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    written(plain, 3 * PAGE)
    assert plain.file_bytes == 3 * PAGE


# -- failures that need a way into the calls ----------------------------------------------------------------


def test_short_transfers_are_continued(plain, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: pwrite(d, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda d, parts, at: preadv(d, [parts[0][:777]], at))
    slot, memory, digest = written(plain)
    target = buffer(3 * PAGE + 5).zero_()
    plain.read(slot, target, 3 * PAGE + 5, digest)
    assert torch.equal(target[: 3 * PAGE + 5], memory[: 3 * PAGE + 5])


def test_a_write_that_stops(plain, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda d, data, at: pwrite(d, data[:PAGE], at) if at == 0 else 0
    )
    with pytest.raises(StoreError, match=rf"wrote {PAGE} of {4 * PAGE} bytes"):
        written(plain)


def test_a_read_that_stops(plain, monkeypatch):
    slot, _, digest = written(plain)
    monkeypatch.setattr(os, "preadv", lambda d, parts, at: 0)
    assert f"read 0 of {4 * PAGE} bytes" in failure(plain, slot, digest)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_while_writing(plain, monkeypatch, code):
    def broken(*_):
        raise OSError(code, os.strerror(code))

    slot, _, digest = written(plain)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError, match=re.escape(os.strerror(code))):
        plain.write(slot, buffer(9), 9)
    monkeypatch.undo()
    assert "No such file" in failure(plain, slot, digest)  # what was there is lost, and says so
    plain.write(slot, buffer(9), 9)


def test_an_error_while_reading(plain, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    slot, _, digest = written(plain)
    monkeypatch.setattr(os, "preadv", broken)
    assert "cannot read 16384 bytes" in failure(plain, slot, digest)


class Handle:
    """An ``aio_handle`` that loses things in silence."""

    def __init__(self, alignment=512, completed=1):
        self.alignment, self.completed = alignment, completed

    def get_alignment(self):
        return self.alignment

    def sync_pwrite(self, memory, path, offset):
        return self.completed

    sync_pread = sync_pwrite


def test_async_io_that_writes_nothing_is_found_out(tmp_path):
    folder = SlotFolder(new_folder(tmp_path), AsyncIO(Handle(), Handle()))
    slot, _, digest = written(folder)
    with pytest.raises(StoreError, match="expected checksum"):
        folder.read(slot, buffer(3 * PAGE + 5, seed=3), 3 * PAGE + 5, digest)


@pytest.mark.parametrize("completed", [-1, 0])
def test_async_io_that_reports_failure(tmp_path, completed):
    folder = SlotFolder(new_folder(tmp_path), AsyncIO(Handle(), Handle(completed=completed)))
    with pytest.raises(StoreError, match=f"async_io returned {completed}"):
        written(folder)


def test_the_first_write_of_async_io_is_alone(tmp_path, monkeypatch):
    """DeepSpeed 0.19.8 hangs when two threads come to its first write together."""
    running, most = [], []

    class Slow(Handle):
        def sync_pwrite(self, memory, path, offset):
            running.append(path)
            most.append(len(running))
            time.sleep(0.05)
            running.remove(path)
            return 1

    monkeypatch.setattr(file_io, "_written", threading.Event())
    path = tmp_path / "file"
    path.touch()
    threads = [
        threading.Thread(target=AsyncIO(Slow(), Slow()).write, args=(str(path), buffer(1)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[:2] == [1, 1]


def test_async_io_alignment():
    with pytest.raises(ValueError, match=r"8192 bytes.*intra_op_parallelism"):
        AsyncIO(Handle(), Handle(alignment=8192))
