"""Advises before the run: whether it fits, how fast it is, what to change, and the JSON for it.

The playbook's three steps: first something that fits (ZeRO's stage, offload, HMT's mode, what becomes of
activations), then the global batch (accumulation), then the fastest of what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hmt_deepspeed.config.codecs import BLOCK_SIZE, PLACES, held_bytes, is_lossy, place_of
from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.advise.setups import (
    Request,
    host_modes,
    host_setups,
    setups,
    stock_setups,
)
from hmt_deepspeed.planner.model.listed_workload import workload_of
from hmt_deepspeed.planner.run.fpdt import longest_fpdt_sequence, runs_in_chunks
from hmt_deepspeed.planner.run.host import usual_memory
from hmt_deepspeed.planner.run.memory import MemoryBudget, OptimizerMode, Sharding, temporary_bytes
from hmt_deepspeed.planner.run.problem import Problem, RunSetup, make_problem
from hmt_deepspeed.planner.solve.cost import Estimate, estimate, ranks_per_node
from hmt_deepspeed.planner.solve.plan import Plan, uniform_plan
from hmt_deepspeed.planner.solve.solve import fits
from hmt_deepspeed.planner.timeline.best import best_plan
from hmt_deepspeed.planner.timeline.simulate import Simulation
from hmt_deepspeed.rules import DENSE

__all__ = [
    "Advice",
    "Answer",
    "advise",
    "evaluate",
    "largest_batch",
    "longest_in_chunks",
    "longest_sequence",
]

BUCKET_ELEMENTS = 50_000_000  # reduce_bucket_size of the JSON that is written
_CHECKED = 8  # the longest sequence is found to so many tokens
_STEP_TIME = 0.5  # seconds of search for each setup
_WORTHWHILE = 3  # times as fast, for which exactness or the size of a step is given up
_SPARED = 1.05  # times as long, within which nothing is on the SSDs
SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Answer:
    """One setup: its plan and how it plays, or None with what its most frugal plan overflows."""

    mode: OptimizerMode
    problem: Problem
    plan: Plan | None
    estimate: Estimate
    simulation: Simulation | None

    @property
    def is_stock(self) -> bool:
        """Whether DeepSpeed runs it without HMT: states and weights on SSD, and checkpointing of whole layers."""
        return _is_stock(self.problem.setup, self.mode)

    @property
    def name(self) -> str:
        """Short, for tables; when the update runs follows from the stage."""
        setup, mode = self.problem.setup, self.mode
        parts = [f"ZeRO-{setup.zero_stage}"]
        parts += [f"weights on {setup.offload_param}"] * (setup.offload_param != "none")
        parts += [f"vertical x {setup.accumulation}"] * setup.vertical
        if self.is_stock:
            return ", ".join([*parts, "DeepSpeed's CPU Adam, states on nvme"])
        place = setup.offload_optimizer
        if place != "none" and mode.rule.is_dense:
            parts += ["CPU Adam"] + ["states on nvme"] * (place == "nvme")
            return ", ".join(parts + ["no masters"] * (mode.master_weights == "none"))
        if place != "none":
            what = "masters" if mode.master_weights == "fp32" else "AdamW's states"
            parts.append(f"{what} on {place}")
        parts.append(mode.method + (f" r={mode.rank}" if not mode.rule.is_dense else ""))
        parts += ["no masters"] * (mode.master_weights == "none")
        parts += [f"{mode.state_dtype} states"] * (mode.state_dtype != "auto")
        parts += ["factored second moments"] * (mode.second_moment == "factored")
        parts += ["int8 weights"] * (mode.weight_dtype == "int8")
        return ", ".join(parts)

    @property
    def is_lossy(self) -> bool:
        """Whether something is rounded that need not be: states, weights without a master, activations."""
        choices = () if self.plan is None else self.plan.counts().values()
        return self.mode.is_lossy or any(is_lossy(choice) for each in choices for choice in each)

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all ranks, by the seconds to believe; 0 if it does not fit."""
        return 0.0 if self.plan is None else self.estimate.tokens / self.plan.seconds

    @property
    def ssd_bytes_per_day(self) -> float:
        """Written to the node's SSDs."""
        assert self.plan is not None
        sharing = ranks_per_node(self.problem.machine, self.problem.setup)
        return self.estimate.ssd_written * sharing * SECONDS_PER_DAY / self.plan.seconds

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the price's currency; None without a price."""
        price = self.problem.machine.price_per_hour
        return None if price is None else price / 3600 / self.tokens_per_second * 1e6


