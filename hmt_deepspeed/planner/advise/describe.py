"""Advice and plans in words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hmt_deepspeed.planner.advise.advise import Advice, Answer
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.shapes import ModelShape, num_parameters
from hmt_deepspeed.planner.run.loads import MEMORIES
from hmt_deepspeed.planner.solve.cost import RESOURCES, Estimate
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["describe", "describe_plan"]

_GIB = 2**30
_CLOSEST = 8  # setups that do not fit and are listed all the same


def describe(advice: Advice) -> str:
    """The whole answer: whether it fits, what it takes, how fast it is, what else was tried."""
    request, best = advice.request, advice.best
    lines = [
        f"{request.shape.family}, {num_parameters(request.shape):,} parameters{_active(request.shape)}, on {request.machine.name} "
        f"with {request.machine.num_gpus} GPU(s): micro-batch {request.micro_batch} x {request.seq_length} tokens, "
        f"accumulation {request.accumulation}",
        *_coarse(request.shape),
        "",
        "setups, fastest first; exact: masters, states and saved activations as the method has them, lossy: some "
        "of them with fewer bits:",
        _setups(advice.answers),
        "",
    ]
    if best.plan is None:
        return "\n".join([*lines, *_what_to_change(advice)])
    lines.append(f"fits. Recommended: {best.name}{_why(advice)}")
    if advice.faster:
        first = advice.faster[0]
        lines.append(
            f"Faster, but lossy: {first.name}, {first.tokens_per_second:,.0f} tokens/s. It is recommended, and "
            "written by --write, with --lossy."
        )
    lines.append(describe_plan(best.plan, best.estimate, _has_choices(request.shape)))
    lines.append(_speed(best))
    lines.append(
        f"longest sequence at this micro-batch: {advice.longest_sequence}; largest micro-batch at this sequence: "
        f"{advice.largest_batch}"
    )
    ranks = best.problem.setup.ranks
    shared = "" if ranks == 1 else f", shared by {ranks} ranks"
    if advice.longest_in_chunks:
        lines.append(f"longest sequence in chunks (hmt.fpdt){shared}: {advice.longest_in_chunks:,}")
    return "\n".join(lines)


def describe_plan(plan: Plan, found: Estimate, has_choices: bool = True) -> str:
    """Choices where there are any, memory by kind, seconds by resource."""
    choices: list[tuple[str, str]] = [
        (component, ", ".join(f"{choice} x {number}" for choice, number in counts.items()))
        for component, counts in plan.counts().items()
    ]
    if plan.partition_activations:
        choices.append(("layers' inputs", "partitioned over model-parallel ranks"))
    memory = [
        (name, kind, f"{size / _GIB:.2f}")
        for name in MEMORIES
        for kind, size in found.memory[name].items()
        if size
    ]
    for name in MEMORIES:
        room = getattr(found.budget, name) / _GIB
        memory.append((name, f"peak, of {room:.2f}", f"{found.peak(name) / _GIB:.2f}"))
    busy = [
        resource for resource in RESOURCES if any(p.by_resource[resource] for p in found.phases)
    ]
    times = [
        (
            f"{phase.name} x {phase.weight:g}",
            f"{phase.seconds:.3g}",
            phase.bottleneck,
            *(f"{phase.by_resource[resource]:.3g}" for resource in busy),
            f"{phase.fill:.2g}",
        )
        for phase in found.phases
    ]
    head = ("phase", "s", "bottleneck", *busy, "fill")
    return "\n\n".join(
        (
            *([_table(("component", "choice x layers"), choices)] if has_choices else []),
            _table(("memory", "kind", "GiB"), sorted(memory)),
            _table(head, times),
        )
    )


def _has_choices(shape: ModelShape) -> bool:
    return not isinstance(shape, ListedShape) or shape.is_managed


def _active(shape: ModelShape) -> str:
    """Of a mixture of experts, what one token meets."""
    if not isinstance(shape, ListedShape) or shape.active == num_parameters(shape):
        return ""
    return f" ({shape.active:,} of them for each token)"


_ABOVE_PEAK = (
    "MFU counts the FLOPs of ordinary training. A projected backward computes up to a third less, so MFU may pass "
    "100 %; HFU, of what is computed, does not."
)


def _coarse(shape: ModelShape) -> list[str]:
    """What is estimated roughly, and how."""
    if not isinstance(shape, ListedShape):
        return []
    head = "no row for this architecture: read from the model itself. Parameters and states are exact; rough are"
    return [head, *(f"  {text}" for text in shape.coarse)]


def _speed(answer: Answer) -> str:
    plan, found = answer.plan, answer.estimate
    assert plan is not None
    scale = (
        found.seconds / plan.seconds
    )  # 1, or the closed form's error where the simulator is believed
    said = f"by the closed form, within {plan.gap:.2%} of any plan"
    if plan.source == "simulator":  # few layers, layers that differ much, or every resource full
        said = f"by the simulator; the closed form, {found.seconds:.4g} s, does not hold here"
    lines = [
        "",
        f"iteration {plan.seconds:.4g} s {said}; bottleneck: {found.bottleneck}",
        f"{answer.tokens_per_second:,.0f} tokens/s, {found.tflops * scale:.1f} TFLOPS per GPU, MFU "
        f"{found.mfu * scale:.1%}, HFU {found.hfu * scale:.1%}",
    ]
    if answer.cost_per_million_tokens is not None:
        lines.append(f"a million tokens cost {answer.cost_per_million_tokens:.3g}")
    if found.ssd_written:
        lines.append(
            f"SSDs: {answer.ssd_bytes_per_day / 1e12:.3g} TB written per day" + _wear(answer)
        )
    return "\n".join(lines)


def _wear(answer: Answer) -> str:
    machine = answer.problem.machine
    if machine.ssd_endurance is None:
        return ""
    days = machine.ssd_endurance * machine.num_ssds / answer.ssd_bytes_per_day
    return f", worn out after {days:,.0f} days"


def _setups(answers: Sequence[Answer]) -> str:
    """All that fit, and of the others those that are closest."""
    fitting = [answer for answer in answers if answer.plan is not None]
    others = answers[len(fitting) :]
    head = ("setup", "", "tokens/s", "s", "MFU", "GPU GiB", "host GiB", "SSD GiB", "")
    lines = [_table(head, map(_row, [*fitting, *others[:_CLOSEST]]))]
    if len(others) > _CLOSEST:
        lines.append(f"... and {len(others) - _CLOSEST} more that do not fit")
    if any(_mfu(answer) > 1 for answer in fitting):
        lines.append(_ABOVE_PEAK)
    return "\n".join(lines)


def _mfu(answer: Answer) -> float:
    """By the seconds to believe."""
    assert answer.plan is not None
    return answer.estimate.mfu * answer.estimate.seconds / answer.plan.seconds


def _why(advice: Advice) -> str:
    """The rule by which one was chosen."""
    if advice.request.lossy is not None:
        return " (the fastest of all: --lossy)"
    if advice.request.fixes_lossy and not advice.best.mode.is_lossy:
        return " (the fastest with this policy whose states and weights are exact)"
    if advice.best.is_lossy:
        return " (lossy: no exact setup fits)"
    return " (the fastest exact one)"


def _row(answer: Answer) -> Sequence[str]:
    found, plan = answer.estimate, answer.plan
    memory = [f"{found.peak(name) / _GIB:.1f}" for name in MEMORIES]
    kind = "lossy" if answer.is_lossy else "exact"
    if plan is None:
        return (answer.name, kind, "-", "-", "-", *memory, "too much " + ", ".join(found.excess()))
    return (
        answer.name,
        kind,
        f"{answer.tokens_per_second:,.0f}",
        f"{plan.seconds:.3g}",
        f"{_mfu(answer):.1%}",
        *memory,
        "",
    )


def _what_to_change(advice: Advice) -> list[str]:
    """The closest setup's overflow, and each single change that would make it fit."""
    best, request = advice.best, advice.request
    over = best.estimate.excess()
    lines = [f"does not fit. Closest: {best.name}, of whose most frugal plan too much is:"]
    lines += [
        f"  {name}: {size / _GIB:.2f} GiB over {getattr(best.problem.budget, name) / _GIB:.2f}"
        for name, size in over.items()
    ]
    kinds = sorted(best.estimate.memory["gpu"].items(), key=lambda item: -item[1])[:3]
    lines.append(
        "largest on the GPU: " + ", ".join(f"{kind} {size / _GIB:.2f} GiB" for kind, size in kinds)
    )
    lines.append("what would do:")
    changes = []
    if advice.largest_batch:
        changes.append(
            f"--micro_batch {advice.largest_batch} (and --global_batch for the batch you want)"
        )
    if advice.longest_sequence:
        changes.append(f"--seq_length {advice.longest_sequence}")
    if "host" in over:
        changes.append(
            f"--host_memory {best.estimate.peak('host') * request.machine.num_gpus / _GIB:.0f} GiB"
        )
    if "ssd" in over:
        changes.append("more or larger SSDs (--num_ssds)")
    if "gpu" in over:
        changes.append(
            f"a GPU of {best.estimate.peak('gpu') / _GIB + 2:.0f} GiB, or more GPUs (--num_gpus)"
        )
    if request.lossy is None:
        changes.append("--lossy, if int8 activations are acceptable")
    return [*lines, *(f"  {change}" for change in changes)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
