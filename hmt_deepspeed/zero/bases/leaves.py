"""Leaf modules of ZeRO-3: mixtures of experts, of which ranks may use different ones in different order.

DeepSpeed gathers the parameters of a leaf at once and watches nothing inside it. Nor may anything inside
communicate: bases of its linears are whole on every rank, and its gradients leave when its backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from deepspeed.utils import z3_leaf_parameter
from torch import Tensor, nn

from hmt_deepspeed.optim.backward.projected_linear import (
    InputGroup,
    ProjectedLinear,
    SharedInputs,
)
from hmt_deepspeed.zero.bases.storage import BasisStorage
from hmt_deepspeed.zero.parameters.param_state import ParamState

__all__ = ["ShardedInputs", "mark_leaves", "shared_inputs"]


def mark_leaves(param_states: Iterable[ParamState]) -> list[nn.Module]:
    """Tell each gradient its leaf, after DeepSpeed has marked parameters; returns the leaves.

    Args:
        param_states: of all trained parameters.
    """
    leaves: dict[nn.Module, None] = {}
    for param_state in param_states:
        gradient = param_state.gradient
        if z3_leaf_parameter(gradient.param):
            gradient.leaf = gradient.param.ds_z3_leaf_module  # type: ignore[attr-defined]
            leaves[gradient.leaf] = None
    return list(leaves)


def shared_inputs(low_rank: Iterable[ParamState], bases: BasisStorage) -> SharedInputs:
    """Shared inputs of the linears with a projected backward, once leaves are marked; experts share none.

    Args:
        low_rank: parameters with a matrix. bases: where those that stage 3 shards wait.
    """
    states = [p for p in low_rank if p.gradient.linear is not None and p.gradient.count == 1]
    linears = [p.gradient.linear for p in states if p.gradient.linear is not None]
    if not bases.is_sharded:
        return SharedInputs(linears)
    whole: dict[ProjectedLinear, object] = {}
    for linear, state in zip(linears, states, strict=True):
        if not bases.holds_rows(state):
            leaf = state.gradient.leaf
            whole[linear] = "redrawn or projected from the left" if leaf is None else leaf
    return ShardedInputs(linears, bases, whole)


class ShardedInputs(SharedInputs):
    """Gathers products' columns, but those that are whole on every rank, which share with others of the same leaf only.

    Args:
        linears: those with a projected backward. bases: gathers their columns.
        whole: of each linear whose columns are whole its leaf, or else why.
    """

    def __init__(
        self,
        linears: Iterable[ProjectedLinear],
        bases: BasisStorage,
        whole: Mapping[ProjectedLinear, object],
    ) -> None:
        super().__init__(linears, bases.gather)
        self._whole = whole

    def meet(self, x: Tensor, linear: ProjectedLinear) -> None:
        if self._last is not None and not linear.transposed:
            last = self._last[2]
            if self._whole.get(last) is not self._whole.get(linear):
                self._last = None
        super().meet(x, linear)

    def gather_of(self, group: InputGroup) -> Callable[[InputGroup], Tensor] | None:
        return None if group.linears[0] in self._whole else self.gather

    def restore(self, groups: Sequence[Sequence[str]], observed: bool = False) -> None:
        """Restore groups; those of a checkpoint without leaves are split."""
        leaves = {linear.name: leaf for linear, leaf in self._whole.items()}
        parts: list[list[str]] = []
        for names in groups:
            by_leaf: dict[object, list[str]] = {}
            for name in names:
                by_leaf.setdefault(leaves.get(name), []).append(name)
            parts += by_leaf.values()
        super().restore(parts, observed)