@dataclass(frozen=True)
class Advice:
    """``answers`` in the order of speed, those that do not fit last.

    Attributes:
        plain: the fastest answer that fits, is exact and has the step that was asked for; a lossy policy that the request
            fixes counts as exact. None if none does.
        best: what is recommended: ``plain``, or the fastest of all where there is none, where it is three times as fast
            or where the request asks for the fastest, of these one without SSDs that is hardly slower; or, where ``plain``
            uses SSDs, the fastest that does not, if it is faster; where nothing fits, the one that overflows least.
        longest_sequence, largest_batch: of the best setup, 0 if nothing does.
        longest_in_chunks: sequence with FPDT beside the same weights and states, shared by all ranks, every
            layer's input on the device.
    """

    request: Request
    answers: tuple[Answer, ...]
    plain: Answer | None
    best: Answer
    longest_sequence: int
    largest_batch: int
    longest_in_chunks: int

    @property
    def faster(self) -> Answer | None:
        """The fastest ahead of the recommended one that rounds, of steps of the same size."""
        size = self.best.problem.setup.accumulation
        return next((a for a in self._ahead if a.problem.setup.accumulation == size), None)

    @property
    def faster_in_larger_steps(self) -> Answer | None:
        """The fastest ahead of the recommended one of larger steps than were asked for."""
        size = self.best.problem.setup.accumulation
        return next((a for a in self._ahead if a.problem.setup.accumulation != size), None)

    @property
    def _ahead(self) -> tuple[Answer, ...]:
        return self.answers[: self.answers.index(self.best)]

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return self.best.plan is not None


def advise(request: Request) -> Advice:
    """Try every setup that runs today and rank them.

    Raises:
        ValueError: sizes, stages or places that do not go together.
    """
    answers = [
        evaluate(request.beside(mode), setup, mode)
        for mode in (*request.modes, *request.lossy_modes)
        for setup in setups(request)
        if not (mode.weight_dtype == "int8" and setup.zero_stage == 3)
    ]
    if request.cpu_adam:
        answers += [
            evaluate(request.beside(mode), setup, replace(mode, host_is_ours=True))
            for mode in host_modes(request)
            for setup in host_setups(request)
        ]
        answers += [_checkpointed(request, setup) for setup in stock_setups(request)]
    answers.sort(key=lambda a: (-a.tokens_per_second, sum(a.estimate.excess().values())))
    plain = next((a for a in answers if a.plan is not None and _is_plain(a, request)), None)
    best = _spared(answers, _recommended(answers, plain, request), request)
    limited = _as_run(request, best)
    return Advice(
        request,
        tuple(answers),
        plain,
        best,
        longest_sequence(limited, best.problem.setup, best.mode),
        largest_batch(limited, best.problem.setup, best.mode),
        longest_in_chunks(best),
    )


def _is_plain(answer: Answer, request: Request) -> bool:
    """See :attr:`Advice.plain`."""
    is_lossy = answer.mode.is_lossy if request.fixes_lossy else answer.is_lossy
    return not is_lossy and answer.problem.setup.accumulation == request.accumulation


def _recommended(answers: Sequence[Answer], plain: Answer | None, request: Request) -> Answer:
    """See :attr:`Advice.best`; ``answers`` are in order."""
    fastest = answers[0]
    if plain is None:
        return fastest
    gains = fastest.tokens_per_second > _WORTHWHILE * plain.tokens_per_second
    if request.recommend == "exact":
        return plain
    if request.recommend == "worthwhile":
        if gains:
            return fastest
        # ahead of it, and off the SSDs, which what is exact would write whole in every step
        ahead = answers[: answers.index(plain)] if _on_ssd(plain) else ()
        size = request.accumulation
        spared = (a for a in ahead if a.problem.setup.accumulation == size and not _on_ssd(a))
        return next(spared, plain)
    asked = (a for a in answers if a.problem.setup.accumulation == request.accumulation)
    best = next(asked)  # plain is one of them
    return fastest if fastest.tokens_per_second > _WORTHWHILE * best.tokens_per_second else best


def _on_ssd(answer: Answer) -> bool:
    return answer.estimate.peak("ssd") > 0


def _spared(answers: Sequence[Answer], chosen: Answer, request: Request) -> Answer:
    """What is hardly slower than the chosen one, no less plain, and keeps everything off the SSDs."""
    if chosen.plan is None or not _on_ssd(chosen):
        return chosen
    size, plain = chosen.problem.setup.accumulation, _is_plain(chosen, request)
    found = (
        a
        for a in answers
        if a.plan is not None and not _on_ssd(a)
        if a.problem.setup.accumulation == size and _is_plain(a, request) >= plain
        if _SPARED * a.tokens_per_second >= chosen.tokens_per_second
    )
    return next(found, chosen)


# Checkpointing of whole layers, as transformers does it: what enters a layer is kept. (It runs the down
# projection again too, which is not counted here.)
_CHECKPOINTED: dict[Component, Choice] = {
    **dict.fromkeys(PAPER_POLICY, "recompute"),
    "layer_input": "keep",
    "layernorm": "keep",
    "lm_head": "keep",
}


def _checkpointed(request: Request, setup: RunSetup) -> Answer:
    return evaluate(
        replace(request, lossy=None, fixed=_CHECKPOINTED), setup, OptimizerMode(method=DENSE)
    )


def _as_run(request: Request, answer: Answer) -> Request:
    """The request with the choices that an answer's engine leaves, and its step."""
    if answer.is_stock:
        request = replace(request, fixed=_CHECKPOINTED)
    return request.beside(answer.mode)


