"""Gradients whose dominant subspace goes from A to B and back: second moments of A that were remembered.

The yardstick is the step of a matrix that has stayed in A and saw A's gradients only ("converged").
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache

import alone
import pytest
import torch
from hmt_runs import settings_of
from torch import Tensor

from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.rules.moments import PreviousMoments, Recalled
from hmt_deepspeed.optim.rules.projected import adopt_together, overlap_of

M, N, RANK, PHASE = 24, 64, 16, 100
BETAS, EPS = (0.9, 0.999), 1e-8


def new_matrix(basis: Tensor, state_dtype: str = "fp32") -> LowRankMatrix:
    settings = settings_of(rank=RANK, residual="none", probes=0, scale=1.0, state_dtype=state_dtype)
    matrix = LowRankMatrix("w", (M, N), (0, M), settings, torch.float32, torch.device("cpu"))
    matrix.state_dtype = state_dtype  # also of so few elements
    matrix.adopt(basis)
    return matrix


def step(matrix: LowRankMatrix, gradient: Tensor) -> Tensor:
    columns = matrix.projection
    return alone.step(matrix, gradient @ columns, betas=BETAS, eps=EPS) @ columns.t()


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator)).Q


def gradients(basis: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """In the span of a basis, of very different size by direction and row; the noise is as large as the mean."""
    size = torch.logspace(0, -2, RANK) * torch.logspace(0, -1, M).view(-1, 1)
    mean = torch.randn(M, RANK, generator=generator) * size
    while True:
        yield (mean + torch.randn(M, RANK, generator=generator) * size) @ basis.t()


class Subspaces:
    """A, B, and A turned within its span; gradients of either; a matrix that was in A, then in B."""

    def __init__(self, seed: int, state_dtype: str = "fp32") -> None:
        generator = torch.Generator().manual_seed(seed)
        frame = orthonormal(N, 2 * RANK, generator)
        self.a, self.b = frame[:, :RANK], frame[:, RANK:]
        self.turned = self.a @ orthonormal(RANK, RANK, generator)
        self.of_a, self.of_b = gradients(self.a, generator), gradients(self.b, generator)
        self.matrix = new_matrix(self.a, state_dtype)
        for _ in range(2 * PHASE):
            step(self.matrix, next(self.of_a))
        self.converged = copy.deepcopy(self.matrix)
        self.previous: PreviousMoments = self.matrix.moments.as_previous()
        self.matrix.adopt(self.b)
        for _ in range(PHASE):
            step(self.matrix, next(self.of_b))

    def recalled(self, basis: Tensor) -> Recalled:
        decay = BETAS[1] ** (self.matrix.steps - self.previous.steps)
        return Recalled(self.previous, overlap_of(self.a, basis), decay)

    def back_to(self, basis: Tensor, remembers: bool) -> LowRankMatrix:
        matrix = copy.deepcopy(self.matrix)
        recalled = [[self.recalled(basis)]] if remembers else None
        adopt_together([matrix], basis, [None], recalled)
        return matrix


@lru_cache
def subspaces(seed: int, state_dtype: str = "fp32") -> Subspaces:
    """Shared by the tests: each goes on from copies."""
    return Subspaces(seed, state_dtype)


SETTLED, STEPS = (
    20,
    50,
)  # by the first the first moment has forgotten what it was before: 0.9^20 = 0.12


def distances(seed: int, turned: bool) -> list[float]:
    """Mean distance to the converged steps, as a share of their norm: without history, and with it."""
    case = subspaces(seed)
    basis = case.turned if turned else case.a
    plain, knowing = (case.back_to(basis, remembers) for remembers in (False, True))
    converged = copy.deepcopy(case.converged)
    converged.adopt(basis)
    found = torch.zeros(2)
    for number in range(STEPS):
        gradient = next(case.of_a)
        target = step(converged, gradient)
        for place, matrix in enumerate((plain, knowing)):
            far = (step(matrix, gradient) - target).norm() / target.norm()
            found[place] += far / (STEPS - SETTLED) if number >= SETTLED else 0
    return found.tolist()


@pytest.mark.parametrize("turned", [False, True])
def test_after_the_return_steps_are_closer_to_the_converged_ones(turned: bool) -> None:
    for seed in range(2):
        without, remembering = distances(seed, turned)
        assert remembering < 0.5 * without  # .035 and .11 over three seeds


def log_error(matrix: LowRankMatrix, converged: LowRankMatrix) -> float:
    """Mean of ``|log(v / v*)| / 2`` over all entries: how far Adam's denominators are off."""
    second, target = (m.moments.exp_avg_sq.read() / m.moments.evidence for m in (matrix, converged))
    return float((second / target).log().abs().mean()) / 2


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_the_second_moment_is_the_converged_one_in_any_state_dtype(state_dtype: str) -> None:
    case = subspaces(0, state_dtype)
    plain, knowing = (case.back_to(case.a, remembers) for remembers in (False, True))
    gradient = next(case.of_a)
    for matrix in (plain, knowing):
        step(matrix, gradient)
    # The weakest directions are a thousandth of their row's mean, where a change of basis floors them.
    assert log_error(knowing, case.converged) < 0.1
    assert log_error(plain, case.converged) > 0.5  # a single square


