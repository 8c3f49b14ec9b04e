"""The best plan: which layers take which choices so that an iteration is shortest and everything fits.

The joint choices of one layer's components are the columns of `program.py`: priced by `loads.py`, so what
recompute needs is counted along the layer's graph and not added up site by site.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hmt_deepspeed.config.codecs import CODECS, is_lossy, place_of
from hmt_deepspeed.config.components import COMPONENTS, Choice, Component, legal_choices
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.workload import Head, Layer
from hmt_deepspeed.planner.run.loads import (
    MEMORIES,
    Choices,
    Memory,
    layer_load,
    phases,
    static_bytes,
)
from hmt_deepspeed.planner.run.problem import Problem, RunSetup
from hmt_deepspeed.planner.solve.cost import (
    RESOURCES,
    estimate,
    fill_seconds,
    phase_seconds,
    rates,
)
from hmt_deepspeed.planner.solve.plan import LayerChoices, Plan, fingerprint, spread, uniform_plan
from hmt_deepspeed.planner.solve.program import Array, Columns, Program
from hmt_deepspeed.planner.solve.search import Solution, solve_program

__all__ = ["Allowed", "allowed_choices", "fits", "solve"]

Allowed = Mapping[Component, tuple[Choice, ...]]


def allowed_choices(
    machine: Machine,
    lossy: Mapping[Component, Choice] | None = None,
    fixed: Mapping[Component, Choice] | None = None,
) -> dict[Component, tuple[Choice, ...]]:
    """Choices open to a plan: everything exact that the machine can do, and what the JSON permits.

    Args:
        lossy: the lossy codec that may be used for a component; none may for the others. INT8 and FP8 take the
            same bytes and time, so which one is a matter of error and not of the plan.
        fixed: components whose choice is made.

    Raises:
        ValueError: a component or choice that is not legal, or a lossy choice that is exact.
    """
    for given in (lossy or {}, fixed or {}):
        for component, choice in given.items():
            legal = legal_choices(component) if component in COMPONENTS else COMPONENTS
            if component not in COMPONENTS or choice not in legal:
                raise ValueError(
                    f"{component}: {choice!r} is not legal; legal: {legal}. Choose one of them."
                )
    found: dict[Component, tuple[Choice, ...]] = {}
    for component in COMPONENTS:
        exact = tuple(
            choice
            for choice in legal_choices(component)
            if not is_lossy(choice) and (place_of(choice) != "ssd" or machine.num_ssds)
        )
        permitted = (lossy or {}).get(component)
        if permitted is not None and not is_lossy(permitted):
            inexact = tuple(filter(is_lossy, CODECS))
            raise ValueError(
                f"lossy {component}: {permitted!r} is exact; legal: {inexact}. Choose one of them."
            )
        found[component] = exact if permitted is None else (*exact, permitted)
    return found | {component: (choice,) for component, choice in (fixed or {}).items()}


def solve(problem: Problem, allowed: Allowed, *, time_limit: float = 1.5) -> Plan | None:
    """The plan with the shortest iteration that fits, or None if no plan fits.

    With several ranks that compute the same activations, plans with and without ZeRO-R's P_a are compared.

    Args:
        allowed: of each component; see :func:`allowed_choices`.
        time_limit: seconds for it all; after that the best plan so far, with its ``gap``.
    """
    variants = [problem]
    if problem.setup.model_parallel > 1:
        setups = (replace(problem.setup, partition_activations=p) for p in (False, True))
        variants = [replace(problem, setup=setup) for setup in setups]
    plans = [_solve(variant, allowed, time_limit / len(variants)) for variant in variants]
    return min((p for p in plans if p is not None), key=lambda plan: plan.seconds, default=None)


def fits(problem: Problem, allowed: Allowed) -> bool:
    """Whether any plan fits.

    Decided by the plans that hold least on the GPU, which compute everything again that may be and treat
    layers' inputs alike; the program is asked only where these fit the GPU and overflow host or SSD.
    """
    over: list[dict[Memory, float]] = []
    for choice in ("recompute", *CODECS):
        policy = {
            c: "recompute" if c in _MADE_AGAIN and "recompute" in given else _least(given, choice)
            for c, given in allowed.items()
        }
        for partition in (False, True)[: 1 + (problem.setup.model_parallel > 1)]:
            plan = uniform_plan(
                problem.workload, problem.machine, policy, partition_activations=partition
            )
            found = estimate(problem, plan)
            if found.fits:
                return True
            over.append(found.excess())
    frugal = all("recompute" in allowed[c] or len(allowed[c]) == 1 for c in _MADE_AGAIN)
    if frugal and all("gpu" in excess for excess in over):
        return False
    return solve(problem, allowed, time_limit=0) is not None


_MADE_AGAIN: tuple[Component, ...] = (
    "attention_qkv",
    "attention_output",
    "mlp_intermediate",
    "experts",
    "projected_inputs",
)


def _least(given: tuple[Choice, ...], of_inputs: Choice) -> Choice:
    """The choice for inputs where it is legal, else the first that is."""
    return of_inputs if of_inputs in given else given[0]


def _solve(problem: Problem, allowed: Allowed, time_limit: float) -> Plan | None:
    parts: list[Layer | Head] = [*problem.workload.layers, problem.workload.head]
    columns, solution = _solution(problem, allowed, parts, time_limit)
    if solution is None:
        return None
    groups: list[LayerChoices] = []
    for layer, options, counts in zip(
        problem.workload.layers, columns, solution.counts, strict=False
    ):
        used = np.flatnonzero(counts)
        spread_numbers = spread(layer.layers, [int(counts[index]) for index in used])
        groups += [
            LayerChoices(numbers, options.choices[index])
            for numbers, index in zip(spread_numbers, used, strict=True)
        ]
    return Plan(
        model=fingerprint(problem.workload.shape),
        machine=fingerprint(problem.machine),
        micro_batch=problem.workload.micro_batch,
        seq_length=problem.workload.seq_length,
        layers=tuple(groups),
        head=columns[-1].choices[int(np.argmax(solution.counts[-1]))],
        partition_activations=problem.setup.partition_activations,
        seconds=solution.objective,
        gap=solution.gap,
    )


def _solution(
    problem: Problem, allowed: Allowed, parts: list[Layer | Head], time_limit: float
) -> tuple[list[_Columns], Solution | None]:
    """Columns of every part and how many layers take which.

    What is swapped takes room in host memory for what is on its way, a constant that a program of fractions
    cannot switch on: it is set aside, and where nothing fits then, done without what needs it.
    """
    start = time.monotonic()
    static, engine = static_bytes(problem), problem.setup.engine
    free = {name: getattr(problem.budget, name) - sum(static[name].values()) for name in MEMORIES}
    stagings: list[tuple[int, frozenset[Choice]]] = [(0, frozenset())]
    if engine is not None:
        on_ssd = frozenset(name for name, row in CODECS.items() if row.place == "ssd")
        moved = frozenset(name for name, row in CODECS.items() if row.is_moved)
        stagings = [(engine.staging, on_ssd), (0, moved)]
        if not all(on_ssd.isdisjoint(given) for given in allowed.values()):
            stagings.insert(0, (engine.ssd_staging, frozenset()))
    for staging, without in stagings:
        if staging > max(0.0, free["host"]):
            continue
        given = tuple(allowed.items())
        columns = [_columns(part, given, problem.setup, without) for part in parts]
        if not all(of_part.choices for of_part in columns):
            continue
        room = free | {"host": free["host"] - staging}
        limits = np.array([room[name] for name in MEMORIES])
        left = max(time_limit / 2, time_limit - (time.monotonic() - start))
        solution = solve_program(_program(problem, parts, columns, limits), left)
        if solution is not None:
            return columns, solution
    return [], None


@dataclass(frozen=True, eq=False)
class _Columns:
    """Every joint choice of a layer's components, and what one layer that takes it adds (`loads.py`).

    Attributes:
        choices: N of them. forward, backward: (N, amounts). held: (N, memories) bytes. working: (N,) bytes.
        inexact: (N,), part of the layer's bytes that is held with a loss.
    """

    choices: tuple[Choices, ...]
    forward: Array
    backward: Array
    held: Array
    working: Array
    inexact: Array


@lru_cache(maxsize=16)  # a problem is solved for several rates, and choices weigh the same in each
def _columns(
    part: Layer | Head,
    allowed: tuple[tuple[Component, tuple[Choice, ...]], ...],
    setup: RunSetup,
    without: frozenset[Choice],
) -> _Columns:
    """All but those with a choice that is done without."""
    legal = dict(allowed)
    components = list(dict.fromkeys(site.component for site in part.sites))
    choices = tuple(
        dict(zip(components, combination, strict=True))
        for combination in itertools.product(*(legal[component] for component in components))
        if without.isdisjoint(combination)
    )
    loads = [layer_load(part, chosen, setup) for chosen in choices]
    total = sum(site.nbytes for site in part.sites)
    inexact = [
        sum(s.nbytes for s in part.sites if is_lossy(chosen[s.component])) / total
        for chosen in choices
    ]
    return _Columns(
        choices,
        forward=np.array([load.forward for load in loads]),
        backward=np.array([load.backward for load in loads]),
        held=np.array([load.held for load in loads]),
        working=np.array([load.working for load in loads]),
        inexact=np.array(inexact),
    )


def _program(
    problem: Problem,
    parts: list[Layer | Head],
    columns: list[_Columns],
    limits: Array,
) -> Program:
    """Rows are (phase, resource); fill and drain count in every row, since they come on top of the largest."""
    per_unit = rates(problem)
    of_iteration = phases(problem)
    num_layers = sum(layer.count for layer in problem.workload.layers)
    bases = []
    for phase in of_iteration:
        base = phase_seconds(phase, per_unit, problem.setup)
        bases.append(base + fill_seconds(base, num_layers))

    def of_class(part: Layer | Head, options: _Columns) -> Columns:
        by_sites: dict[str | None, Array] = {
            "forward": options.forward @ per_unit,
            "backward": options.backward @ per_unit,
            None: np.zeros((len(options.choices), len(RESOURCES))),
        }
        seconds = np.concatenate([by_sites[phase.sites] for phase in of_iteration], axis=1)
        return Columns(
            num_layers=part.count if isinstance(part, Layer) else 1,
            seconds=seconds,
            bytes=options.held,
            working=options.working,
            # Seconds that resources are busy, and far dearer: bytes held with a loss where exact ones are as fast.
            # So nothing is moved, computed again or made less exact for nothing, and SSDs are spared.
            tie=seconds.sum(1) + 1e3 * options.inexact,
        )

    classes = tuple(of_class(*given) for given in zip(parts, columns, strict=True))
    return Program(
        classes=classes,
        base=np.concatenate(bases),
        phase=np.repeat(np.arange(len(of_iteration)), len(RESOURCES)),
        weights=np.array([phase.weight for phase in of_iteration], dtype=float),
        limits=limits,
    )
