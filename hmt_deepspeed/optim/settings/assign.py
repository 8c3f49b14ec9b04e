"""Assigns a rule to each parameter, with the reason. Nothing is silently dense: the start table gives the reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from torch import nn

from hmt_deepspeed.optim.settings.matrix import MatrixSettings
from hmt_deepspeed.rules import DENSE
from hmt_deepspeed.sites import ADAPTER, EMBEDDING, LEFT_TO_ADAMW

__all__ = [
    "Assignment",
    "ExpertKind",
    "ModuleRule",
    "assign_rules",
    "embedding_weights",
    "head_weights",
    "left_dense",
    "linear_weights",
    "tied_weights",
]

_MOST_DENSE = 0.1  # share of the parameters that may stay dense without a warning
_D_WEIGHT = "-D weight"  # of a reason

# Of the matrices in a 3-D weight that is not known to be one of experts: narrower ones may be kernels of a convolution.
_LEAST_SIDE = 8
_NO_EXPERTS: Mapping[str, Any] = {}


class ModuleRule(NamedTuple):
    """A row of ``hmt.optimizer.module_rules``.

    Attributes:
        pattern: regex, searched in a parameter's name.
        settings: of the matrices that match; None leaves them to AdamW.
        lr_scale: factor on the learning rate of all that matches, vectors too; None where the rule gives none.
        rate_alone: ``lr_scale`` is all that the rule gives: its matches keep the rule that they have without it.
    """

    pattern: str
    settings: MatrixSettings | None
    lr_scale: float | None = None
    rate_alone: bool = False


class ExpertKind(NamedTuple):
    """What is known of a 3-D weight of several matrices.

    Attributes:
        role: of experts, "up" for what reads a layer's stream and "down" for what writes into it; None of a weight that
            user's code reads in its own way.
        is_transposed: stored E x in x out, else E x out x in.
        reason: why no backward can be projected for it; empty if one can.
    """

    role: Literal["up", "down"] | None
    is_transposed: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Assignment:
    """Rule of one parameter.

    Attributes:
        settings: of a matrix rule; None for dense AdamW, and then ``reason`` says why.
        lr_scale: factor on the learning rate: a module rule's, else :attr:`MatrixSettings.beside_ratio` or
            :attr:`MatrixSettings.embedding_ratio`, and 1 of a matrix.

    A matrix rule has a 3-D weight as several matrices, :attr:`count` of :attr:`matrix_shape`.
    """

    name: str
    shape: tuple[int, ...]
    settings: MatrixSettings | None
    reason: str = ""
    lr_scale: float = 1.0

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """lr, betas, eps and weight_decay of a step from a parameter group; a step takes ``lr * weight_decay`` of a
        weight whatever ``lr_scale`` is."""
        return {
            "lr": float(group["lr"]) * self.lr_scale,
            "betas": group["betas"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"] / self.lr_scale,
        }

    @property
    def low_rank(self) -> bool:
        """Whether the parameter has a matrix rule."""
        return self.settings is not None

    @property
    def count(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.shape[-2], self.shape[-1]

    @property
    def rule(self) -> str:
        """Name of the method."""
        return DENSE if self.settings is None else self.settings.method

    @property
    def layout(self) -> str:
        """Settings that must agree for a saved state to fit, see :meth:`Rule.layout`."""
        settings = self.settings
        if settings is None:
            return self.rule
        drawn = settings.drawn_rank(*self.matrix_shape)
        found = settings.rule.layout(settings.projection, drawn)
        return found if self.count == 1 else f"{found}, experts, {settings.expert_basis or 'auto'}"


def linear_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Weights of the model's linear layers: ``nn.Linear`` and GPT-2's ``Conv1D``, by parameter name."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


def head_weights(model: nn.Module) -> set[str]:
    """Weights of output heads, by parameter name, as far as a model of transformers, also inside another, shows them.

    Heads are its output embeddings, and what it has beside its base model: classifiers, scores, predictions, but
    no stack of layers, which is a decoder rather than a head. An embedding that is tied to one is a head too.
    """
    heads: set[nn.Module] = set()
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "get_output_embeddings"):
            output = module.get_output_embeddings()  # type: ignore[operator]
            heads.update(output.modules() if isinstance(output, nn.Module) else ())
        base = module._modules.get(getattr(kind, "base_model_prefix", ""))
        if base is not None:
            heads.update(_beside(module, base))
    names = {name for name, linear in linear_weights(model).items() if linear in heads}
    tied = tied_weights(model)
    return names | {tied[name] for name in names & tied.keys()}


def embedding_weights(model: nn.Module) -> set[str]:
    """Weights of ``nn.Embedding``, by parameter name: of tokens and positions."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }


