"""Stacks: their members step as they would alone, go from one to another, and stay as they are where they take no step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest
import torch
from alone import draw_probes
from hmt_runs import settings_of
from torch import Tensor

from hmt_deepspeed.optim.rules.build import build_matrix
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.probes import ProbeDraws
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.side_by_side import stacked
from hmt_deepspeed.optim.rules.stack import Gradients, Stack
from hmt_deepspeed.optim.rules.stacks import Stacks

CPU = torch.device("cpu")
SHAPE, RANK, NAMES = (96, 72), 60, ("a", "b", "c")  # 72 x 60 moments are enough for INT8
HYPER: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}
FACTORS = (1.0, 0.25, 3.0)  # of the members
WHOLE = {"rank_candidates": (RANK, 72)}
CASES: dict[str, dict[str, Any]] = {
    "right": {},
    "left": {"projection": "left"},
    "without a residual": {"residual": "none"},
    "no probes": {"residual": "none", "probes": 0},
    "full residual": {"residual": "full"},
    "drawn anew": {"range_finder": "random"},
    "full rank": WHOLE,
    "two-sided": {"projection": "two_sided", "rank": 70},
    "two-sided without a residual": {"projection": "two_sided", "rank": 70, "residual": "none"},
    "factored": {"second_moment": "factored"},
    "factored, full residual": {"second_moment": "factored", "residual": "full"},
    "factored, full rank": {"second_moment": "factored", **WHOLE},
    "apollo": {"method": "apollo", "rank": RANK},
    "mini": {"method": "apollo_mini"},
}
KEPT_IN = ["fp32", "bf16", "int8"]
# Products of matrices: of several in another order of summation than of one.
SUMMED = {"full residual", "factored, full residual", "two-sided", "apollo", "mini"}


def matrices(case: str, dtype: str = "fp32") -> list[MatrixRule]:
    """Three alike, with bases of their own that a gradient may have made."""
    fields = {"state_dtype": dtype, **CASES[case]}
    settings = settings_of(
        **({} if case == "mini" or "full rank" in case else {"rank": RANK}) | fields
    )
    shape, found = (4096, 8) if case == "mini" else SHAPE, []
    for number, name in enumerate(NAMES):
        rows = (0, settings.oriented(*shape)[0])
        matrix = build_matrix(name, shape, rows, settings, torch.float32, CPU)
        if isinstance(matrix, ProjectedMatrix) and not matrix.redraws:
            full = "full rank" in case
            matrix.adopt(None if full else matrix.seeded_basis(matrix.rank, number))
        found.append(matrix)
    return found


def gradients(members: Sequence[MatrixRule], step: int) -> Tensor:
    """As the members take them; of very different size, which also changes from step to step."""
    first = members[0]
    found = []
    for matrix in members:
        number = NAMES.index(matrix.name)
        generator = torch.Generator().manual_seed(100 * step + number)
        given = torch.randn(first.num_rows, first.width, generator=generator)
        found.append(given * 10.0 ** (number - 1) * (1 + 0.3 * step))
    return torch.stack(found)


def given(stack: Stack, gradient: Tensor) -> Gradients:
    return list(gradient) if stack.reads_whole_rows else gradient.clone()


def advance(
    stack: Stack, gradient: Tensor, factor: Tensor, step: int, most: int = 1 << 26
) -> Change:
    """The change; where rows are whole its update is all of it.

    most: elements of a part of the stack.
    """
    for matrix in stack.members:
        matrix.moments.steps += 1
    before, parts = gradient.clone(), stack.parts(most)

    def by_parts() -> list[Gradients]:
        sizes = [len(part.members) for part in parts]
        return [given(stack, some) for some in gradient.split(sizes)]

    stack.observe(stack.measure(parts, by_parts(), slice(None)), 2.0)
    stack.start(factor, step=torch.tensor(step), **HYPER)
    updates, sums = stack.advance(parts, by_parts())
    found = []
    changes = stack.finish(parts, updates, sums)
    for (begin, end), change in zip(stack.pieces(most), changes, strict=True):
        if change.beside is not None:
            columns = stack.part(begin, end).update_columns(change)
            whole = [change.whole(place, columns[place]) for place in range(end - begin)]
            change = Change(torch.stack(whole), change.scale)
        found.append(change)
    assert torch.equal(gradient.nan_to_num(), before.nan_to_num())
    scales = torch.cat([change.scale for change in found])
    return Change(torch.cat([change.update for change in found]), scales)


def terms(change: Change) -> dict[str, Tensor]:
    return {"update": change.update, "scale": change.scale}


def held(matrix: MatrixRule) -> dict[str, Tensor]:
    """All that a step changes of a matrix."""
    return {name: attrgetter(path)(matrix).clone() for name, path in matrix.paths().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], exact: bool) -> None:
    for name, value in expected.items():
        if exact:
            assert torch.equal(found[name], value), name
        elif value.dtype == torch.uint8:
            # rounding of the values may turn one that falls on the boundary of two codes
            assert (found[name] != value).float().mean() < 1e-3, name
        else:
            # fp32's 6e-8, enlarged by what cancels in a product of some hundred terms, and one of bf16's 2^-8
            rtol = 1e-5 if value.dtype == torch.float32 else 2**-7
            scale = float(value.abs().max())
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=1e-5 * scale)


@pytest.mark.parametrize("case", ["right", "left", "no probes", "drawn anew"])
def test_probes_drawn_alone_are_those_drawn_together(case: str) -> None:
    together, alone = matrices(case, "fp32"), matrices(case, "fp32")
    for matrix in together:
        matrix.prepare(3)
    ProbeDraws().draw(together)
    for matrix, other in zip(together, alone, strict=True):
        assert isinstance(matrix, ProjectedMatrix)
        assert isinstance(other, ProjectedMatrix)
        other.draw_probes(3)
        if matrix.columns.whole is None:
            assert other.columns.whole is None
            continue
        assert other.columns.whole is not None
        torch.testing.assert_close(other.columns.whole, matrix.columns.whole, rtol=0, atol=1e-6)
        assert other.columns.whole[:, matrix.rank :].any() == bool(matrix.num_probes)


@pytest.mark.parametrize("dtype", KEPT_IN)
@pytest.mark.parametrize("case", CASES)
def test_members_step_as_they_would_alone(case: str, dtype: str) -> None:
    """Each by its own key, factor and residual; parts of a stack share its memory."""
    together, alone = matrices(case, dtype), matrices(case, dtype)
    assert {s.dtype for s in together[0].states().values()} >= {dtype}
    exact, stack = case not in SUMMED, together[0].STACK(together)
    singles = [matrix.STACK([matrix]) for matrix in alone]
    for step in range(4):
        if step == 2:
            together[1].measured = alone[1].measured = False  # has no residual
        for matrix in (*together, *alone):
            draw_probes(matrix, step)
        most = 1 if step == 3 else 1 << 26
        assert len(stack.parts(most)) == (len(together) if step == 3 else 1)
        gradient, factor = gradients(together, step), torch.tensor(FACTORS)
        change = advance(stack, gradient, factor, step, most)
        for place, single in enumerate(singles):
            own = slice(place, place + 1)
            expected = advance(single, gradient[own], factor[own], step)
            found = {"update": change.update[own], "scale": change.scale[own]}
            assert_same(found, terms(expected), exact)
            assert_same(held(together[place]), held(alone[place]), exact)


@pytest.mark.parametrize("dtype", KEPT_IN)
@pytest.mark.parametrize("case", CASES)
def test_a_member_with_factor_zero_stays_as_it_is_and_the_others_step_as_without_it(
    case: str, dtype: str
) -> None:
    members = matrices(case, dtype)
    stack = members[0].STACK(members)
    for step in range(2):
        advance(stack, gradients(members, step), torch.tensor(FACTORS), step)
    others = copy.deepcopy([members[0], members[2]])
    without, before = others[0].STACK(others), held(members[1])
    for step, bad in ((2, float("nan")), (3, float("inf"))):
        gradient = gradients(members, step)
        gradient[1, ::5] = bad
        factor = torch.tensor(FACTORS) * torch.tensor([1.0, 0.0, 1.0])
        change = advance(stack, gradient, factor, step)
        assert not change.scale[1].any()
        assert change.update.isfinite().all()
        kept = [0, 2]
        expected = advance(without, gradient[kept], factor[kept], step)
        found = {"update": change.update[kept], "scale": change.scale[kept]}
        assert_same(found, terms(expected), case not in SUMMED)
        for name, value in held(members[1]).items():
            assert torch.equal(value, before[name]), name
        for one, other in zip((members[0], members[2]), others, strict=True):
            assert_same(held(one), held(other), case not in SUMMED)
    after = advance(stack, gradients(members, 4), torch.tensor(FACTORS), 4)
    assert after.update[1].any()
    assert after.scale[1].any()


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_not_taken_leaves_the_energies(case: str) -> None:
    members = matrices(case)
    stack = members[0].STACK(members)
    advance(stack, gradients(members, 0), torch.tensor(FACTORS), 0)
    before = [held(matrix) for matrix in members]
    sums = stack.measure([stack], [given(stack, gradients(members, 1))], slice(None))
    stack.observe(sums, 1.0, torch.tensor(False))
    stack.observe(sums.clone().fill_(float("nan")), 1.0, torch.tensor(False))
    for matrix, kept in zip(members, before, strict=True):
        assert_same(held(matrix), kept, exact=True)
    stack.observe(sums, 1.0, torch.tensor(True))
    changed = [not torch.equal(m.energy, k["energy"]) for m, k in zip(members, before, strict=True)]
    assert all(changed) == ("apollo" not in case and case != "mini")


# -- who is in which stack ----------------------------------------------------------------------------


def test_a_matrix_that_changes_rank_moves_to_another_stack_and_goes_on() -> None:
    """And comes back; all the while it steps as it would alone."""
    settings = settings_of(rank_candidates=(16, 32), state_dtype="int8")
    pairs = [
        [build_matrix(n, (256, 72), (0, 256), settings, torch.float32, CPU) for n in NAMES]
        for _ in range(2)
    ]
    stacks, ranks = Stacks(), {0: (16, 16, 16), 1: (16, 32, 16), 3: (32, 32, 16), 4: (16, 16, 16)}
    members, alone = pairs
    sizes = []
    for step in range(6):
        for matrix, single, rank in zip(members, alone, ranks.get(step, (0, 0, 0)), strict=True):
            if step == 0 or rank not in (0, matrix.rank):
                for one in (matrix, single):
                    one.adopt(one.seeded_basis(rank, step))
        for matrix in (*members, *alone):
            draw_probes(matrix, step)
        found = stacks.of(members, [None] * len(members))
        sizes.append(sorted(len(stack.members) for stack in found))
        for stack in found:
            change = advance(
                stack, gradients(stack.members, step), torch.ones(len(stack.members)), step
            )
            for place, matrix in enumerate(stack.members):
                single = alone[NAMES.index(matrix.name)]
                expected = advance(
                    single.STACK([single]), gradients([single], step), torch.ones(1), step
                )
                assert torch.equal(change.update[place], expected.update[0])
                assert torch.equal(change.scale[place], expected.scale[0])
                assert_same(held(matrix), held(single), exact=True)
    assert sizes == [[3], [1, 2], [1, 2], [1, 2], [3], [3]]


def test_those_that_stay_together_keep_their_memory() -> None:
    members, stacks = matrices("right"), Stacks()
    (first,) = stacks.of(members, [None] * len(members))
    whole = first["exp_avg.data"]
    assert members[1].states()["exp_avg"].data.data_ptr() == whole[1].data_ptr()
    (again,) = stacks.of(members, [None] * len(members))
    assert again is first
    # what a refresh or a checkpoint has replaced is taken over, into the same memory
    advance(first, gradients(members, 0), torch.tensor(FACTORS), 0)
    members[1].load_state_dict(members[0].state_dict())
    (loaded,) = stacks.of(members, [None] * len(members))
    assert loaded is first
    assert first["exp_avg.data"].data_ptr() == whole.data_ptr()
    assert torch.equal(whole[1], whole[0])
    assert members[1].states()["exp_avg"].data.data_ptr() == whole[1].data_ptr()
    # another order is another stack
    (turned,) = stacks.of(members[::-1], [None] * len(members))
    assert turned is not first
    assert torch.equal(turned["exp_avg.data"], whole.flip(0))


def test_what_is_not_alike_is_apart() -> None:
    one, other = matrices("right"), matrices("right")  # of settings of their own
    left = matrices("left")
    bf16 = matrices("right", "bf16")
    several = (*one, *other, *left, *bf16)
    found = Stacks().of(several, [None] * len(several))
    assert [stack.members for stack in found] == [one, other, left, bf16]
    apart = Stacks().of(one, [matrix.name == "b" for matrix in one])
    assert [[m.name for m in stack.members] for stack in apart] == [["a", "c"], ["b"]]


def test_stacking_copies_only_what_does_not_lie_side_by_side() -> None:
    whole = torch.randn(4, 3, 5)
    views = whole.unbind()
    assert stacked(views).data_ptr() == whole.data_ptr()
    assert stacked(views[1:3]).data_ptr() == whole[1].data_ptr()
    assert stacked(views[2:3]).data_ptr() == whole[2].data_ptr()
    for chosen in ((1, 0), (0, 2), (0, 0)):
        some = [views[place] for place in chosen]
        copied = stacked(some)
        assert copied.data_ptr() != some[0].data_ptr()
        assert torch.equal(copied, torch.stack(some))
    columns = [view[:, :2] for view in views]  # bases: the first columns of what is side by side
    assert torch.equal(stacked(columns), whole[..., :2])
    for tensors in (views, views[1:3], columns):
        assert stacked(tensors).shape == (len(tensors), *tensors[0].shape)
