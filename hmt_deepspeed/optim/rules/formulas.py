"""Update rules: state in, update out.

Shapes: a rule sees the rows of a matrix that the caller holds, ``rows x r`` projected gradients
``A = G Q`` and ``rows x k`` probes ``S = G P``. Nothing here knows whether the rows are all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

__all__ = [
    "adamw_",
    "clipped_images",
    "estimated_square_norm",
    "full_residual",
    "square_norms",
]

TINY = 1e-30  # a norm below it is none; what is divided by it stays finite


def adamw_(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skipped: Tensor | None = None,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, algorithm 2), by torch's fused kernel.

    Args:
        params, gradients, exp_avgs, exp_avg_sqs: of each parameter, same shape, fp32; all but gradients are updated.
        steps: of each, 0-dim fp32 tensor, number of steps taken; incremented.
        skipped: 0-dim fp32: 1 where nothing is to change, whatever the gradients hold.
    """
    torch_adamw(
        list(params),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        found_inf=skipped,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def square_norms(stack: Tensor) -> Tensor:
    """Squared Frobenius norm of each matrix of a stack.

    Args:
        stack: B x rows x columns, of any float dtype and strides.

    Returns:
        (B,) fp32.
    """
    # by rows first: of a slice of columns four times as fast on a CPU as of both dimensions at once
    return torch.linalg.vector_norm(stack, dim=2, dtype=torch.float32).square_().sum(dim=1)


def clipped_images(images: Tensor, squares: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Images and squared norms of rows of gradients that are multiplied by a factor; zeros where it is 0, whatever
    they hold.

    Args:
        images: B x rows x r. squares: B x rows. factor: (B,).
    """
    each = factor.unsqueeze(1)
    squares = torch.where(each != 0, squares * each.square(), 0.0)
    each = each.unsqueeze(2)
    return torch.where(each != 0, images * each, 0.0), squares


def full_residual(
    direction: Tensor, projected: Tensor, squares: Tensor, gram: Tensor
) -> tuple[Tensor, Tensor]:
    """Fira's residual ``phi o (G - A Q^T)`` row by row: ``phi``, and its squared norm; B x rows each.

    ``phi_j = ||U_j|| / ||A_j||`` per row (Fira, equation of section 4.1). A row of which the basis sees
    less than a hundredth of the energy moves as if it saw that: its ratio would be noise. With ``A = G Q``,
    ``||G_j - A_j Q^T||^2 = ||G_j||^2 - 2 ||A_j||^2 + A_j Q^T Q A_j^T``, whatever rounding has left of ``Q^T Q = I``.

    Args:
        squares: ``||G_j||^2``, B x rows. gram: ``Q^T Q``, B x r x r, fp32.
    """
    seen = projected.square().sum(dim=2)
    turned = projected @ gram
    missed = (squares - 2 * seen + (turned * projected).sum(dim=2)).clamp_min(0)
    phi = direction.norm(dim=2) / torch.maximum(seen, 0.01 * missed).sqrt().clamp_min(TINY)
    return phi, phi.square() * missed


def estimated_square_norm(
    projected_square: Tensor, probe_square: Tensor, n: int, rank: int | Tensor, num_probes: int
) -> Tensor:
    """``||G||_F^2 ~ ||G Q||_F^2 + ||G P||_F^2 (n - r)/k``: only the residual is estimated.

    Unbiased over probe columns uniform in the complement of the basis, of which ``rank`` columns are not zero: one number,
    or one of each matrix. Without probes the part outside the basis is unknown and counted as nothing.
    """
    if num_probes == 0:
        return projected_square
    return projected_square + probe_square * ((n - rank) / num_probes)