def _beside(module: nn.Module, base: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if child is not base and not isinstance(child, nn.ModuleList):
            yield child
            yield from _beside(child, base)


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Parameters that several modules hold: by each name the first of the others."""
    users = defaultdict(list)
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                users[param].append(f"{path}.{key}" if path else key)
    return {
        name: next(other for other in names if other != name)
        for names in users.values()
        if len(names) > 1
        for name in names
    }


def assign_rules(
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    *,
    settings: MatrixSettings | None,
    module_rules: Sequence[ModuleRule] = (),
    target_modules: Sequence[str] | Literal["all"] | None,
    linear_names: Iterable[str] | None = None,
    head_names: Iterable[str] = (),
    embedding_names: Iterable[str] = (),
    expert_weights: Mapping[str, ExpertKind] | None = _NO_EXPERTS,
) -> list[Assignment]:
    """Assign a rule to each parameter.

    Args:
        parameters: (name, shape) of every trainable parameter.
        settings: of the matrices; None when the method is that of dense parameters.
        module_rules: the first match decides, before the other patterns and for any matrix.
        target_modules: regexes searched in the name; None means every linear weight. Those of
            :data:`~hmt_deepspeed.sites.LEFT_TO_ADAMW` stay dense, but with "all", every matrix that is no adapter's.
        linear_names: names known to be weights of linear layers; None when no module is at hand,
            then every matrix counts as one.
        head_names: names known to be weights of output heads, which stay dense too.
        embedding_names: names known to be weights of embeddings, as are those that "embed" is part of.
        expert_weights: 3-D weights that may have a matrix rule, by name: those of a known role as linears have it,
            others where a pattern names them. None when no module is at hand, then any that a pattern names.

    Raises:
        ValueError: a pattern that should match and does not, or whose matches earlier ones take.
    """
    parameters = list(parameters)
    targets = [] if target_modules is None or target_modules == "all" else target_modules
    _check_matches(targets, module_rules, parameters)
    linear = None if linear_names is None else set(linear_names)
    heads, embeddings = set(head_names), set(embedding_names)
    choice = _Choice(
        settings, module_rules, target_modules, linear, heads, embeddings, expert_weights, {}
    )
    matrices = [name for name, shape in parameters if len(shape) == 2 or choice.holds(name, shape)]
    _check_order(module_rules, parameters, matrices)
    assigned = [choice.assign(name, tuple(shape)) for name, shape in parameters]
    _check_targets(
        targets, assigned, [rule.pattern for rule in module_rules if not rule.rate_alone]
    )
    if not any(own.low_rank for own in assigned):  # nothing is beside a matrix in low rank
        assigned = [replace(own, lr_scale=1.0) for own in assigned]
    rates = ((own, choice.rule(own.name)) for own in assigned)
    return [
        own if rule is None or rule.lr_scale is None else replace(own, lr_scale=rule.lr_scale)
        for own, rule in rates
    ]


@dataclass(frozen=True)
class _Choice:
    """The arguments of :func:`assign_rules` by which each parameter's rule is chosen, whatever the others' are."""

    settings: MatrixSettings | None
    module_rules: Sequence[ModuleRule]
    target_modules: Sequence[str] | Literal["all"] | None
    linear: set[str] | None
    heads: set[str]
    embeddings: set[str]
    experts: Mapping[str, ExpertKind] | None
    # by the settings that they are made of: the same of equal ones, which stacks go by
    made: dict[tuple[int, str, str | None], MatrixSettings]

    @cached_property
    def biases(self) -> set[str]:
        """Of experts: a vector of each, in one tensor."""
        known = (self.experts or {}).items()
        return {f"{name}_bias" for name, kind in known if kind.role is not None}

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter is one of several matrices that can have a matrix rule."""
        if len(shape) != 3 or min(shape) < 2:
            return False
        known = ExpertKind(None) if self.experts is None else self.experts.get(name)
        return known is not None and (known.role is not None or min(shape[1:]) >= _LEAST_SIDE)

    def rule(self, name: str) -> ModuleRule | None:
        """The first module rule that matches."""
        return next((rule for rule in self.module_rules if re.search(rule.pattern, name)), None)

    def _method_rule(self, name: str) -> ModuleRule | None:
        """The same, if it gives more than a rate."""
        rule = self.rule(name)
        return None if rule is None or rule.rate_alone else rule

    def assign(self, name: str, shape: tuple[int, ...]) -> Assignment:
        """Assign by shape, then by the first module rule that matches, then by the target modules; of a module rule's rates
        nothing yet."""
        settings, is_vector = self.settings, _is_vector(shape) or name in self.biases
        scale = 1.0
        if settings and _is_beside(name, shape, is_vector, self.heads | self.embeddings):
            embeds = name in self.embeddings or re.search(EMBEDDING, name)
            is_embedding = embeds and len(shape) == 2 and not is_vector and name not in self.heads
            scale = settings.embedding_ratio if is_embedding else settings.beside_ratio
        if self.holds(name, shape):
            return self._assign_experts(name, shape)
        if len(shape) != 2:
            reason = "not a matrix" if len(shape) < 2 else f"{len(shape)}{_D_WEIGHT}"
            reason = reason if settings else f"method is {DENSE}"
            return Assignment(name, shape, None, reason, scale)
        if is_vector:
            return Assignment(name, shape, None, "a vector in disguise", scale)
        rule = self._method_rule(name)
        if rule is not None:
            reason = "" if rule.settings else f"module_rules {rule.pattern!r}"
            return Assignment(name, shape, rule.settings, reason)
        reason = self._reason_dense(name)
        if settings is None or reason:
            return Assignment(name, shape, None, reason, scale)
        return Assignment(name, shape, settings)

    def _assign_experts(self, name: str, shape: tuple[int, ...]) -> Assignment:
        """Several matrices: by the first module rule that matches, then by the target modules."""
        known = ExpertKind(None) if self.experts is None else self.experts[name]
        rule = self._method_rule(name)
        if rule is not None:
            settings, reason = rule.settings, f"module_rules {rule.pattern!r}"
        else:
            settings, reason = self.settings, self._reason_dense(name, of_experts=True)
            if not reason and known.role is None and self.target_modules is None:
                reason = f"3{_D_WEIGHT}" + (f", {known.reason}" if known.reason else "")
            settings = None if reason else settings
        if settings is not None:
            settings = self._of_experts(settings, known)
            if settings.rule.holds_experts:
                return Assignment(name, shape, settings)
            reason = f"{settings.method} does not hold experts"
        return Assignment(name, shape, None, reason)

    def _of_experts(self, settings: MatrixSettings, known: ExpertKind) -> MatrixSettings:
        """The settings with the side that is projected and whose basis it is, which the role says, not ``projection``:
        a basis of the stream is on the inputs of "up" and on the outputs of "down", one of each expert on its inputs."""
        if settings.rule.side == "smaller":
            return settings
        own = settings.expert_basis == "own"
        projection, basis = settings.projection, settings.expert_basis
        if known.role is not None:
            on_inputs = known.role == "up" or own
            projection = "right" if on_inputs != known.is_transposed else "left"
        elif projection == "two_sided":
            projection = "right"
        if known.role != "down":
            basis = "own" if own else "shared"
        key = id(settings), projection, basis
        if key not in self.made:
            self.made[key] = replace(settings, projection=projection, expert_basis=basis)
        return self.made[key]

    def _reason_dense(self, name: str, of_experts: bool = False) -> str:
        """Why a matrix that no module rule matches is left to AdamW; empty if it is not."""
        if self.settings is None:
            return f"method is {DENSE}"
        if self.target_modules == "all":
            return f"{ADAPTER!r} is left to AdamW" if ADAPTER in name else ""
        if name in self.heads:
            return "output head"
        always = next((p for p in LEFT_TO_ADAMW if re.search(p, name)), None)
        if always is not None:
            return f"{always!r} is left to AdamW"
        targets = self.target_modules
        if targets is not None and not any(re.search(p, name) for p in targets):
            return "not in target_modules"
        if self.linear is not None and name not in self.linear and not of_experts:
            return "not the weight of a linear layer"
        return ""


def _is_beside(name: str, shape: tuple[int, ...], is_vector: bool, known: set[str]) -> bool:
    """Whether AdamW has a parameter beside the matrices in low rank by its kind: vectors, embeddings and heads, which
    GaLore, Fira and APOLLO train at the matrices' rate; no adapter, and nothing of more than two dimensions.

    Args:
        known: names of embeddings and heads.
    """
    if ADAPTER in name or len(shape) > 2:
        return False
    beside = is_vector or len(shape) < 2 or name in known
    return beside or any(re.search(p, name) for p in LEFT_TO_ADAMW)


def _check_matches(
    targets: Sequence[str],
    rules: Sequence[ModuleRule],
    parameters: Sequence[tuple[str, tuple[int, ...]]],
) -> None:
    """Refuse a pattern that matches nothing."""
    named = [("target_modules", pattern) for pattern in targets]
    named += [("module_rules", rule.pattern) for rule in rules]
    for field, pattern in named:
        if not any(re.search(pattern, name) for name, _ in parameters):
            raise ValueError(
                f"hmt.optimizer.{field}: {pattern!r} matches no trainable parameter; "
                f"names look like {[name for name, _ in parameters[:3]]}. Correct or remove the pattern."
            )


def _is_vector(shape: tuple[int, ...]) -> bool:
    """Whether a two-dimensional weight has one row or column: a reward head's, of which no rank is low."""
    return len(shape) == 2 and min(shape) < 2


def _check_order(
    rules: Sequence[ModuleRule],
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    matrices: Collection[str],
) -> None:
    """Refuse a pattern all of whose matrices an earlier one takes, or that has none to give a rule to."""
    patterns = [rule.pattern for rule in rules]
    for pattern, settings, lr_scale, _ in rules:
        decides = settings is None or lr_scale is not None
        if not decides and not any(re.search(pattern, name) for name in matrices):
            name = next(name for name, _ in parameters if re.search(pattern, name))
            raise ValueError(
                f"hmt.optimizer.module_rules: {pattern!r} decides nothing, for it matches no matrix: {name} is a "
                "vector or has more than two dimensions, which AdamW takes; legal: a pattern that matches some "
                "matrix. Correct or remove it."
            )
    first = {name: next((p for p in patterns if re.search(p, name)), None) for name in matrices}
    for pattern in patterns:
        taken = {name: first[name] for name in matrices if re.search(pattern, name)}
        if taken and pattern not in taken.values():
            name, earlier = next(iter(taken.items()))
            raise ValueError(
                f"hmt.optimizer.module_rules: {pattern!r} decides nothing, for patterns before it take all its "
                f"matches: {earlier!r} takes {name}; legal: a pattern that is some matrix's first match. Put "
                "the narrower pattern before the wider one, or remove it."
            )


def _check_targets(
    patterns: Sequence[str], assigned: Sequence[Assignment], ruled: Sequence[str]
) -> None:
    """Refuse a target that gives no matrix the method's rule, but for one that is too narrow for any."""
    for pattern in patterns:
        matches = [a for a in assigned if re.search(pattern, a.name)]
        taken = [a for a in matches if any(re.search(rule, a.name) for rule in ruled)]
        if not any(a.low_rank or _is_vector(a.shape) for a in matches if a not in taken):
            why = "module_rules decide it" if matches[0] in taken else matches[0].reason
            raise ValueError(
                f"hmt.optimizer.target_modules: {pattern!r} decides nothing: {matches[0].name} is not for it "
                f"({why}); legal: a pattern that matches some linear's weight which "
                "module_rules do not take and which is no head, embedding or adapter: these a module rule takes. Correct "
                "or remove it."
            )


def left_dense(assigned: Sequence[Assignment]) -> str:
    """A warning where more than a tenth of all elements stays dense because of weights that have more than two
    dimensions and no matrix rule, by reason; empty where there is nothing to warn of."""
    dense: Counter[str] = Counter()
    first: dict[str, str] = {}
    for own in assigned:
        if not own.low_rank and _D_WEIGHT in own.reason:
            dense[own.reason] += prod(own.shape)
            first.setdefault(own.reason, own.name)
    total = sum(prod(own.shape) for own in assigned)
    if sum(dense.values()) <= _MOST_DENSE * total:
        return ""
    several = len(dense) > 1
    parts = [
        f"{numel / total:.0%} " * several + f"{reason} ({first[reason]} is the first)"
        for reason, numel in dense.most_common()
    ]
    named = any(reason.startswith("3-D") for reason in dense)
    advice = ". hmt.optimizer.target_modules may name 3-D ones: low rank of their whole gradients"
    return (
        f"{sum(dense.values()) / total:.0%} of the trained parameters are left to AdamW, and have its states, since "
        f"they cannot be projected: {', '.join(parts)}{advice * named}"
    )
