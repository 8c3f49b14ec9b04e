"""Searches for subspaces of several gradients at once: all are launched before the host reads what it has to decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hmt_deepspeed.optim.bases.expert_search import ExpertSearch
from hmt_deepspeed.optim.bases.host_read import read_together
from hmt_deepspeed.optim.bases.range_finder import (
    Conditions,
    Sketch,
    Subspace,
    check_rank,
    exact_subspace,
    find_subspace,
)

__all__ = ["Search", "SubspaceSearch", "find_subspace_to_energy", "finish_searches"]


class SubspaceSearch:
    """Sketch ``first`` columns, and go on to the next candidate rank only while the energy is missed.

    Widening keeps the columns found and iterates only the new ones, in their complement, from the old
    basis where it is wider; a first width that misses costs one product with its columns more than
    the last width alone would have.

    Construction launches the first width. Columns are taken for well conditioned, and the host reads with the energies
    of a width whether they were. Where not, all is computed again, with Householder QR where that is needed: the result
    is that of deciding on the way.

    Args:
        kind: of RANGE_FINDERS. gradient: gives G, m x n; called again where more than the first width is needed.
        ranks: strictly increasing candidates, each <= min(m, n).
        threshold: captured energy wanted, in (0, 1]. generator: draws the Gaussian columns.
        start: n x r_old old basis, or None. first: one of ``ranks``, the predicted one.

    Attributes:
        numbers: flat fp32 on the device, for :meth:`finish`.

    Raises:
        ValueError: unknown kind, ``first`` not among the candidates, a candidate out of range.
    """

    def __init__(
        self,
        kind: str,
        gradient: Callable[[], Tensor],
        ranks: Sequence[int],
        threshold: float,
        generator: torch.Generator,
        start: Tensor | None = None,
        *,
        first: int,
    ) -> None:
        if first not in ranks:
            raise ValueError(f"first is {first}; legal: one of the candidates {list(ranks)}")
        self._kind, self._gradient, self._start = kind, gradient, start
        self._threshold, self._generator, self._first = threshold, generator, first
        self._ranks = [rank for rank in ranks if rank >= first]
        values = gradient()
        check_rank(ranks[-1], values)
        self._found: Subspace | None = None
        if kind == "svd":  # has no first width
            self.numbers = values.new_empty(0, dtype=torch.float32)
            return
        self._drawn, conditions = generator.get_state(), Conditions(put_off=True)
        self._found = find_subspace(kind, values, first, generator, start, conditions)
        self.numbers = _numbers(conditions, self._found)

    def finish(self, numbers: Tensor) -> Subspace | None:
        """The subspace of the first candidate from ``first`` up that reaches the threshold, else the last.

        Waits for the device once for each further width. None when the gradient is not finite or is zero.

        Args:
            numbers: those of :attr:`numbers` on the host.
        """
        found, self._found = self._found, None
        if found is not None and numbers[0]:  # only columns of a finite gradient that is not zero
            widened = self._widened(replace(found, on_host=numbers[1:]), Conditions(put_off=True))
            if widened is not None:
                return widened
        gradient = self._gradient()
        largest = torch.linalg.vector_norm(gradient, ord=float("inf"), dtype=torch.float32).item()
        if not 0 < largest < float("inf"):
            return None
        if self._kind == "svd":
            return self._cut(exact_subspace(gradient, self._ranks[-1], self._generator))
        self._generator.set_state(self._drawn)
        again = find_subspace(self._kind, gradient, self._first, self._generator, self._start)
        return self._widened(again, Conditions())

    def _cut(self, full: Subspace) -> Subspace:
        """One decomposition has all ranks."""
        captured = full.captured()
        fits = (rank for rank in self._ranks if captured[rank - 1] >= self._threshold)
        rank = next(fits, self._ranks[-1])
        return Subspace(full.basis[:, :rank], full.energies[:rank], full.total)

    def _widened(self, found: Subspace, conditions: Conditions) -> Subspace | None:
        """None where a condition that was put off was not met."""
        sketch: Sketch | None = None
        for rank in self._ranks[1:]:
            if found.captured()[-1] >= self._threshold:
                break
            if sketch is None:
                sketch = Sketch(self._gradient(), conditions)
                sketch.add(found.basis, rounds=0)
                sketch.products += found.products
            if self._start is not None:
                sketch.add(self._start[:, sketch.width : rank].float(), rounds=1)
            sketch.widen(rank, self._generator)
            found = sketch.subspace(rank)
            if conditions.put_off:
                numbers = _numbers(conditions, found).cpu()
                if not numbers[0]:
                    return None
                found = replace(found, on_host=numbers[1:])
        return found


Search = SubspaceSearch | ExpertSearch


def _numbers(conditions: Conditions, found: Subspace) -> Tensor:
    """What the host decides by: whether all conditions were met, energies, their total; flat fp32 on the device."""
    return torch.cat((conditions.met.float().view(1), found.energies, found.total.view(1)))


def finish_searches(searches: Sequence[Search]) -> list[Subspace | None]:
    """What each has found; one read for all, and one more for each further width of any."""
    if not searches:
        return []
    read = read_together([search.numbers for search in searches])
    return [search.finish(numbers) for search, numbers in zip(searches, read, strict=True)]


def find_subspace_to_energy(
    kind: str,
    gradient: Tensor,
    ranks: Sequence[int],
    threshold: float,
    generator: torch.Generator,
    start: Tensor | None = None,
    *,
    first: int,
) -> Subspace:
    """A :class:`SubspaceSearch` alone, in a gradient that is finite and not zero."""
    search = SubspaceSearch(kind, lambda: gradient, ranks, threshold, generator, start, first=first)
    (found,) = finish_searches([search])
    assert found is not None
    return found
