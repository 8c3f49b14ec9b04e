"""The plan to run: the program's, unless the simulator finds another that wastes less.

A plan of the closed form keeps several resources busy to the last moment. With buffers of two layers that
may not come true: where the simulator disagrees, plans for links and SSDs that are slower than the machine's
are played too, since they leave some slack, and the fastest on the real machine is taken.
"""

from __future__ import annotations

from dataclasses import replace

from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import Estimate
from hmt_deepspeed.planner.solve.plan import Plan
from hmt_deepspeed.planner.solve.solve import Allowed, solve
from hmt_deepspeed.planner.timeline.simulate import Simulation, predict

__all__ = ["best_plan"]

_SLACK = (0.85, 0.7, 0.5)  # parts of the links' and SSDs' rates that plans are made for


def best_plan(
    problem: Problem, allowed: Allowed, *, time_limit: float = 1.5
) -> tuple[Plan, Estimate, Simulation] | None:
    """(plan, its closed form, its simulation), or None if no plan fits.

    Args:
        time_limit: seconds of each solve; there are up to four.
    """
    plan = solve(problem, allowed, time_limit=time_limit)
    if plan is None:
        return None
    best = predict(problem, plan)
    if best[0].source == "closed form":
        return best
    bound = plan.seconds / (1 + plan.gap)
    for part in _SLACK:
        slower = replace(problem, machine=_slower(problem.machine, part))
        other = solve(slower, allowed, time_limit=time_limit)
        if other is None:
            continue
        found = predict(problem, replace(other, machine=plan.machine))
        if found[0].seconds < best[0].seconds:
            best = (replace(found[0], gap=found[1].seconds / bound - 1), *found[1:])
    return best


def _slower(machine: Machine, part: float) -> Machine:
    """Links and SSDs at a part of their rates."""
    limit = machine.ssd_array_limit
    return replace(
        machine,
        device_to_host=part * machine.device_to_host,
        host_to_device=part * machine.host_to_device,
        both_directions=part * machine.both_directions,
        ssd_read=part * machine.ssd_read,
        ssd_write=part * machine.ssd_write,
        ssd_mixed=part * machine.ssd_mixed,
        ssd_array_limit=None if limit is None else part * limit,
    )
