"""Which rule each parameter gets, and why. Nothing is silently dense: the reason is in the start table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["Assignment", "assign_rules", "linear_weights"]

LOW_RANK = "lowrank_adamw"
DENSE = "adamw"


@dataclass(frozen=True)
class Assignment:
    """Rule of one parameter. ``reason`` says why a parameter is dense; empty for a low-rank one."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str = ""

    @property
    def low_rank(self) -> bool:
        return self.rule == LOW_RANK


def linear_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Weights of the model's linear layers: ``nn.Linear`` and GPT-2's ``Conv1D``, by parameter name."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


def assign_rules(
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    *,
    method: str,
    target_modules: Sequence[str] | None,
    exclude_modules: Sequence[str],
    linear_names: Iterable[str] | None = None,
    rank: int | None = None,
) -> list[Assignment]:
    """Assign a rule to each parameter.

    Args:
        parameters: (name, shape) of every trainable parameter.
        method: ``lowrank_adamw`` or ``adamw``.
        target_modules: regexes searched in the name; None means every linear weight.
        exclude_modules: regexes whose matches stay dense.
        linear_names: names known to be weights of linear layers; None when no module is at hand,
            then every matrix counts as one.
        rank: fixed rank, checked against every matrix it would apply to.

    Raises:
        ValueError: a pattern of ``target_modules`` that matches no parameter, or a rank above the
            smaller side of a matrix.
    """
    parameters = list(parameters)
    linear = None if linear_names is None else set(linear_names)
    for pattern in target_modules or ():
        if not any(re.search(pattern, name) for name, _ in parameters):
            raise ValueError(
                f"hmt.optimizer.target_modules: {pattern!r} matches no trainable parameter; "
                f"names look like {[name for name, _ in parameters[:3]]}. Correct or remove the pattern."
            )

    def reason_dense(name: str, shape: tuple[int, ...]) -> str:
        if method == DENSE:
            return "method is adamw"
        if len(shape) != 2:
            return "not a matrix" if len(shape) < 2 else f"{len(shape)}-D weight"
        if min(shape) < 2:
            return "a vector in disguise"
        excluded = next((p for p in exclude_modules if re.search(p, name)), None)
        if excluded is not None:
            return f"excluded by {excluded!r}"
        if target_modules is not None and not any(re.search(p, name) for p in target_modules):
            return "not in target_modules"
        if linear is not None and name not in linear:
            return "not the weight of a linear layer"
        return ""

    assigned = []
    for name, shape in parameters:
        reason = reason_dense(name, shape)
        if not reason and rank is not None and rank > min(shape):
            raise ValueError(
                f"hmt.optimizer.rank is {rank}, but {name} is {shape[0]} x {shape[1]}: legal is 1..{min(shape)}. "
                f'Lower the rank, use "auto" (candidates are lowered per matrix), or exclude the module.'
            )
        assigned.append(Assignment(name, tuple(shape), DENSE if reason else LOW_RANK, reason))
    return assigned
