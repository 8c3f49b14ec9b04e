"""Pictures of runs as SVG: one function each, which answers None where no run has the numbers for it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hmt_deepspeed.report.drawing import (
    COLOURS,
    by_part,
    bytes_unit,
    colour_of,
    coloured,
    label_runs,
    label_steps,
    legend_once,
    median_of,
    new_figure,
    unit_of,
)
from hmt_deepspeed.report.heat_maps import energies, ranks
from hmt_deepspeed.report.phases import PHASES
from hmt_deepspeed.report.runs import Run
from hmt_deepspeed.report.timeline import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "Plot", "check_matplotlib", "draw"]

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "hmt-report",  # the same runs give the same file
}
_MEMORY = {
    "weight_bytes": "weights",
    "master_weight_bytes": "fp32 masters",
    "optimizer_state_bytes": "moments and bases",
    "gradient_buffer_bytes": "gradients, at most",
    "activation_bytes": "activations, at most",
}
_PATHS = {
    "bytes_to_host": "device to host",
    "bytes_from_host": "host to device",
    "bytes_to_ssd": "host to SSD",
    "bytes_from_ssd": "SSD to host",
    "communication_bytes_per_step": "sent to other ranks",
}
_PHASE_COLOURS = {  # none of them a run's
    "forward": "#bcd9ea",
    "backward": "#f3cbb0",
    "reduce": "#e3c4d8",
    "optimizer": "#b5dccf",
    "other": "#d9d9d9",
}


class Plot(NamedTuple):
    """title, text: of its section; draw: see :func:`draw`."""

    name: str
    title: str
    text: str
    draw: Callable[[Sequence[Run]], Figure | None]


def check_matplotlib() -> None:
    """Raises ValueError where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "hmt-report draws with matplotlib, which is not installed: pip install 'hmt_deepspeed[report]', or "
            "pip install matplotlib"
        ) from error