def test_what_the_basis_in_force_knows_better_stays_as_it_is() -> None:
    case = subspaces(0)
    half = torch.cat((case.b[:, : RANK // 2], case.a[:, : RANK // 2]), dim=1)
    plain, knowing = (case.back_to(half, remembers).moments for remembers in (False, True))
    assert torch.equal(knowing.exp_avg.read(), plain.exp_avg.read())
    known, back = slice(0, RANK // 2), slice(RANK // 2, RANK)
    second, before = (m.exp_avg_sq.read() for m in (knowing, plain))
    assert torch.equal(second[:, known], before[:, known])
    assert torch.equal(knowing.evidence[known], plain.evidence[known])
    # 1 - beta_2^200 of A's gradients, 100 steps ago
    expected = torch.full((RANK // 2,), (1 - 0.999**200) * 0.999**100)
    torch.testing.assert_close(knowing.evidence[back], expected, rtol=1e-4, atol=0)
    assert (plain.evidence[back] < 1e-6).all()


def test_moments_that_are_too_old_are_left_alone() -> None:
    case = subspaces(0)
    rest = case.a + 0.1 * case.b  # of which the basis in force spans a hundredth
    basis = torch.linalg.qr(rest).Q
    stale = case.recalled(basis)._replace(decay=1e-3)
    plain, knowing = (copy.deepcopy(case.matrix) for _ in range(2))
    adopt_together([plain], basis, [None])
    adopt_together([knowing], basis, [None], [[stale]])
    assert torch.equal(knowing.moments.exp_avg_sq.read(), plain.moments.exp_avg_sq.read())
    assert torch.equal(knowing.moments.evidence, plain.moments.evidence)


def test_of_several_bases_each_direction_takes_the_one_that_knew_it_best() -> None:
    case = subspaces(0)
    recalled = []
    for keep in (slice(0, RANK // 2), slice(RANK // 2, RANK)):
        older = case.recalled(case.a)
        only = torch.zeros(RANK)
        only[keep] = 1.0  # an entry that knew half of A
        moments = older.moments.holding(
            [older.moments.evidence * only + 1e-8, *older.moments.tensors()[1:]]
        )
        recalled.append(older._replace(moments=moments))
    both, whole = copy.deepcopy(case.matrix), case.back_to(case.a, remembers=True)
    adopt_together([both], case.a, [None], [recalled])
    torch.testing.assert_close(both.moments.evidence, whole.moments.evidence, rtol=1e-5, atol=0)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_previous_moments_stay_as_they_are_and_survive_a_checkpoint(state_dtype: str) -> None:
    case = subspaces(0, state_dtype)
    before = [tensor.clone() for tensor in case.previous.tensors()]
    back = case.back_to(case.a, remembers=True)
    step(back, next(case.of_a))
    for tensor, was in zip(case.previous.tensors(), before, strict=True):
        assert torch.equal(tensor, was)
    state = case.previous.state_dict()
    restored = PreviousMoments.restored(state, state_dtype, torch.device("cpu"))
    assert (restored.steps, restored.first_evidence) == (2 * PHASE, case.previous.first_evidence)
    for tensor, was in zip(restored.tensors(), before, strict=True):
        assert torch.equal(tensor, was)
    again = case.previous.holding(before)
    assert torch.equal(again.exp_avg_sq.read(), case.previous.exp_avg_sq.read())
