"""What a projected linear and its optimizer share: columns in, the projected gradient out.

Linears that read the same input share one product ``X [B_1 B_2 ...]``. Who shares is discovered, not declared:
consecutive calls whose inputs are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hmt_deepspeed.sites import computing_projection, kept_projection

__all__ = ["InputGroup", "ProjectedSite", "SharedInputs"]

_InputKey = tuple[int, int, tuple[int, ...], tuple[int, ...], int, torch.dtype]


def _input_key(x: Tensor) -> _InputKey:
    """Identity of a tensor's contents as long as its storage is kept alive."""
    storage = x.untyped_storage().data_ptr()
    return storage, int(x.storage_offset()), tuple(x.shape), x.stride(), x._version, x.dtype


class InputGroup:
    """Sites that read the same input and the one product they share within a forward.

    Attributes:
        sites: members in the order of their first call.
        columns: n x sum of widths, the members' projections side by side; or a part of their rows,
            which ``gather`` makes whole for the time of one product; None where a member makes its own.
    """

    def __init__(self, site: ProjectedSite) -> None:
        self.sites = [site]
        self.columns: Tensor | None = None
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the shared input and product of the last forward."""
        self._input: Tensor | None = None
        self._key: _InputKey | None = None
        self._product: Tensor | None = None
        self._served: set[int] = set()

    def join(self, sites: Sequence[ProjectedSite]) -> Tensor:
        """Columns of active sites side by side, those of a shared projection once; sets their spans."""
        parts: list[Tensor] = []
        begin = 0
        for site in sites:
            columns = site.columns()
            if parts and columns is parts[-1]:
                site.span = (begin - columns.shape[1], begin)
                continue
            site.span = (begin, begin + columns.shape[1])
            begin = site.span[1]
            parts.append(columns)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def product(self, x: Tensor, site: ProjectedSite) -> Tensor:
        """``X B`` of one member, T x width: a view of the product that all members share."""
        if self._product is None or self._key != _input_key(x) or id(site) in self._served:
            kept = kept_projection()
            self._product, self._served = self._compute(x) if kept is None else kept, set()
            # Holding the input keeps its address from being reused.
            self._input, self._key = x.detach(), _input_key(x)
        begin, end = site.span
        part = self._product[:, begin:end]
        self._served.add(id(site))
        if len(self._served) == sum(s.active for s in self.sites):
            self.forget()
        return part

    def _compute(self, x: Tensor) -> Tensor:
        columns = self.columns
        if columns is None:
            columns = self.join([s for s in self.sites if s.active])
        elif self.gather is not None:
            columns = self.gather(columns)[: x.shape[-1]]
        flat = x.detach().reshape(-1, x.shape[-1]).to(columns.dtype)
        with computing_projection():
            return flat @ columns


class ProjectedSite:
    """What a patched linear and the optimizer share: the projection in, the projected gradient out.

    Attributes:
        projection: n x width columns for the coming window (m x width when ``transposed``), a function
            that makes them anew for each use, or None for an ordinary backward.
        transposed: the weight is projected from the left; what backward leaves is n x width.
        span: columns of the group's product that are this site's.
    """

    def __init__(self, name: str, transposed: bool = False) -> None:
        self.name, self.transposed = name, transposed
        self.projection: Tensor | Callable[[], Tensor] | None = None
        self.span = (0, 0)
        self.group = InputGroup(self)
        self._pending: Tensor | None = None

    @property
    def active(self) -> bool:
        return self.projection is not None

    def columns(self) -> Tensor:
        """The projection of an active site."""
        assert self.projection is not None
        if isinstance(self.projection, Tensor):
            return self.projection
        # A backend that watches the linear's operations must not see the draw's.
        with _disable_current_modes():
            return self.projection()

    @property
    def pending(self) -> Tensor | None:
        """What :meth:`take` would return."""
        return self._pending

    def add(self, product: Tensor) -> None:
        """Add one backward's ``D^T (X B)``, m x width (``X^T (D B)`` of a transposed site, n x width);
        sums of several are kept in fp32 or wider."""
        if self._pending is not None:
            wide = torch.promote_types(product.dtype, torch.float32)
            product = self._pending.to(wide).add_(product)
        self._pending = product

    def take(self) -> Tensor | None:
        """The products since the last call, summed, or None."""
        pending, self._pending = self._pending, None
        return pending


class SharedInputs:
    """Discovers which sites read the same input and lays their projections side by side.

    ``gather`` is for projections of which every process holds some rows: it is given the local rows of
    a group's columns and returns those of all processes.
    """

    def __init__(
        self,
        sites: Iterable[ProjectedSite],
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.sites, self.gather = list(sites), gather
        self._last: tuple[_InputKey, Tensor, ProjectedSite] | None = None
        self._joins: dict[ProjectedSite, ProjectedSite] = {}
        self._learning = True
        self._retired: list[list[str]] = []

    def meet(self, x: Tensor, site: ProjectedSite) -> None:
        """Note a call while learning; the groups take effect at the next :meth:`lay_out`."""
        if not self._learning or site.transposed:
            return
        key = _input_key(x)
        leader = site
        if self._last is not None and self._last[0] == key:
            leader = self._last[2]
            if leader is not site:
                self._joins.setdefault(site, leader)
        self._last = (key, x.detach(), leader)

    def settle(self) -> None:
        """End the observed window: form the groups it showed."""
        self._learning = self._learning and self._last is None  # one observed window is enough
        self._last = None
        for site, leader in self._joins.items():
            if len(site.group.sites) == 1 and leader not in self._joins:
                leader.group.sites.append(site)
                site.group = leader.group
        self._joins.clear()

    @property
    def settled(self) -> bool:
        """Whether a window has been observed, or there is nothing to observe."""
        return not self._learning or not self.sites

    def lay_out(self) -> None:
        """Build every group's columns from its active members' projections; shared ones once."""
        self.settle()
        seen: set[int] = set()
        for site in self.sites:
            group = site.group
            if id(group) in seen:
                continue
            seen.add(id(group))
            group.forget()
            group.gather = self.gather
            active = [site for site in group.sites if site.active]
            made = any(not isinstance(site.projection, Tensor) for site in active)
            group.columns = None if made or not active else group.join(active)

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Take what ``place`` gives for all that is laid out: the same elsewhere."""
        for site in self.sites:
            if isinstance(site.projection, Tensor):
                site.projection = place(site.projection)
        for group in {id(site.group): site.group for site in self.sites}.values():
            if group.columns is not None:
                group.columns = place(group.columns)

    def groups(self) -> list[list[str]]:
        """Names of the sites that share a product, for a checkpoint: a resumed run computes the same."""
        groups = {id(site.group): site.group for site in self.sites}
        named = [[site.name for site in g.sites] for g in groups.values() if len(g.sites) > 1]
        return self._retired + named

    def retire(self) -> None:
        """Let the sites go, whose modules are ordinary again. Which of them shared a product is still told."""
        self.settle()
        self._retired, self.sites = self.groups(), []

    def restore(self, groups: Sequence[Sequence[str]], settled: bool = False) -> None:
        """Form the groups of a checkpoint; they take effect at the next :meth:`lay_out`.

        Without groups the next window is observed, unless one was before the checkpoint (``settled``).
        """
        by_name = {site.name: site for site in self.sites}
        for site in self.sites:
            site.group = InputGroup(site)
        for names in groups:
            members = [by_name[name] for name in names if name in by_name]
            for site in members[1:]:
                members[0].group.sites.append(site)
                site.group = members[0].group
        self._last, self._learning = None, not groups and not settled
        self._joins.clear()
        self._retired = []
