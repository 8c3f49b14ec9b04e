"""Groups of matrices that share a basis: when they refresh, at which rank, and which projection they use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hmt_deepspeed.optim.backward.linear import SharedInputs
from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.decisions.sharing import regroup, share_bases
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.probes import ProbeDraws
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.zero.bases.moment_history import SavedHistory
from hmt_deepspeed.zero.bases.refresh import BasisRefresh
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["BasisGroups"]


class BasisGroups:
    """The groups of one optimizer; a matrix is a group of its own unless bases are shared.

    Args:
        low_rank: parameters with a matrix. schedule: when each of them refreshes, in their order.
        bases: stores projections between their uses. shared: which linears read the same input.
        refresh: finds bases and carries moments over to them. collectives: of the data-parallel group.
        options: fields of ``hmt.optimizer``. warn: tells the user something.

    Attributes:
        groups: places in ``low_rank`` of the matrices of each group, the one that gives the basis its name first.
        schedule: when each matrix refreshes. policy: the rank of each group's next basis.
    """

    def __init__(
        self,
        low_rank: Sequence[ParamState],
        schedule: RefreshSchedule,
        bases: BasisStorage,
        shared: SharedInputs,
        refresh: BasisRefresh,
        collectives: Collectives,
        options: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.low_rank, self.schedule, self.bases, self.shared = low_rank, schedule, bases, shared
        self._refresh, self._collectives = refresh, collectives
        self._options, self._warn = options, warn
        self._draws, self._numbers = ProbeDraws(bases.held_rows), StepNumbers()
        self._matrices = [p.matrix for p in low_rank if p.matrix is not None]
        self.form()

    def forget_columns(self) -> None:
        """Hold no memory of columns any more: they have moved elsewhere."""
        self._draws.forget()

    def form(self) -> None:
        """Group the matrices whose linears read the same input, as far as is known by now."""
        readers = self.shared.groups() if self._options["share_basis"] else []
        fixed = self._options["max_full_gradient_bytes"] != "auto"
        self.schedule = regroup(self.schedule, self._matrices, readers, fixed, self._warn)
        self.groups = self.schedule.groups
        for index in {i for group in self.groups if len(group) > 1 for i in group}:
            self.bases.restore(self.low_rank[index])
        members = [[self._matrices[i] for i in group] for group in self.groups]
        share_bases(members)
        for number, group in enumerate(self.groups):
            for index in group:
                self.low_rank[index].gradient.owner = self._owner(number)
        self.bases.keep_only(self.low_rank)
        self.bases.arrange(self._drawn_together())
        self.policy = build_policy(members, self._options)

    # -- an accumulation window: draw probes, choose who refreshes, lay out the projections --------

    def begin_window(self, step: int) -> None:
        """Prepare the matrices for the gradients of one optimizer step.

        Args:
            step: number of optimizer steps taken.
        """
        due = self._due(step)
        runs = self._drawn_together()
        self.bases.will_use(runs)
        for index in sorted(due):
            if self._matrices[index].redraws:
                due.discard(index)
                with self.bases.whole(self.low_rank[index]):
                    self._redraw(index, step)
        for matrix in self._matrices:
            matrix.prepare(self._numbers.step(step, matrix.device))
        self._draw_probes(runs)
        for index, param_state in enumerate(self.low_rank):
            gradient = param_state.gradient
            gradient.refreshing = index in due
            if gradient.linear is not None:
                projection = None if gradient.refreshing else self.bases.projection(param_state)
                gradient.linear.projection = projection
                matrix = self._matrices[index]
                gradient.linear.own = matrix.own_bases
                gradient.linear.transposed = matrix.transposed
        self.shared.lay_out()
        self.bases.will_use(None)

    def _drawn_together(self) -> list[list[ParamState]]:
        """Matrices whose probes are drawn at once; of those that share a basis its owner draws them. Matrices alike follow
        one another, as they do where they step together: what lies side by side is moved together."""
        alike: dict[Hashable, list[ParamState]] = {}
        for param_state in filter(_owns_basis, self.low_rank):
            assert param_state.matrix is not None
            alike.setdefault(param_state.matrix.alike, []).append(param_state)
        owners = [param_state for some in alike.values() for param_state in some]
        return [owners[begin:end] for begin, end in self.bases.runs(owners, whole=False)]

    def _draw_probes(self, runs: Sequence[Sequence[ParamState]]) -> None:
        """Probe columns of the coming step; of bases in host memory those of a run at a time."""
        if not self.bases.stores:
            self._draws.draw(self._matrices)
            return
        for some in runs:
            with self.bases.all_present(some):
                matrices = [p.matrix for p in some if p.matrix is not None]
                away = self.bases.cache is not None
                draws = ProbeDraws(self.bases.held_rows) if away else self._draws
                draws.draw(matrices)

    def _due(self, step: int) -> set[int]:
        """Matrices that refresh in the coming step."""
        if self._options["share_basis"] and not self.shared.observed:
            self.shared.form_groups()  # the first accumulation window only observes who reads the same input
            if not self.shared.observed:
                return set()
            groups = self._collectives.broadcast_object(self.shared.groups())
            self.shared.restore(groups, observed=True)
            self.form()
        return {i for i in self.schedule.due(step) if self._matrices[i].takes_bases}

    def _redraw(self, index: int, step: int) -> None:
        """The next basis of a rule that draws it from a seed: no gradient is needed."""
        matrix = self._matrices[index]
        number = self.schedule.num_refreshes[index]
        if isinstance(matrix, ProjectedMatrix):
            basis = matrix.seeded_basis(matrix.rank, number).to(matrix.dtype)
            self._refresh.adopt([index], basis)
        matrix.draw = number  # only now: the old number gives the basis that moments come from
        self.schedule.refreshed(index, step)

    def refresh(self, step: int, overflow: Tensor | None = None) -> bool:
        """Find new bases at the end of an accumulation window, from its mean full gradients.

        Args:
            step: number of the optimizer step. overflow: 0-dim fp32, alike on all ranks: where it is not 0 the step
                is skipped, and nothing changes.

        Returns:
            Whether the step is taken.
        """
        return self._refresh.run(self.groups, self.policy, self.schedule, step, overflow)

    def _owner(self, group: int) -> int:
        """The rank that finds the basis of a group."""
        return group % self._collectives.world

    # -- restoring a checkpoint ---------------------------------------------------------------------

    def load_old_bases(self, saved: Mapping[str, Tensor]) -> None:
        """Restore old bases of the groups whose bases this rank finds.

        Args:
            saved: n x r on the host, by name of the matrix.
        """
        own = [g[0] for n, g in enumerate(self.groups) if self._owner(n) == self._collectives.rank]
        self.bases.old.load([self.low_rank[index] for index in own], saved)

    def load_history(self, saved: SavedHistory) -> None:
        """Take over moments of previous bases."""
        members = [[self.low_rank[index] for index in group] for group in self.groups]
        finds = (self._owner(number) == self._collectives.rank for number in range(len(members)))
        self.bases.history.load(list(zip(members, finds, strict=True)), saved)


def _owns_basis(param_state: ParamState) -> bool:
    """Whether the matrix has a basis of its own, or gives it to others."""
    matrix = param_state.matrix
    return isinstance(matrix, ProjectedMatrix) and matrix.columns.owner == matrix.name
