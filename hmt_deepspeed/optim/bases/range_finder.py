"""Range finders: the dominant row space of a gradient and its energies.

Shapes: G is m x n, a basis is n x r with orthonormal columns, a sketch has w = r + oversampling columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt_deepspeed.kernels.precision import fp32_products

__all__ = [
    "RANGE_FINDERS",
    "Conditions",
    "Sketch",
    "Subspace",
    "check_rank",
    "exact_subspace",
    "find_subspace",
    "range_finder",
]

OVERSAMPLING = 8
# Power iterations of columns that start as Gaussian ones. With one, a spectrum i^-0.6 at r = d/4 is .02
# short of the SVD's energy, with two .005.
COLD_ROUNDS = 2
# Cholesky-QR loses orthogonality by the rounding error times the squared condition number. Bounds of the square up
# to which one does: for a result, and for columns that are multiplied again.
_WELL_CONDITIONED, _ENOUGH = 256.0, 1e5
# Added to the Gram matrix of unit columns: Cholesky does not fail, and the condition number falls by a factor of 300.
_SHIFT = 1e-5
# Of a 16-bit gradient in fp32 at once: rows at least, and on CUDA elements (64 MiB).
_ROWS, _ELEMENTS = 256, 1 << 24
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Subspace:
    """Result of a range finder.

    basis: n x r, fp32, orthonormal columns in order of falling energy.
    energies: (r,) fp32, of G in the columns: the squared singular values sigma_i^2.
    total: 0-dim fp32, ||G||_F^2.
    products: columns multiplied by G or G^T on the way, oversampling included: 2 m n FLOPs each, and
        nearly the whole cost. 0 for an SVD, which multiplies none.
    on_host: energies and total, (r + 1,) fp32, where they were read already.
    """

    basis: Tensor
    energies: Tensor
    total: Tensor
    products: int = 0
    on_host: Tensor | None = None

    def captured(self) -> Tensor:
        """E(1..r): share of ||G||_F^2 inside the first i columns, (r,) fp32 (HMT paper, eq. for E(r)).

        On the host: a device has no deterministic cumulative sum in torch. Waits for the device unless it was read.
        """
        sums = self.on_host
        if sums is None:
            sums = torch.cat((self.energies, self.total.view(1))).cpu()
        return sums[:-1].cumsum(0) / sums[-1].clamp_min(_TINY)


class Conditions:
    """Whether Cholesky-QR is accurate enough for columns: read at once, or put off for the host to read later.

    Args:
        put_off: take every condition for met. Where one is not, what was computed since counts for nothing.
    """

    def __init__(self, put_off: bool = False) -> None:
        self.put_off = put_off
        self._seen: list[Tensor] = []

    def may_look(self, columns: Tensor) -> bool:
        """Whether the host may read how skew columns are, to do no more than they need: on a CPU that is no wait."""
        return not (self.put_off and columns.is_cuda)

    def is_met(self, condition: Tensor) -> bool:
        """Waits for the device unless put off."""
        if self.put_off:
            self._seen.append(condition)
            return True
        return bool(condition)

    @property
    def met(self) -> Tensor:
        """Whether all that were put off are met, 0-dim bool."""
        return torch.stack(self._seen).all()

    def finite(self, gram: Tensor) -> Tensor:
        """The matrix, or the identity where a condition is not met: ``eigh`` raises for one that is not finite."""
        if not self.put_off:
            return gram
        self._seen.append(torch.isfinite(gram.diagonal().sum()))
        return torch.where(self.met, gram, torch.eye(len(gram), device=gram.device))


class Sketch:
    """Directions of the row space found so far and their image: what widening starts from.

    directions: n x w fp32, orthonormal. image: m x w fp32, ``G directions``.
    """

    def __init__(self, gradient: Tensor, conditions: Conditions | None = None) -> None:
        self.gradient = gradient
        self._conditions = conditions or Conditions()
        m, n = gradient.shape
        self.directions = gradient.new_empty((n, 0), dtype=torch.float32)
        self.image = gradient.new_empty((m, 0), dtype=torch.float32)
        self.total = _square_norm(gradient)
        self.products = 0

    @property
    def width(self) -> int:
        return self.directions.shape[1]

    @fp32_products()
    def add(self, columns: Tensor, rounds: int) -> None:
        """Iterate ``columns`` (n x p) in the complement of what is there, and append them.

        ``V <- orth(G^T orth(G V))``, ``rounds`` times; the image takes one more product.
        """
        if not columns.shape[1]:
            return
        self.products += (2 * rounds + 1) * columns.shape[1]
        new = self._outside(columns)
        for number in range(rounds):
            # V itself may be skew: its image is made orthonormal, and that is as good.
            left = self._qr(_times(self.gradient, new), only_span=True)
            raised = self._outside(_transposed_times(self.gradient, left))
            new = self._qr(raised, only_span=number < rounds - 1)
        # What cancellation left of the old columns. Twice: where the gradient has no more directions, the
        # columns are rounding errors, and a first pass leaves too few digits.
        for _ in range(2 if self.width else not rounds):
            new = self._qr(self._outside(new))
        self.directions = torch.cat((self.directions, new), dim=1)
        self.image = torch.cat((self.image, _times(self.gradient, new)), dim=1)

    def widen(self, rank: int, generator: torch.Generator, rounds: int = COLD_ROUNDS) -> None:
        """Add Gaussian columns until there are ``rank`` and the oversampling."""
        m, n = self.gradient.shape
        missing = max(0, min(rank + OVERSAMPLING, m, n) - self.width)
        gaussian = torch.randn(n, missing, generator=generator, device=self.gradient.device)
        self.add(gaussian, rounds)

    @fp32_products()
    def subspace(self, rank: int) -> Subspace:
        """Rayleigh-Ritz: rotate to the image's singular directions and keep the ``rank`` strongest."""
        # eigh of the small Gram matrix gives sigma^2 and the rotation; relative energies survive squaring.
        gram = self._conditions.finite(self.image.t() @ self.image)
        energies, rotation = torch.linalg.eigh(gram)
        energies, rotation = energies.flip(0)[:rank].clamp_min(0), rotation.flip(1)[:, :rank]
        return Subspace(self.directions @ rotation, energies, self.total, self.products)

    def _qr(self, columns: Tensor, only_span: bool = False) -> Tensor:
        limit = _ENOUGH if only_span else _WELL_CONDITIONED
        return _cholesky_qr(columns, limit, self._conditions, only_span)

    def _outside(self, columns: Tensor) -> Tensor:
        if not self.width:
            return columns
        return columns - self.directions @ (self.directions.t() @ columns)


