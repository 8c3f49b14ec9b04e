"""``(S + eps I)^(-1/2)`` of Gram matrices: what orthogonalises a matrix whose columns they are of.

``N S^(-1/2)`` is the polar factor of ``N``: its columns are orthonormal and span what those of ``N`` do. Only products
of small symmetric matrices are taken, the same for all of a batch, and nothing is read from the device. The composition
of quintic polynomials that comes nearest to 1 on what singular values there may be is that of Polar Express (2505.16932,
section 3); it is evaluated on the Gram matrix, whose eigenvalues are their squares.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.symmetric_product import symmetric_product

__all__ = ["ERROR", "FLOOR", "inverse_root", "quintics"]

# Added to the eigenvalues of a Gram matrix of Frobenius norm 1: directions whose singular value is less than a 300th of
# the largest stay smaller than others, for what is known of them is the rounding of the others' squares.
FLOOR = 1e-5
# Of singular values of the result from 1, at most: what four quintics reach, with 13 products where six and 21 reach
# all that fp32 knows, at the same loss (``launch/results/compare/findings.md``). ``torch.optim.Muon`` errs by 0.3.
ERROR = 0.2

Quintic = tuple[float, float, float]


def inverse_root(gram: Tensor, floor: float = FLOOR, error: float = ERROR) -> Tensor:
    """``(S + floor |S|_F I)^(-1/2)`` of each matrix of a batch; finite of a matrix of zeros.

    Call it where products of fp32 are exact to fp32 (:func:`hmt_deepspeed.kernels.precision.fp32_products`).

    Args:
        gram: B x r x r, fp32 or fp64, symmetric without negative eigenvalues. floor: > 0. error: in (0, 1).

    Returns:
        B x r x r, symmetric up to rounding, with the eigenvectors of ``gram`` and each eigenvalue within a share
        ``error`` of what it should be. Beside that it errs as an eigendecomposition in fp32 does, by rounding over
        ``floor`` in the directions of the smallest eigenvalues.
    """
    # the largest entry, which is of the diagonal: squares of what is divided by it are neither too large nor too small
    top = gram.diagonal(dim1=1, dim2=2).amax(dim=1).clamp_min_(torch.finfo(gram.dtype).tiny)
    square = gram / top.view(-1, 1, 1)
    # no eigenvalue is larger; a norm below 1 is that of zeros
    whole = torch.linalg.matrix_norm(square).clamp_min_(0.5).mul_(1 + floor)
    square /= whole.view(-1, 1, 1)
    square.diagonal(dim1=1, dim2=2).add_(floor / (1 + floor))
    root: Tensor | None = None
    steps = quintics(sqrt(floor / (1 + floor)), error)
    for number, (first, third, fifth) in enumerate(steps):
        rest = symmetric_product(square, square, square, third, fifth)
        # F S F of F = first I + rest, from both sides: else what rounding has made unequal grows
        if number + 1 < len(steps):
            half = symmetric_product(square, rest, square, first)
            square = symmetric_product(rest, half, half, first)
        if root is None:
            root = rest
            root.diagonal(dim1=1, dim2=2).add_(first)
        else:
            # from the right alone, as N is turned: what is copied from below rounds on the left too, where 1 / s grows
            root = torch.baddbmm(root, root, rest, beta=first)
    assert root is not None
    return root * (top * whole).rsqrt_().view(-1, 1, 1)


@cache
def quintics(least: float, error: float) -> tuple[Quintic, ...]:
    """As few polynomials ``a s + b s^3 + c s^5`` as take ``[least, 1]`` to 1, applied one after the other.

    Args:
        least: the smallest singular value, in (0, 1). error: of the result from 1, at most.
    """
    low, high = least, 1.0
    found: list[Quintic] = []
    while 1 - low > error:
        first, third, fifth = _nearest_to_one(low, high)
        found.append((first, third, fifth))
        low = first * low + third * low**3 + fifth * low**5
        high = 2 - low  # it errs by as much on either side
    return tuple(found)


def _nearest_to_one(low: float, high: float) -> Quintic:
    """The odd quintic whose largest distance from 1 on an interval is the least: it is taken at four points, below and
    above in turn (Remez)."""
    if 1 - low / high < 1e-5:  # where the points cannot be told apart: Newton and Schulz's
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    error, before = np.inf, None
    while before is None or abs(before - error) > 1e-15:
        points = np.array([low, inner[0], inner[1], high])
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        system = np.stack([points, points**3, points**5, signs], axis=1)
        before, (first, third, fifth, error) = error, np.linalg.solve(system, np.ones(4))
        spread = sqrt(9 * third**2 - 20 * first * fifth)
        inner = (
            sqrt((-3 * third - spread) / (10 * fifth)),
            sqrt((-3 * third + spread) / (10 * fifth)),
        )
    return float(first), float(third), float(fifth)
