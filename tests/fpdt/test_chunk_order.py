"""The order of chunks: what has to hold whatever is computed."""

from itertools import pairwise

import pytest

from hmt_deepspeed.fpdt.schedule import (
    Step,
    Unit,
    backward_steps,
    forward_steps,
    most_resident,
    seen_by,
)

VISIBLE = {
    "causal": lambda i, j: True,
    "window of one chunk before": lambda i, j: i - j <= 1,
    "window of two": lambda i, j: i - j <= 2,
    "documents": lambda i, j: i // 3 == j // 3,
    "own chunk only": lambda i, j: False,
}


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 9])
@pytest.mark.parametrize("name", VISIBLE)
def test_backward_visits_each_pair_once_with_two_buffers(name, num_chunks):
    keys = seen_by(num_chunks, VISIBLE[name])
    first, steps = backward_steps(keys)
    expected = {(i, i) for i in range(num_chunks)} | {
        (i, j) for i in range(num_chunks) for j in range(i) if VISIBLE[name](i, j)
    }
    assert sorted((s.query, s.key) for s in steps) == sorted(expected)
    most = most_resident(steps, first)
    assert most["kv"] <= 2
    assert most["query"] <= 2


@pytest.mark.parametrize("name", VISIBLE)
def test_all_three_gradients_of_a_chunk_are_final_after_its_last_step(name):
    _, steps = backward_steps(seen_by(9, VISIBLE[name]))
    done = set()
    for step in steps:
        assert step.query not in done, "dQ was final"
        assert step.key not in done, "dK and dV were final"
        if step.last:
            done.add(step.key)
    assert done == set(range(9))


def test_a_fetch_starts_one_pair_before_it_is_needed():
    first, steps = backward_steps(seen_by(5, VISIBLE["causal"]))
    there = set(first)
    for now, after in pairwise(steps):
        there |= set(now.fetch)
        assert set(after.needs) <= there
        there -= set(now.release)


def test_forward_begins_with_the_pair_that_is_on_the_device():
    steps = forward_steps(3, [0, 1, 2])
    assert [s.key for s in steps] == [3, 0, 1, 2]
    assert steps[0].fetch == (Unit("kv", 0),)
    assert most_resident(steps, [Unit("kv", 3)]) == {"kv": 2, "query": 0}
    assert [s.last for s in steps] == [False, False, False, True]


def test_a_unit_that_the_next_pair_needs_is_not_fetched_again():
    """With a window of one chunk the last query chunk of each row is the first of the next."""
    _, steps = backward_steps(seen_by(6, VISIBLE["window of one chunk before"]))
    fetched = [unit for step in steps for unit in step.fetch if unit.kind == "query"]
    assert len(fetched) == len(set(fetched)) == 5


def test_the_evaluator_refuses_an_order_that_cannot_run():
    unit = Unit("kv", 0)
    with pytest.raises(ValueError, match="not there"):
        most_resident([Step(0, 0, (unit,), (), (), True)])
    with pytest.raises(ValueError, match="what is there"):
        most_resident([Step(0, 0, (unit,), (unit,), (), True)], [unit])
