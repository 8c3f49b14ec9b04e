"""Draws a plan: when each resource works, and the GPU's memory. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from hmt_deepspeed.planner.timeline.simulate import Simulation

__all__ = ["draw", "require_matplotlib"]

_ROWS = {  # resource -> what it is called, from the top
    "gpu": "GPU",
    "host_to_gpu": "host to GPU",
    "gpu_to_host": "GPU to host",
    "network": "network",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
    "cpu": "CPU",
}
_KINDS = {  # first word of a task's name -> what it is called, and its colour
    "forward": ("forward", "tab:blue"),
    "backward": ("backward", "tab:orange"),
    "update": ("update", "tab:red"),
    "gradients": ("gradients", "tab:pink"),
    "reduce": ("gradients", "tab:pink"),
    "swap": ("activations", "tab:green"),
    "read": ("read from SSD", "tab:purple"),
    "write": ("written to SSD", "tab:brown"),
}
_OTHER = ("weights", "tab:gray")  # on their way
_LEGEND = "gaps are idle,\npale is busy part of the time"


def require_matplotlib(path: str | Path) -> None:
    """
    Raises:
        ValueError: matplotlib is not installed, without which there is no picture at ``path``.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--picture {path} needs matplotlib, which is not installed. pip install matplotlib, or leave "
            "--picture out."
        ) from error


def draw(simulation: Simulation, path: str | Path, *, gpu_limit: float, title: str) -> None:
    """Write the picture; its kind follows from the file's suffix.

    Args:
        gpu_limit: bytes, drawn as a line over the memory.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib(path)
    from matplotlib.figure import Figure

    spans = [span for span in simulation.timeline.spans if span.end > span.start]
    resources = [name for name in _ROWS if any(span.task.resource == name for span in spans)]
    figure = Figure(figsize=(12, 3 + 0.5 * len(resources)), layout="constrained")
    work, memory = figure.subplots(2, 1, sharex=True, height_ratios=[max(2, len(resources)), 2])
    bars: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {
        kind: {} for kind in [*_KINDS.values(), _OTHER]
    }
    for span in spans:
        kind = _KINDS.get(span.task.name.replace(",", " ").split()[0], _OTHER)
        places = bars[kind].setdefault(resources.index(span.task.resource), [])
        places.append((span.start, span.end - span.start))
    for (label, colour), rows in bars.items():
        for row, places in rows.items():
            # Not snapped to pixels: what is thinner than one shows as the share of time that it fills.
            work.broken_barh(places, (row - 0.4, 0.8), facecolors=colour, linewidth=0, snap=False)
        if rows:
            work.bar(0, 0, color=colour, label=label)
    work.set_yticks(range(len(resources)), [_ROWS[name] for name in resources])
    work.set_ylim(len(resources) - 0.5, -0.5)
    work.set_title(title)
    work.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, title=_LEGEND)

    times, held = zip(
        *simulation.gpu_memory, (simulation.seconds, simulation.gpu_memory[-1][1]), strict=True
    )
    memory.step(
        times, [size / 2**30 for size in held], where="post", color="tab:blue", label="held"
    )
    limit = f"limit, {gpu_limit / 2**30:.1f} GiB"
    memory.axhline(gpu_limit / 2**30, color="tab:red", linestyle="--", label=limit)
    memory.set_ylim(bottom=0)
    memory.set_xlim(0, simulation.seconds)
    memory.set_xlabel("seconds of an iteration")
    memory.set_ylabel("GPU memory, GiB")
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
