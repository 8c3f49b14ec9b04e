"""Refresh schedule: budget, interval, spread."""

from itertools import pairwise

import pytest

from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule


def run(schedule, steps):
    """Steps at which each matrix refreshed, and the indices per step."""
    per_step = []
    for step in range(steps):
        due = schedule.due(step)
        for index in due:
            schedule.refreshed(index, step)
        per_step.append(due)
    times = [
        [s for s, due in enumerate(per_step) if i in due] for i in range(len(schedule.next_refresh))
    ]
    return times, per_step


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([1, 1, 1, 1], 4, [[0, 1, 2, 3]]),
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([3, 1, 1, 3], 4, [[0, 1], [2, 3]]),  # a later one fills what an earlier leaves
        ([3, 3, 1], 4, [[0, 2], [1]]),
        ([], 0, [[]]),
    ],
)
def test_first_round(sizes, budget, expected):
    _, per_step = run(RefreshSchedule(sizes, 100, budget), len(expected))
    assert per_step == expected


@pytest.mark.parametrize(
    ("sizes", "interval", "budget"),
    [
        ([4] * 28, 40, 8),
        ([4] * 64, 32, 8),
        ([4, 4, 4, 4, 11, 11, 11] * 12, 200, None),
        ([8] * 5, 50, 8),
        ([8] * 3, 1, 24),
    ],
)
def test_budget_interval_and_spread(sizes, interval, budget):
    budget = auto_full_gradient_bytes(sizes) if budget is None else budget
    times, per_step = run(RefreshSchedule(sizes, interval, budget), 8 * interval + len(sizes))
    for due in per_step:
        assert sum(sizes[i] for i in due) <= budget
    settled = 3 * interval + len(sizes)
    for own in times:
        assert own
        late = [t for t in own if t >= settled - interval]
        gaps = [b - a for a, b in pairwise(late)]
        assert gaps
        assert set(gaps) == {interval}
    # Spread: a tenth of the interval has a tenth of the refreshes, up to rounding at its ends.
    window = max(1, interval // 10)
    for begin in range(settled, settled + interval):
        count = sum(len(due) for due in per_step[begin : begin + window])
        assert abs(count - len(sizes) * window / interval) <= 1


def test_a_large_matrix_does_not_starve():
    """Small ones fill the budget every step; the large one still comes first once it waits longest."""
    times, _ = run(RefreshSchedule([10] + [1] * 30, 10, 10), 60)
    assert len(times[0]) >= 3


def test_unrefreshed_stays_due():
    schedule = RefreshSchedule([1, 1], 10, 1)
    assert schedule.due(0) == schedule.due(0) == [0]
    schedule.refreshed(0, 0)
    assert schedule.due(5) == [1]


def test_what_has_no_gradient_to_refresh_from_lets_the_others_pass():
    schedule = RefreshSchedule([1, 1, 1], 10, 1)
    order = []
    for step in range(6):
        (index,) = schedule.due(step)
        order.append(index)
        if index:
            schedule.refreshed(index, step)
        else:
            schedule.postpone(index, step)
    assert order == [0, 1, 2, 0, 0, 0]  # the first comes back when nobody else waits


def test_default_budget():
    assert auto_full_gradient_bytes([100] * 60) == 750
    assert auto_full_gradient_bytes([2**28] * 64) == 2**30  # 2 GiB would be an eighth
    assert auto_full_gradient_bytes([2**28] * 256) == 2**31  # a thirty-second
    assert auto_full_gradient_bytes([1, 500]) == 500
    assert auto_full_gradient_bytes([]) == 0


# -- groups -------------------------------------------------------------------------------------------


def test_a_group_refreshes_together_and_counts_its_bytes_together():
    sizes, groups = [4, 4, 4, 11, 11, 4] * 6, []
    for layer in range(6):
        groups += [[6 * layer, 6 * layer + 1, 6 * layer + 2], [6 * layer + 4, 6 * layer + 3]]
    budget, interval = 22, 60  # the largest group
    schedule = RefreshSchedule(sizes, interval, budget, groups)
    times, per_step = run(schedule, 6 * interval)
    for group in groups:
        assert all(times[i] == times[group[0]] for i in group)
    for due in per_step:
        assert sum(sizes[i] for i in due) <= budget
    # Phases are spread over the 18 groups: nowhere more than one in three steps or so.
    late = [sum(1 for g in schedule.groups if g[0] in due) for due in per_step[3 * interval :]]
    assert max(late) == 1
    assert sum(late) == 3 * len(schedule.groups)


def test_a_group_with_a_member_left_over_is_due_again():
    schedule = RefreshSchedule([1, 1, 1], 10, 2, [[0, 2]])
    assert schedule.due(0) == [0, 2]
    schedule.refreshed(0, 0)  # the gradient of 2 was not finite
    assert schedule.due(1) == [0, 2]


def test_groups_and_budgets_that_cannot_be():
    for groups in ([[0, 1], [1, 2]], [[0, 3]], [[-1]]):
        with pytest.raises(ValueError, match=r"legal: each of 0\.\.2"):
            RefreshSchedule([1, 1, 1], 10, 3, groups)
    with pytest.raises(ValueError, match="at least 3"):
        RefreshSchedule([1, 2, 1], 10, 2, [[0, 1]])
