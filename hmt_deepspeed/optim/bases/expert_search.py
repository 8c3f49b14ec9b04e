"""Search for a subspace of each of E gradients alike, all at once: experts with bases of their own.

Shapes: G is E x m x n, bases are E x n x r. One rank serves all; a gradient of fewer directions, as of an expert with few
tokens, has zero columns in the place of the others, and one that is zero keeps the basis that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.optim.bases.range_finder import (
    COLD_ROUNDS,
    OVERSAMPLING,
    RANGE_FINDERS,
    Subspace,
)

__all__ = ["ExpertSearch"]

# Energy of a direction, as a share of the strongest one's, below which it is rounding.
_LEAST_ENERGY = 2.0**-20
# Added to Gram matrices of unit columns, see :mod:`hmt_deepspeed.optim.bases.range_finder`: where only the span counts,
# and where columns are to be orthonormal to fp32.
_SPAN, _ORTHONORMAL = (1e-5,), (1e-5, 1e-5, 1e-7)
_ELEMENTS = 1 << 24  # of gradients in fp32 at once, but of one whole matrix
_TINY = torch.finfo(torch.float32).tiny


class ExpertSearch:
    """:class:`hmt_deepspeed.optim.bases.search.SubspaceSearch` of experts: energies are those of all together.

    Args:
        kind: of RANGE_FINDERS: ``svd``, or subspace iteration. gradient: gives G. ranks: strictly increasing candidates, each
            <= min(m, n).
        threshold: captured energy wanted, in (0, 1]. generator: draws the Gaussian columns.
        kept: E x n x r_old, the bases in force. warm: they are of earlier gradients, so that iteration starts from them.
        first: one of ``ranks``, the predicted one.

    Attributes:
        numbers: flat fp32 on the device, for :meth:`finish`.
    """

    def __init__(
        self,
        kind: str,
        gradient: Callable[[], Tensor],
        ranks: Sequence[int],
        threshold: float,
        generator: torch.Generator,
        kept: Tensor,
        warm: bool,
        *,
        first: int,
    ) -> None:
        assert kind in RANGE_FINDERS
        self._kind, self._gradient, self._kept, self._warm = kind, gradient, kept, warm
        self._threshold, self._generator = threshold, generator
        self._ranks = [rank for rank in ranks if rank >= first]
        self._found: Subspace | None = self._find(self._ranks[0])
        self.numbers = _numbers(self._found)

    def finish(self, numbers: Tensor) -> Subspace | None:
        """As of one gradient. None when G is not finite or is zero.

        Args:
            numbers: those of :attr:`numbers` on the host.
        """
        found, self._found = self._found, None
        for rank in self._ranks:
            if found is None:
                found = self._find(rank)
                numbers = _numbers(found).cpu()
            if not 0 < float(numbers[-1]) < float("inf"):
                return None
            found = Subspace(found.basis, found.energies, found.total, found.products, numbers)
            if found.captured()[-1] >= self._threshold or rank == self._ranks[-1]:
                return found
            found = None
        raise AssertionError

    @fp32_products()
    def _find(self, rank: int) -> Subspace:
        gradient, kept = self._gradient(), self._kept
        width = min(rank + OVERSAMPLING, *gradient.shape[1:])
        rounds = COLD_ROUNDS - (self._warm and kept.shape[2] >= rank)
        basis = kept.new_zeros(*kept.shape[:2], rank, dtype=torch.float32)
        energies = kept.new_zeros(len(kept), rank, dtype=torch.float32)
        totals = kept.new_zeros(len(kept), dtype=torch.float32)
        for some in _parts(gradient):
            own = gradient[some].float()
            totals[some] = torch.linalg.vector_norm(own, dim=2).square_().sum(dim=1)
            if self._kind == "svd":
                _, sigma, right = torch.linalg.svd(_finite(own), full_matrices=False)
                directions, squares = right.mT[..., :rank], sigma[:, :rank].square()
            else:
                columns = _iterated(own, self._start(kept[some], width), rounds)
                directions, squares = _turned(own @ columns, columns, rank)
            there = squares > _LEAST_ENERGY * squares[:, :1]
            basis[some], energies[some] = directions * there.unsqueeze(1), squares * there
        idle = (totals == 0)[:, None, None]
        old = torch.nn.functional.pad(kept.float(), (0, max(0, rank - kept.shape[2])))[..., :rank]
        basis = torch.where(idle, old, basis)
        return Subspace(basis, energies.sum(0), totals.sum(), (2 * rounds + 1) * width)

    def _start(self, kept: Tensor, width: int) -> Tensor:
        """Columns that iteration starts with: those in force as far as they are from a gradient, and Gaussian ones."""
        size, n, _ = kept.shape
        columns = torch.randn(size, n, width, generator=self._generator, device=kept.device)
        columns /= n**0.5
        if self._warm:
            known = kept[..., :width].float()
            there = known.square().sum(dim=1, keepdim=True) > 0
            columns[..., : known.shape[2]] = torch.where(
                there, known, columns[..., : known.shape[2]]
            )
        return columns


def _parts(gradient: Tensor) -> Iterator[slice]:
    """Experts in parts that are in fp32 at once."""
    each = max(1, _ELEMENTS // gradient[0].numel())
    for begin in range(0, len(gradient), each):
        yield slice(begin, begin + each)


def _iterated(gradient: Tensor, columns: Tensor, rounds: int) -> Tensor:
    """Orthonormal ``V <- orth(G^T orth(G V))``, ``rounds`` times."""
    for number in range(rounds):
        left = _orthonormal(gradient @ columns, _SPAN)
        raised = gradient.mT @ left
        columns = _orthonormal(raised, _SPAN if number < rounds - 1 else _ORTHONORMAL)
    return columns


def _turned(image: Tensor, columns: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rayleigh-Ritz: the strongest directions of orthonormal columns, by their image, and energies along them."""
    values, rotation = torch.linalg.eigh(_finite(image.mT @ image))
    strongest = rotation.flip(2)[..., :rank]
    return columns @ strongest, values.flip(1)[:, :rank].clamp_min(0)


def _orthonormal(columns: Tensor, shifts: Sequence[float]) -> Tensor:
    """Shifted Cholesky-QR (1809.11085), as often as there are shifts; columns of zeros stay zero."""
    for shift in shifts:
        unit = columns / torch.linalg.vector_norm(columns, dim=1, keepdim=True).clamp_min(_TINY)
        gram = unit.mT @ unit
        gram.diagonal(dim1=1, dim2=2).add_(shift)
        lower = torch.linalg.cholesky_ex(gram).L
        columns = torch.linalg.solve_triangular(lower.mT, unit, upper=True, left=False)
    return columns


def _finite(matrices: Tensor) -> Tensor:
    """Zeros in the place of those that are not finite: ``eigh`` and ``svd`` raise for them."""
    finite = matrices.isfinite().flatten(1).all(dim=1)
    return torch.where(finite[:, None, None], matrices, 0.0)


def _numbers(found: Subspace) -> Tensor:
    return torch.cat((found.energies, found.total.view(1)))
