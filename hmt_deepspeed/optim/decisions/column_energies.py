"""Reads the energies of past gradients along the directions of a basis from the states of its matrices.

A mini-batch's gradient has noise of its own; Adam's second moments have averaged ``(G q_j)^2`` along every direction q_j
of a basis, over many batches, and Muon's momentum ``G q_j``. By them a rank is chosen for what it will hold
(:mod:`hmt_deepspeed.optim.decisions.later_energy`), which takes their shares alone. Nothing is stored for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["column_energies"]


def column_energies(members: Sequence[ProjectedMatrix], counted: Sequence[slice]) -> Tensor | None:
    """Energies along each direction of a basis, over the matrices that share it: (r,) fp32.

    Of the rows held here: the whole is the sum over all holders. None before the first basis from a gradient and
    its first step, at full rank, and of a rule whose states do not tell.

    Args:
        members: of one basis, the first leads. counted: of each, its rows that no other holder counts.
    """
    leader = members[0]
    if not leader.measured or not leader.steps or leader.full_rank:
        return None
    parts = [m.column_energies(rows) for m, rows in zip(members, counted, strict=True)]
    known = [part for part in parts if part is not None]
    return torch.stack(known).sum(0) if known else None
