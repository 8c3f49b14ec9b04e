"""`hmt.activations`: what becomes of each component of the activations between forward and backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hmt_deepspeed.config.codecs import CODECS, Place
from hmt_deepspeed.config.components import (
    PAPER_POLICY,
    Choice,
    Component,
    all_choices,
    legal_choices,
)
from hmt_deepspeed.config.fields import Auto, Regex, StrictModel
from hmt_deepspeed.config.optimizer_conflicts import Conflict

__all__ = [
    "MIN_HOST_MEMORY",
    "ActivationsConfig",
    "Policy",
    "PolicyOverride",
    "activation_conflicts",
]

PLAN = "plan"
MIN_HOST_MEMORY = 2**20

# Components of which a module can own the output; what enters a layer is known, whoever made it, and so are
# linears that are projected are known.
OwnedComponent = Literal[
    "attention_qkv",
    "attention_output",
    "mlp_intermediate",
    "experts",
    "residual",
    "layernorm",
    "lm_head",
]


def _in_words(names: tuple[str, ...]) -> str:
    *first, last = map(json.dumps, names)
    return f"{', '.join(first)} or {last}"


def _choice(component: Component, description: str, who: str) -> Any:
    return Field(
        default=PAPER_POLICY[component],
        description=description,
        json_schema_extra=_schema_of(component, who=who),
    )


def _override(component: Component) -> Any:
    return Field(default=None, json_schema_extra=_schema_of(component))


def _schema_of(component: Component, **more: str) -> Callable[[dict[str, Any]], None]:
    """Legal values as they are when asked: codecs may be registered."""
    return lambda schema: schema.update(legal=_in_words(legal_choices(component)), **more)


def _check_choice(choice: Choice | None, info: ValidationInfo) -> Choice | None:
    """Refuse what a component cannot be held as."""
    component: Any = info.field_name
    if choice is None or choice in legal_choices(component):
        return choice
    if choice not in all_choices():
        raise PydanticCustomError("unknown_choice", "there is no such choice")
    if component == "projected_inputs":
        raise ValueError(
            "X [Q | P] of linears under hmt.optimizer.projected_backward is held, or is not"
        )
    if choice == "project":
        raise ValueError("only projected_inputs are held as X [Q | P]")
    raise ValueError("the rest is computed again from it")


class Policy(StrictModel):
    """`hmt.activations.policy`; the defaults are the HMT paper's table."""

    layer_input: Choice = _choice(
        "layer_input",
        "What enters a decoder layer.",
        who="swap_host, or swap_host_int8: it is what is left where all else is computed again.",
    )
    attention_qkv: Choice = _choice(
        "attention_qkv",
        "Outputs of the query, key and value projections.",
        who="keep: memory to spare for one recompute less.",
    )
    attention_output: Choice = _choice(
        "attention_output",
        "Output of the attention operation, which enters the output projection.",
        who="swap_host in chunks: backward does not attend again (case alst).",
    )
    mlp_intermediate: Choice = _choice(
        "mlp_intermediate",
        "Outputs of the gate and up projections (of fc1), which enter the activation function.",
        who="recompute: the first step where the default does not fit.",
    )
    experts: Choice = _choice(
        "experts",
        "Outputs of a mixture's experts, of both their projections; the router's output is always kept.",
        who="recompute: likewise, in a mixture.",
    )
    residual: Choice = _choice(
        "residual",
        "What attention adds to what enters a layer.",
        who="recompute: likewise, at one product more.",
    )
    projected_inputs: Choice = _choice(
        "projected_inputs",
        "X [Q | P], which projected linears in a layer save of their inputs: held, or computed again, which "
        "costs a product of r + k columns.",
        who="project: memory to spare for r + k columns an input.",
    )
    lm_head: Choice = _choice(
        "lm_head",
        "Input of the language-model head.",
        who="swap_host: long sequences in chunks (hmt.fpdt).",
    )

    check_choice = field_validator("*")(_check_choice)


class PlannedPolicy(Policy):
    """`"policy": "plan"`: the choices are the planner's; until it has made them, these are in force.

    Everything that may be is computed again: the least that a step can hold without moving anything.
    """

    attention_qkv: Choice = "recompute"
    attention_output: Choice = "recompute"
    mlp_intermediate: Choice = "recompute"
    experts: Choice = "recompute"
    residual: Choice = "recompute"


def _planned(policy: object) -> object:
    return PlannedPolicy() if policy == PLAN else policy


