"""Projected linears: the optimizer gives each its projection, backward leaves the projected gradient in it.

Linears that read the same input share one product ``X [B_1 B_2 ...]``. Who shares is discovered, not declared:
consecutive calls whose inputs are the same memory. A window is an accumulation window: the backwards between
two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import is_

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hmt_deepspeed.kernels.gradient_product import add_gradient_product
from hmt_deepspeed.kernels.grouped_product import add_grouped_product
from hmt_deepspeed.sites import computing_projection, kept_projection

__all__ = ["InputGroup", "ProjectedLinear", "SharedInputs"]

# Elements of columns that groups of linears have in one piece of memory, unless those of one group are more.
_JOINED = 1 << 27

_InputKey = tuple[int, int, tuple[int, ...], tuple[int, ...], int, torch.dtype]


def _input_key(x: Tensor) -> _InputKey:
    """Identity of a tensor's contents as long as its storage is kept alive."""
    storage = x.untyped_storage().data_ptr()
    return storage, int(x.storage_offset()), tuple(x.shape), x.stride(), x._version, x.dtype


class InputGroup:
    """Linears that read the same input and the one product they share within a forward.

    Attributes:
        linears: members in the order of their first call.
        columns: n x sum of widths, the members' projections side by side; None where a member makes its own. With
            ``gather`` a part of their rows, as are those that members make.
        gather: gives the whole columns of a group, whose last rows may be padding, for the time of one product.
    """

    def __init__(self, linear: ProjectedLinear) -> None:
        self.linears = [linear]
        self.columns: Tensor | None = None
        self.gather: Callable[[InputGroup], Tensor] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the shared input and product of the last forward."""
        self._input: Tensor | None = None
        self._key: _InputKey | None = None
        self._product: Tensor | None = None
        self._served: set[int] = set()

    @property
    def active(self) -> list[ProjectedLinear]:
        """Members with a projected backward in this accumulation window."""
        return [linear for linear in self.linears if linear.projection is not None]

    def parts(self) -> list[Tensor]:
        """Columns of the active members, those of a shared projection once; sets the members' spans."""
        parts: list[Tensor] = []
        begin = 0
        for linear in self.active:
            columns = linear.columns()
            if parts and columns is parts[-1]:
                linear.span = (begin - columns.shape[1], begin)
                continue
            linear.span = (begin, begin + columns.shape[1])
            begin = linear.span[1]
            parts.append(columns)
        return parts

    def join(self) -> Tensor:
        """These columns side by side."""
        parts = self.parts()
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def product(self, x: Tensor, linear: ProjectedLinear) -> Tensor:
        """``X B`` of one member, T x width: a view of the product that all members share."""
        if self._product is None or self._key != _input_key(x) or id(linear) in self._served:
            kept = kept_projection()
            self._product, self._served = self._compute(x) if kept is None else kept, set()
            # Holding the input keeps its address from being reused.
            self._input, self._key = x.detach(), _input_key(x)
        begin, end = linear.span
        part = self._product[:, begin:end]
        self._served.add(id(linear))
        if len(self._served) == len(self.active):
            self.forget()
        return part

    def _compute(self, x: Tensor) -> Tensor:
        columns = self.columns
        if self.gather is not None:
            with _disable_current_modes():  # a backend would see what is gathered beside it
                columns = self.gather(self)[: x.shape[-1]]
        elif columns is None:
            columns = self.join()
        flat = x.detach().reshape(-1, x.shape[-1]).to(columns.dtype)
        with computing_projection():
            return flat @ columns


