"""Tasks on resources."""

from __future__ import annotations

import pytest

from hmt_deepspeed.planner.timeline.timeline import Task, play


def test_a_pipeline_takes_its_slowest_stage_and_one_of_each_other() -> None:
    """n (2 s then 3 s): 2 + 3 n."""
    tasks = []
    for _ in range(5):
        tasks.append(Task("load", "link", 2.0))
        tasks.append(Task("work", "gpu", 3.0, after=(len(tasks) - 1,)))
    played = play(tasks)
    assert played.seconds == pytest.approx(2 + 3 * 5)
    assert played.busy() == pytest.approx({"link": 10.0, "gpu": 15.0})


def test_two_directions_slow_each_other_down_while_both_are_busy() -> None:
    tasks = [Task("out", "down", 4.0), Task("in", "up", 2.0)]
    played = play(tasks, {("down", "up"): (0.5, 0.5)})
    # both at half speed until `in` is done at 4, when `out` has 2 s left, at full speed
    assert [span.end for span in played.spans] == pytest.approx([6.0, 4.0])
    assert play(tasks).seconds == pytest.approx(4.0)


def test_the_earlier_in_the_list_goes_first_but_nobody_waits_for_who_is_not_ready() -> None:
    tasks = [
        Task("slow", "gpu", 5.0),
        Task("wanted first", "link", 1.0, after=(0,)),
        Task("ready", "link", 2.0),
    ]
    played = play(tasks)
    assert played.spans[2].start == 0.0
    assert played.spans[1].start == 5.0


def test_memory_over_time() -> None:
    tasks = [
        Task("a", "gpu", 1.0, takes=(("gpu", 3.0),)),
        Task("b", "gpu", 1.0, after=(0,), takes=(("gpu", 2.0),), gives=(("gpu", 5.0),)),
        Task(
            "c", "gpu", 1.0, after=(1,), takes=(("gpu", 4.0), ("host", 9.0)), gives=(("gpu", 4.0),)
        ),
    ]
    played = play(tasks)
    assert played.memory("gpu", 1.0) == [
        (0.0, 1.0),
        (0.0, 4.0),
        (1.0, 6.0),
        (2.0, 1.0),
        (2.0, 5.0),
        (3.0, 1.0),
    ]
    assert played.peak("gpu", 1.0) == 6.0
    assert played.peak("host") == 9.0


def test_memory_is_in_order_of_time_and_not_of_the_list() -> None:
    tasks = [
        Task("long", "gpu", 4.0),
        Task("late", "gpu", 1.0, after=(0,), takes=(("gpu", 2.0),)),
        Task("early", "link", 1.0, takes=(("gpu", 5.0),), gives=(("gpu", 5.0),)),
    ]
    played = play(tasks)
    assert played.memory("gpu") == [(0.0, 0.0), (0.0, 5.0), (1.0, 0.0), (4.0, 2.0)]
    assert played.peak("gpu") == 5.0


def test_a_task_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for task 1"):
        play([Task("a", "gpu", 1.0, after=(1,)), Task("b", "gpu", 1.0)])
