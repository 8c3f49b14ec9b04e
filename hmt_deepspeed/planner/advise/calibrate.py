"""Calibrates a machine's rates and overheads from the measured iterations of a run.

Recomputation under a known plan gives the rate of products and the attention op's overhead. The rest of forward,
backward and update does not depend on the choices for activations. Its time over that of products and memory
traffic at their rates gives the other overheads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from hmt_deepspeed.planner.hardware import Machine, MatmulRates
from hmt_deepspeed.planner.model.workload import made_again
from hmt_deepspeed.planner.run.loads import model_work, site_choices, update_work
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import Estimate, device_seconds, estimate, grouped_layers
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["IterationSeconds", "calibrated", "predicted_seconds", "with_rerun_rates"]

# Noise may leave less than nothing for the model's own work: this part of a phase is taken to be its own.
_LEAST_OWN = 0.1


@dataclass(frozen=True)
class IterationSeconds:
    """Seconds of an iteration by what its user's loop does: forwards, backwards, the optimizer's pass."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return self.forward + self.backward + self.update


def predicted_seconds(plan: Plan, found: Estimate) -> IterationSeconds:
    """The plan's seconds by phase; where the simulator is believed, the closed form's phases in proportion."""
    groups = {field.name: 0.0 for field in fields(IterationSeconds)}
    for phase in found.phases:
        name = "update" if phase.name in ("update", "redo") else phase.name.split()[-1]
        groups[name] += phase.weight * phase.seconds
    scale = plan.seconds / found.seconds if plan.seconds else 1.0
    return IterationSeconds(**{name: scale * seconds for name, seconds in groups.items()})


def with_rerun_rates(
    machine: Machine, problem: Problem, reference: Plan, seconds: Mapping[str, float]
) -> Machine:
    """The machine with the rate of products and the attention op's overhead as a backward had them.

    Args:
        problem: of the run that was measured. reference: the plan that it executed.
        seconds: of what one micro-step's backward ran again, by component.
    """
    flops: dict[str, float] = {}
    for layer, group in grouped_layers(problem.workload, reference):
        count = len(group.layers)
        for site in made_again(layer, site_choices(layer, group.choices)):
            flops[site.component] = flops.get(site.component, 0.0) + count * site.flops
    attention = flops.pop("attention_output", 0.0), seconds.get("attention_output", 0.0)
    timed = {name: size for name, size in flops.items() if size and seconds.get(name)}
    if not timed:
        return machine
    rate = sum(timed.values()) / sum(seconds[name] for name in timed)
    overheads = machine.overheads
    if all(attention):
        overheads = replace(overheads, attention=attention[1] * rate / attention[0])
    peak = max(machine.peak_flops, rate)
    matmul = MatmulRates(rate, rate, rate)
    return replace(machine, matmul=matmul, overheads=overheads, peak_flops=peak)


def calibrated(problem: Problem, reference: Plan, measured: IterationSeconds) -> Machine:
    """The problem's machine with overheads by which ``reference`` takes the seconds measured.

    With several ranks, or states in host memory, what a phase waited for counts as the device's.

    Args:
        problem: with rates as measured. reference: the plan that the measured iterations executed.
    """
    machine, setup = problem.machine, problem.setup
    plain = replace(machine.overheads, forward=1.0, backward=1.0, update=1.0)
    machine = replace(machine, overheads=plain)
    found = estimate(replace(problem, machine=machine), reference)
    own = _own_seconds(replace(problem, machine=machine))
    seconds = predicted_seconds(reference, found)
    factors = {}
    for name in ("forward", "backward"):
        took = getattr(measured, name)
        # the closed form is own + rest, of which only own is scaled
        rest = getattr(seconds, name) - getattr(own, name)
        factors[name] = max(took - rest, _LEAST_OWN * took) / getattr(own, name)
    if setup.offload_optimizer == "none" and measured.update > 0:
        factors["update"] = measured.update / own.update
    return replace(machine, overheads=replace(plain, **factors))


def _own_seconds(problem: Problem) -> IterationSeconds:
    """Seconds of an iteration's forwards, backwards and update that no choice for activations changes."""
    n = problem.setup.accumulation
    of_model = model_work(problem.workload)
    forward, backward = (device_seconds(problem, work) for work in of_model)
    update = device_seconds(problem, update_work(problem))
    return IterationSeconds(n * forward, n * backward, update)
