"""The engine on the CPU twin: order, room, errors. Each rule is also broken once, to see it show."""

import threading
import weakref

import pytest
import torch
from memory_cases import PAGE, assert_same, pattern, tensors

from hmt_deepspeed.memory import transfer as transfer_module
from hmt_deepspeed.memory.errors import PoolFull, TransferError
from hmt_deepspeed.memory.streams import Direction, TwinStreams
from hmt_deepspeed.memory.transfer import TransferEngine


def make(pages=16, streams=None):
    return TransferEngine("cpu", pages * PAGE, streams)


def pending(engine, direction=Direction.TO_HOST):
    return len(engine.streams.pending[direction])


@pytest.mark.parametrize("kind", tensors())
def test_round_trip(kind):
    tensor, engine = tensors()[kind], make()
    handle = engine.put(tensor, kind)
    assert_same(engine.get(handle), tensor)


def test_counters_are_exact():
    engine, tensor = make(), pattern(100)
    handle = engine.put(tensor, "x")
    for _ in range(3):
        engine.prefetch(handle)
        engine.prefetch(handle)  # on its way already
        engine.get(handle)
    engine.put(torch.empty(0), "nothing")
    counted = engine.counters
    assert (counted.bytes_out, counted.num_out) == (400, 2)
    assert (counted.bytes_in, counted.num_in) == (1200, 3)
    assert engine.pool.peak_bytes == engine.pool.used_bytes == 2 * PAGE


def test_each_get_is_a_copy_of_its_own():
    engine, tensor = make(), pattern(10)
    handle = engine.put(tensor, "x")
    engine.get(handle).zero_()
    assert_same(engine.get(handle), tensor)


# -- the order of operations -----------------------------------------------------------------------


def test_nothing_runs_before_it_is_waited_for():
    engine, tensor = make(), pattern(10)
    handle = engine.put(tensor, "x")
    engine.prefetch(handle)
    assert not handle.stored.done()
    assert handle.arrival.tensor.isnan().all()
    assert handle.buffer.memory.view(torch.float32).isnan().all()
    assert_same(engine.get(handle), tensor)
    assert handle.stored.done()


def test_copies_run_in_order_of_submission():
    engine = make()
    handles = [engine.put(pattern(4, seed=i), str(i)) for i in range(3)]
    engine.host_bytes(handles[1])
    assert [h.stored.done() for h in handles] == [True, True, False]


def test_a_consumer_that_does_not_wait_reads_poison():
    class Forgetful(TwinStreams):
        def use(self, tensor, event, home):
            pass

    engine = make(streams=Forgetful())
    assert engine.get(engine.put(pattern(10), "x")).isnan().all()


def test_a_fetch_that_does_not_wait_for_the_store_reads_poison():
    class Forgetful(TwinStreams):
        def copy(self, direction, destination, source, after):
            return super().copy(direction, destination, source, after[:1])

    engine = make(streams=Forgetful())
    assert engine.get(engine.put(pattern(10), "x")).isnan().all()


def test_host_bytes_wait_for_the_store():
    engine, tensor = make(), pattern(10)
    assert torch.equal(engine.host_bytes(engine.put(tensor, "x")).view(torch.float32), tensor)


def test_the_tensor_may_be_freed_at_once():
    engine, tensor = make(), pattern(10)
    expected, alive = tensor.clone(), weakref.ref(tensor)
    handle = engine.put(tensor, "x")
    del tensor
    assert alive() is None
    assert_same(engine.get(handle), expected)


def test_device_memory_freed_too_early_is_an_error():
    class Forgetful(TwinStreams):
        def keep(self, tensor, direction):
            pass

    engine = make(streams=Forgetful())
    handle = engine.put(pattern(10), "x")
    with pytest.raises(TransferError, match=r"'x' \(40 bytes\).*keep"):
        engine.get(handle)


