"""A plan: choices for each layer's activations, with the model and machine it was made for, as JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from hmt_deepspeed.config.codecs import place_of
from hmt_deepspeed.config.components import (
    COMPONENTS,
    POLICY_COMPONENTS,
    Choice,
    Component,
    all_choices,
    legal_choices,
)
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.shapes import ModelShape
from hmt_deepspeed.planner.model.workload import Workload

__all__ = [
    "LayerChoices",
    "Plan",
    "fingerprint",
    "plan_from_json",
    "regrouped",
    "spread",
    "uniform_plan",
]

_VERSION = 2
_BESIDE_THE_PLAN = ("price_per_hour", "ssd_endurance")


@dataclass(frozen=True)
class LayerChoices:
    """Layers that take the same choices; ``layers`` are their numbers."""

    layers: tuple[int, ...]
    choices: Mapping[Component, Choice]


@dataclass(frozen=True)
class Plan:
    """Choices that the backend executes.

    Attributes:
        model, machine: fingerprints of what it was made for; see :func:`fingerprint`.
        micro_batch, seq_length: shapes it was made for; others need another plan.
        layers: every decoder layer's choices. head: those of the head's components.
        partition_activations: ZeRO-R's P_a for the layers' inputs.
        seconds: predicted of an iteration; 0 for a plan not solved for.
        gap: how much slower than the best plan it may be by the closed form, as a fraction.
        source: whose ``seconds`` these are.
    """

    model: str
    machine: str
    micro_batch: int
    seq_length: int
    layers: tuple[LayerChoices, ...]
    head: Mapping[Component, Choice]
    partition_activations: bool = False
    seconds: float = 0.0
    gap: float = 0.0
    source: Literal["closed form", "simulator"] = "closed form"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(len(group.layers) for group in self.layers)

    def counts(self) -> dict[Component, dict[Choice, int]]:
        """Number of layers that take each choice, by component; the head counts as one."""
        found: dict[Component, Counter[Choice]] = {}
        parts = [(len(group.layers), group.choices) for group in self.layers]
        for number, choices in [*parts, (1, self.head)]:
            for component, choice in choices.items():
                found.setdefault(component, Counter())[choice] += number
        return {component: dict(counter) for component, counter in found.items()}

    @property
    def uses_ssd(self) -> bool:
        """Whether any layer swaps to files."""
        taken = {choice for counts in self.counts().values() for choice in counts}
        return any(place_of(choice) == "ssd" for choice in taken)

    def choices_of(self, layer: int) -> Mapping[Component, Choice]:
        """Choices of decoder layer ``layer``."""
        for group in self.layers:
            if layer in group.layers:
                return group.choices
        raise ValueError(f"layer is {layer}; legal: 0 to {self.num_layers - 1}. Give one of them.")

    def policy(self) -> dict[Component, Choice]:
        """The choice that most layers take, of every component that a policy has: ``hmt.activations.policy``.

        Of projected inputs only where there are any: elsewhere that key is refused.
        """
        usual = {
            component: max(counts, key=lambda choice: counts[choice])
            for component, counts in self.counts().items()
            if component in POLICY_COMPONENTS
        }
        rest = [c for c in POLICY_COMPONENTS if c not in usual and c != "projected_inputs"]
        return usual | {component: "keep" for component in rest}

    def overrides(self, layer_path: str) -> dict[str, dict[Component, Choice]]:
        """Choices of other layers, by a regex of their names: ``hmt.activations.overrides``.

        Args:
            layer_path: of a layer in the model, ``*`` for its number (``shape.names.layer``).
        """
        policy = self.policy()
        found = {}
        for group in self.layers:
            differing = {c: choice for c, choice in group.choices.items() if policy[c] != choice}
            if differing:
                numbers = "|".join(str(layer) for layer in sorted(group.layers))
                name = re.escape(layer_path).replace(re.escape("*"), f"({numbers})")
                found[f"^{name}$"] = differing
        return found

    def to_json(self) -> str:
        """As :func:`plan_from_json` reads it."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2)

    def check_fits(self, workload: Workload, machine: Machine | None = None) -> None:
        """Refuse to execute a plan that was made for something else.

        Raises:
            ValueError: another model, other shapes, or another machine where one is given.
        """
        shapes = (workload.micro_batch, workload.seq_length)
        if self.model != fingerprint(workload.shape):
            raise ValueError(
                f"the plan is of model {self.model}, this one is {fingerprint(workload.shape)} "
                f"({workload.shape.family}). Plan again for this model."
            )
        if (self.micro_batch, self.seq_length) != shapes:
            raise ValueError(
                f"the plan is for micro_batch {self.micro_batch} and seq_length {self.seq_length}, the run "
                f"has {shapes[0]} and {shapes[1]}. Plan again for these."
            )
        if machine is not None and self.machine != fingerprint(machine):
            raise ValueError(
                f"the plan is for machine {self.machine}, this one is {fingerprint(machine)} "
                f"({machine.name}). Plan again for this machine."
            )


