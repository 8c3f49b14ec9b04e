"""A plan as a picture: who works when, and what the GPU holds meanwhile. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from hmt_deepspeed.planner.timeline.simulate import Simulation

__all__ = ["draw"]

_ORDER = ("gpu", "host_to_gpu", "gpu_to_host", "network", "ssd_read", "ssd_write", "cpu")
_COLOURS = {  # first word of a task's name
    "forward": "tab:blue",
    "backward": "tab:orange",
    "swap": "tab:green",
    "read": "tab:purple",
    "write": "tab:brown",
    "update": "tab:red",
    "gradients": "tab:pink",
    "reduce": "tab:pink",
}
_OTHER = "tab:gray"  # weights on their way


def draw(simulation: Simulation, path: str | Path, *, gpu_limit: float, title: str) -> None:
    """Write the picture; its kind follows from the file's suffix.

    Args:
        gpu_limit: bytes, drawn as a line over the memory.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"--picture {path} needs matplotlib, which is not installed. pip install matplotlib, or leave "
            "--picture out."
        ) from error
    spans = [span for span in simulation.timeline.spans if span.end > span.start]
    resources = [name for name in _ORDER if any(span.task.resource == name for span in spans)]
    figure = Figure(figsize=(12, 2.5 + 0.5 * len(resources)), layout="constrained")
    work, memory = figure.subplots(2, 1, sharex=True, height_ratios=[max(2, len(resources)), 2])
    drawn: set[str] = set()
    for row, resource in enumerate(reversed(resources)):
        of_kind: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.task.resource == resource:
                word = span.task.name.replace(",", " ").split()[0]
                kind = word if word in _COLOURS else "weights"
                of_kind.setdefault(kind, []).append((span.start, span.end - span.start))
        for kind, bars in of_kind.items():
            label = None if kind in drawn else kind
            drawn.add(kind)
            work.broken_barh(
                bars, (row - 0.4, 0.8), facecolors=_COLOURS.get(kind, _OTHER), label=label
            )
    work.set_yticks(range(len(resources)), [name.replace("_", " ") for name in reversed(resources)])
    work.set_title(title)
    work.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)

    times, held = zip(
        *simulation.gpu_memory, (simulation.seconds, simulation.gpu_memory[-1][1]), strict=True
    )
    memory.step(times, [size / 2**30 for size in held], where="post", color="tab:blue")
    memory.axhline(gpu_limit / 2**30, color="tab:red", linestyle="--", label="limit")
    memory.set_ylim(bottom=0)
    memory.set_xlabel("seconds of an iteration")
    memory.set_ylabel("GPU, GiB")
    memory.legend(loc="lower left", frameon=False)
    figure.savefig(path, dpi=120)
