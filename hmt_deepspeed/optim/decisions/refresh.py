"""New bases for matrices of one process: found from full gradients, moments carried over.

:mod:`hmt_deepspeed.zero.bases.refresh` does the same over shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from hmt_deepspeed.optim.decisions.column_energies import column_energies
from hmt_deepspeed.optim.decisions.policy import RankPolicy
from hmt_deepspeed.optim.decisions.sharing import stacked_gradient
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, adopt_together
from hmt_deepspeed.optim.slot import Slot

__all__ = ["refresh_bases"]


def refresh_bases(due: Mapping[int, Sequence[Slot]], policy: RankPolicy, step: int) -> set[int]:
    """Take new bases from the window's full gradients.

    Args:
        due: by group, its slots.

    Returns:
        The groups that have a new basis; the others' gradients gave none.
    """
    given = [i for i, slots in due.items() if any(s.param.grad is not None for s in slots)]
    columns: dict[int, Tensor] = {}
    for index in filter(policy.reads_columns, given):
        matrices = _matrices(due[index])
        energies = column_energies(matrices, [slice(None)] * len(matrices))
        if energies is not None:
            columns[index] = energies
    if given:
        policy.close_windows(columns)
    order = policy.ordered(given)
    return {i for i in order if _refresh(i, due[i], policy, step)}


def _matrices(slots: Sequence[Slot]) -> list[ProjectedMatrix]:
    return [cast(ProjectedMatrix, slot.matrix) for slot in slots]


def _refresh(index: int, slots: Sequence[Slot], policy: RankPolicy, step: int) -> bool:
    """Of one group; False where the gradient is zero or not finite."""
    matrices = _matrices(slots)
    gradient = stacked_gradient(matrices, [slot.full_gradient() for slot in slots])
    assert gradient is not None
    first, sought = policy.first_width(index), policy.sought_energy(index)
    found = matrices[0].find_basis(gradient, step, first, sought)
    if found is not None:
        rank = policy.choose(index, matrices[0].captured_at_candidates(found), step)
        is_full = matrices[0].is_full_at(rank)
        basis = None if is_full else matrices[0].basis_of(found, rank, gradient)
        adopt_together(matrices, basis, [m.overlap_sum(basis, slice(None)) for m in matrices])
    for slot, matrix in zip(slots, matrices, strict=True):
        matrix.prepare(step, found is not None)
        slot.due = False
    return found is not None
