"""One parameter's gradient: taken from backward, accumulated, reduced to its shard.

A window is an accumulation window: the micro-batches between two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from hmt_deepspeed.kernels.low_rank_projection import project, project_together
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.zero.offload.worker import HostGradient
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.sharding.shards import Shards

__all__ = ["Accumulated", "Gradient"]


@dataclass(eq=False)
class Gradient:
    """Gradient of one parameter on its way to its shard.

    Attributes:
        shards: partition of the matrix over ranks (numel x 1 for a dense parameter), of its transpose where
            that is projected.
        holders: collectives of the ranks that share the parameter.
        matrix: its rule, None for a dense parameter. linear: receives projected gradients; None without
            projected backward.
        refreshing: this window forms the full gradient, for the basis.
        owner: rank that finds the basis.
        leaf: of ZeRO-3, when it is of one: it counts as arrived with the leaf, whether this rank used it or not.
        arrived: contribution of this rank, complete, waiting for its bucket.
        local: contributions of earlier micro-batches that were not reduced.
        reduced: mean over ranks of the rows held here, rows x width; None when nothing came.
        full: mean full gradient, m x n, at the owner of a refreshing matrix.
        room: gives memory for ``reduced``, side by side with that of others that step together.
        host: takes the place of ``reduced`` where the parameter is updated in host memory.
    """

    index: int
    name: str
    param: nn.Parameter
    shards: Shards
    holders: Collectives
    matrix: MatrixRule | None = None
    linear: ProjectedLinear | None = None
    refreshing: bool = False
    owner: int = 0
    leaf: nn.Module | None = None
    arrived: Tensor | None = None
    local: Tensor | None = None
    reduced: Tensor | None = None
    full: Tensor | None = None
    host: HostGradient | None = None
    room: Callable[[], Tensor] | None = None

    def free_room(self) -> Tensor | None:
        """Memory for what comes first in a window, rows x width; None where there is none, or something in it."""
        taken = (self.arrived, self.local, self.reduced)
        if self.room is None or self.refreshing or any(t is not None for t in taken):
            return None
        return self.room()

    def room_of_link(self) -> Tensor | None:
        """:meth:`free_room` as backward leaves gradients: of experts E x rows x width."""
        room = self.free_room()
        if room is None or self.count == 1:
            return room
        return room.unflatten(0, (self.count, -1))

    @property
    def count(self) -> int:
        """Matrices that the parameter holds; those of experts are here one below the other."""
        return 1 if self.matrix is None else self.matrix.count

    @property
    def width(self) -> int:
        """Columns of the contribution that is sharded by rows."""
        return 1 if self.matrix is None else self.matrix.width

    def collect(self) -> Tensor | None:
        """Take what backward left: m x width, or the full m x n for a refreshing matrix.

        Raises:
            RuntimeError: a whole gradient to be projected where the basis lies in parts on all ranks.
        """
        grad, self.param.grad = self.param.grad, None
        if grad is not None and self.matrix is not None and self.matrix.transposed:
            grad = grad.detach().mT
        elif grad is not None and self.count == 1:
            grad = grad.detach().reshape(self.shards.m, self.shards.n)
        if self.matrix is None or self.refreshing or self.matrix.takes_whole:
            return grad if grad is None else grad.reshape(self.shards.m, self.shards.n)
        product = self.linear.take() if self.linear is not None else None
        if product is not None and self.count > 1:
            product = product.flatten(0, 1)
        if grad is not None:
            columns = self.matrix.projection
            assert columns is not None
            # this rank's rows only, see `BasisStorage`; hooks must not gather
            if columns.shape[-2] < grad.shape[-1]:
                raise RuntimeError(
                    f"{self.name} is read outside its module's forward, as F.linear(x, module.weight) does. "
                    "zero_optimization.stage is 3, where each rank holds a part of its basis and none can "
                    "project that use's gradient. Leave it to adamw in hmt.optimizer.module_rules, or set "
                    "hmt.optimizer.projected_backward to false."
                )
            projected = self.project(grad, columns)
            product = projected if product is None else product + projected
        return product

    def project(self, whole: Tensor, columns: Tensor) -> Tensor:
        """A whole gradient, of experts E x m x n or these one below the other, on the matrix's projection: m x width."""
        if self.count == 1:
            return project(whole, columns)
        each = whole if whole.dim() == 3 else whole.unflatten(0, (self.count, -1))
        images, _ = project_together([each], [columns.expand(self.count, -1, -1)])
        return images.flatten(0, 1)

    def nbytes(self) -> int:
        """Bytes of gradient alive in this object, on the device."""
        nbytes = 0
        for tensor in (self.arrived, self.local, self.reduced, self.full):
            if tensor is not None:
                nbytes += tensor.nbytes
        return nbytes

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for what has accumulated on the device.

        Args:
            place: gives a copy elsewhere of a tensor.
        """
        for name in ("arrived", "local", "reduced", "full"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, place(tensor))

    def clear(self) -> None:
        """Forget everything accumulated."""
        self.arrived = self.local = self.reduced = self.full = None
        if self.host is not None:
            self.host.clear()
        if self.linear is not None:
            self.linear.take()


class Accumulated(Enum):
    """How far the accumulation window has come; the same on every rank whose backwards were the same."""

    NOTHING = "no backward has run since the last step"
    PART = "a backward is under way, or was broken off"
    OWN = "sums of this rank's backwards, which no other rank has"
    MEAN = "means over ranks"
    BOTH = "means over ranks, and sums of this rank's later backwards"
