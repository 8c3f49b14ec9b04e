"""Simulates a plan event by event: when each layer computes, moves and is updated, and its memory.

Independent of `cost.py`: durations come from the machine and the model, the order from what waits for what.
Where the closed form's assumption fails (few layers, layers that differ much), this is the number to believe.

Of each layer, per micro-step::

    forward    [read weights] -> [to GPU] -> [gather] -> compute -> [swap to host] -> [write]
    backward   the same for weights, and [read] -> [back to GPU] for what was swapped -> compute
               -> [reduce gradients] -> [gradients to host] -> [read states] update [write states]

Buffers are of constant size: weights and swapped activations are fetched one layer ahead, a layer computes
only when what the layer before the last swapped has left, and three layers' states are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hmt_deepspeed.planner.run.loads import (
    BACKWARD_PASSES,
    FORWARD_PASSES,
    Amount,
    static_bytes,
    sums_before_sending,
    update_work,
    updated_on_device,
)
from hmt_deepspeed.planner.run.offloaded import TREATMENTS, HostShare, Treatment
from hmt_deepspeed.planner.run.problem import Problem
from hmt_deepspeed.planner.solve.cost import (
    ADDED_SHARE,
    Estimate,
    device_seconds,
    estimate,
    ranks_per_node,
)
from hmt_deepspeed.planner.solve.plan import Plan
from hmt_deepspeed.planner.timeline.timeline import Contention, Task, Timeline, play
from hmt_deepspeed.planner.timeline.units import Unit, units_of

__all__ = ["AGREEMENT", "Simulation", "predict", "simulate"]

AGREEMENT = 0.05  # relative difference to the simulator beyond which the closed form is not used
_AHEAD = 2  # layers in flight: one computes, one comes or leaves
_STATES_AHEAD = 3  # one is read, one updated, one written


@dataclass(frozen=True)
class Simulation:
    """One iteration of a plan.

    Attributes:
        gpu_at_rest: bytes of the GPU that are occupied all the time.
    """

    timeline: Timeline
    gpu_at_rest: float

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return self.timeline.seconds

    @property
    def gpu_memory(self) -> list[tuple[float, float]]:
        """(time, bytes of the GPU from then on)."""
        return self.timeline.memory("gpu", self.gpu_at_rest)

    @property
    def gpu_peak(self) -> float:
        """Bytes."""
        return max(held for _, held in self.gpu_memory)


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Play one iteration of ``plan``.

    Raises:
        ValueError: a plan of other layers, or a choice that is not legal.
    """
    if plan.partition_activations != problem.setup.partition_activations:
        setup = replace(problem.setup, partition_activations=plan.partition_activations)
        problem = replace(problem, setup=setup)
    builder = _Builder(problem, units_of(problem, plan))
    setup = problem.setup
    overlap = "none" if setup.offload_optimizer == "none" else setup.overlap
    if overlap == "forward":
        builder.update_on_gpu()
    for step in range(setup.passes):
        builder.forward(with_update=overlap == "forward" and step == 0)
        last = step == setup.passes - 1
        builder.backward(last, with_update=overlap == "backward" and last)
    if overlap != "forward":
        builder.update_on_gpu()
    if overlap == "none":
        builder.update_alone(1.0, TREATMENTS)
    elif overlap == "backward":
        builder.update_alone(1.0, ("low_rank",))
        if setup.redo_fraction > 0:
            builder.update_alone(setup.redo_fraction, ("dense",))
    static = static_bytes(problem)["gpu"]
    passing = static.get("gathered weights", 0.0)
    if not sums_before_sending(setup):
        passing += static.get("gradients in passing", 0.0)
    at_rest = sum(static.values()) - passing
    return Simulation(play(builder.tasks, _contention(problem)), at_rest)


def predict(problem: Problem, plan: Plan) -> tuple[Plan, Estimate, Simulation]:
    """The plan with the seconds to believe: the closed form's where the simulator agrees, else the simulator's."""
    by_formula, played = estimate(problem, plan), simulate(problem, plan)
    if abs(by_formula.seconds / played.seconds - 1) <= AGREEMENT:
        return replace(plan, seconds=by_formula.seconds, source="closed form"), by_formula, played
    return replace(plan, seconds=played.seconds, source="simulator"), by_formula, played