def test_an_abandoned_fetch_keeps_its_memory_until_the_copy_is_done():
    engine = make()
    handle = engine.put(pattern(10), "x")
    engine.prefetch(handle)
    copies = engine.streams.pending[Direction.TO_DEVICE]
    event, target = copies[0].event, weakref.ref(handle.arrival.flat)
    engine.drop(handle)
    del handle
    assert target() is not None
    engine.streams.drain()
    assert event.error is None
    assert target() is None
    assert engine.pool.take(16 * PAGE, "all of it")  # the buffer is free again


def test_writing_to_a_tensor_on_its_way_shows():
    engine, tensor = make(), pattern(10)
    handle = engine.put(tensor, "x")
    tensor.zero_()  # against the contract of put
    assert engine.get(handle).eq(0).all()


def test_a_buffer_is_not_reused_before_its_fetch_is_done():
    engine, tensor = make(pages=1), pattern(10)
    handle = engine.put(tensor, "x")
    arrival = engine.fetch(handle)
    engine.drop(handle)
    other = engine.put(pattern(10, seed=1), "y")  # waits for both copies of x
    assert_same(engine.receive(arrival), tensor)
    assert_same(engine.get(other), pattern(10, seed=1))
    assert engine.counters.seconds_waited > 0


def test_reusing_a_buffer_too_early_shows():
    class Hasty(TwinStreams):
        def copy(self, *args):
            event = super().copy(*args)
            event.done = lambda: True
            return event

    engine, tensor = make(pages=1, streams=Hasty()), pattern(10)
    handle = engine.put(tensor, "x")
    arrival = engine.fetch(handle)
    engine.drop(handle)
    engine.host_bytes(engine.put(pattern(10, seed=1), "y"))
    assert not torch.equal(engine.receive(arrival), tensor)


# -- room ----------------------------------------------------------------------------------------------


def test_the_pool_waits_instead_of_growing():
    engine = make(pages=4)
    for step in range(50):
        handle = engine.put(pattern(1024, seed=step), str(step))
        assert_same(engine.get(handle), pattern(1024, seed=step))
        engine.drop(handle)
    assert engine.pool.peak_bytes <= 4 * PAGE


def test_a_tensor_larger_than_the_pool():
    with pytest.raises(PoolFull, match=rf"'x' needs {3 * PAGE} bytes.*{2 * PAGE}"):
        make(pages=2).put(torch.zeros(3 * PAGE, dtype=torch.uint8), "x")


def test_a_pool_full_of_handles():
    engine = make(pages=2)
    held = [engine.put(pattern(8), name) for name in "ab"]
    with pytest.raises(PoolFull, match="'c' needs"):
        engine.put(pattern(8), "c")
    engine.drop(held[0])
    engine.put(pattern(8), "c")


