"""Where the basis and the probe columns of a matrix lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Columns"]


@dataclass(eq=False)
class Columns:
    """``[Q | P]`` of one matrix, or of several that share a basis.

    whole: n x (r + k), None where whole gradient rows are taken. basis: its first r columns, or all
    there is; None where it is redrawn from a seed, and for full rank. owner: name of the matrix whose bytes
    it counts as. parked: this process's rows while the whole is dropped (ZeRO stage 3, a basis cache); a meta
    tensor while they are in host memory. fetch: brings the whole from there, where no other process has a
    part of it.
    """

    owner: str
    whole: Tensor | None = None
    basis: Tensor | None = None
    parked: Tensor | None = None
    fetch: Callable[[], Tensor] | None = None

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for what is on the device: the same elsewhere."""
        if self.parked is not None:
            self.parked = self.parked if self.parked.is_meta else place(self.parked)
        elif self.whole is not None:
            width = 0 if self.basis is None else self.basis.shape[1]
            self.whole = place(self.whole)
            self.basis = self.whole[:, :width]
        elif self.basis is not None:
            self.basis = place(self.basis)
