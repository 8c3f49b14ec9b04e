"""Bases of the gradient's row space: seeds, random bases, probe columns, moment transfer.

Shapes: G is m x n, a basis Q is n x r with orthonormal columns, probe columns are n x k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import CHUNK_ELEMENTS, scratch_like
from hmt_deepspeed.kernels.noise import base_key, normals
from hmt_deepspeed.kernels.precision import fp32_products

__all__ = [
    "HeldRows",
    "keyed_generator",
    "orthonormal",
    "probe_columns",
    "random_bases",
    "random_basis",
    "transfer_second_moment",
    "widened",
]

# Elements of bases that are held in fp32 at once, on a CPU and on CUDA (256 MiB).
_WIDENED = {False: CHUNK_ELEMENTS, True: 1 << 26}


def keyed_generator(device: torch.device, seed: int, *parts: object) -> torch.Generator:
    """A torch generator on ``device`` seeded by :func:`base_key`."""
    generator = torch.Generator(device=device)
    generator.manual_seed(base_key(seed, *parts))
    return generator


def random_basis(n: int, rank: int, keys: Tensor) -> Tensor:
    """Orthonormal bases drawn uniformly, B x n x rank fp32: what a matrix uses before its first refresh.

    Args:
        keys: B x 2, int32: of :func:`hmt_deepspeed.kernels.noise.step_keys`.
    """
    return orthonormal(normals(keys, n, rank))


def random_bases(n: int, rank: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`random_basis` in a dtype, B x n x rank, a few at a time."""
    out = torch.empty(len(keys), n, rank, dtype=dtype, device=keys.device)
    together = max(1, _WIDENED[keys.is_cuda] // max(n * rank, 1))
    for some, part in zip(keys.split(together), out.split(together), strict=True):
        part.copy_(random_basis(n, rank, some))
    return out


class HeldRows(NamedTuple):
    """Rows of bases that this process holds, where others hold the rest.

    Attributes:
        begin: the first of them. most: of any holder. n: of whole bases. sum: adds up what all holders have, in
            place; all call it in the same order.
    """

    begin: int
    most: int
    n: int
    sum: Callable[[Tensor], object]


@fp32_products()
def probe_columns(
    basis: Tensor, num_probes: int, keys: Tensor, held: HeldRows | None = None
) -> Tensor:
    """Orthonormal columns, random in the complement of each basis of a stack, without a wait for the device.

    Every direction outside the basis is drawn with the same probability, hence
    ``E[P P^T] = k/(n-r) (I - Q Q^T)``: norms of ``G P`` estimate the residual's, see
    :func:`hmt_deepspeed.optim.rules.formulas.estimated_square_norm`.

    Args:
        basis: B x n x r, fp32 or 16 bits, any strides.
        keys: B x 2, int32: of :func:`hmt_deepspeed.kernels.noise.step_keys`.
        held: the rows that ``basis`` has; None for all n.

    Returns:
        B x n x k, fp32, or the held rows of it: up to rounding the same.

    Raises:
        ValueError: more columns asked for than the complement has.
    """
    members, rows, rank = basis.shape
    if held is None:
        held = HeldRows(0, rows, rows, _keep)
    n = held.n
    if num_probes > n - rank:
        raise ValueError(
            f"{num_probes} probes do not fit into a complement of {n - rank} dimensions"
        )
    together = max(1, _WIDENED[basis.is_cuda] // max(held.most * rank, 1))  # alike at all holders
    probes = basis.new_empty((members, rows, num_probes), dtype=torch.float32)
    parts = zip(basis.split(together), keys.split(together), probes.split(together), strict=True)
    for part, own_keys, out in parts:
        gaussian = normals(own_keys, rows, num_probes, held.begin)
        out.copy_(_completed(part, gaussian, 2 * num_probes > n - rank, held.sum))
    return probes


def _keep(whole: Tensor) -> None:
    """All rows are here."""


def _completed(
    basis: Tensor, columns: Tensor, crowded: bool, sums: Callable[[Tensor], object]
) -> Tensor:
    """Orthonormal columns that Gaussian ones, which are overwritten, span outside the bases.

    Args:
        crowded: more columns than half of what the complement has: some combination may be all but missing.
        sums: as of :class:`HeldRows`.
    """
    wide = basis
    if basis.dtype != torch.float32:
        wide = scratch_like(basis, torch.float32).copy_(basis)
    # A 16-bit basis is orthonormal to three digits only: a second pass removes what the first left.
    for _ in range(1 if wide is basis else 2):
        _leave(columns, wide, sums)
    if crowded:
        # A shift keeps Cholesky from failing and makes the columns better conditioned by a factor of 300 instead of
        # orthonormal (shifted Cholesky-QR, 1809.11085), twice; what that enlarges of the basis is taken out.
        for _ in range(2):
            gram = _product(columns, columns, sums)
            diagonal = gram.diagonal(dim1=1, dim2=2)
            diagonal += 1e-5 * diagonal.mean(dim=1, keepdim=True)
            columns = _whitened(columns, gram)
            _leave(columns, wide, sums)
    # Cholesky-QR of well-conditioned columns, as thin Gaussians are, is exact to rounding.
    return _whitened(columns, _product(columns, columns, sums))


def _product(left: Tensor, right: Tensor, sums: Callable[[Tensor], object]) -> Tensor:
    """``L^T R`` over all rows."""
    product = left.mT @ right
    sums(product)
    return product


def _whitened(columns: Tensor, gram: Tensor) -> Tensor:
    """``P L^-T``, where ``L L^T`` is the given Gram matrix."""
    lower = torch.linalg.cholesky_ex(gram).L
    return torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)


def _leave(columns: Tensor, basis: Tensor, sums: Callable[[Tensor], object]) -> None:
    """``P <- (I - Q Q^T) P`` in place."""
    columns.baddbmm_(basis, _product(basis, columns, sums), alpha=-1)


@fp32_products()
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


@fp32_products()
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

    All but a core's may be of several matrices, with that leading dimension; ``overlap`` then of each or of all.

    Returns:
        v^ in the new basis, m x r_new (r_new x r_new of a core).
    """
    squared = overlap.square()
    rho = squared.sum(-2, keepdim=overlap.dim() == 3).clamp(max=1.0)
    variance, turned = (second - mean.square()) @ squared, mean @ overlap
    if left_overlap is not None:
        left_squared = left_overlap.square()
        rho = left_squared.sum(0).clamp(max=1.0).unsqueeze(1) * rho
        variance, turned = left_squared.t() @ variance, left_overlap.t() @ turned
    moved = (variance + turned.square()).abs() / rho.clamp_min(1e-6)
    return torch.maximum(moved, floor * moved.mean(dim=-1, keepdim=True))


@fp32_products()
def orthonormal(matrix: Tensor) -> Tensor:
    """Q of the reduced QR decomposition."""
    return torch.linalg.qr(matrix).Q
