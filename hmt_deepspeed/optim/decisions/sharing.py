"""Matrices that share a basis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.settings.matrix import MatrixSettings

__all__ = ["regroup", "share_bases", "stacked_gradient"]


def regroup(
    schedule: RefreshSchedule,
    matrices: Sequence[MatrixRule],
    readers: Sequence[Sequence[str]],
    fixed_budget: bool,
    say: Callable[[str], object],
) -> RefreshSchedule:
    """The schedule in groups of matrices that take one basis together, each other matrix alone.

    Args:
        matrices: by place in the schedule.
        readers: names of those that read the same input.
        fixed_budget: the bytes of full gradients do not grow with the groups.
        say: is told of a group that they are too few for.
    """
    place = {matrix.name: index for index, matrix in enumerate(matrices)}
    names = _shareable(readers, {matrix.name: matrix for matrix in matrices})
    if fixed_budget:
        sizes = dict(zip(place, schedule.matrix_bytes, strict=True))
        names = _affordable(names, sizes, schedule.budget, say)
    return schedule.regrouped([[place[name] for name in group] for group in names], fixed_budget)


def _shareable(
    groups: Sequence[Sequence[str]], matrices: Mapping[str, MatrixRule]
) -> list[list[str]]:
    """The parts of groups of names that can share a basis: one-sided, stored and of the same settings.

    The first leads, so it is one with as high a rank as any: a narrower one would lower all others' to its own.
    """
    place = {name: index for index, name in enumerate(matrices)}

    def leads(name: str) -> tuple[int, int]:
        matrix = matrices[name]
        return -matrix.settings.ranks(*matrix.shape)[-1], place[name]

    parts: list[list[str]] = []
    for names in groups:
        alike: dict[MatrixSettings, list[str]] = {}
        for name in names:
            matrix = matrices[name]
            if isinstance(matrix, ProjectedMatrix) and matrix.SHARES and not matrix.redraws:
                alike.setdefault(matrix.settings, []).append(name)
        shared = [part for part in alike.values() if len(part) > 1]
        parts += [sorted(part, key=leads) for part in shared]
    return parts


def _affordable(
    groups: Sequence[list[str]],
    sizes: Mapping[str, int],
    budget: int,
    say: Callable[[str], object],
) -> list[list[str]]:
    """Those whose full gradients (bytes by name) fit a fixed budget together, as a refresh of one basis needs.

    The others keep bases of their own, which is said: who shares shows only in the first step, too late to refuse.
    """
    kept = []
    for names in groups:
        size = sum(sizes[name] for name in names)
        if size <= budget:
            kept.append(names)
            continue
        say(
            f"hmt.optimizer.max_full_gradient_bytes is {budget}, but the basis that {', '.join(names)} would share "
            f"is found from {size} bytes of full gradients: they keep bases of their own, though "
            f'hmt.optimizer.share_basis is true. To share, set at least {size}, or "auto".'
        )
    return kept


def share_bases(groups: Sequence[Sequence[MatrixRule]]) -> None:
    """Let every member of a group take over the first one's basis, now and from now on; one that is alone has
    its own."""
    for group in groups:
        leader, *others = group
        if isinstance(leader, ProjectedMatrix):
            leader.unshare()
        for other in others:
            assert isinstance(leader, ProjectedMatrix)
            assert isinstance(other, ProjectedMatrix)
            if other.columns is not leader.columns:
                other.share(leader)


def stacked_gradient(
    members: Sequence[MatrixRule], parts: Sequence[Tensor | None]
) -> Tensor | None:
    """The full gradients of matrices that take one basis, one below the other: zeros for a member that no
    backward reached; None where none reached any."""
    known = next((part for part in parts if part is not None), None)
    if known is None or len(parts) == 1:
        return known
    rows = zip(members, parts, strict=True)
    return torch.cat([known.new_zeros(m.shape) if part is None else part for m, part in rows])
