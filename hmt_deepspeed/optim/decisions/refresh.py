"""Finds new bases for matrices of one process from full gradients, and carries moments over.

:mod:`hmt_deepspeed.zero.bases.refresh` does the same over shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.optim.backward.projected_linear import SharedInputs
from hmt_deepspeed.optim.bases.range_finder import Subspace
from hmt_deepspeed.optim.bases.search import Search, finish_searches
from hmt_deepspeed.optim.decisions.column_energies import column_energies
from hmt_deepspeed.optim.decisions.expert_bases import decide_expert_bases, propose_own_bases
from hmt_deepspeed.optim.decisions.policy import RankPolicy, build_policy
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.decisions.sharing import regroup, share_bases, stacked_gradient
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.numbers import StepNumbers
from hmt_deepspeed.optim.rules.probes import ProbeDraws
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, adopt_together
from hmt_deepspeed.optim.slot import Slot

__all__ = ["BasisRefreshes"]


class BasisRefreshes:
    """Refreshes of one process: when matrices take new bases, which of them share one, and at which ranks.

    Args:
        options: fields of ``hmt.optimizer``.

    Attributes:
        slots: of the matrices; :meth:`extend` takes those that were added. schedule: by their places.
        groups: places of those that take one basis together; each alone unless bases are shared.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.slots: list[Slot] = []
        self._draws, self._numbers = ProbeDraws(), StepNumbers()
        self.groups: list[list[int]] = []
        self.schedule = RefreshSchedule((), 1, 0)
        self.policy = build_policy((), options)

    def extend(self, shared: SharedInputs) -> None:
        """Make room in the schedule for slots that were added.

        Raises:
            ValueError: ``max_full_gradient_bytes`` below the largest gradient.
        """
        sizes = [slot.full_gradient_bytes for slot in self.slots]
        budget = self.options["max_full_gradient_bytes"]
        if budget == "auto":
            budget = auto_full_gradient_bytes(sizes)
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if largest is not None and budget < sizes[largest]:
            raise ValueError(
                f"hmt.optimizer.max_full_gradient_bytes is {budget}, but the gradient of "
                f"{self.slots[largest].name} has {sizes[largest]} bytes; legal: at least that. "
                'Raise it, use "auto", or leave the module to adamw in module_rules.'
            )
        old, self.schedule = (
            self.schedule,
            RefreshSchedule(sizes, int(self.options["update_interval"]), budget),
        )
        self.schedule.take_times(old)
        self.form_groups(shared)

    def form_groups(self, shared: SharedInputs) -> None:
        """Let the matrices that read the same input take one basis, where bases are shared."""
        matrices = [cast(MatrixRule, slot.matrix) for slot in self.slots]
        readers = shared.groups() if self.options["share_basis"] else []
        fixed = self.options["max_full_gradient_bytes"] != "auto"
        self.schedule = regroup(self.schedule, matrices, readers, fixed, warnings.warn)
        self.groups = self.schedule.groups
        members = [[matrices[i] for i in group] for group in self.groups]
        share_bases(members)
        known = self.policy.state_dict()
        self.policy = build_policy(members, self.options)
        self.policy.load_state_dict(known)

    def prepare(self, step: int, shared: SharedInputs) -> None:
        """Decide who refreshes in the coming step and what the others' backward projects on."""
        due: set[int] = set()
        if self.options["share_basis"] and not shared.observed:
            shared.form_groups()  # the first accumulation window only observes who reads the same input
            if shared.observed:
                self.form_groups(shared)
        if not self.options["share_basis"] or shared.observed:
            changing = self.schedule.due(step)
            due.update(i for i in changing if cast(MatrixRule, self.slots[i].matrix).takes_bases)
        for index, slot in enumerate(self.slots):
            matrix = slot.matrix
            if index in due and matrix is not None and matrix.redraws:
                due.discard(index)
                slot.redraw(self.schedule.num_refreshes[index])
                self.schedule.refreshed(index, step)
            slot.prepare(self._numbers.step(step, slot.param.device), index in due)
        self._draws.draw(slot.matrix for slot in self.slots if slot.matrix is not None)
        for slot in self.slots:
            slot.project()
        shared.lay_out()

    def find(self, step: int) -> None:
        """Find the bases that are due once the gradients of an accumulation window are complete; once per step."""
        due = {
            index: [self.slots[member] for member in group]
            for index, group in enumerate(self.groups)
            if self.slots[group[0]].due
        }
        refreshed = _refresh_all(due, self.policy, step)
        for index, slots in due.items():
            if index in refreshed:
                for member in self.groups[index]:
                    self.schedule.refreshed(member, step)
            if index not in refreshed or _is_undecided(slots[0]):
                self.schedule.postpone(self.groups[index][0], step)

    def times(self, slot: Slot) -> dict[str, int]:
        """For a checkpoint: the step of a matrix's next refresh, and the number of its refreshes."""
        place = self.slots.index(slot)
        schedule = self.schedule
        return {
            "next_refresh": schedule.next_refresh[place],
            "num_refreshes": schedule.num_refreshes[place],
        }

    def set_times(self, slot: Slot, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`times` gave."""
        place = self.slots.index(slot)
        self.schedule.next_refresh[place] = int(saved["next_refresh"])
        self.schedule.num_refreshes[place] = int(saved["num_refreshes"])


def _refresh_all(due: Mapping[int, Sequence[Slot]], policy: RankPolicy, step: int) -> set[int]:
    """Take new bases from the full gradients of the accumulation window.

    Args:
        due: by group, its slots.

    Returns:
        The groups that have a new basis; the others' gradients gave none.
    """
    given = [i for i, slots in due.items() if any(s.param.grad is not None for s in slots)]
    decide_expert_bases(_undecided([due[i][0] for i in given], proposed=True))
    columns: dict[int, Tensor] = {}
    for index in filter(policy.reads_columns, given):
        matrices = _matrices(due[index])
        energies = column_energies(matrices, [slice(None)] * len(matrices))
        if energies is not None:
            columns[index] = energies
    if given:
        policy.close_windows(columns)
        policy.read_averages(given)
    order = policy.ordered(given)
    early = [i for i in order if policy.knows_width(i)]
    searches = [_search(i, due[i], policy, step) for i in early]
    found = dict(zip(early, finish_searches(searches), strict=True))
    for index in order:
        if index not in found:
            (found[index],) = finish_searches([_search(index, due[index], policy, step)])
        _adopt(index, due[index], found[index], policy, step)
    refreshed = {index for index, subspace in found.items() if subspace is not None}
    propose_own_bases(_undecided([due[i][0] for i in refreshed], proposed=False), step)
    return refreshed


def _is_undecided(slot: Slot) -> bool:
    """Whether experts are to decide by their next gradient whether they share a basis."""
    matrix = slot.matrix
    return isinstance(matrix, ProjectedMatrix) and matrix.undecided and not matrix.full_rank


def _undecided(slots: Sequence[Slot], proposed: bool) -> dict[ProjectedMatrix, Tensor]:
    """Whole gradients of those experts, with bases of their own proposed or without."""
    found = {}
    for slot in filter(_is_undecided, slots):
        matrix, gradient = cast(ProjectedMatrix, slot.matrix), slot.full_gradient()
        if gradient is not None and (matrix.proposed is not None) == proposed:
            found[matrix] = gradient
    return found


def _matrices(slots: Sequence[Slot]) -> list[ProjectedMatrix]:
    return [cast(ProjectedMatrix, slot.matrix) for slot in slots]


def _search(index: int, slots: Sequence[Slot], policy: RankPolicy, step: int) -> Search:
    """Begin to find the basis of one group."""
    first, sought = policy.first_width(index), policy.sought_energy(index)
    return _matrices(slots)[0].search_basis(lambda: _gradient(slots), step, first, sought)


def _gradient(slots: Sequence[Slot]) -> Tensor:
    """Stacked full gradients of one group."""
    matrices = _matrices(slots)
    gradient = stacked_gradient(matrices, [slot.full_gradient() for slot in slots])
    assert gradient is not None
    return matrices[0].searched(gradient)


def _adopt(
    index: int, slots: Sequence[Slot], found: Subspace | None, policy: RankPolicy, step: int
) -> None:
    """Let one group take what was found; None where its gradient is zero or not finite."""
    matrices = _matrices(slots)
    if found is not None:
        rank = policy.choose(index, matrices[0].captured_at_candidates(found), step)
        is_full = matrices[0].is_full_at(rank)
        basis = None if is_full else matrices[0].basis_of(found, rank, _gradient(slots))
        adopt_together(matrices, basis, [m.overlap_sum(basis, slice(None)) for m in matrices])
    for slot, matrix in zip(slots, matrices, strict=True):
        matrix.prepare(step, found is not None)
        matrix.draw_probes(step)
        slot.due = False
