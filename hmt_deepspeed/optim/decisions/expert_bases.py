"""Whether experts whose outputs go into one stream share a basis of it, or have bases of their inputs.

A gradient of few tokens flatters bases of single experts, which hold all of it. So they are proposed from the gradient that
makes the first shared basis, at equal bytes of moments and bases, and the next whole gradient says which of the two captures
more of it. What it says is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt_deepspeed.kernels.low_rank_projection import project_together
from hmt_deepspeed.optim.bases.basis import keyed_generator
from hmt_deepspeed.optim.bases.expert_search import ExpertSearch
from hmt_deepspeed.optim.bases.host_read import read_together
from hmt_deepspeed.optim.bases.search import finish_searches
from hmt_deepspeed.optim.rules.formulas import square_norms
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["captured_energies", "decide_expert_bases", "propose_own_bases"]

Gradients = Mapping[ProjectedMatrix, Tensor]  # E x m x n, as a shared basis projects them


def propose_own_bases(gradients: Gradients, step: int) -> None:
    """Find bases of the experts' own beside the shared ones that have just been made. Waits for the device once.

    Args:
        gradients: of undecided matrices, neither zero nor infinite. step: its number, which keys the sketches.
    """
    searches = [_search(matrix, gradient, step) for matrix, gradient in gradients.items()]
    for matrix, found in zip(gradients, finish_searches(searches), strict=True):
        if found is not None:
            matrix.proposed = found.basis.to(matrix.dtype)


def _search(matrix: ProjectedMatrix, gradient: Tensor, step: int) -> ExpertSearch:
    draw = keyed_generator(matrix.device, matrix.settings.seed, matrix.name, "own sketch", step)
    rank, none = matrix.own_rank(matrix.rank), gradient.new_zeros(matrix.count, matrix.shape[0], 0)
    kind = matrix.settings.range_finder
    return ExpertSearch(kind, lambda: gradient.mT, (rank,), 0.0, draw, none, False, first=rank)


def decide_expert_bases(gradients: Gradients) -> None:
    """Let experts have bases of their own where the proposed ones capture more. Waits for the device once.

    Args:
        gradients: of matrices with a proposal. One that is zero or not finite decides nothing.
    """
    energies = [captured_energies(matrix, gradient) for matrix, gradient in gradients.items()]
    for matrix, read in zip(gradients, read_together(energies), strict=True):
        shared, own = read.tolist()
        if 0 < shared + own < float("inf"):
            matrix.decide(own_bases=own > shared)


def captured_energies(matrix: ProjectedMatrix, gradient: Tensor) -> Tensor:
    """Energies inside the shared basis and inside the proposed ones, (2,) fp32."""
    assert matrix.basis is not None
    assert matrix.proposed is not None
    shared, _ = project_together([gradient], [matrix.basis.expand(matrix.count, -1, -1)])
    own, _ = project_together([gradient.mT], [matrix.proposed])
    return torch.stack((square_norms(shared).sum(), square_norms(own).sum()))