@fp32_products()
def range_finder(
    gradient: Tensor,
    rank: int,
    generator: torch.Generator,
    start: Tensor | None = None,
    conditions: Conditions | None = None,
    power_iterations: int = 1,
) -> Subspace:
    """Dominant right singular subspace of a gradient by randomised subspace iteration.

    Halko, Martinsson and Tropp, algorithms 4.4 and 5.1: warm-started from an old basis,
    re-orthonormalised after every product, rotated to singular directions by its image's Gram matrix.

    Args:
        gradient: m x n, any float dtype; computed in fp32, without an m x n copy.
        rank: columns wanted, 1 <= rank <= min(m, n).
        generator: draws the Gaussian columns. start: n x r_old old basis, or None.
        conditions: who decides on Cholesky-QR; None: the host at once.
        power_iterations: rounds of ``V <- orth(G^T orth(G V))`` from ``start``; one more for columns
            that nothing warms.

    Raises:
        ValueError: rank out of range.
    """
    check_rank(rank, gradient)
    sketch = Sketch(gradient, conditions)
    if start is not None:
        warm = start[:, :rank]
        sketch.add(_completed(warm, warm.shape[1], gradient, generator), power_iterations)
    sketch.widen(rank, generator, power_iterations + 1)
    return sketch.subspace(rank)


@fp32_products()
def power_step(
    gradient: Tensor,
    rank: int,
    generator: torch.Generator,
    start: Tensor | None = None,
    conditions: Conditions | None = None,
) -> Subspace:
    """One power step and QR from an old basis: two products with G instead of three.

    ``B = G^T orth(G V)``. Energies are the squared singular values of B, lower bounds of what the
    columns capture (2048 x 5461, r = 512: .0005 short after a drift that cost the old basis .07, .005
    after one that cost it half); where the old basis is narrower a third product gives them
    exactly: what it lacks starts as Gaussian columns, for which one step is so little
    that the bounds are up to .09 low, and the columns themselves up to .03 (512 x 768, i^-0.6, 8 columns for 64).
    Without an old basis, and for arguments and errors: :func:`range_finder`.
    """
    check_rank(rank, gradient)
    if start is None:
        return range_finder(gradient, rank, generator, start, conditions)
    conditions = conditions or Conditions()
    warm = start[:, :rank]
    columns = _completed(warm, rank, gradient, generator)
    image = _cholesky_qr(_times(gradient, columns), _ENOUGH, conditions)
    raised = _transposed_times(gradient, image)
    energies, rotation = torch.linalg.eigh(conditions.finite(raised.t() @ raised))
    # The rotated columns are orthogonal but for rounding, and QR of them keeps their order.
    basis = _cholesky_qr(raised @ rotation.flip(1)[:, :rank], _WELL_CONDITIONED, conditions)
    energies, products = energies.flip(0)[:rank].clamp_min(0), 2 * columns.shape[1]
    if warm.shape[1] < rank:
        energies, products = _times(gradient, basis).square().sum(0), products + rank
    return Subspace(basis, energies, _square_norm(gradient), products)


@fp32_products()
def exact_subspace(
    gradient: Tensor,
    rank: int,
    generator: torch.Generator,
    start: Tensor | None = None,
    conditions: Conditions | None = None,
) -> Subspace:
    """Range finder by ``torch.linalg.svd``: slow, for checking. Ignores all but the first two arguments."""
    check_rank(rank, gradient)
    _, sigma, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    return Subspace(right[:rank].t().contiguous(), sigma[:rank].square(), _square_norm(gradient))


