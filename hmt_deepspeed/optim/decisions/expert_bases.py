"""Whether experts whose outputs go into one stream share a basis of it, or have bases of their inputs.

Their first gradient says which captures more of it at equal bytes of moments and bases, at the rank that is in the middle of
the candidates. What it says is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from hmt_deepspeed.optim.bases.basis import keyed_generator
from hmt_deepspeed.optim.bases.expert_search import ExpertSearch
from hmt_deepspeed.optim.bases.search import Search, SubspaceSearch, finish_searches
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix

__all__ = ["decide_expert_bases"]


def decide_expert_bases(gradients: Mapping[ProjectedMatrix, Tensor], step: int) -> None:
    """Let experts have bases of their own where these capture more. Waits for the device once.

    Args:
        gradients: of undecided matrices, E x m x n as a shared basis projects them. One that is zero or not finite decides
            nothing.
        step: its number, which keys the sketches.
    """
    searches = [s for matrix, whole in gradients.items() for s in _searches(matrix, whole, step)]
    found = finish_searches(searches)
    for matrix, shared, own in zip(gradients, found[::2], found[1::2], strict=True):
        if shared is not None and own is not None:
            matrix.decide(own_bases=bool(own.captured()[-1] > shared.captured()[-1]))


def _searches(matrix: ProjectedMatrix, gradient: Tensor, step: int) -> tuple[Search, Search]:
    """For a shared basis, and for bases of the experts' own."""
    rank, kind = matrix.candidates[len(matrix.candidates) // 2], matrix.settings.range_finder
    of = matrix.device, matrix.settings.seed, matrix.name, "decision"
    shared, own = (keyed_generator(*of, which, step) for which in ("shared", "own"))
    each, none = matrix.own_rank(rank), gradient.new_zeros(matrix.count, matrix.shape[0], 0)
    return (
        SubspaceSearch(kind, partial(gradient.flatten, 0, 1), (rank,), 0.0, shared, first=rank),
        ExpertSearch(kind, lambda: gradient.mT, (each,), 0.0, own, none, False, first=each),
    )
