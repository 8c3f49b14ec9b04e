"""The basis and the probe columns of a matrix, whole or stored elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Columns"]


@dataclass(eq=False)
class Columns:
    """``[Q | P]`` of one matrix, or of several that share a basis; of experts with bases of their own E of them, in one
    tensor.

    Attributes:
        owner: name of the matrix whose bytes they count as.
        rank: r. whole: n x (r + k), or n x r where there are no probes; None where whole gradient rows are taken
            without a basis and where it is redrawn from a seed.
        local: this process's rows while the whole is dropped (ZeRO stage 3, a basis cache); a meta tensor while
            they are in host memory.
        fetch: brings the whole from host memory, where no other process has a part of it.
        directions: of experts with bases of their own how many of the r columns are not zero, (E,) fp32: an expert of few
            tokens has fewer.
    """

    owner: str
    rank: int = 0
    whole: Tensor | None = None
    local: Tensor | None = None
    fetch: Callable[[], Tensor] | None = None
    directions: Tensor | None = None

    @property
    def basis(self) -> Tensor | None:
        """The first r columns of the whole: a view."""
        return None if self.whole is None else self.whole[..., : self.rank]

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor on the device by ``place`` of it, the same values elsewhere."""
        if self.local is not None:
            self.local = self.local if self.local.is_meta else place(self.local)
        elif self.whole is not None:
            self.whole = place(self.whole)