def _join_together(
    groups: Sequence[tuple[InputGroup, list[Tensor]]],
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Lay the columns of groups side by side, those of several groups in one launch.

    Args:
        groups: with their :meth:`InputGroup.parts`, of one number of rows, dtype and device.

    Returns:
        What lies side by side, and where.
    """
    rows, begin = len(groups[0][1][0]), 0
    while begin < len(groups):
        widths: list[int] = []
        for _, parts in groups[begin:]:
            width = sum(part.shape[1] for part in parts)
            if widths and rows * (sum(widths) + width) > _JOINED:
                break
            widths.append(width)
        piece, begin = groups[begin : begin + len(widths)], begin + len(widths)
        own = [part for _, parts in piece for part in parts]
        joined = torch.cat(own, dim=1)
        for (group, _), columns in zip(piece, joined.split(widths, dim=1), strict=True):
            group.columns = columns
        yield own, joined


class ProjectedLinear:
    """Link of a patched linear and the optimizer: the projection and the projected gradient.

    Attributes:
        projection: n x width columns for the coming window (m x width when ``transposed``), a function
            that makes them anew for each use, or None for an ordinary backward.
        transposed: the weight is projected from the left; what backward leaves is n x width.
        own: of experts that have a projection each, E x n x width (E x m x width when ``transposed``). What backward
            leaves of experts, whose projection is shared or not, is E x m x width (E x n x width), fp32.
        room: gives memory for the window's product, fp32, or None; None for new memory.
        span: this linear's columns in the group's product, half-open.
    """

    def __init__(self, name: str, transposed: bool = False) -> None:
        self.name, self.transposed, self.own = name, transposed, False
        self.projection: Tensor | Callable[[], Tensor] | None = None
        self.span = (0, 0)
        self.group = InputGroup(self)
        self.room: Callable[[], Tensor | None] | None = None
        self._pending: Tensor | None = None

    @property
    def active(self) -> bool:
        return self.projection is not None

    def columns(self) -> Tensor:
        """The projection of an active linear."""
        assert self.projection is not None
        if isinstance(self.projection, Tensor):
            return self.projection
        # A backend that watches the linear's operations must not see the draw's.
        with _disable_current_modes():
            return self.projection()

    @property
    def pending(self) -> Tensor | None:
        """The result of :meth:`take`, without taking it."""
        return self._pending

    def add(self, delta: Tensor, features: Tensor) -> None:
        """Add one backward's ``D^T (X B)``, m x width (``X^T (D B)`` of a transposed linear, n x width)."""
        room = None if self.room is None or self._pending is not None else self.room()
        self._pending = add_gradient_product(self._pending, delta, features, room)

    def add_experts(self, delta: Tensor, features: Tensor, offsets: Tensor) -> None:
        """Add one backward's products of experts, E x m x width; see :func:`add_grouped_product`."""
        room = None if self.room is None or self._pending is not None else self.room()
        delta = delta.to(features.dtype)
        self._pending = add_grouped_product(self._pending, delta, features, offsets, room)

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Replace the projection by ``place`` of it, the same values elsewhere."""
        if isinstance(self.projection, Tensor):
            self.projection = place(self.projection)

    def take(self) -> Tensor | None:
        """The products since the last call, summed, or None."""
        pending, self._pending = self._pending, None
        return pending


class SharedInputs:
    """Discovers which linears read the same input and lays their projections side by side.

    ``gather`` is for projections of which every process holds some rows, see :class:`InputGroup`.
    """

    def __init__(
        self,
        linears: Iterable[ProjectedLinear],
        gather: Callable[[InputGroup], Tensor] | None = None,
    ) -> None:
        self.linears, self.gather = list(linears), gather
        self._last: tuple[_InputKey, Tensor, ProjectedLinear] | None = None
        self._joins: dict[ProjectedLinear, ProjectedLinear] = {}
        self._learning = True
        self._retired: list[list[str]] = []
        # projections by linear as they were laid out, what of them is joined, and where
        self._laid: tuple[list[object], list[tuple[list[Tensor], Tensor]]] | None = None

    def meet(self, x: Tensor, linear: ProjectedLinear) -> None:
        """Note a call while learning; the groups take effect at the next :meth:`lay_out`."""
        if not self._learning or linear.transposed:
            return
        key = _input_key(x)
        leader = linear
        if self._last is not None and self._last[0] == key:
            leader = self._last[2]
            if leader is not linear:
                self._joins.setdefault(linear, leader)
        self._last = (key, x.detach(), leader)

    def form_groups(self) -> None:
        """End the observed window and form the groups that it showed."""
        self._learning = self._learning and self._last is None  # one observed window is enough
        self._last = None
        self._laid = None if self._joins else self._laid
        for linear, leader in self._joins.items():
            if len(linear.group.linears) == 1 and leader not in self._joins:
                leader.group.linears.append(linear)
                linear.group = leader.group
        self._joins.clear()

    @property
    def observed(self) -> bool:
        """Whether a window has been observed, or there is nothing to observe."""
        return not self._learning or not self.linears

    def gather_of(self, group: InputGroup) -> Callable[[InputGroup], Tensor] | None:
        """What gives a group's whole columns; None where they are here."""
        return self.gather

    def lay_out(self) -> None:
        """Build every group's columns from its active members' projections; shared ones once."""
        self.form_groups()
        groups = dict.fromkeys(linear.group for linear in self.linears)
        for group in groups:
            group.forget()
        projections: list[object] = [linear.projection for linear in self.linears]
        if self._laid is not None and all(map(is_, projections, self._laid[0])):
            for parts, joined in self._laid[1]:
                torch.cat(parts, dim=1, out=joined)
            return
        self._laid = None
        several: dict[Hashable, list[tuple[InputGroup, list[Tensor]]]] = {}
        for group in groups:
            group.gather, group.columns = self.gather_of(group), None
            active = group.active
            if not active or any(not isinstance(one.projection, Tensor) for one in active):
                continue
            parts = group.parts()
            if len(parts) == 1:
                group.columns = parts[0]
            elif group.gather is None:  # else its rows are joined as they are gathered
                kind = parts[0].shape[0], parts[0].dtype, parts[0].device
                several.setdefault(kind, []).append((group, parts))
        pieces = [piece for alike in several.values() for piece in _join_together(alike)]
        self._laid = projections, pieces

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that is laid out by ``place`` of it, the same values elsewhere."""
        self._laid = None
        for linear in self.linears:
            linear.move(place)
        for group in {id(linear.group): linear.group for linear in self.linears}.values():
            if group.columns is not None:
                group.columns = place(group.columns)

    def groups(self) -> list[list[str]]:
        """Names of the linears that share a product, for a checkpoint: a resumed run computes the same."""
        groups = {id(linear.group): linear.group for linear in self.linears}
        named = [[one.name for one in g.linears] for g in groups.values() if len(g.linears) > 1]
        return self._retired + named

    def retire(self) -> None:
        """Forget the linears, whose modules are ordinary again; :meth:`groups` still tells which shared a product."""
        self.form_groups()
        self._laid = None
        self._retired, self.linears = self.groups(), []

    def restore(self, groups: Sequence[Sequence[str]], observed: bool = False) -> None:
        """Form the groups of a checkpoint; they take effect at the next :meth:`lay_out`.

        Without groups the next window is observed, unless one was before the checkpoint (``observed``).
        """
        self._laid = None
        by_name = {linear.name: linear for linear in self.linears}
        for linear in self.linears:
            linear.group = InputGroup(linear)
        for names in groups:
            members = [by_name[name] for name in names if name in by_name]
            for linear in members[1:]:
                members[0].group.linears.append(linear)
                linear.group = members[0].group
        self._last, self._learning = None, not groups and not observed
        self._joins.clear()
        self._retired = []
