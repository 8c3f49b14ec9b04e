"""The linear program on plain arrays: equal to brute force, bounded by its relaxation, quick."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from hmt_deepspeed.planner.solve.program import Columns, Program
from hmt_deepspeed.planner.solve.search import Solution, round_and_repair, solve_program

AS_FAST = 3e-7  # solve_program trades 1e-7 of the time for less movement, and floats round


def random_columns(rng: np.random.Generator, layers: int, columns: int) -> Columns:
    return Columns(
        num_layers=layers,
        seconds=rng.random((columns, 4)),
        bytes=rng.random((columns, 2)) * 1e9,
        working=rng.random(columns) * 1e9,
        tie=rng.random(columns),
    )


def random_program(rng: np.random.Generator, layers: int, columns: int, room: float) -> Program:
    """Two classes, two phases of two resources, GPU and host."""
    classes = tuple(random_columns(rng, layers, columns) for _ in range(2))
    limits = rng.uniform(0.15, room, 2) * 2 * layers * 1e9
    return Program(classes, rng.random(4), np.array([0, 0, 1, 1]), np.array([1.0, 2.0]), limits)


def brute_force(program: Program) -> float:
    """Seconds of the fastest counts that fit; infinite if none do."""
    options = [
        [
            np.bincount(chosen, minlength=len(c.working))
            for chosen in itertools.combinations_with_replacement(
                range(len(c.working)), c.num_layers
            )
        ]
        for c in program.classes
    ]
    best = np.inf
    for counts in itertools.product(*options):
        if program.is_feasible(list(counts)):
            best = min(best, program.objective(list(counts)))
    return best


def test_the_counts_are_the_best_there_are() -> None:
    rng = np.random.default_rng(0)
    feasible = 0
    for _ in range(50):
        layers, columns = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        program = random_program(rng, layers, columns, 0.8)
        best, found = brute_force(program), solve_program(program)
        if found is None:
            assert best == np.inf
            continue
        feasible += 1
        assert program.is_feasible(found.counts)
        assert program.objective(found.counts) == found.objective
        assert found.objective == pytest.approx(best, rel=AS_FAST)
        assert found.relaxation <= best * (1 + 1e-9)
        assert found.gap <= AS_FAST
    assert 15 <= feasible < 50  # both kinds were seen


def test_the_largest_working_size_counts_and_not_each_layers() -> None:
    """One fast column fits once its working bytes are counted once, and not if they were counted per layer."""
    columns = Columns(
        4, np.array([[1.0], [3.0]]), np.array([[1.0], [1.0]]), np.array([5.0, 0.0]), np.zeros(2)
    )
    program = Program((columns,), np.zeros(1), np.zeros(1, dtype=int), np.ones(1), np.array([9.0]))
    found = solve_program(program)
    assert found is not None
    assert found.objective == pytest.approx(4.0)
    found = solve_program(Program(*_with_limit(program, 8.9)))
    assert found is not None
    assert found.objective == pytest.approx(12.0)


def _with_limit(program: Program, limit: float) -> tuple:
    return (program.classes, program.base, program.phase, program.weights, np.array([limit]))


def test_none_where_nothing_fits() -> None:
    columns = Columns(3, np.ones((1, 1)), np.ones((1, 1)), np.zeros(1), np.zeros(1))
    program = Program((columns,), np.zeros(1), np.zeros(1, dtype=int), np.ones(1), np.array([2.9]))
    assert solve_program(program) is None


def test_of_equally_fast_counts_the_least_tie_cost() -> None:
    base = np.array([10.0])  # something else takes longer than any column
    seconds, tie = np.array([[1.0], [2.0], [0.5]]), np.array([3.0, 1.0, 2.0])
    columns = Columns(4, seconds, np.zeros((3, 1)), np.zeros(3), tie)
    two_rows = Columns(
        4, np.hstack([seconds, np.zeros((3, 1))]), np.zeros((3, 1)), np.zeros(3), tie
    )
    program = Program(
        (two_rows,), np.array([0.0, *base]), np.zeros(2, dtype=int), np.ones(1), np.ones(1)
    )
    found = solve_program(program)
    assert found is not None
    assert found.objective == 10.0
    assert list(found.counts[0]) == [0, 4, 0]
    alone = Program((columns,), np.zeros(1), np.zeros(1, dtype=int), np.ones(1), np.ones(1))
    found = solve_program(alone)
    assert found is not None
    assert list(found.counts[0]) == [0, 0, 4]


def large_program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    return random_program(rng, 48, 200, 0.5)


def test_a_search_that_time_cuts_is_at_most_2_percent_worse() -> None:
    for seed in range(3):
        program = large_program(seed)
        cut = solve_program(program, time_limit=1e-9)
        assert isinstance(cut, Solution)
        assert cut.objective <= 1.02 * cut.bound
        assert cut.gap == pytest.approx(cut.objective / cut.bound - 1)


def test_96_layers_of_200_columns_take_less_than_two_seconds() -> None:
    program = large_program(7)
    start = time.process_time()  # of this process alone, whatever else the machine does
    found = solve_program(program)
    assert found is not None
    assert time.process_time() - start < 2


def test_rounding_repairs_what_it_breaks() -> None:
    """Half of three layers each: one is left over, and only the slow column still fits."""
    columns = Columns(
        3, np.array([[1.0], [2.0]]), np.array([[2.0], [1.0]]), np.zeros(2), np.zeros(2)
    )
    program = Program((columns,), np.zeros(1), np.zeros(1, dtype=int), np.ones(1), np.array([4.5]))
    counts = round_and_repair(program, [np.array([1.5, 1.5])])
    assert counts is not None
    assert list(counts[0]) == [1, 2]
    tight = Program(*_with_limit(program, 2.9))
    assert round_and_repair(tight, [np.array([1.5, 1.5])]) is None