class PolicyOverride(StrictModel):
    """A value of `hmt.activations.overrides`: components left out are as in the policy."""

    layer_input: Choice | None = _override("layer_input")
    attention_qkv: Choice | None = _override("attention_qkv")
    attention_output: Choice | None = _override("attention_output")
    mlp_intermediate: Choice | None = _override("mlp_intermediate")
    experts: Choice | None = _override("experts")
    residual: Choice | None = _override("residual")
    projected_inputs: Choice | None = _override("projected_inputs")
    lm_head: Choice | None = _override("lm_head")

    check_choice = field_validator("*")(_check_choice)


class ActivationsConfig(StrictModel):
    """`hmt.activations`: the activation backend is on where the block has this section."""

    policy: Annotated[Policy, BeforeValidator(_planned)] = Field(
        default_factory=Policy,
        description="A choice for each component; plan: the planner's, for each layer, see hmt.planner.",
        json_schema_extra={
            "legal": '"plan" or an object',
            "who": "plan: whoever would rather not choose.",
        },
    )
    overrides: dict[Regex, PolicyOverride] = Field(
        default={},
        description="Choices of their own for layers or modules, by regular expression searched in "
        "the name; the first match decides.",
        json_schema_extra={
            "legal": "an object of regular expressions and objects",
            "who": "Layers that 8 bits harm, or that have memory to spare.",
        },
    )
    components: dict[Regex, OwnedComponent] = Field(
        default={},
        description="Components of modules of model families that are not known, by regular "
        "expression searched in the name; the first match decides.",
        json_schema_extra={
            "legal": f"an object of regular expressions and {_in_words(get_args(OwnedComponent))}",
            "who": "Model families that are not known by their modules' names.",
        },
    )
    host_memory: Auto | Annotated[int, Field(ge=MIN_HOST_MEMORY)] = Field(
        default="auto",
        description="Bytes of pinned host memory that each rank may swap to, also by a plan or by DeepSpeed's "
        "cpu_checkpointing; auto takes what a step needs, up to half of what is free, shared by the ranks of a machine.",
        json_schema_extra={"who": "Machines whose host memory others need too."},
    )
    nvme_path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder on an SSD for swap_ssd.",
        json_schema_extra={
            "legal": "null or the path of a folder",
            "who": "swap_ssd, and plans that may use an SSD.",
        },
    )

    @property
    def is_planned(self) -> bool:
        """Whether the planner chooses."""
        return isinstance(self.policy, PlannedPolicy)

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> ActivationsConfig:
        given = self.model_dump(exclude_unset=True)
        if self.is_planned:
            given["policy"] = PLAN
        conflicts = activation_conflicts(given)
        if conflicts:
            raise ValueError(" ".join(f"{c.key}: {c.advice}" for c in conflicts))
        return self


# -- fields that cannot be given together -------------------------------------------------------------


def codecs_in(*places: Place) -> tuple[Choice, ...]:
    """Those that hold what they saved in one of the places."""
    return tuple(name for name, row in CODECS.items() if row.place in places)


def activation_conflicts(given: Mapping[str, object]) -> list[Conflict]:
    """Combinations of explicitly given `hmt.activations` fields that cannot be honoured."""
    if given.get("policy") == PLAN:
        overrides = given.get("overrides")
        advice = 'With "policy": "plan" each layer has choices of its own: remove it, or write the policy out.'
        return [Conflict("overrides", overrides, ("policy",), advice)] if overrides else []
    chosen = dict(_chosen(given))
    written = _object(given.get("policy"))
    defaults = {choice for component, choice in PAPER_POLICY.items() if component not in written}
    in_use = defaults | set(chosen.values())
    conflicts, on_ssd = [], codecs_in("ssd")
    path = given.get("nvme_path")
    if path is not None and not in_use & set(on_ssd):
        advice = f"No component is {' or '.join(on_ssd)}: remove it or set one."
        conflicts.append(Conflict("nvme_path", path, ("policy", "overrides"), advice))
    if path is None:
        advice = 'It needs a folder on an SSD: set "nvme_path", or choose "swap_host".'
        conflicts += [
            Conflict(key, choice, ("nvme_path",), advice)
            for key, choice in chosen.items()
            if choice in on_ssd
        ]
    return conflicts + [
        Conflict(f"overrides[{pattern!r}]", choices, (), "It sets no component: remove it.")
        for pattern, choices in _object(given.get("overrides")).items()
        if not any(_object(choices).values())
    ]


def _chosen(given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(key, choice) of everything that is written down in `policy` and `overrides`."""
    for component, choice in _object(given.get("policy")).items():
        yield f"policy.{component}", choice
    for pattern, choices in _object(given.get("overrides")).items():
        for component, choice in _object(choices).items():
            if choice is not None:
                yield f"overrides[{pattern!r}].{component}", choice


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
