"""Prints advice and plans as text and tables, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from hmt_deepspeed.planner.advise.advise import Advice, Answer
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.shapes import ModelShape, num_parameters, parameters
from hmt_deepspeed.planner.run.host import what_rounding_takes
from hmt_deepspeed.planner.run.loads import MEMORIES
from hmt_deepspeed.planner.solve.cost import RESOURCES, Estimate
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["describe", "describe_plan", "rough_estimates"]

_GIB = 2**30
_WIDTH = 80
_LISTED = 8  # setups of a kind that are listed
_PER_RANK = "Memory is in GiB per rank, at its peak."
_HEAD = ("tokens/s", "MFU", "GPU", "host", "SSD", "setup")


def describe(advice: Advice) -> str:
    """The whole answer: what was tried, whether it fits, what it takes, how fast it is."""
    request, best = advice.request, advice.best
    gpus = f"{request.machine.num_gpus} GPU" + "s" * (request.machine.num_gpus > 1)
    lines = [
        f"{request.shape.family}, {num_parameters(request.shape):,} parameters{_active(request.shape)}",
        f"on {request.machine.name} with {gpus}: micro-batch {request.micro_batch} x "
        f"{request.seq_length:,} tokens, accumulation {request.accumulation}",
        *rough_estimates(request.shape),
    ]
    lines = [*map(_wrapped, lines), "", *_setups(advice.answers), ""]
    if best.plan is None:
        return "\n".join([*lines, *map(_wrapped, _what_to_change(advice))])
    lines.append(_wrapped(f"It fits. Recommended{_why(advice)}: {best.name}."))
    lines += map(_wrapped, _others(advice))
    lines += ["", describe_plan(best.plan, best.estimate, _has_choices(request.shape)), ""]
    lines += map(_wrapped, [*_speed(best), *_room(advice)])
    return "\n".join(lines)


def describe_plan(plan: Plan, found: Estimate, has_choices: bool = True) -> str:
    """Choices where there are any, memory by kind, seconds by resource."""
    parts = [_memory(found), _times(found)]
    if has_choices:
        parts.insert(0, _choices(plan))
    return "\n\n".join(parts)


def _choices(plan: Plan) -> str:
    rows: list[tuple[str, str]] = [
        (component, ", ".join(f"{choice} x {number}" for choice, number in counts.items()))
        for component, counts in plan.counts().items()
    ]
    if plan.partition_activations:
        rows.append(("layers' inputs", "partitioned over model-parallel ranks"))
    told = "What becomes of activations between forward and backward:"
    return f"{told}\n{_table(('component', 'choice x layers'), rows)}"


def _memory(found: Estimate) -> str:
    """A kind a row, largest first; what would show as 0.00 is left out."""
    unit, scale = ("GiB", _GIB) if max(map(found.peak, MEMORIES)) >= _GIB else ("MiB", 2**20)
    rows = []
    for name in MEMORIES:
        kinds = sorted(found.memory[name].items(), key=lambda item: -item[1])
        sizes = [(kind, f"{size / scale:,.2f}") for kind, size in kinds]
        rows += [(name, *row) for row in sizes if row[1] != "0.00"]
        if found.peak(name):
            room = f"all, of {getattr(found.budget, name) / scale:,.2f}"
            rows.append((name, room, f"{found.peak(name) / scale:,.2f}"))
    table = _table(("memory", "kind", unit), rows)
    return f"Memory per rank, at its peak.\n{table}"


def _times(found: Estimate) -> str:
    """A phase a column, what it takes of each resource a row."""
    phases = found.phases
    rows = [
        ("times in an iteration", [phase.weight for phase in phases]),
        ("seconds of each", [phase.seconds for phase in phases]),
        *((f"  {name}", [phase.by_resource[name] for phase in phases]) for name in RESOURCES),
        ("  fill and drain", [phase.fill for phase in phases]),
    ]
    head = ("phase", *(phase.name for phase in phases))
    cells = [(name, *(f"{value:.3g}" for value in values)) for name, values in rows if any(values)]
    told = (
        "A phase takes as long as its busiest resource, beside which the others work, and as the first and last "
        "layers take to fill and drain the pipeline."
    )
    return f"{_wrapped(told, '')}\n{_table(head, cells)}"


def _has_choices(shape: ModelShape) -> bool:
    return not isinstance(shape, ListedShape) or shape.is_managed


def _active(shape: ModelShape) -> str:
    """Parameters of a mixture of experts that one token meets."""
    if not isinstance(shape, ListedShape) or shape.active == num_parameters(shape):
        return ""
    return f" ({shape.active:,} of them for each token)"


_ABOVE_PEAK = (
    "MFU counts the FLOPs of ordinary training. A projected backward computes up to a third less, so MFU may pass "
    "100 %; HFU, of what is computed, does not."
)


def rough_estimates(shape: ModelShape) -> list[str]:
    """Lines about them, of an architecture without a row; none of one with a row."""
    if not isinstance(shape, ListedShape):
        return []
    head = "no row for this architecture: read from the model itself. Parameters and states are exact; rough are"
    return [head, *(f"  {text}" for text in shape.coarse)]


def _speed(answer: Answer) -> list[str]:
    plan, found = answer.plan, answer.estimate
    assert plan is not None
    scale = (
        found.seconds / plan.seconds
    )  # 1, or the closed form's error where the simulator is believed
    said = f"by the closed form, within {plan.gap:.2%} of any plan"
    if plan.source == "simulator":  # few layers, layers that differ much, or every resource full
        said = f"by the simulator; the closed form, {found.seconds:.4g} s, does not hold here"
    lines = [
        f"iteration {plan.seconds:.4g} s {said}; bottleneck: {found.bottleneck}",
        f"{answer.tokens_per_second:,.0f} tokens/s, {found.tflops * scale:.1f} TFLOPS per GPU, MFU "
        f"{found.mfu * scale:.1%}, HFU {found.hfu * scale:.1%}",
    ]
    if answer.cost_per_million_tokens is not None:
        lines.append(f"a million tokens cost {answer.cost_per_million_tokens:.3g}")
    if line := _rounding(answer):
        lines.append(line)
    if found.ssd_written:
        lines.append(
            f"SSDs: {answer.ssd_bytes_per_day / 1e12:.3g} TB written per day" + _wear(answer)
        )
    return lines


def _rounding(answer: Answer) -> str:
    """What page-locking the weights takes beyond their bytes, which is not in the table."""
    problem = answer.problem
    if problem.setup.offload_param != "cpu":
        return ""
    work = problem.workload
    parts = ((-(-p.numel // problem.setup.ranks), p.count) for p in parameters(work.shape))
    sizes = (work.itemsize * part for part, count in parts for _ in range(count))
    return what_rounding_takes(sizes, {})


def _wear(answer: Answer) -> str:
    machine = answer.problem.machine
    if machine.ssd_endurance is None:
        return ""
    days = machine.ssd_endurance * machine.num_ssds / answer.ssd_bytes_per_day
    return f", worn out after {days:,.0f} days"


def _room(advice: Advice) -> list[str]:
    """Lines about the room that the recommended setup leaves."""
    lines = [
        f"longest sequence at this micro-batch: {advice.longest_sequence:,} tokens",
        f"largest micro-batch at this sequence: {advice.largest_batch}",
    ]
    ranks = advice.best.problem.setup.ranks
    shared = "" if ranks == 1 else f", shared by {ranks} ranks"
    if advice.longest_in_chunks:
        lines.append(
            f"longest sequence in chunks (hmt.fpdt){shared}: {advice.longest_in_chunks:,} tokens"
        )
    return lines


def _setups(answers: Sequence[Answer]) -> list[str]:
    """The fastest that fit, exact and lossy ones by themselves, and of the others those that are closest."""
    fitting = [answer for answer in answers if answer.plan is not None]
    groups = {
        "Exact setups (masters, states and saved activations as the method has them), fastest first:": [
            answer for answer in fitting if not answer.is_lossy
        ],
        "Lossy setups (masters, states, weights or saved activations with fewer bits), fastest first:": [
            answer for answer in fitting if answer.is_lossy
        ],
        "Setups that do not fit, closest first:": answers[len(fitting) :],
    }
    lines = [_PER_RANK]
    for title, found in groups.items():
        if found:
            rows = [line for answer in found[:_LISTED] for line in _row(answer)]
            lines += ["", _wrapped(title), _numbers(*_HEAD), *rows]
        if len(found) > _LISTED:
            lines.append(f"  ... and {len(found) - _LISTED} more")
    if any(_mfu(answer) > 1 for answer in fitting):
        lines += ["", _wrapped(_ABOVE_PEAK, "")]
    return lines


def _row(answer: Answer) -> list[str]:
    """Numbers, and the name in as many lines as it takes beside them."""
    if answer.plan is None:
        speed, name = ("-", "-"), f"too much {', '.join(answer.estimate.excess())}: {answer.name}"
    else:
        speed, name = (f"{answer.tokens_per_second:,.0f}", f"{_mfu(answer):.1%}"), answer.name
    peaks = (f"{answer.estimate.peak(memory) / _GIB:,.1f}" for memory in MEMORIES)
    numbers = _numbers(*speed, *peaks)
    hanging = " " * (len(numbers) + 2)
    return textwrap.wrap(
        name, _WIDTH, initial_indent=numbers, subsequent_indent=hanging, break_on_hyphens=False
    )


def _numbers(*cells: str) -> str:
    widths = (8, 7, 8, 8, 8)
    found = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
    return "".join(found) + "  " + "".join(cells[len(widths) :])


def _mfu(answer: Answer) -> float:
    """MFU by the seconds to believe."""
    assert answer.plan is not None
    return answer.estimate.mfu * answer.estimate.seconds / answer.plan.seconds


def _why(advice: Advice) -> str:
    """The rule by which one was chosen."""
    request, best = advice.request, advice.best
    size = best.problem.setup.accumulation
    larger = "" if size == request.accumulation else f"; --global_batch {size * _each(request)}"
    if best is advice.plain:
        if request.fixes_lossy:
            return " (the fastest with this policy whose states and weights are exact)"
        return " (the fastest exact one)"
    if request.recommend == "fastest":
        return f" (the fastest of all: --lossy{larger})"
    if not best.is_lossy:
        return f" (exact{larger})"
    told = "no exact setup fits" if advice.plain is None else "three times as fast as exact ones"
    return f" (lossy: {told}{larger})"


def _others(advice: Advice) -> list[str]:
    """Lines about what another option would recommend."""
    found = []
    if advice.plain is not None and advice.plain is not advice.best:
        found.append(("Exact, in steps as asked for", advice.plain, "--lossy never"))
    if advice.faster is not None:
        found.append(("Faster, but lossy", advice.faster, "--lossy"))
    if (larger := advice.faster_in_larger_steps) is not None:
        size = larger.problem.setup.accumulation * _each(advice.request)
        option = f"--global_batch {size}" + " --lossy" * larger.is_lossy
        found.append(("Faster, in larger steps", larger, option))
    return [
        f"{how}: {answer.name}, {answer.tokens_per_second:,.0f} tokens/s. It is recommended, and written by "
        f"--write, with {option}."
        for how, answer, option in found
    ]


def _each(request: Request) -> int:
    """Sequences of a micro-step of all ranks."""
    return request.micro_batch * request.machine.num_gpus


def _what_to_change(advice: Advice) -> list[str]:
    """The closest setup's overflow, and each single change that would make it fit."""
    best, request = advice.best, advice.request
    over = best.estimate.excess()
    lines = [f"It does not fit. Closest: {best.name}, of whose most frugal plan too much is:"]
    lines += [
        f"  {name}: {size / _GIB:.2f} GiB over {getattr(best.problem.budget, name) / _GIB:.2f}"
        for name, size in over.items()
    ]
    kinds = sorted(best.estimate.memory["gpu"].items(), key=lambda item: -item[1])[:3]
    lines.append(
        "largest on the GPU: " + ", ".join(f"{kind} {size / _GIB:.2f} GiB" for kind, size in kinds)
    )
    lines.append("Any one of these would do:")
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
    if request.recommend != "fastest":
        changes.append("--lossy, if int8 activations are acceptable")
    return [*lines, *(f"  {change}" for change in changes)]


def _wrapped(text: str, indent: str = "  ") -> str:
    """In lines that end between words; the first keeps its own indent."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of numbers to the right, all others to the left."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
