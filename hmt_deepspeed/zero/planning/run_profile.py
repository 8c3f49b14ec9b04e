"""Profiles the machine in the first iterations of a run.

These iterations recompute all activations that may be recomputed. Their phases and the recomputed operations are
timed: on a GPU in turn, because timing every op makes the iteration slower; on a CPU together. The rates of links,
SSDs and codecs are then measured with tensors of the sizes that the run would move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from statistics import median
from typing import Any, NamedTuple

import torch

from hmt_deepspeed.activations.codecs import build_codec
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.codecs import place_of
from hmt_deepspeed.memory.file_io import PositionalIO
from hmt_deepspeed.planner.advise.calibrate import IterationSeconds, calibrated, with_rerun_rates
from hmt_deepspeed.planner.hardware import Machine, MatmulRates, Overheads
from hmt_deepspeed.planner.model.workload import Workload
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.plan import Plan, uniform_plan
from hmt_deepspeed.zero.activations.install import choices_of
from hmt_deepspeed.zero.planning.facts import RunFacts
from hmt_deepspeed.zero.planning.measure import Probe, measure_machine

__all__ = ["PROFILED", "RunProfile", "reference_plan"]

PROFILED = 4  # iterations
_BUFFER_BYTES = (2**16, 2**26)
_UNKNOWN = MatmulRates(1.0, 1.0, 1.0)  # until what was run again gives it


class _Sample(NamedTuple):
    """One iteration: seconds by phase, and seconds of recomputation in one of its micro-steps, by component."""

    facts: RunFacts
    workload: Workload
    phases: IterationSeconds | None
    reruns: Mapping[str, float] | None


def reference_plan(hmt: HMTConfig, facts: RunFacts, workload: Workload, machine: Machine) -> Plan:
    """The plan that is executed until there is another."""
    policy = {"layernorm": "keep", **choices_of(hmt.activations.policy)}
    for component, choice in facts.inputs.items():
        policy[component] = choice if policy[component] == "keep" else policy[component]
    return uniform_plan(workload, machine, policy)


class RunProfile:
    """Samples of a run's first iterations.

    Args:
        facts: of the run. hmt: its block. accelerator: DeepSpeed's. device: of the activations.
    """

    def __init__(
        self, facts: RunFacts, hmt: HMTConfig, accelerator: Any, device: torch.device
    ) -> None:
        self._facts, self._hmt, self._accelerator, self._device = facts, hmt, accelerator, device
        self._is_processor = device.type == "cpu"
        self._samples: list[_Sample] = []

    def times_reruns(self, number: int) -> bool:
        """Whether recomputed operations are timed in the profiled iteration of this number."""
        return self._is_processor or number % 2 == 1

    def add(
        self,
        facts: RunFacts,
        workload: Workload,
        phases: IterationSeconds | None,
        reruns: Mapping[str, float] | None,
    ) -> None:
        """Keep an iteration.

        Args:
            facts: of the run as it was then.
            phases: None where the iteration was not timed as a whole.
            reruns: seconds of the iteration by component; None where they were not timed.
        """
        n = self._facts.setup.accumulation
        if reruns is not None:
            reruns = {component: seconds / n for component, seconds in reruns.items()}
            phases = phases if self._is_processor else None
        self._samples.append(_Sample(facts, workload, phases, reruns))

    def measure(self, interconnect: float | None) -> Machine:
        """The machine by all samples; takes about half an iteration.

        Args:
            interconnect: see :func:`~hmt_deepspeed.zero.planning.measure.measure_machine`.
        """
        machine = measure_machine(
            self._accelerator, self._device, self._probe(), interconnect=interconnect
        )
        rates = [self._with_reruns(machine, s) for s in self._samples if s.reruns]
        typical = _median(rates) if rates else machine
        # where one iteration gives both, its phases are compared with its own rates: noise is in both
        whole = [
            self._calibrated(self._with_reruns(machine, s) if s.reruns else typical, s)
            for s in self._samples
            if s.phases is not None
        ]
        return _median(whole) if whole else typical

    def _with_reruns(self, machine: Machine, sample: _Sample) -> Machine:
        assert sample.reruns is not None
        problem, plan = self._reference(machine, sample)
        return with_rerun_rates(machine, problem, plan, sample.reruns)

    def _calibrated(self, machine: Machine, sample: _Sample) -> Machine:
        assert sample.phases is not None
        problem, plan = self._reference(machine, sample)
        return calibrated(problem, plan, sample.phases)

    def _reference(self, machine: Machine, sample: _Sample) -> tuple[Problem, Plan]:
        plan = reference_plan(self._hmt, sample.facts, sample.workload, machine)
        return sample.facts.problem(sample.workload, machine), plan

    def _probe(self) -> Probe:
        """The measurements of what the run could do, with tensors as large as it would move."""
        work = self._samples[-1].workload
        seconds = [s.phases.total for s in self._samples if s.phases is not None]
        least, most = _BUFFER_BYTES
        # of one that stays on the device: encoding and decoding alone are to be timed
        lossy = next((c for c in self._hmt.planner.lossy.values() if place_of(c) == "device"), None)
        sites = [site for layer in work.layers for site in layer.sites]
        shape = work.shape
        folder = self._facts.ssd_folder
        offloads = self._facts.setup.offload_optimizer != "none"
        return Probe(
            products=((work.tokens, shape.hidden, shape.intermediate),),
            matmul=_UNKNOWN if any(s.reruns for s in self._samples) else None,
            seconds=max(median(seconds) / 2, 1e-3) if seconds else 1.0,
            buffer_bytes=min(most, max(least, max(site.nbytes for site in sites))),
            adam_parameters=work.layers[0].parameters if offloads else 0,
            file_io=None if folder is None else PositionalIO(),
            folder=folder,
            codec=None if lossy is None else build_codec(lossy),
            activation=(
                work.tokens,
                max(site.channels for site in sites),
                torch.float32 if work.itemsize == 4 else torch.bfloat16,
            ),
        )


def _median(machines: list[Machine]) -> Machine:
    """The first with the median of each rate and overhead that samples differ in."""
    rate = median(machine.matmul.bf16 for machine in machines)
    factors = {
        field.name: median(getattr(machine.overheads, field.name) for machine in machines)
        for field in fields(Overheads)
    }
    return replace(
        machines[0],
        matmul=MatmulRates(rate, rate, rate),
        overheads=Overheads(**factors),
        peak_flops=max(machine.peak_flops for machine in machines),
    )
