"""What a new basis remembers of past gradients: how the old directions' energies compare in Adam's second moments.

A mini-batch's gradient has noise of its own, and a basis of it alone holds that too. Second moments have averaged
``(G q_j)^2`` along every direction q_j of the old basis, over many batches;
:func:`hmt_deepspeed.optim.range_finder.remembered_rows` puts that beside the new gradient. Nothing is stored for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.low_rank import LowRankMatrix

__all__ = ["column_energies"]


def column_energies(members: Sequence[LowRankMatrix], counted: Sequence[slice]) -> Tensor | None:
    """Second moments along each direction of a basis, over the matrices that share it: (r,) fp32.

    Of the rows held here: the whole is the sum over all holders. None where there is nothing to remember: without
    momentum, before the first basis from a gradient and its first Adam step, and at full rank.

    Args:
        members: of one basis, the first leads. counted: of each, its rows that no other holder counts.
    """
    leader = members[0]
    has_past = leader.measured and leader.steps and not leader.full_rank
    if not (has_past and leader.settings.basis_momentum):
        return None
    parts = [m.moments.column_energies(rows) for m, rows in zip(members, counted, strict=True)]
    return torch.stack(parts).sum(0)
