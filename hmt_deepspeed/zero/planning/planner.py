"""``"hmt.activations.policy": "plan"``: a run that measures itself, plans its activations and executes the plan.

The first iterations compute everything again that may be, and are timed (`run_profile.py`); then the plan is
made on rank 0, and every rank executes it from the next iteration on. A profile from the cache, or the plan in the
file ``hmt.planner.plan``, is used at once; where there is no such file the plan is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from hmt_deepspeed.config import ActivationsConfig, HMTConfig
from hmt_deepspeed.config.activations import Policy, PolicyOverride
from hmt_deepspeed.planner.advise.compare import Busy, Comparison
from hmt_deepspeed.planner.advise.describe import describe_plan, rough_estimates
from hmt_deepspeed.planner.hardware import Machine, machine_from_json
from hmt_deepspeed.planner.run.memory import MemoryBudget
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import Resource, estimate
from hmt_deepspeed.planner.solve.plan import Plan, plan_from_json, regrouped
from hmt_deepspeed.planner.solve.solve import allowed_choices
from hmt_deepspeed.planner.timeline.best import best_plan
from hmt_deepspeed.planner.timeline.simulate import predict
from hmt_deepspeed.zero.planning.comparison import PlannedIterations
from hmt_deepspeed.zero.planning.facts import (
    RunFacts,
    Shapes,
    device_capacity,
    memory_budget,
    shapes_of,
)
from hmt_deepspeed.zero.planning.found_ranks import FoundRanks, reason_to_plan_again
from hmt_deepspeed.zero.planning.measure import measure_interconnect
from hmt_deepspeed.zero.planning.plan_files import (
    find_profile,
    keep_profile,
    read_plan,
    write_plan,
)
from hmt_deepspeed.zero.planning.profile_files import write_profile
from hmt_deepspeed.zero.planning.run_profile import PROFILED, RunProfile, reference_plan
from hmt_deepspeed.zero.planning.step_timer import StepTimer

__all__ = ["RunPlanner"]

WARM_UP = 1  # iterations before those that are profiled: bases are found, memory is allocated
_SETTLED, COMPARED = 2, 20  # a plan's iterations that are not timed, and those after them that are


class RunPlanner:
    """The plan of one engine: made, executed, renewed when shapes change, compared with what happens.

    Args:
        facts: of the run. hmt: its block. accelerator: DeepSpeed's. device: of the activations.
        adopt: executes other choices from the next forward on.
        activations: the engine's backend with its numbers, as it is now.
        counted: bytes by (memory, kind), named as the planner names them.
        busy: seconds and bytes of each resource since the start, as far as somebody counts them.
        found_ranks: of matrices whose rank is "auto", after a step that found bases; else None.
        refreshing_columns: see :func:`~hmt_deepspeed.zero.planning.facts.refreshing_columns`, of this accumulation
            window.

    Attributes:
        plan: in execution; None before there is one. machine: planned for; None before it is measured, and
            with a plan from a file. problem: what the plan is for; None before there is one.
        profile_seconds: what measuring the machine took; None where nothing was measured.
        planning_seconds: what the last search took, likewise.
    """

    def __init__(
        self,
        facts: RunFacts,
        hmt: HMTConfig,
        accelerator: Any,
        device: torch.device,
        adopt: Callable[[ActivationsConfig], None],
        activations: Callable[[], Any],
        counted: Callable[[], Mapping[tuple[str, str], float]],
        busy: Callable[[], Mapping[Resource, Busy]],
        found_ranks: Callable[[], FoundRanks | None] = lambda: None,
        refreshing_columns: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self.facts, self._hmt, self._accelerator, self._device = facts, hmt, accelerator, device
        self._adopt, self._activations, self._counted = adopt, activations, counted
        self._found_ranks, self._refreshing_columns = found_ranks, refreshing_columns
        self._not_projected: Mapping[int, int] = {}  # columns by layer, in the last step
        self._now = self._expected = facts  # with the ranks of today, and with those to plan for
        self._ranks: FoundRanks | None = None
        self._why_again: str | None = None
        self.plan: Plan | None = None
        self.machine: Machine | None = None
        self.profile_seconds: float | None = None
        self.planning_seconds: float | None = None
        self.problem: Problem | None = None
        self._choices: ActivationsConfig | None = None
        self._profile = RunProfile(facts, hmt, accelerator, device)
        self._timer = StepTimer(accelerator.synchronize)
        self._is_from_file = False
        self._has_begun = False
        self._iteration = 0  # since the start, or since the plan is in execution
        self._shapes = Shapes(0, 0)
        self._times_reruns = False
        self._busy = busy
        self._timed = PlannedIterations(busy)

    # -- what the engine calls --------------------------------------------------------------------

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward that trains."""
        if not self._has_begun:
            is_first = self._shapes == Shapes(0, 0)
            self._shapes = self._agreed(shapes_of(args, kwargs))
            self._has_begun = True
            if is_first:
                self._use_files()
            self._begin_iteration()
        self._timer.begin_forward()

    def end_forward(self) -> None:
        """After it."""
        self._timer.end_forward()

    def begin_step(self) -> None:
        """Before the engine's ``step``."""
        self._timer.begin_step()
        self._not_projected = self._refreshing_columns()

    def end_step(self, ends_iteration: bool) -> None:
        """After it."""
        seconds = self._timer.end_step(ends_iteration)
        if not ends_iteration:
            return
        self._has_begun = False
        self._iteration += 1
        if self.plan is not None:
            if seconds is not None:
                self._timed.end(seconds)
        elif self._iteration > WARM_UP:
            reruns = self._backend.report().rerun_seconds if self._times_reruns else None
            self._profile.add(self._now, self._now.workload(*self._shapes), seconds, reruns)

    # -- an iteration -----------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        """Profile, plan, or go on."""
        has_other_ranks = self._look_at_ranks()
        if self.plan is None and self.machine is None and self._iteration == WARM_UP + PROFILED:
            self.machine = self._measure()
        if self.machine is not None and self._must_plan(self.plan, has_other_ranks):
            self._make_plan()
        elif self.plan is not None and self._is_from_file:
            self._check_plan_of_file(self.plan)
        is_profiled = self.plan is None and self._iteration >= WARM_UP
        if is_profiled:
            self._times_reruns = self._profile.times_reruns(self._iteration - WARM_UP)
            self._backend.time_reruns(self._timer.clock if self._times_reruns else None)
        is_compared = _SETTLED <= self._iteration < _SETTLED + COMPARED
        if self.plan is not None and is_compared:
            self._timed.begin()
        self._timer.begin_iteration(is_profiled if self.plan is None else is_compared)

    @property
    def _backend(self) -> Any:
        return self._activations().backend

    def _agreed(self, own: Shapes) -> Shapes:
        """The largest of all ranks, for which all plan. Waits for the device where there are several."""
        if self.facts.setup.ranks == 1:
            return own
        sizes = torch.tensor(own, device=self._device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        return Shapes(*map(int, sizes.tolist()))

    def _is_larger(self, plan: Plan) -> bool:
        now = self._shapes
        return now.micro_batch > plan.micro_batch or now.seq_length > plan.seq_length

    def _look_at_ranks(self) -> bool:
        """Whether they have changed; all ranks of the job see the same, so nothing is to be agreed on."""
        ranks = self._found_ranks()
        if ranks is None or ranks == self._ranks:
            return False
        self._ranks, self._now = ranks, self.facts.at_ranks(ranks.now, ranks.decided)
        self._expected = self.facts.at_ranks(ranks.to_expect, ranks.decided)
        return True

    def _must_plan(self, plan: Plan | None, has_other_ranks: bool) -> bool:
        """Whether there is no plan yet, or a reason for another."""
        if plan is None or self._outgrown(plan):
            self._why_again = None
            return True
        if not has_other_ranks or self.problem is None:
            return False
        now = self._problem_of(self._expected, self.problem, plan)
        reason = reason_to_plan_again(self.problem, now, plan)
        self._why_again = reason or self._why_again
        return reason is not None

    def _problem_of(self, facts: RunFacts, planned: Problem, plan: Plan) -> Problem:
        """The plan's problem at other ranks."""
        work = facts.workload(plan.micro_batch, plan.seq_length)
        return facts.problem(work, planned.machine, planned.budget)

    def _outgrown(self, plan: Plan) -> bool:
        """Whether batches are larger than planned for, or so small that another plan may be faster."""
        tokens = self._shapes.micro_batch * self._shapes.seq_length
        return self._is_larger(plan) or 2 * tokens <= plan.micro_batch * plan.seq_length

    def _check_plan_of_file(self, plan: Plan) -> None:
        if self._is_larger(plan):
            raise ValueError(
                f"hmt.planner.plan {self._hmt.planner.plan!r} is for micro-batches of up to {plan.micro_batch} "
                f"x {plan.seq_length} tokens, this one has {self._shapes.micro_batch} x "
                f"{self._shapes.seq_length}. Name a file that is not there, so that the run plans for itself."
            )

    # -- files ------------------------------------------------------------------------------------

    def _use_files(self) -> None:
        """A plan or a profile that there is already."""
        read = partial(read_plan, self._hmt, self.facts, self._shapes)
        text = self._on_rank_zero(read)
        if text is not None:
            self._is_from_file = True
            self._execute(plan_from_json(text), None)
            return
        found = self._on_rank_zero(partial(find_profile, self._hmt, self.facts))
        if found is not None:
            self.machine = machine_from_json(found)

    def save(self, folder: Path) -> None:
        """Write ``plan.json``, and ``profile.json`` where there is a machine."""
        if self.plan is not None:
            write_plan(self.plan, folder / "plan.json")
        if self.machine is not None:
            write_profile(self.machine, folder / "profile.json")

    # -- profile and plan -------------------------------------------------------------------------

    def _measure(self) -> Machine:
        """Measure the machine at rank 0 while the others wait, and keep the result for the next run."""
        self._backend.time_reruns(None)
        several = self.facts.setup.ranks > 1
        begin = perf_counter()
        interconnect = measure_interconnect(self._device) if several else None

        def measure() -> str:
            machine = self._profile.measure(interconnect)
            keep_profile(machine, self._hmt, self.facts)
            return machine.to_json()

        machine = machine_from_json(self._on_rank_zero(measure))
        self.profile_seconds = perf_counter() - begin
        return machine

    def _make_plan(self) -> None:
        assert self.machine is not None
        begin = perf_counter()
        machine = self.machine
        if self.facts.ssd_folder is None:
            machine = replace(machine, num_ssds=0)
        facts = self._expected
        work = facts.workload(*self._shapes)
        capacity = device_capacity(self._accelerator)
        on_ssd = self._counted().get(("ssd", "optimizer states"), 0.0)
        own = memory_budget(facts.problem(work, machine), self._hmt, *capacity, on_ssd)
        problem = facts.problem(work, machine, self._least(own))
        plan = plan_from_json(self._on_rank_zero(lambda: self._search(problem)))
        self.planning_seconds = perf_counter() - begin
        self._execute(plan, problem)

    def _least(self, own: MemoryBudget) -> MemoryBudget:
        """The least budget of all ranks, since all execute one plan."""
        if self.facts.setup.ranks == 1:
            return own
        sizes = torch.tensor([own.gpu, own.host, own.ssd], device=self._device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MIN)
        return MemoryBudget(*map(int, sizes.tolist()))

    def _search(self, problem: Problem) -> str:
        machine = problem.machine
        if self._hmt.activations.nvme_path is None:  # an SSD is for the states only
            machine = replace(machine, num_ssds=0)
        allowed = allowed_choices(machine, self._hmt.planner.lossy, self.facts.inputs)
        found = best_plan(problem, allowed)
        if found is not None:
            return found[0].to_json()
        frugal = estimate(problem, reference_plan(self._hmt, self.facts, problem.workload, machine))
        over = [
            f"{frugal.peak(name) / 2**20:,.0f} MiB of {name} memory, of {getattr(problem.budget, name) / 2**20:,.0f}"
            for name in frugal.excess()
        ]
        raise ValueError(
            f'hmt.activations.policy is "plan", but no plan fits: computing everything again that may be takes '
            f"{' and '.join(over)}. Raise hmt.planner.gpu_memory or hmt.activations.host_memory, allow files with "
            "hmt.activations.nvme_path or 8 bits with hmt.planner.lossy, make the micro-batch smaller, or use a "
            "higher ZeRO stage."
        )

    def _execute(self, plan: Plan, problem: Problem | None) -> None:
        overrides = plan.overrides(self.facts.shape.names.layer)
        update = {
            "policy": Policy(**plan.policy()),
            "overrides": {name: PolicyOverride(**given) for name, given in overrides.items()},
        }
        choices = self._hmt.activations.model_copy(update=update)
        if choices != self._choices:
            self._adopt(choices)
        self._choices = choices
        self.plan, self.problem = plan, problem
        self._iteration, self._timed = 0, PlannedIterations(self._busy)
        if _rank() == 0:
            print(self.describe(), flush=True)
            path = self._hmt.planner.plan
            if path is not None and self.machine is not None:  # it was made here
                write_plan(plan, Path(path))
                write_profile(self.machine, f"{path}.profile.json")

    def describe(self) -> str:
        """The plan, what it is made for and what it is expected to take."""
        assert self.plan is not None
        plan = self.plan
        title = f"hmt: plan for micro-batches of {plan.micro_batch} x {plan.seq_length} tokens"
        if self.problem is None:
            return f"{title}, from {self._hmt.planner.plan}"
        found, rough = estimate(self.problem, plan), rough_estimates(self.facts.shape)
        took = "" if self.profile_seconds is None else f"profiled in {self.profile_seconds:.2g} s, "
        lines = [
            f"{title} on {self.problem.machine.name}, {took}planned in {self.planning_seconds:.2g} s",
            *["\n".join(rough)] * bool(rough),
            describe_plan(plan, found),
            *([self._why_again] if self._why_again else []),
            *([self._ranks.describe()] if self._ranks else []),
            f"predicted by the {plan.source}: {plan.seconds:.4g} s for an iteration, within {plan.gap:.2%} of "
            f"any plan; bottleneck: {found.bottleneck}",
        ]
        return "\n\n".join(lines)

    # -- predicted against measured ---------------------------------------------------------------

    @property
    def comparison(self) -> Comparison | None:
        """The plan in execution compared with its timed iterations; None before there are any.

        Predicted is for the ranks that matrices have by now, which the plan may have been made before.
        """
        if self.problem is None or self.plan is None:
            return None
        problem, plan = self.problem, self.plan
        if self._ranks is not None:
            problem = self._problem_of(self._now, problem, plan)
            plan = predict(problem, regrouped(plan, problem.workload))[0]
        counted, held = self._counted(), self._activations().metrics()
        return self._timed.compared(problem, plan, held, counted, self._not_projected)

    def metrics(self) -> dict[str, Any]:
        """Numbers of the plan in execution; nothing before there is one."""
        if self.plan is None:
            return {}
        return {
            "planned_step_seconds": self.plan.seconds,
            "profile_seconds": self.profile_seconds,
            "planning_seconds": self.planning_seconds,
        }

    # -- ranks ------------------------------------------------------------------------------------

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Its result, or its ValueError, on every rank."""
        if self.facts.setup.ranks == 1:
            return work()
        answer: list[Any] = [None, None]
        if _rank() == 0:
            try:
                answer[0] = work()
            except ValueError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, device=self._device)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return answer[0]


# -- small things -----------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
