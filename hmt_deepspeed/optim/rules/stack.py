"""Stacks: matrices alike that take their steps together.

All matrices of equal rule and settings, equal shape as they are projected, equal rank, dtype and rows held here are
one stack. Each of its tensors has a leading dimension B, one entry a matrix; what a matrix itself has of it, for a
refresh or a checkpoint, is a view. A matrix alone is a stack of one; a member that holds E experts has E entries, one
after the other. Of its experts a member may hold some: then energies, and the sums that :meth:`Stack.observe` takes, are
those of all, everything else of those held. One step::

    sums = measure(gradients)             B x sums, each summed over all holders of rows
    observe(sums)                         the gradient's norm, smoothed energies
    start(factor)                         what is not as large as a gradient, once for all members
    updates, sums = advance(gradients)    states; ``sums`` summed over all holders
    sums = complete(updates, sums)        of rules that make the update of sums of states; summed again
    changes = finish(updates, sums)       limiter and scale, applied together with the update

What is as large as a gradient comes by parts of a stack, which bound the memory taken at once: gradients of a part lie
side by side, and changes are of parts. The last two are of the whole stack or, where its updates would take memory of
their own, of one of its :meth:`Stack.groups` after the other.

Whole rows of gradients stay where they are, and are a part of the change: no copy of them is made. Of experts they, and
what they are projected on, are one tensor of a member's E matrices.
Nothing is read from the device. A matrix whose factor is zero takes no step: its states stay as they are, bit for
bit, whatever its gradient holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import device_table, upload
from hmt_deepspeed.kernels.noise import base_keys, step_keys
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.matrix import ENERGY_SMOOTHING, OWN_WEIGHT, MatrixRule
from hmt_deepspeed.optim.rules.side_by_side import Stacked, joined
from hmt_deepspeed.optim.rules.state import StateTensor
from hmt_deepspeed.rules import SumOf

__all__ = ["MOST_ALIVE", "Gradients", "Stack"]

_S = TypeVar("_S", bound="Stack")
_T = TypeVar("_T")
# Of B matrices: B x rows x width, or where they are whole rows one by one, of equal strides and float dtype; of members
# with E experts each is E x rows x width.
Gradients = Tensor | list[Tensor]
# fp32 elements of what a part of a stack has beside its gradients while it steps: 256 MiB.
MOST_ALIVE = 1 << 26
_TINY = torch.finfo(torch.float32).tiny


@dataclass
class _Begun:
    """The step that a stack is in, see :meth:`Stack.start`."""

    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    shared: dict[str, Tensor] = field(default_factory=dict)


class Stack(ABC):
    """Matrices that take their steps together; a rule's class says how.

    Attributes:
        members: with B matrices. tensors: of all, by name, see :meth:`MatrixRule.paths`.
        base_keys, member_keys: of matrices and of members, see :func:`base_keys`.
        largest_rows: of a member at the process that holds most, where parts must be alike on all; by default those here.
    """

    def __init__(self, members: Sequence[MatrixRule]) -> None:
        self.members = list(members)
        self.first = members[0]
        self.settings, self.rule = self.first.settings, self.first.settings.rule
        self.shape, self.rank, self.device = self.first.shape, self.first.rank, self.first.device
        self.largest_rows = self.first.num_held * self.first.num_rows
        self._cut: dict[tuple[int, int], Any] = {}
        # What parts have in common with the whole, and which of its members they are.
        self._begun, self._rooms = _Begun(), dict[int, Tensor]()
        self._begin, self._whole_size = 0, len(self.members)
        names, seed = [name for member in members for name in member.names], self.settings.seed
        self._all_keys = self.member_keys = base_keys(seed, names, self.device)
        self.base_keys = self.of_held(self._all_keys)
        if self.first.count > 1:
            self.member_keys = base_keys(seed, [member.name for member in members], self.device)
        self.tensors = {n: Stacked(members, path) for n, path in self.first.paths().items()}

    def gather(self) -> None:
        """Take over what members have replaced since the last step."""
        for tensors in self.tensors.values():
            tensors.gather()

    def part(self: _S, begin: int, end: int) -> _S:
        """Some of the members, as a stack of the same memory; the same object every time."""
        if (begin, end) == (0, len(self.members)):
            return self
        if (begin, end) not in self._cut:
            other = copy(self)
            other.members = self.members[begin:end]
            other._cut, other._begin = {}, self._begin + begin
            other.first, other.member_keys = other.members[0], self.member_keys[begin:end]
            count, held = self.first.count, self.first.num_held
            other._all_keys = self._all_keys[begin * count : end * count]
            other.base_keys = self.base_keys[begin * held : end * held]
            other.tensors = {name: found.part(begin, end) for name, found in self.tensors.items()}
            self._cut[begin, end] = other
        found: _S = self._cut[begin, end]
        return found

    def _each(self, most: int) -> int:
        """Members of a part."""
        return max(1, most // max(1, self.largest_rows * self.alive_width))

    def _ranges(self, most: int) -> list[tuple[int, int]]:
        each, size = self._each(most), len(self.members)
        return [(begin, min(begin + each, size)) for begin in range(0, size, each)]

    def parts(self: _S, most: int) -> list[_S]:
        """The stack in parts of at most ``most`` elements of update, or of one member."""
        return [self.part(*members) for members in self._ranges(most)]

    def by_parts(self, given: Sequence[_T], most: int) -> list[list[_T]]:
        """What members have, for each of the parts."""
        return [list(given[begin:end]) for begin, end in self._ranges(most)]

    def pieces(self, most: int) -> list[tuple[int, int]]:
        """Half-open ranges of members whose weights are changed together, of each change of :meth:`finish`."""
        return self._ranges(most)

    def groups(self, most: int, in_place: bool) -> list[tuple[int, int]]:
        """Half-open ranges of members whose updates are alive at once: all where their updates take no memory but their
        gradients', else parts of the stack.

        Args:
            in_place: whether gradients are fp32 in the stack's own memory, and updates take their place.
        """
        alone = self.held_width(in_place) == 0
        return [(0, len(self.members))] if alone else self._ranges(most)

    def room(self, dtype: torch.dtype, most: int, place: int) -> Tensor:
        """Memory for the gradient of one member, rows x width: a piece of its part's, until :meth:`free`."""
        each, first = self._each(most), self.first
        number, member = divmod(self._begin + place, each)
        if number not in self._rooms:
            size = min(each, self._whole_size - number * each)
            shape = (size, *first.several, first.num_rows, first.width)
            self._rooms[number] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._rooms[number][member]

    def free(self, most: int, place: int) -> None:
        """Let go of the memory of the gradients of a member's part."""
        self._rooms.pop((self._begin + place) // self._each(most), None)

    @property
    def size(self) -> int:
        """B, the number of its matrices."""
        return len(self.base_keys)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of all matrices, B x ..."""
        whole = self.tensors[name].whole
        return whole.flatten(0, 1) if self.first.count > 1 else whole

    def state(self, name: str) -> StateTensor:
        """A stored state of all matrices."""
        parts = [f"{name}.data"] + [f"{name}.scales"] * (f"{name}.scales" in self.tensors)
        return self.first.states()[name].of_many([self[part] for part in parts])

    def keys(self, step: Tensor | int, stream: int, of_all: bool = False) -> Tensor:
        """Keys of what is random in a step, B x 2 int32, see :func:`step_keys`.

        Args:
            step: its number, or (B,) int64 of each matrix. of_all: also of experts that are held elsewhere.
        """
        return step_keys(self._all_keys if of_all else self.base_keys, step, stream)

    def draws(self) -> Tensor:
        """Numbers of the matrices' seeded bases, (B,) int64 on the device."""
        return device_table(tuple(self.of_each([m.draw for m in self.members])), self.device)

    def of_each(self, values: Sequence[_T], of_all: bool = False) -> Sequence[_T]:
        """What members have, for each of their matrices; ``of_all``: also of experts that are held elsewhere."""
        first = self.first
        each = first.count if of_all else first.num_held
        return values if first.count == 1 else [value for value in values for _ in range(each)]

    def of_held(self, whole: Tensor) -> Tensor:
        """Of all matrices of the members, one after the other, those held here."""
        first = self.first
        if first.num_held == first.count:
            return whole
        return whole.unflatten(0, (len(self.members), first.count))[:, first.held].flatten(0, 1)

    def by_member(self, whole: Tensor) -> list[Tensor]:
        """Matrices B x rows x n as members have them: each one, or the experts held here in one tensor."""
        if self.first.count > 1:
            whole = whole.unflatten(0, (len(self.members), self.first.num_held))
        return list(whole.unbind())

    @property
    def reads_whole_rows(self) -> bool:
        """Whether gradients are whole rows, which are read where they are; else they lie side by side."""
        return False

    @property
    def alive_width(self) -> int:
        """Columns of the fp32 updates that a step makes."""
        return self.rank if self.reads_whole_rows else self.first.width

    def held_width(self, in_place: bool) -> int:
        """Columns of the fp32 updates that take memory of their own, beside gradients, until weights have changed."""
        return 0 if in_place and not self.first.takes_whole else self.alive_width

    @abstractmethod
    def projections(self) -> list[Tensor]:
        """Columns that gradients are projected on, n x width of each member, E x n x width of experts held here; those of a
        rule that redraws are made. None of members without a basis."""

    def all_projections(self) -> list[Tensor]:
        """:meth:`projections`, also of experts that are held elsewhere."""
        return self.projections()

    def update_columns(self, change: Change, of_all: bool = False) -> list[Tensor]:
        """The columns that a change's update is of, n x its width of each member, E x n x width of experts: of those held
        here, or ``of_all``."""
        if change.update.shape[2]:
            return self.all_projections() if of_all else self.projections()
        assert change.beside is not None
        n, first = change.beside.matrices[0].shape[-1], self.first
        several = (first.count,) if of_all and first.count > 1 else first.several
        none = torch.empty(*several, n, 0, device=self.device)
        return [none] * len(self.members)

    def taken(self, factor: Tensor, sums: Tensor) -> Tensor:
        """The factor of a step, (B,) fp32: 0 for an expert whose gradient is zero, as it is of one without tokens.

        Args:
            sums: of :meth:`measure`, over all rows, of the matrices held here.
        """
        if self.first.count == 1:
            return factor
        return torch.where(self.square_norms(sums) == 0, 0.0, factor)

    def named(self, sums: Tensor, of: SumOf) -> dict[str, Tensor]:
        """The sums of :meth:`measure`, :meth:`advance` or :meth:`complete`, each B x its length, by name in the table."""
        lengths = self.rule.sum_lengths(of, *self.shape, self.rank)
        return dict(zip(lengths, sums.split(list(lengths.values()), dim=1), strict=True))

    @property
    def sums_states(self) -> bool:
        """Whether what :meth:`advance` gives is to be summed over all rows."""
        return any(one.of == "states" for one in self.rule.sums)

    @property
    def sums_updates(self) -> bool:
        """Whether :meth:`complete` is to be called, and what it gives to be summed over all rows."""
        return any(one.of == "update" for one in self.rule.sums)

    # -- step -----------------------------------------------------------------------------------

    @abstractmethod
    def measure(
        self, parts: Sequence[Stack], gradients: Sequence[Gradients], counted: slice
    ) -> Tensor:
        """Terms to be summed over all rows before clipping: B x a fixed length, fp32.

        Args:
            parts: of this stack, in order. gradients: of each, of rows x width each, reduced, not yet clipped; all in
                one dtype. counted: the rows that no other holder of states counts.
        """

    @abstractmethod
    def square_norms(self, sums: Tensor) -> Tensor:
        """The (estimated) ``||G||_F^2`` from the sums of :meth:`measure`, (B,) fp32."""

    @abstractmethod
    def observe(
        self, sums: Tensor, scale: Tensor | float = 1.0, taken: Tensor | None = None
    ) -> None:
        """Take the sums of :meth:`measure` over all rows, of all matrices, wherever they are held.

        Args:
            scale: what the gradient they measured has been multiplied by: a loss scale, a clipping.
            taken: 0-dim bool: whether the step is taken; None for yes.
        """

    def start(
        self, factor: Tensor, *, betas: tuple[float, float], eps: float, step: Tensor
    ) -> None:
        """Begin the step of the whole stack. The caller counts the steps of the members.

        Args:
            factor: (B,) fp32, unscales and clips gradients; 0 where a matrix takes no step. betas, eps: Adam's. step: its
                number, 0-dim int64, which keys random rounding.
        """
        self._begun.betas, self._begun.eps = betas, eps
        self._begun.shared["factor"] = factor
        self._begun.shared |= self.once(step)

    def end(self) -> None:
        """Hold nothing of the step any more."""
        self._begun.shared.clear()

    def shared(self, name: str) -> Tensor:
        """What :meth:`once` has found for the step, by name, of these matrices: B x ... fp32; ``factor``, see
        :meth:`start`."""
        first = self._begin * self.first.num_held
        return self._begun.shared[name][first : first + self.size]

    @property
    def factor(self) -> Tensor:
        """(B,) fp32, of :meth:`start`."""
        return self.shared("factor")

    @property
    def betas(self) -> tuple[float, float]:
        return self._begun.betas

    @property
    def eps(self) -> float:
        return self._begun.eps

    @abstractmethod
    def once(self, step: Tensor) -> dict[str, Tensor]:
        """What a step does once for all members: what their parts need of it, B x ... each, see :meth:`shared`.

        Args:
            step: as of :meth:`start`.
        """

    def advance(
        self,
        parts: Sequence[Stack],
        gradients: Sequence[Gradients],
        counted: slice = slice(None),
    ) -> tuple[list[Tensor], Tensor]:
        """Let the states of the rows held here take the gradient.

        Args:
            parts: as in :meth:`measure`. gradients: of each, of rows x width each, reduced; used up, but for whole rows
                that are read where they are. counted: as in :meth:`measure`.

        Returns:
            ``(updates, sums)``: the update of each part before :meth:`finish`, B x rows x its columns; and of all what
            is to be summed over all holders, B x a fixed length, fp32.
        """
        found = [
            part.advance_part(gradient, counted)
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        return [update for update, _ in found], joined([terms for _, terms in found])

    @abstractmethod
    def advance_part(self, gradient: Gradients, counted: slice) -> tuple[Tensor, Tensor]:
        """:meth:`advance` of a part: its update, and terms of which the rule makes the sums, B x ... fp32."""

    def complete(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor, counted: slice
    ) -> Tensor:
        """Complete the updates in place, given the sums of states over all rows, where :attr:`sums_updates` is true.

        Args:
            parts, counted: as in :meth:`advance`. updates, sums: of it.

        Returns:
            What is to be summed over all holders, B x a fixed length, fp32.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor
    ) -> list[Change]:
        """Limiter and scale, given the sums over all rows: the change of each of :meth:`pieces`.

        Args:
            parts: as in :meth:`advance`. updates: of it. sums: of it, or of :meth:`complete`.
        """

    # -- energy ---------------------------------------------------------------------------------

    def follow(
        self, inside: Tensor, total: Tensor, scale: Tensor | float, taken: Tensor | None
    ) -> None:
        """Smooth ``||G||^2`` without the scale and the share of it inside the basis, (B,) each; bias-corrected like a
        moment. A window without a gradient says nothing of either, that of a refresh next to nothing."""
        usual = 1 - ENERGY_SMOOTHING
        own = [member.made_basis for member in self.members]
        weight = (total > 0) & (total < float("inf"))
        if taken is not None:
            weight &= taken
        if any(own) and not all(own):
            each = self.of_each([OWN_WEIGHT if made else usual for made in own], of_all=True)
            weight = weight * upload(each, torch.float32, self.device)
        else:
            weight = weight * (OWN_WEIGHT if own[0] else usual)
        found = torch.stack(
            (inside / total.clamp_min(_TINY), total / scale**2, torch.ones_like(total)), dim=1
        )
        weight = weight.unsqueeze(1)
        # what is not finite counts as nothing, and nothing times it must not be counted either
        self["energy"].lerp_(torch.where(weight > 0, found, 0.0), weight)
