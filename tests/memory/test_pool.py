"""The pool: constant size, no overlap, no buffer taken again while a transfer uses it."""

import random
import threading

import psutil
import pytest
import torch
from memory_cases import PAGE, entered

from hmt_deepspeed.memory.counters import Counters, run_in_background
from hmt_deepspeed.memory.errors import PoolFull
from hmt_deepspeed.memory.pool import PinnedPool
from hmt_deepspeed.memory.streams import TwinStreams


class Use:
    """An event that ends when told to, or when waited for."""

    def __init__(self):
        self.passed = False
        self.waits = 0

    def done(self):
        return self.passed

    def wait(self):
        self.waits += 1
        self.passed = True


def make(pages, counters=None):
    return PinnedPool(pages * PAGE, "test pool", TwinStreams(), counters or Counters())


def test_random_workload_never_overlaps_and_never_grows():
    rng, pool, held = random.Random(0), make(64), {}
    start = pool._memory.data_ptr()
    for step in range(3000):
        if held and rng.random() < 0.5:
            key = rng.choice(list(held))
            buffer = held.pop(key)
            assert (buffer.memory == key % 251).all()  # nobody else wrote into it
            pool.release(buffer)
        else:
            nbytes = rng.choice([0, 1, 100, PAGE, PAGE + 1, 5 * PAGE])
            try:
                buffer = pool.take(nbytes, str(step))
            except PoolFull:
                continue
            assert nbytes <= buffer.memory.numel() <= max(nbytes + PAGE - 1, PAGE)
            assert buffer.memory.data_ptr() % PAGE == 0
            assert 0 <= buffer.memory.data_ptr() - start <= 64 * PAGE - buffer.memory.numel()
            held[step] = buffer
            buffer.memory.fill_(step % 251)
        assert pool.used_bytes == sum(b.memory.numel() for b in held.values())
        assert pool.used_bytes <= pool.peak_bytes <= pool.nbytes
    assert pool.peak_bytes > 0.9 * pool.nbytes  # the workload pressed
    for buffer in held.values():
        pool.release(buffer)
    assert pool.take(64 * PAGE, "all").memory.numel() == 64 * PAGE  # the pieces became one again


def test_a_buffer_in_use_is_not_taken_again():
    pool, use = make(2), Use()
    first = pool.take(PAGE, "first")
    pool.release(first, use)
    second = pool.take(PAGE, "second")
    assert second.offset != first.offset
    assert use.waits == 0
    assert pool.used_bytes == 2 * PAGE


def test_waits_for_the_oldest_transfer_only_when_there_is_no_room():
    counters = Counters()
    pool, uses = make(2, counters), [Use(), Use()]
    for use in uses:
        pool.release(pool.take(PAGE, "x"), use)
    assert counters.seconds_waited == 0
    pool.take(PAGE, "y")
    assert [use.waits for use in uses] == [1, 0]
    assert counters.seconds_waited > 0
    assert pool.peak_bytes == 2 * PAGE


def test_an_error_of_another_transfer_is_not_raised_here():
    class Broken(Use):
        def wait(self):
            super().wait()
            raise OSError("not yours")

    pool = make(1)
    pool.release(pool.take(PAGE, "x"), Broken())
    pool.take(PAGE, "y")
    assert pool.used_bytes == PAGE


def test_larger_than_the_pool():
    with pytest.raises(PoolFull, match=rf"'big' needs {3 * PAGE} bytes.*has {2 * PAGE}"):
        make(2).take(3 * PAGE, "big")


def test_full_of_held_buffers():
    pool = make(3)
    buffers = [pool.take(PAGE, name) for name in "abc"]
    pool.release(buffers[1])
    with pytest.raises(PoolFull, match=rf"'d'.*holds {2 * PAGE} .*largest free piece has {PAGE}"):
        pool.take(2 * PAGE, "d")


@pytest.mark.parametrize("background", [False, True])
def test_waits_for_what_another_thread_will_release(background):
    counters = Counters()
    pool = make(1, counters)
    buffer = pool.take(PAGE, "lent", lent=True)
    taken = []

    def taker():
        if background:
            run_in_background()
        taken.append(pool.take(PAGE, "next"))

    thread = threading.Thread(target=taker)
    waits = entered(counters)
    thread.start()
    assert waits.wait(120)
    assert not taken
    pool.release(buffer)
    thread.join(120)
    assert taken[0].offset == 0
    assert (counters.seconds_waited > 0) is not background


def test_released_twice():
    pool = make(2)
    buffer = pool.take(1, "x")
    pool.release(buffer)
    with pytest.raises(RuntimeError, match="'x' was released twice"):
        pool.release(buffer)


def test_freed_memory_is_poisoned():
    pool = make(1)
    buffer = pool.take(8, "x")
    buffer.memory.zero_()
    pool.release(buffer)
    assert buffer.memory.view(torch.float32).isnan().all()


def test_fresh_memory_is_poisoned_and_no_page_is_touched_early():
    before = psutil.Process().memory_info().rss
    pool = PinnedPool(1 << 30, "large", TwinStreams(), Counters())
    for _ in range(3):
        buffer = pool.take(2 * PAGE, "x")
        assert buffer.memory.view(torch.float32).isnan().all()
        pool.take(PAGE, "y")
        buffer.memory.zero_()
        pool.release(buffer)
    assert psutil.Process().memory_info().rss - before < 1 << 26


def test_close_ends_takers_and_is_idempotent():
    pool, use = make(1), Use()
    pool.release(pool.take(1, "x"), use)
    pool.close()
    pool.close()
    assert use.waits == 1
    with pytest.raises(RuntimeError, match="closed"):
        pool.take(1, "y")


@pytest.mark.parametrize("nbytes", [0, -1])
def test_size_must_be_positive(nbytes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        PinnedPool(nbytes, "test pool", TwinStreams(), Counters())