def test_device_memory_waiting_to_be_freed_is_bounded():
    engine = make(pages=4)
    store = engine.new_pool(100 * PAGE, "large")
    sources = []
    for _ in range(60):
        tensor = torch.ones(PAGE // 4)
        sources.append(weakref.ref(tensor.untyped_storage()))
        engine.put(tensor, "x", store)
        del tensor
        assert pending(engine) <= 4
    assert pending(engine) == 4
    engine.put(torch.zeros(20 * PAGE, dtype=torch.uint8), "goes alone", store)
    assert pending(engine) == 1


# -- errors and misuse -----------------------------------------------------------------------------------


class Faulty(TwinStreams):
    """Copies of tensors that begin with byte 13 fail."""

    def copy(self, direction, destination, source, after):
        event = super().copy(direction, destination, source, after)
        if source.numel() and direction is Direction.TO_HOST and source[0] == 13:

            def fail():
                raise RuntimeError("the cable is out")

            self.pending[direction][-1].run = fail
        return event


def test_an_error_is_raised_where_its_result_is_used():
    engine = make(streams=Faulty())
    bad = engine.put(torch.full((9,), 13, dtype=torch.uint8), "layer 3, mlp")
    good = engine.put(pattern(9), "layer 4, mlp")
    assert_same(engine.get(good), pattern(9))
    engine.prefetch(bad)
    for use in (engine.get, engine.host_bytes, engine.get):
        with pytest.raises(TransferError, match=r"'layer 3, mlp' \(9 bytes\).*the cable is out"):
            use(bad)
    engine.drop(bad)
    engine.drop(good)
    assert engine.pool.take(16 * PAGE, "all of it")


def test_no_device_memory_in_prefetch_is_tried_again_in_get(monkeypatch):
    engine, tensor = make(), pattern(9)
    handle = engine.put(tensor, "x")
    with monkeypatch.context() as patch:

        def no_memory(layout, device):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(transfer_module, "new_like", no_memory)
        engine.prefetch(handle)
        with pytest.raises(TransferError, match=r"'x' \(36 bytes\).*out of memory"):
            engine.get(handle)
    assert_same(engine.get(handle), tensor)


@pytest.mark.parametrize("verb", ["get", "prefetch", "drop", "host_bytes", "fetch"])
def test_a_dropped_handle(verb):
    engine = make()
    handle = engine.put(pattern(9), "gone")
    engine.drop(handle)
    with pytest.raises(RuntimeError, match="'gone' was dropped"):
        getattr(engine, verb)(handle)


def test_another_device():
    with pytest.raises(ValueError, match="'x' is on meta, this engine moves cpu"):
        make().put(torch.empty(3, device="meta"), "x")
    with pytest.raises(ValueError, match="no streams are known for device meta"):
        TransferEngine("meta", PAGE)


def test_a_refused_tensor_takes_no_room():
    engine = make(pages=1)
    with pytest.raises(ValueError, match="can be moved"):
        engine.put(torch.eye(3).to_sparse(), "x")
    assert engine.pool.used_bytes == 0


def test_a_copy_that_cannot_be_started_takes_no_room():
    class Broken(TwinStreams):
        def copy(self, *args):
            raise RuntimeError("no such device")

    engine = make(pages=1, streams=Broken())
    with pytest.raises(TransferError, match=r"'x' \(36 bytes\) failed: no such device"):
        engine.put(pattern(9), "x")
    assert engine.pool.used_bytes == 0


def test_received_before_it_was_sent():
    engine = make()
    layout = engine.put(pattern(9), "x").layout
    with pytest.raises(RuntimeError, match="'y' is received before"):
        engine.receive(engine.expect(layout, "y"))


def test_close():
    engine = make()
    engine.put(pattern(9), "x")
    engine.close()
    engine.close()
    assert pending(engine) == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.put(pattern(9), "y")


def test_threads():
    engine, failures = make(pages=64), []

    def work(seed):
        try:
            for step in range(40):
                tensor = pattern(700, seed=seed * 1000 + step)
                handle = engine.put(tensor, f"{seed}.{step}")
                engine.prefetch(handle)
                assert_same(engine.get(handle), tensor)
                engine.drop(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.counters.num_out == engine.counters.num_in == 160
    assert engine.counters.bytes_out == engine.counters.bytes_in == 160 * 2800


def test_bytes_go_into_an_existing_tensor_once_they_are_received():
    engine, target = make(), torch.zeros(10)
    arrival = engine.into(target[2:6], "x")
    buffer = engine.pool.take(16, "x")
    buffer.memory[:16].view(torch.float32).copy_(torch.ones(4))
    engine.deliver(arrival, engine.pool, buffer)
    assert target.sum() == 0  # the twin copies as late as it may
    assert engine.receive(arrival).data_ptr() == target[2:].data_ptr()
    assert target.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert (engine.counters.bytes_in, engine.pool.used_bytes) == (16, PAGE)
    engine.pool.take(16 * PAGE, "all")  # the buffer is free again


def test_into_what_cannot_be_written():
    with pytest.raises(ValueError, match="'columns' must be contiguous"):
        make().into(torch.zeros(4, 4)[:, 1], "columns")
    with pytest.raises(ValueError, match="on cpu, is on meta"):
        make().into(torch.zeros(4, device="meta"), "elsewhere")
