"""Update rules: state in, update out.

Shapes: a rule sees the rows of a matrix that the caller holds, ``rows x r`` projected gradients
``A = G Q`` and ``rows x k`` probes ``S = G P``. Nothing here knows whether the rows are all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

__all__ = [
    "adamw_",
    "estimated_square_norm",
    "full_residual",
    "growth_factor",
    "probe_residual",
]

GROWTH_LIMIT = 1.01  # Fira's and APOLLO's published value
TINY = 1e-30  # a norm below it is none; what is divided by it stays finite


def adamw_(
    param: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, algorithm 2), by torch's fused kernel.

    Args:
        param, gradient, exp_avg, exp_avg_sq: same shape, fp32; all but ``gradient`` are updated.
        step: 0-dim fp32 tensor, number of steps taken; incremented.
    """
    torch_adamw(
        [param],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def probe_residual(direction: Tensor, projected: Tensor, probes: Tensor, scale: float) -> Tensor:
    """Stateless update of the part of G outside the basis: ``c phi o S``, rows x k.

    ``phi_j = ||U_j|| / ||A_j||`` per row is Fira's norm-based scaling: the residual of a row moves as
    far per unit of gradient as Adam moved its projected part. With ``c = (n-r)/k`` the expectation
    of ``c S P^T`` over probes is the exact residual ``G - A Q^T``.
    """
    # Where the basis sees less of a row than the probes do, ||S_j|| takes ||A_j||'s place, so a row
    # the basis misses (A_j ~ 0) moves by c ||U_j|| at most instead of without bound.
    seen = torch.maximum(projected.norm(dim=1, keepdim=True), probes.norm(dim=1, keepdim=True))
    phi = direction.norm(dim=1, keepdim=True) / seen.clamp_min(TINY)
    return (scale * phi) * probes


def full_residual(direction: Tensor, projected: Tensor, gradient: Tensor, basis: Tensor) -> Tensor:
    """Fira's residual ``phi o (G - A Q^T)``, rows x n; ``gradient`` is overwritten.

    ``phi_j = ||U_j|| / ||A_j||`` per row (Fira, equation of section 4.1). A row of which the basis sees
    less than a hundredth of the energy moves as if it saw that: its ratio would be noise.
    """
    gradient.addmm_(projected, basis.t(), alpha=-1)
    seen = torch.maximum(
        projected.norm(dim=1, keepdim=True), 0.1 * gradient.norm(dim=1, keepdim=True)
    )
    phi = direction.norm(dim=1, keepdim=True) / seen.clamp_min(TINY)
    return gradient.mul_(phi)


def growth_factor(norm: Tensor, previous: Tensor) -> Tensor:
    """Factor <= 1 that keeps a norm from growing by more than GROWTH_LIMIT per step (Fira, section 4.2).

    ``previous`` of zero means that there was no step before: nothing is limited. 0-dim or vector, fp32.
    """
    allowed = GROWTH_LIMIT * previous
    factor = (allowed / norm.clamp_min(TINY)).clamp(max=1.0)
    return torch.where(previous > 0, factor, torch.ones_like(factor))


def estimated_square_norm(
    projected_square: Tensor, probe_square: Tensor, n: int, rank: int, num_probes: int
) -> Tensor:
    """``||G||_F^2 ~ ||G Q||_F^2 + ||G P||_F^2 (n - r)/k``: only the residual is estimated.

    Unbiased over probe columns uniform in the complement of the basis. Without probes the part
    outside the basis is unknown and counted as nothing.
    """
    if num_probes == 0:
        return projected_square
    return projected_square + probe_square * ((n - rank) / num_probes)