def _is_stock(setup: RunSetup, mode: OptimizerMode) -> bool:
    return setup.offload_optimizer != "none" and not mode.host_is_ours


def evaluate(request: Request, setup: RunSetup, mode: OptimizerMode) -> Answer:
    """The best plan of one setup: one whose activations stay off the SSDs, which wear out, where that is hardly slower."""
    problem = _problem(request, setup, mode)
    without_ssd = replace(request, nvme=False)
    tried = [without_ssd, request] if request.allowed != without_ssd.allowed else [request]
    best = None
    for each in tried:
        if fits(problem, each.allowed):
            found = best_plan(problem, each.allowed, time_limit=_STEP_TIME)
            if found is not None and (best is None or _SPARED * found[0].seconds < best[0].seconds):
                best = found
    if best is None:
        frugal = uniform_plan(problem.workload, problem.machine, _frugal_policy(request))
        return Answer(mode, problem, None, estimate(problem, frugal), None)
    return Answer(mode, problem, *best)


def _problem(request: Request, setup: RunSetup, mode: OptimizerMode) -> Problem:
    workload = workload_of(
        request.shape,
        micro_batch=request.micro_batch,
        seq_length=request.seq_length,
        attention="eager" if request.shape.soft_cap else "fused",
        projected=mode.backward(),
    )
    sharding = Sharding(setup.zero_stage, setup.ranks)
    temporary = temporary_bytes(workload, mode, sharding, bucket_elements=BUCKET_ELEMENTS)
    budget = MemoryBudget.of(request.machine)
    if request.gpu_memory is not None:
        if request.gpu_memory > request.machine.gpu_memory:
            raise ValueError(
                f"gpu_memory is {request.gpu_memory}; legal: up to {request.machine.gpu_memory} bytes, which is "
                f"what {request.machine.name} has. Lower it or leave it out."
            )
        budget = replace(budget, gpu=request.gpu_memory)
    setup = setup.with_buffers(temporary)
    if not _is_stock(setup, mode):
        engine = usual_memory(
            request.shape,
            setup.ranks,
            states=setup.offload_optimizer,
            weights=setup.offload_param,
            host_memory=budget.host,
        )
        setup = replace(setup, engine=engine)
    return make_problem(workload, request.machine, setup, mode, budget=budget)


def _frugal_policy(request: Request) -> dict[Component, Choice]:
    """For each component the allowed choice that holds least on the GPU."""
    return {
        component: min(given, key=_weight)
        for component, given in request.allowed.items()
        if component in PAPER_POLICY
    }


def _weight(choice: Choice) -> tuple[int, int]:
    """Key that sorts choices: device bytes of one block in 16 bits; of equals, the distance that it is moved."""
    place = place_of(choice)
    return held_bytes(choice, BLOCK_SIZE, 1, 2), 0 if place is None else 1 + PLACES.index(place)


# -- how far it goes ------------------------------------------------------------------------------------


def longest_sequence(request: Request, setup: RunSetup, mode: OptimizerMode) -> int:
    """The longest sequence that fits, by bisection to a multiple of 8 tokens; 0 if none does."""

    def holds(eighths: int) -> bool:
        return _fits(replace(request, seq_length=_CHECKED * eighths), setup, mode)

    most = request.shape.positions // _CHECKED if request.shape.positions else None
    return _CHECKED * _largest(holds, max(1, request.seq_length // _CHECKED), most)


def largest_batch(request: Request, setup: RunSetup, mode: OptimizerMode) -> int:
    """The largest micro-batch that fits, by bisection; 0 if none does."""

    def holds(batch: int) -> bool:
        return _fits(replace(request, micro_batch=batch, global_batch=None), setup, mode)

    return _largest(holds, request.micro_batch, None)


def longest_in_chunks(answer: Answer) -> int:
    """The longest sequence that all ranks can share in FPDT's chunks (``hmt.fpdt``); 0 if none does."""
    problem, held = answer.problem, answer.estimate.memory
    shape, setup = answer.problem.workload.shape, answer.problem.setup
    if not runs_in_chunks(shape):
        return 0
    # FPDT has its own in their place
    passing = ("activations", "working", "outside the layers", "staging")
    gpu, host = (
        getattr(problem.budget, name)
        - sum(n for kind, n in held[name].items() if kind not in passing)
        for name in ("gpu", "host")
    )
    return longest_fpdt_sequence(
        shape,
        int(gpu),
        int(host),
        micro_batch=problem.workload.micro_batch,
        itemsize=problem.workload.itemsize,
        sequence_parallel=setup.ranks,
    )


def _fits(request: Request, setup: RunSetup, mode: OptimizerMode) -> bool:
    return fits(_problem(request, setup, mode), request.allowed)


def _largest(holds: Callable[[int], bool], start: int, most: int | None) -> int:
    """The largest number from 1 that fits, 0 if none; what is larger than one that does not, does not."""
    low, high = 0, start
    while (most is None or high <= most) and holds(high):
        low, high = high, 2 * high
    if most is not None:
        high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
