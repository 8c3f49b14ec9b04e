"""Bases of the gradient's row space: seeds, random bases, probe columns, moment transfer.

Shapes: G is m x n, a basis Q is n x r with orthonormal columns, probe columns are n x k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import scratch_like
from hmt_deepspeed.kernels.noise import base_key

__all__ = [
    "keyed_generator",
    "keyed_seed",
    "orthonormal",
    "probe_columns",
    "random_basis",
    "transfer_second_moment",
    "widened",
]


def keyed_seed(seed: int, *parts: object) -> int:
    """A 63-bit seed from ``seed`` and any labels, the same in every process and on every rank.

    Seeds are keyed by parameter name and step, never by order of enumeration, so the numbers drawn
    do not depend on world size, sharding or how many parameters come before.
    """
    return base_key(seed, *parts)


def keyed_generator(device: torch.device, seed: int, *parts: object) -> torch.Generator:
    """A torch generator on ``device`` seeded by :func:`keyed_seed`."""
    generator = torch.Generator(device=device)
    generator.manual_seed(keyed_seed(seed, *parts))
    return generator


def random_basis(n: int, rank: int, generator: torch.Generator) -> Tensor:
    """Orthonormal n x rank basis drawn uniformly, fp32: what a matrix uses before its first refresh."""
    gaussian = torch.randn(n, rank, generator=generator, device=generator.device)
    return orthonormal(gaussian)


def probe_columns(basis: Tensor, num_probes: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns, random in the complement of a basis: n x k, fp32.

    Every direction outside the basis is drawn with the same probability, hence
    ``E[P P^T] = k/(n-r) (I - Q Q^T)``: norms of ``G P`` estimate the residual's, see
    :func:`hmt_deepspeed.optim.rules.formulas.estimated_square_norm`.

    Raises:
        ValueError: more columns asked for than the complement has.
    """
    n, rank = basis.shape
    if num_probes > n - rank:
        raise ValueError(
            f"{num_probes} probes do not fit into a complement of {n - rank} dimensions"
        )
    gaussian = torch.randn(n, num_probes, generator=generator, device=basis.device)
    wide = basis
    if basis.dtype != torch.float32:
        wide = scratch_like(basis, torch.float32).copy_(basis)
    # A 16-bit basis is orthonormal to three digits only: a second pass removes what the first left.
    for _ in range(1 if basis.dtype == torch.float32 else 2):
        gaussian -= wide @ (wide.t() @ gaussian)
    if 4 * num_probes > n - rank:
        return orthonormal(gaussian)
    # A thin Gaussian is well conditioned, so Cholesky-QR is exact to rounding and needs no host sync.
    lower = torch.linalg.cholesky_ex(gaussian.t() @ gaussian).L
    return torch.linalg.solve_triangular(lower.t(), gaussian, upper=True, left=False)


def widened(basis: Tensor, older: Tensor) -> Tensor:
    """A basis followed by what an older, wider one spans outside it: n x r_old, fp32, orthonormal.

    At least ``r_old - r`` directions of the older span are orthogonal to the basis; with ``F = (I - Q Q^T)
    Q_old`` they are the singular vectors of F to the singular value 1.
    """
    wide = basis.float()
    outside = older.float() - wide @ (wide.t() @ older.float())
    missing = older.shape[1] - basis.shape[1]
    rotation = torch.linalg.eigh(outside.t() @ outside).eigenvectors.flip(1)[:, :missing]
    return torch.cat((wide, orthonormal(outside @ rotation)), dim=1)


def transfer_second_moment(
    mean: Tensor,
    second: Tensor,
    overlap: Tensor,
    left_overlap: Tensor | None = None,
    floor: float = 1e-3,
) -> Tensor:
    """Second moment of Adam in a new basis (LDAdam's rule, normalised by what the old basis saw).

    With ``R = Q_old^T Q_new`` and ``rho_j = sum_i R_ij^2``, the share of new direction j that the old
    basis spanned, and bias-corrected moments ``m^, v^``::

        v^ <- |(v^ - m^ m^)(R o R) + (m^ R)^2| / rho

    A two-sided core is turned on both sides, ``m^ <- R_P^T m^ R`` and likewise with squares. The
    absolute value can leave arbitrarily small entries; they are floored at ``floor`` times the row's
    mean, or a tiny denominator would throw the next step far.

    Args:
        mean: m x r_old, bias-corrected first moment.
        second: m x r_old, bias-corrected second moment.
        overlap: r_old x r_new, R. left_overlap: r_old x r_new, R_P of a two-sided core.

    Returns:
        v^ in the new basis, m x r_new (r_new x r_new of a core).
    """
    squared = overlap.square()
    rho = squared.sum(0).clamp(max=1.0)
    variance, turned = (second - mean.square()) @ squared, mean @ overlap
    if left_overlap is not None:
        left_squared = left_overlap.square()
        rho = left_squared.sum(0).clamp(max=1.0).unsqueeze(1) * rho
        variance, turned = left_squared.t() @ variance, left_overlap.t() @ turned
    moved = (variance + turned.square()).abs() / rho.clamp_min(1e-6)
    return torch.maximum(moved, floor * moved.mean(dim=1, keepdim=True))


def orthonormal(matrix: Tensor) -> Tensor:
    """Q of the reduced QR decomposition."""
    return torch.linalg.qr(matrix).Q
