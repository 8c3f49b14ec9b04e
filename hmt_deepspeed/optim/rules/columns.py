"""The basis and the probe columns of a matrix, whole or stored elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Columns"]


@dataclass(eq=False)
class Columns:
    """``[Q | P]`` of one matrix, or of several that share a basis.

    Attributes:
        owner: name of the matrix whose bytes they count as.
        whole: n x (r + k); None where whole gradient rows are taken.
        basis: the first r columns of ``whole``, or all there is; None where it is redrawn from a seed, and for
            full rank.
        local: this process's rows while the whole is dropped (ZeRO stage 3, a basis cache); a meta tensor while
            they are in host memory.
        fetch: brings the whole from host memory, where no other process has a part of it.
    """

    owner: str
    whole: Tensor | None = None
    basis: Tensor | None = None
    local: Tensor | None = None
    fetch: Callable[[], Tensor] | None = None

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor on the device by ``place`` of it, the same values elsewhere."""
        if self.local is not None:
            self.local = self.local if self.local.is_meta else place(self.local)
        elif self.whole is not None:
            width = 0 if self.basis is None else self.basis.shape[1]
            self.whole = place(self.whole)
            self.basis = self.whole[:, :width]
        elif self.basis is not None:
            self.basis = place(self.basis)