RangeFinder = Callable[[Tensor, int, torch.Generator, Tensor | None, Conditions | None], Subspace]
RANGE_FINDERS: dict[str, RangeFinder] = {
    "randomized": range_finder,
    "subspace": power_step,
    "svd": exact_subspace,
}


def find_subspace(
    kind: str,
    gradient: Tensor,
    rank: int,
    generator: torch.Generator,
    start: Tensor | None = None,
    conditions: Conditions | None = None,
) -> Subspace:
    """Dominant right singular subspace by the range finder called ``kind``, see RANGE_FINDERS.

    Raises:
        ValueError: unknown kind, or rank out of range.
    """
    if kind not in RANGE_FINDERS:
        raise ValueError(f"range finder is {kind!r}; legal: {', '.join(RANGE_FINDERS)}")
    return RANGE_FINDERS[kind](gradient, rank, generator, start, conditions)


def check_rank(rank: int, gradient: Tensor) -> None:
    """Raises ValueError for a rank that the gradient cannot have."""
    (m, n), most = gradient.shape, min(gradient.shape)
    if not 1 <= rank <= most:
        raise ValueError(f"rank is {rank}; legal is 1..{most} for a {m} x {n} gradient")


def _completed(start: Tensor, rank: int, gradient: Tensor, generator: torch.Generator) -> Tensor:
    """``start`` and Gaussian columns of about unit length up to ``rank`` and OVERSAMPLING more, as many as
    fit: fp32."""
    n = gradient.shape[1]
    extra = min(rank + OVERSAMPLING, *gradient.shape) - start.shape[1]
    gaussian = torch.randn(n, extra, generator=generator, device=gradient.device)
    return torch.cat((start.float(), gaussian / n**0.5), dim=1)


def _square_norm(gradient: Tensor) -> Tensor:
    """``||G||_F^2``, 0-dim fp32, row by row: no m x n temporary, and no sum of m n terms in fp32."""
    return torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32).square().sum()


def _blocks(gradient: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows of a 16-bit gradient, in fp32, with the same rows of another matrix."""
    rows = max(_ROWS, _ELEMENTS // gradient.shape[1]) if gradient.is_cuda else _ROWS
    for part, same in zip(gradient.split(rows), other.split(rows), strict=True):
        yield part.float(), same


def _times(gradient: Tensor, columns: Tensor) -> Tensor:
    """``G V`` in fp32: m x w. A 16-bit G is widened a block of rows at a time."""
    if gradient.dtype == torch.float32:
        return gradient @ columns
    out = columns.new_empty(gradient.shape[0], columns.shape[1])
    for rows, part in _blocks(gradient, out):
        torch.mm(rows, columns, out=part)
    return out


def _transposed_times(gradient: Tensor, columns: Tensor) -> Tensor:
    """``G^T Y`` in fp32: n x w."""
    if gradient.dtype == torch.float32:
        return gradient.t() @ columns
    out = columns.new_zeros(gradient.shape[1], columns.shape[1])
    for rows, part in _blocks(gradient, columns):
        out.addmm_(rows.t(), part)
    return out


def _cholesky_qr(
    columns: Tensor, limit: float, conditions: Conditions, only_span: bool = False
) -> Tensor:
    """Orthonormal basis of the columns, in their order; with ``only_span`` any that is well conditioned.

    Columns are scaled to unit length first, which brings the condition number near the least that a
    scaling can reach (van der Sluis); images of a warm start are nearly orthogonal, so it is small. Skew
    columns take shifted Cholesky-QR first (1809.11085), and Householder QR where they are not even then of full rank.
    """
    unit = columns / torch.linalg.vector_norm(columns, dim=0).clamp_min(_TINY)
    gram = unit.t() @ unit
    if conditions.may_look(columns):
        inverse, is_enough = _inverse_factor(gram, limit)
        if is_enough:
            return unit @ inverse.t()
    for number in range(1 if only_span else 2):
        if number:
            gram = unit.t() @ unit
        gram.diagonal().add_(_SHIFT)
        lower = torch.linalg.cholesky_ex(gram).L
        unit = torch.linalg.solve_triangular(lower.t(), unit, upper=True, left=False)
    if only_span:
        return unit
    inverse, is_enough = _inverse_factor(unit.t() @ unit, limit)
    if conditions.is_met(is_enough):
        return unit @ inverse.t()
    return torch.linalg.qr(columns).Q


def _inverse_factor(gram: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """``L^-1`` of ``L L^T``, and whether the squared condition number of L is within the limit, 0-dim bool."""
    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    # sqrt(|A|_1 |A|_inf) bounds the largest singular value of L^-1; unit columns bound that of L.
    sizes = inverse.abs()
    square_bound = sizes.sum(0).max() * sizes.sum(1).max()
    return inverse, (info == 0) & (square_bound <= limit)
