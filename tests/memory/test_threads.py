"""A thread whose calls run in order: what waits for them, and when it ends."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from hmt_deepspeed.memory.counters import in_background
from hmt_deepspeed.memory.threads import OrderedThread


def test_calls_run_in_order_and_waiting_is_for_all_before():
    thread, seen = OrderedThread("t"), []
    for number in range(200):
        last = thread.submit(seen.append, number)
        if number % 50 == 49:
            thread.wait(last)
            assert seen == list(range(number + 1))
    thread.submit(lambda: seen.append((threading.current_thread().name, in_background())))
    thread.shutdown()
    thread.shutdown()
    assert seen[-1] == ("t", True)


def test_several_may_wait_for_one_thread():
    thread, gate, woken = OrderedThread("t"), threading.Event(), []
    numbers = [thread.submit(gate.wait), thread.submit(int), thread.submit(time.sleep, 0.05)]

    def wait(number):
        thread.wait(number)
        woken.append(number)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in numbers * 3]
    for one in waiting:
        one.start()
    assert not woken
    gate.set()
    for one in waiting:
        one.join()
    assert sorted(woken) == sorted(numbers * 3)
    thread.shutdown()


def test_the_first_error_is_raised_where_it_is_waited_for():
    thread, seen = OrderedThread("t"), []
    thread.submit(lambda: 1 / 0)
    last = thread.submit(seen.append, 1)
    with pytest.raises(ZeroDivisionError):
        thread.wait(last)
    assert seen == [1]
    thread.shutdown()


def test_a_dropped_one_ends_and_keeps_nothing():
    class Thing:
        pass

    thing, thread = Thing(), OrderedThread("t")
    gone = weakref.ref(thing)
    thread.wait(thread.submit(id, thing))
    del thing
    gc.collect()
    assert gone() is None
    running = thread._thread
    del thread
    gc.collect()
    running.join(60)
    assert not running.is_alive()


def test_the_interpreter_ends_when_all_is_done():
    code = (
        "import time\n"
        "from hmt_deepspeed.memory.threads import OrderedThread\n"
        "thread = OrderedThread('t')\n"
        "thread.submit(time.sleep, 0.2)\n"
        "thread.submit(print, 'done')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "done\n"