def _contention(problem: Problem) -> Contention:
    machine = problem.machine
    one_way = machine.device_to_host + machine.host_to_device
    both = min(1.0, machine.both_directions / one_way)
    found: dict[tuple[str, str], tuple[float, float]] = {
        ("gpu_to_host", "host_to_gpu"): (both, both)
    }
    if machine.num_ssds:
        half = machine.total_ssd_mixed / 2
        speeds = (half / machine.total_ssd_read, half / machine.total_ssd_write)
        found["ssd_read", "ssd_write"] = speeds
    return found


@dataclass
class _Builder:
    """Appends the tasks of an iteration in the order in which they are wanted."""

    problem: Problem
    units: list[Unit]
    tasks: list[Task] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # compute tasks, in order of time
    written: list[int] = field(default_factory=list)  # last task of each update
    updated: dict[str, int] = field(default_factory=dict)  # unit -> last task of its update
    swapped_out: dict[str, list[int]] = field(default_factory=dict)  # unit -> its last tasks

    # -- durations ------------------------------------------------------------------------------

    def seconds(self, resource: str, size: float) -> float:
        """Seconds of moving ``size`` bytes, or of ``size`` FLOPs or CPU Adam's elements, alone on this rank's share."""
        machine = self.problem.machine
        sharing = ranks_per_node(machine, self.problem.setup)
        per_link = min(sharing, machine.gpus_per_link)
        if resource == "gpu_to_host":
            return size * per_link / machine.device_to_host
        if resource == "host_to_gpu":
            return size * per_link / machine.host_to_device
        if resource == "ssd_read":
            return size * sharing / machine.total_ssd_read
        if resource == "ssd_write":
            return size * sharing / machine.total_ssd_write
        if resource == "cpu":
            return size * sharing * machine.cpu_adam_ns * 1e-9
        if resource == "network":
            return size / machine.interconnect
        assert resource == "gpu"
        matmul = machine.matmul.bf16 if self.problem.workload.itemsize == 2 else machine.matmul.fp32
        return size / matmul

    # -- tasks ----------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        resource: str,
        size: float,
        after: Iterable[int | None] = (),
        takes: float = 0.0,
        gives: float = 0.0,
        extra: float = 0.0,
    ) -> int | None:
        """Append a task, None where there is nothing to do; takes and gives are bytes of the GPU."""
        if size <= 0 and resource != "gpu":
            return None
        before = tuple(sorted({index for index in after if index is not None}))
        held = (("gpu", takes),) if takes else ()
        freed = (("gpu", gives),) if gives else ()
        seconds = self.seconds(resource, size) + extra
        if resource in ("gpu_to_host", "host_to_gpu") and not self.problem.machine.copies_beside:
            resource = "gpu"
        self.tasks.append(Task(name, resource, seconds, before, held, freed))
        return len(self.tasks) - 1

    def chain(
        self, unit: Unit, steps: Iterable[tuple[str, str, float]], after: Iterable[int | None]
    ) -> int | None:
        """Append steps (name, resource, size) one after another; the last one's index."""
        last: int | None = None
        for name, resource, size in steps:
            before = [last] if last is not None else after
            added = self.add(f"{name}, {unit.name}", resource, size, before)
            last = added if added is not None else last
        return last

    def behind(self, distance: int = _AHEAD) -> int | None:
        """The compute task after which a buffer of the layer ``distance`` before this one is free."""
        return self.computed[-distance] if len(self.computed) >= distance else None

    def fetch(self, unit: Unit) -> tuple[list[int | None], float]:
        """Bring a unit's weights; (what compute waits for, bytes of the GPU they take)."""
        setup, problem = self.problem.setup, self.problem
        mine = problem.of_rank.weights * unit.share
        offloaded = setup.offload_param != "none"
        steps = (
            ("read weights", "ssd_read", mine if setup.offload_param == "nvme" else 0.0),
            ("weights to GPU", "host_to_gpu", mine if offloaded else 0.0),
            (
                "gather weights",
                "network",
                problem.total.weights * unit.share * setup.others if setup.zero_stage == 3 else 0.0,
            ),
        )
        updated = self.updated.get(unit.name)
        last = self.chain(unit, steps, [self.behind(), updated])
        takes = problem.total.weights * unit.share if last is not None else 0.0
        return [last, updated], takes

    def compute_seconds(self, unit: Unit, forward: bool) -> float:
        """Seconds of a unit's products and other ops, and of what its choices add: recompute and codecs."""
        machine = self.problem.machine
        factors, memory = machine.overheads, machine.gpu_bandwidth
        if forward:
            load, factor = unit.load.forward, factors.forward
            flops, passes = unit.forward_flops, FORWARD_PASSES
        else:
            load, factor = unit.load.backward, factors.backward
            flops, passes = unit.backward_flops, BACKWARD_PASSES
        model = factor * (self.seconds("gpu", flops) + passes * unit.saved / memory)
        model *= self.problem.setup.at_once
        again = load[Amount.FLOPS] + factors.attention * load[Amount.ATTENTION]
        codecs = factors.encode * load[Amount.ENCODE] + factors.decode * load[Amount.DECODE]
        return model + self.seconds("gpu", float(again)) + float(codecs) / memory

    def forward(self, with_update: bool) -> None:
        """One micro-step's forward; ``with_update``: each layer waits for its own update."""
        at_once = self.problem.setup.at_once  # of what moves, one's bytes are on the device
        for position, unit in enumerate(self.units):
            if with_update:
                self.update(unit, None, 1.0, TREATMENTS)
            waits, weights = self.fetch(unit)
            load = unit.load
            before = self.units[position - _AHEAD].name if position >= _AHEAD else ""
            moved = float(load.forward[Amount.TO_HOST])
            done = self.add(
                f"forward, {unit.name}",
                "gpu",
                0.0,
                [*waits, self.behind(1), *self.swapped_out.get(before, [])],
                takes=weights + float(load.held[0]) + moved / at_once,
                gives=weights,
                extra=self.compute_seconds(unit, True),
            )
            assert done is not None
            self.computed.append(done)
            out = self.add(
                f"swap out, {unit.name}", "gpu_to_host", moved, [done], gives=moved / at_once
            )
            on_ssd = float(load.forward[Amount.SSD_WRITE])
            stored = self.add(f"write, {unit.name}", "ssd_write", on_ssd, [out])
            self.swapped_out[unit.name] = [index for index in (out, stored) if index is not None]

    def backward(self, last: bool, with_update: bool) -> None:
        """One micro-step's backward, head first."""
        left: list[int | None] = []  # what frees each unit's gradients
        head: int | None = (
            None  # nothing that was swapped is asked for before the last layer's turn
        )
        for unit in reversed(self.units):
            waits, weights = self.fetch(unit)
            load = unit.load
            back = float(load.backward[Amount.TO_GPU])
            part_back = back / self.problem.setup.at_once
            on_ssd = float(load.backward[Amount.SSD_READ])
            ahead = [self.behind(), head, *self.swapped_out[unit.name]]
            read = self.add(f"read, {unit.name}", "ssd_read", on_ssd, ahead)
            returned = self.add(
                f"swap in, {unit.name}", "host_to_gpu", back, [*ahead, read], takes=part_back
            )
            part = self.add(
                f"gather inputs, {unit.name}",
                "network",
                float(load.backward[Amount.NETWORK]),
                ahead,
            )
            summed = sums_before_sending(self.problem.setup)
            gradients = 0.0 if summed else unit.off_device.formed
            # `working` counts what returned and as much of the next layer, both taken when they are sent for
            working = max(0.0, load.working - 2 * part_back)
            done = self.add(
                f"backward, {unit.name}",
                "gpu",
                0.0,
                [*waits, returned, part, self.behind(1), *left[-_AHEAD : -_AHEAD + 1]],
                takes=weights + working + gradients,
                gives=weights + working + part_back + float(load.held[0]),
                extra=self.compute_seconds(unit, False),
            )
            assert done is not None
            self.computed.append(done)
            head = done if head is None else head
            left.append(self.reduce(unit, done, last, gradients))
            if with_update:
                self.update(unit, left[-1], 1.0, ("dense",))

    def reduce(self, unit: Unit, done: int, last: bool, held: float) -> int | None:
        """Gradients to the ranks and places that update them; what ends it. ``held``: bytes freed by then."""
        setup, problem = self.problem.setup, self.problem
        if setup.zero_stage < 2 and not last:
            return done
        times = 2 if setup.zero_stage == 0 else 1
        gradients = problem.total.gradients * unit.share
        sent = self.add(
            f"reduce gradients, {unit.name}", "network", times * gradients * setup.others, [done]
        )
        left = self.add(
            f"gradients to host, {unit.name}",
            "gpu_to_host",
            unit.off_device.arriving,
            [done, sent],
            gives=held,
        )
        return next(task for task in (left, sent, done) if task is not None)

    # -- the optimizer --------------------------------------------------------------------------

    def update(
        self, unit: Unit, arrived: int | None, times: float, rules: Iterable[Treatment]
    ) -> None:
        """One unit's update on the host: its states' way from and to SSD, what is sent, the new weights."""
        setup = self.problem.setup
        share = sum((unit.host[rule] for rule in rules), HostShare()).times(times)
        work = share.adam + ADDED_SHARE * share.added
        if not work:
            return
        on_device, on_ssd = setup.offload_param == "none", setup.offload_optimizer == "nvme"
        states = share.states if on_ssd else 0.0
        buffer = self.written[-_STATES_AHEAD] if len(self.written) >= _STATES_AHEAD else None
        naive = setup.schedule == "naive"
        before = [arrived, self.written[-1] if self.written else None] if naive else [buffer]
        read = self.add(f"read states, {unit.name}", "ssd_read", states, before)
        sent = self.add(
            f"updates to host, {unit.name}",
            "gpu_to_host",
            share.sent if on_device or share.added else 0.0,
            [arrived],
        )
        done = self.add(f"update, {unit.name}", "cpu", work, [arrived, read, buffer, sent])
        assert done is not None
        written = states + (share.returned if setup.offload_param == "nvme" else 0.0)
        stored = self.add(f"write states, {unit.name}", "ssd_write", written, [done])
        self.written.append(stored if stored is not None else done)
        self.updated[unit.name] = done
        if on_device:
            to_gpu = self.add(f"weights to GPU, {unit.name}", "host_to_gpu", share.returned, [done])
            self.gather_updated(f"gather weights, {unit.name}", share.returned, to_gpu)

    def gather_updated(self, name: str, nbytes: float, after: int | None) -> None:
        """Stages 1 and 2: every rank gets the weights that the others updated; ``nbytes``: of this rank's."""
        setup = self.problem.setup
        if setup.zero_stage in (1, 2):
            self.add(name, "network", nbytes / self.problem.shard * setup.others, [after])

    def update_alone(self, times: float, rules: Iterable[Treatment]) -> None:
        """The host's pass after everything else."""
        rules = tuple(rules)
        if not any(unit.host[rule].returned for unit in self.units for rule in rules):
            return
        start = self.add("all gradients are there", "gpu", 0.0, self.ends())
        self.written, self.updated = [], {}
        for unit in self.units:
            self.update(unit, start, times, rules)

    def ends(self) -> list[int]:
        """Tasks that nothing waits for yet."""
        awaited = {before for task in self.tasks for before in task.after}
        return [index for index in range(len(self.tasks)) if index not in awaited]

    def update_on_gpu(self) -> None:
        """Add the optimizer's pass on the GPU and the return of its weights."""
        setup, problem = self.problem.setup, self.problem
        weights, work = updated_on_device(problem), update_work(problem)
        if not work.any():
            return
        seconds = problem.machine.overheads.update * device_seconds(problem, work)
        start = self.ends()
        if setup.offload_param == "none":
            done = self.add("update", "gpu", 0.0, start, extra=seconds)
            self.gather_updated("gather weights", weights, done)
            return
        read = setup.offload_param == "nvme"
        for unit in self.units:  # the next one comes, and the last goes, while one is updated
            own, brought = weights * unit.share, float(problem.updates_bring_weights)
            comes = self.chain(
                unit,
                (
                    ("read weights", "ssd_read", own * brought * read),
                    ("weights to GPU", "host_to_gpu", own * brought),
                ),
                start,
            )
            extra = seconds * unit.share
            done = self.add(f"update, {unit.name}", "gpu", 0.0, [*start, comes], extra=extra)
            goes = (
                ("weights to host", "gpu_to_host", own),
                ("write weights", "ssd_write", own * read),
            )
            self.chain(unit, goes, [done])
