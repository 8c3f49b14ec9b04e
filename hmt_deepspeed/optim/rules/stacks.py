"""Which matrices of an optimizer take their steps together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.stack import Stack

__all__ = ["Stacks"]


class Stacks:
    """The stacks of one optimizer. Matrices that stay together keep their memory from step to step."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Stack] = {}
        self._of: tuple[list[MatrixRule], list[Hashable], list[Hashable]] = [], [], []

    def of(self, matrices: Sequence[MatrixRule], apart: Sequence[Hashable]) -> list[Stack]:
        """Matrices in stacks, by what they have in common.

        Args:
            apart: of each the caller's own reasons to keep it apart: equal for matrices that may be together.
        """
        of = list(matrices), [matrix.alike for matrix in matrices], list(apart)
        if of != self._of:
            self._of = of
            self._form(*of)
        for stack in self._known.values():
            stack.gather()
        return list(self._known.values())

    def forget(self) -> None:
        """Hold no memory any more: the matrices' states have moved elsewhere."""
        self._known, self._of = {}, ([], [], [])

    def _form(
        self,
        matrices: Sequence[MatrixRule],
        alike: Sequence[Hashable],
        apart: Sequence[Hashable],
    ) -> None:
        together: dict[Hashable, list[MatrixRule]] = {}
        for matrix, *kinds in zip(matrices, alike, apart, strict=True):
            together.setdefault(tuple(kinds), []).append(matrix)
        known, self._known = self._known, {}
        for key, members in together.items():
            stack = known.pop(key, None)
            if stack is None or stack.members != members:
                stack = members[0].STACK(members)
            self._known[key] = stack