@lru_cache(maxsize=16)
def fingerprint(described: ModelShape | Machine) -> str:
    """16 hexadecimal digits of everything that a plan for a model or a machine follows from."""
    given = {
        field: value for field, value in asdict(described).items() if field not in _BESIDE_THE_PLAN
    }
    text = json.dumps(given, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def uniform_plan(
    workload: Workload,
    machine: Machine,
    policy: Mapping[Component, Choice],
    *,
    partition_activations: bool = False,
) -> Plan:
    """Every layer takes the same choices; ``policy`` has every component that the workload's sites have."""
    groups = []
    for layer in workload.layers:
        names = dict.fromkeys(site.component for site in layer.sites)
        groups.append(LayerChoices(layer.layers, {name: policy[name] for name in names}))
    return Plan(
        model=fingerprint(workload.shape),
        machine=fingerprint(machine),
        micro_batch=workload.micro_batch,
        seq_length=workload.seq_length,
        layers=tuple(groups),
        head={site.component: policy[site.component] for site in workload.head.sites},
        partition_activations=partition_activations,
    )


def regrouped(plan: Plan, workload: Workload) -> Plan:
    """The same choices for a workload whose equal layers are others, of the same model.

    At other ranks a layer may project what it did not, and the other way round.
    """
    # where a layer has no choice of its own
    executed: dict[Component, Choice] = {"projected_inputs": "recompute", **plan.policy()}
    groups = []
    for group, layer in itertools.product(plan.layers, workload.layers):
        part = tuple(sorted(set(group.layers) & set(layer.layers)))
        components = dict.fromkeys(site.component for site in layer.sites)
        choices = {c: group.choices.get(c, executed[c]) for c in components}
        groups += [LayerChoices(part, choices)] * bool(part)
    return replace(plan, layers=tuple(groups))


def spread(numbers: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Distribute layer numbers over groups of the sizes given, each spread evenly.

    The closed form supposes that every resource is busy from the first layer to the last; layers of one kind
    in a row would leave some idle and queue up others.
    """
    assert sum(counts) == len(numbers)
    groups: list[list[int]] = [[] for _ in counts]
    for position, number in enumerate(numbers, start=1):
        # the group furthest behind its share of the layers so far
        share = [
            count * position / len(numbers) - len(group)
            for count, group in zip(counts, groups, strict=True)
        ]
        groups[max(range(len(counts)), key=share.__getitem__)].append(number)
    return [tuple(group) for group in groups]


def plan_from_json(text: str) -> Plan:
    """The plan that :meth:`Plan.to_json` wrote.

    Raises:
        ValueError: no JSON, another version, a key missing or unknown, a choice that is not legal, layers
            missing or given twice.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the plan is no JSON: {error}. Write one with hmt-plan --save_plan."
        ) from error
    known = {"version", *Plan.__dataclass_fields__}
    if not isinstance(found, dict) or set(found) != known:
        given = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"the plan has {given}; legal: exactly the keys {sorted(known)}. Write it again."
        )
    if found.pop("version") != _VERSION:
        raise ValueError(f"the plan is of another version; legal: {_VERSION}. Write it again.")
    try:
        groups = tuple(
            LayerChoices(tuple(int(n) for n in group["layers"]), _checked_choices(group["choices"]))
            for group in found["layers"]
        )
        head = _checked_choices(found["head"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the plan's layers are malformed ({error!r}). Write it again.") from error
    numbers = sorted(_flatten(group.layers for group in groups))
    if numbers != list(range(len(numbers))) or not numbers:
        raise ValueError(
            f"the plan has layers {numbers}; legal: 0 to the last, each once. Write it again."
        )
    return Plan(**{**found, "layers": groups, "head": head})


def _flatten(parts: Iterable[Iterable[int]]) -> list[int]:
    return [number for part in parts for number in part]


def _checked_choices(given: Mapping[Any, Any]) -> dict[Component, Choice]:
    for component, choice in given.items():
        if component not in get_args(Component):
            raise ValueError(
                f"the plan has component {component!r}; legal: {COMPONENTS}. Write it again."
            )
        if choice not in legal_choices(component):
            raise ValueError(
                f"the plan has {component}: {choice!r}; legal: {legal_choices(component)} of {all_choices()}. "
                "Write it again."
            )
    return dict(given)
