"""Bytes that the worst step holds for basis refreshes: full gradients, and inputs of linears.

A matrix that refreshes forms its full gradient instead of the projected one, and for that its linear keeps its
input. How many do so in one step is bounded by ``max_full_gradient_bytes``; the fullest are the first steps,
in which all matrices are due and as many as that allows find their basis, in the model's order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.shapes import (
    ModelShape,
    Parameter,
    Role,
    layer_linears,
    parameters,
)
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.states import gradient_columns

__all__ = ["WorstRefresh", "worst_refresh"]


class WorstRefresh(NamedTuple):
    """The worst step until every matrix has its basis.

    full_gradients: bytes that they have beyond the projected gradients whose place they take.
    inputs: which linears' inputs some layer keeps for it, by role; each different set once.
    elements: of full gradients in one layer, at most. largest: elements of the largest.
    """

    full_gradients: int
    inputs: frozenset[frozenset[Role]]
    elements: int
    largest: int


class _Group(NamedTuple):
    """Matrices that refresh together."""

    layer: int
    roles: frozenset[Role]
    nbytes: int  # of their full gradients
    more: int  # than their projected gradients
    elements: int
    largest: int  # elements of one of them


@lru_cache(maxsize=256)
def worst_refresh(shape: ModelShape, mode: OptimizerMode, gradient_itemsize: int) -> WorstRefresh:
    """See :class:`WorstRefresh`.

    Args:
        gradient_itemsize: bytes of an element of accumulated gradients.
    """
    waiting = _groups(shape, mode, gradient_itemsize)
    if not waiting:
        return WorstRefresh(0, frozenset(), 0, 0)
    budget = mode.max_full_gradient_bytes
    if budget is None:
        budget = auto_full_gradient_bytes([group.nbytes for group in waiting])
    most, inputs, elements, largest = 0, set(), 0, 0
    while waiting:
        chosen, later, alive = list[_Group](), list[_Group](), 0
        for group in waiting:
            fits = alive + group.nbytes <= budget
            (chosen if fits else later).append(group)
            alive += group.nbytes if fits else 0
        if not chosen:  # a budget that the engine refuses
            break
        most = max(most, sum(group.more for group in chosen))
        of_layer: dict[int, set[Role]] = defaultdict(set)
        in_layer = Counter[int]()
        for group in chosen:
            of_layer[group.layer] |= group.roles
            in_layer[group.layer] += group.elements
            largest = max(largest, group.largest)
        inputs |= {frozenset(roles) for roles in of_layer.values()}
        elements = max(elements, *in_layer.values())
        waiting = later
    return WorstRefresh(most, frozenset(inputs), elements, largest)


def _groups(shape: ModelShape, mode: OptimizerMode, itemsize: int) -> list[_Group]:
    """In the model's order; alone unless bases are shared."""
    if not mode.finds_bases:
        return []
    if isinstance(shape, ListedShape):
        return _listed_groups(shape, mode, itemsize)
    path = f"{shape.names.layer}."
    roles = {f"{path}{linear.name}.weight": linear.role for linear in layer_linears(shape)}
    low_rank = [p for p in parameters(shape) if mode.is_low_rank(p)]
    members: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in (p for p in low_rank if p.name in roles):
        key = roles[parameter.name] if mode.share_basis else parameter.name
        members[key].append(parameter)
    found, numbers = list[_Group](), iter(range(shape.layers))
    # which layers have ranks of their own makes no difference here
    for own, count in mode.by_layers(shape):
        of_a_layer = [_group(given, own, roles, itemsize) for given in members.values()]
        found += [g._replace(layer=n) for n in islice(numbers, count) for g in of_a_layer]
    outside = [_group([p], mode, roles, itemsize) for p in low_rank if p.name not in roles]
    return found + outside


def _listed_groups(shape: ListedShape, mode: OptimizerMode, itemsize: int) -> list[_Group]:
    """Likewise, of layers that need not be equal."""
    roles: dict[str, Role] = {
        f"{shape.names.layer}.{product.linear.weight}": product.role
        for group in shape.groups
        for product in group.tokens.products
        if product.linear is not None and product.role is not None
    }
    found = [
        _group([parameter], mode, roles, itemsize)._replace(layer=number)
        for group in shape.groups
        for number in group.numbers
        for parameter in group.parameters
        if mode.is_low_rank(parameter)
    ]
    found.sort(key=lambda group: group.layer)
    outside = filter(mode.is_low_rank, shape.outside)
    return found + [_group([p], mode, roles, itemsize) for p in outside]


def _group(
    given: list[Parameter], mode: OptimizerMode, roles: dict[str, Role], itemsize: int
) -> _Group:
    elements = sum(p.numel for p in given)
    whole = elements * itemsize
    projected = sum(rows * columns for rows, columns in (gradient_columns(p, mode) for p in given))
    # without projected backward, and from the left, inputs are kept anyway
    keeps = [p.name for p in given if mode.is_projected(p) and not mode.is_transposed(p)]
    freed = frozenset(roles[name] for name in keeps if name in roles)
    largest = max(p.numel for p in given)
    return _Group(-1, freed, whole, whole - projected * itemsize, elements, largest)