def draw(plot: Plot, runs: Sequence[Run]) -> str | None:
    """The picture as SVG text; None where no run has the numbers."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure = plot.draw(runs)
        if figure is None:
            return None
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _planned(runs: Sequence[Run]) -> Figure | None:
    """Measured over predicted, a bar a quantity; the line is a plan that was right."""
    having = []
    for run, colour in coloured(runs):
        found = {
            name: row["measured"] / row["predicted"]
            for name, row in run.planned().items()
            if row["predicted"] and row["measured"] is not None
        }
        having += [(run, colour, found)] if found else []
    if not having:
        return None
    names = list(dict.fromkeys(name for *_, found in having for name in found))
    figure, (axis,) = new_figure(1, 1, 1.2 + 0.25 * len(names) * len(having))
    thickness = 0.8 / len(having)
    for number, (run, colour, found) in enumerate(having):
        own = [(i, found[name]) for i, name in enumerate(names) if name in found]
        places = [i + (number - (len(having) - 1) / 2) * thickness for i, _ in own]
        drawn = axis.barh(
            places, [v for _, v in own], thickness * 0.9, color=colour, label=run.name
        )
        axis.bar_label(drawn, fmt="{:.2f}", padding=3, fontsize=8)
    axis.axvline(1.0, color="#222222", linewidth=1)
    axis.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="measured / predicted")
    axis.margins(x=0.1)
    if len(having) > 1:
        axis.legend()
    return figure


# -- by steps ---------------------------------------------------------------------------------------


def _learning(runs: Sequence[Run]) -> Figure | None:
    panels = {
        "loss": "loss, nats per token",
        "lr": "learning rate",
        "grad_norm": "norm of the gradient",
    }
    panels = {n: label for n, label in panels.items() if any(run.series(n)[0] for run in runs)}
    figure, axes = new_figure(1, len(panels), 2.9)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for number, (run, colour) in enumerate(coloured(runs)):
            width = 1 + 0.8 * (len(runs) - 1 - number)  # runs that coincide stay visible
            axis.plot(*run.series(name), color=colour, linewidth=width, label=run.name)
            if name == "loss":
                axis.plot(*run.series("eval_loss"), "o", color=colour, markersize=4 + width)
        label_steps(axis, ylabel=label)
        axis.margins(y=0.08)
    axes[0].plot([], [], "o", color="#666666", label="held out")
    axes[0].legend()
    return figure


def _memory(runs: Sequence[Run]) -> Figure | None:
    """Of device and host; on a CPU they are one."""
    unit, scale = bytes_unit(runs, ["peak_device_bytes", "peak_host_bytes"])
    devices = sorted({str(run.records[-1].get("device")) for run in runs})
    places = {"device": f"device: {', '.join(devices)}", "host": "host: memory of this process"}
    if all(device.startswith("cpu") for device in devices):
        places = {"device": "no GPU: memory of the process (RSS)"}
    figure, axes = new_figure(1, len(places), 2.9, sharey=True)
    for axis, (place, title) in zip(axes, places.items(), strict=True):
        for run, colour in coloured(runs):
            for name, style in ((f"{place}_bytes", "-"), (f"peak_{place}_bytes", ":")):
                steps, values = run.series(name)
                label = run.name if style == "-" else None
                axis.plot(steps, [v / scale for v in values], style, color=colour, label=label)
        label_steps(axis, title=title)
    axes[0].set_ylabel(unit)
    axes[0].set_ylim(0, None)  # last: the axes share it, and what is set is no longer fitted
    axes[0].plot([], [], ":", color="#666666", label="peak so far")
    axes[0].legend(loc="lower right")
    return figure


def _memory_by_kind(runs: Sequence[Run]) -> Figure | None:
    having = [run for run in runs if run.last("weight_bytes")]
    if not having:
        return None
    unit, scale = bytes_unit(having, list(_MEMORY), together=True)
    figure, axes = new_figure(1, len(having), 3.0, sharey=True)
    for axis, run in zip(axes, having, strict=True):
        steps = run.series("weight_bytes")[0]
        layers = {text: run.series(name) for name, text in _MEMORY.items()}
        layers = {text: found for text, found in layers.items() if found[0] == steps}
        values = [[v / scale for v in found[1]] for found in layers.values()]
        colours = [COLOURS[list(_MEMORY.values()).index(text)] for text in layers]
        axis.stackplot(steps, values, labels=list(layers), colors=colours, alpha=0.85)
        label_steps(axis, title=run.name)
        axis.margins(x=0)
    axes[0].set_ylabel(unit)
    axes[0].set_ylim(0, None)
    named: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    shown = [text for text in _MEMORY.values() if text in named][::-1]
    figure.legend([named[text] for text in shown], shown, loc="outside right center")
    return figure


def _activations(runs: Sequence[Run]) -> Figure | None:
    held = {run.name: by_part(run, "activation_bytes_per_component") for run in runs}
    having = [run for run in runs if held[run.name]]
    if not having:
        return None
    figure, axes = new_figure(1, 1, 1.7 + 0.4 * len(having))
    unit, scale = unit_of(max(v[-1] for run in having for _, v in held[run.name].values()))
    parts = list(dict.fromkeys(part for run in having for part in held[run.name]))
    for number, run in enumerate(having):
        left = 0.0
        for part in parts:
            size = held[run.name].get(part, ([], [0.0]))[1][-1] / scale
            label, colour = part.replace("_", " "), colour_of(parts, part)
            axes[0].barh(number, size, left=left, color=colour, label=label)
            left += size
    axes[0].set(xlabel=f"{unit} between forward and backward")
    label_runs(axes[0], having)
    legend_once(figure, axes[0])
    return figure


# -- time and bytes ---------------------------------------------------------------------------------


def _phases(runs: Sequence[Run]) -> Figure | None:
    having = [run for run in runs if run.last("forward_seconds") is not None]
    if not having:
        return None
    figure, (bars, lines) = new_figure(1, 2, 1.9 + 0.35 * max(len(having), 2), width_ratios=[3, 2])
    for number, run in enumerate(having):
        seconds = {phase: median_of(run, f"{phase}_seconds") for phase in PHASES}
        seconds["other"] = max(median_of(run, "step_seconds") - sum(seconds.values()), 0.0)
        left = 0.0
        for part, colour in _PHASE_COLOURS.items():
            bars.barh(number, seconds[part], left=left, color=colour, label=part)
            left += seconds[part]
    label_runs(bars, having)
    bars.set(xlabel="seconds of the median step")
    legend_once(figure, bars)
    for run, colour in coloured(runs):
        lines.plot(*run.series("step_seconds"), color=colour, linewidth=1, label=run.name)
    label_steps(lines, ylabel="seconds of the step", ylim=(0, None))
    if len(runs) > 1:
        lines.legend(loc="best")
    return figure


def _bytes_moved(runs: Sequence[Run]) -> Figure | None:
    moved = {run.name: {path: median_of(run, path) for path in _PATHS} for run in runs}
    paths = [path for path in _PATHS if any(sizes[path] for sizes in moved.values())]
    if not paths:
        return None
    unit, scale = unit_of(max(max(sizes.values()) for sizes in moved.values()))
    figure, (axis,) = new_figure(1, 1, 1.3 + 0.3 * len(paths) * len(runs))
    thickness = 0.8 / len(runs)
    for number, (run, colour) in enumerate(coloured(runs)):
        places = [i + (number - (len(runs) - 1) / 2) * thickness for i in range(len(paths))]
        sizes = [moved[run.name][path] / scale for path in paths]
        drawn = axis.barh(places, sizes, thickness * 0.9, color=colour, label=run.name)
        texts = [f"{size:.1f}" if size else "" for size in sizes]
        axis.bar_label(drawn, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(paths)), [_PATHS[path] for path in paths])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=f"{unit} of the median step, rank 0")
    axis.margins(x=0.1)
    if len(runs) > 1:
        axis.legend(loc="best")
    return figure


def _timeline(runs: Sequence[Run]) -> Figure | None:
    traced = [(run, run.trace) for run in runs if run.trace is not None]
    if not traced:
        return None
    heights = [len(trace.rows) + 1.0 for _, trace in traced]
    figure, axes = new_figure(len(traced), 1, 0.35 * sum(heights) + 1.0, height_ratios=heights)
    palette = {phase: _PHASE_COLOURS[phase] for phase in ("forward", "backward", "optimizer")}
    palette |= zip(KINDS, (*COLOURS[:4], "#999999"), strict=True)
    used: set[str] = set()
    for axis, (run, trace) in zip(axes, traced, strict=True):
        for number, bars in enumerate(trace.rows.values()):
            for kind in palette:
                spans = [(b.begin, b.end - b.begin) for b in bars if b.kind == kind]
                used |= {kind} if spans else set()
                axis.broken_barh(spans, (number - 0.4, 0.8), facecolors=palette[kind])
        axis.set_yticks(range(len(trace.rows)), list(trace.rows))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(title=run.name, xlabel="seconds of the step", xlim=(0, trace.seconds))
    from matplotlib.patches import Patch

    shown = [Patch(color=palette[kind], label=kind) for kind in palette if kind in used]
    figure.legend(handles=shown, loc="outside right center")
    return figure


PLOTS = (
    Plot(
        "planned",
        "Predicted and measured",
        "What the plan said before the run, and what the run measured. Bars right of the line: more than it said.",
        _planned,
    ),
    Plot(
        "learning",
        "Loss, learning rate, gradient norm",
        "Lines: each step's training loss on its whole batch; dots: loss on held-out rows.",
        _learning,
    ),
    Plot(
        "memory",
        "Memory over time",
        "Rank 0's, after each step, and the highest value so far (dotted).",
        _memory,
    ),
    Plot(
        "kinds",
        "Memory by kind",
        "What rank 0 holds for the model, counted tensor by tensor. Gradients and activations are the "
        "most that was alive at once in a step.",
        _memory_by_kind,
    ),
    Plot(
        "ranks",
        "Rank of every matrix",
        "A row is a matrix; those of one kind stand together, first layer on top. A colour holds until the next "
        "record, some steps later.",
        ranks,
    ),
    Plot(
        "energies",
        "Captured energy of every matrix",
        "Share of the gradient's squared norm inside the basis, smoothed over recent steps; rows as above. Until its "
        "first basis comes from a gradient, a matrix has a random one, which captures about rank / width.",
        energies,
    ),
    Plot(
        "phases",
        "Time of a step",
        "Left: medians over all steps but the first; reduce is what backward did not hide of it, other is data, "
        "logging and what lies between the phases. Right: whole steps.",
        _phases,
    ),
    Plot(
        "bytes",
        "Bytes moved in a step",
        "By path, counted where copies and collectives are started. Parameters that DeepSpeed itself "
        "offloads are not counted.",
        _bytes_moved,
    ),
    Plot(
        "activations",
        "Activations",
        "What rank 0 held for backward in its last step, by component of the decoder layers, and around them.",
        _activations,
    ),
    Plot(
        "timeline",
        "Timeline of one step",
        "From the profiler's trace (--trace): the loop's phases, then every CPU thread and GPU stream. "
        "Gaps are idle.",
        _timeline,
    ),
)
