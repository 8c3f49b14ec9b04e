"""`hmt-report`: what runs leave behind, as a page."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hmt_deepspeed.report import command, plots
from hmt_deepspeed.report.plots import PLOTS
from hmt_deepspeed.report.runs import read_runs
from hmt_deepspeed.report.timeline import read_trace

MATRICES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]


def record(step: int) -> dict[str, Any]:
    """A line as the training loop writes it; every number of a report is in one of them."""
    line: dict[str, Any] = {
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3 * step,
        "grad_norm": 1.0,
        "step_seconds": 1.0,
        "device": "cpu (process RSS)",
        "device_bytes": 3 << 20,
        "peak_device_bytes": 4 << 20,
        "host_bytes": 3 << 20,
        "peak_host_bytes": 4 << 20,
        "forward_seconds": 0.2,
        "backward_seconds": 0.4,
        "reduce_seconds": 0.1,
        "optimizer_seconds": 0.1,
        "bytes_to_host": 7 << 20,
        "communication_bytes_per_step": 0,
        "weight_bytes": 1 << 20,
        "optimizer_state_bytes": 1 << 19,
        "activation_bytes_per_component": {"residual": 1 << 20},
    }
    if step % 2:
        line["rank_per_matrix"] = dict.fromkeys(MATRICES, 4 * step)
        line["captured_energy_per_matrix"] = dict.fromkeys(MATRICES, 0.5)
    return line


def span(name: str, begin: float, seconds: float, **more: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, "pid": 1, "tid": 1}
    return {"cat": "cpu_op", **event, **more}


def trace() -> dict[str, Any]:
    """Two steps; in the last one a product for 2 s with operations inside, a gap of 1 s, a copy for 1 s."""
    note = {"cat": "user_annotation"}
    kernel = {"cat": "kernel", "tid": 7}
    events = [
        span("step", 0, 5, **note),
        span("step", 10, 5, **note),
        span("forward", 10, 2, **note),
        span("backward", 12, 2.5, **note),
        span("aten::mm", 10, 2),
        span("aten::copy_", 10.5, 1),  # within the product
        span("aten::copy_", 13, 1),
        span("ampere_bf16_gemm", 11, 3, **kernel),
        span("aten::mm", 20, 1),  # after the step
    ]
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a <run>"
    folder.mkdir()
    lines = [json.dumps(record(step)) for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {
        "steps": 4,
        "eval_loss": 1.2345,
        "step_seconds_median": 1.0,
        "peak_device_bytes": 4 << 20,
        "command": "run.py --x '<&>'",
        "config": {"zero_optimization": {"stage": 2}},
        "plan": {  # as the planner's Comparison.as_json() writes it
            "forward": {"unit": "s", "predicted": 0.5, "measured": 1.0, "error": -0.5},
            "gpu: weights": {
                "unit": "bytes",
                "predicted": 2 << 20,
                "measured": 4 << 20,
                "error": -0.5,
            },
            "busy: gpu": {
                "unit": "s",
                "predicted": 0.5,
                "measured": None,
                "error": None,
                "note": "kernels are not timed one by one",
            },
            "activations: residual": {
                "unit": "bytes",
                "predicted": 0.0,
                "measured": 0.0,
                "error": None,
            },
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "trace.json").write_text(json.dumps(trace()))
    return folder


@pytest.fixture
def other(run: Path) -> Path:
    """A run under way, without what HMT's parts tell, the last line half written."""
    folder = run.parent / "other"
    folder.mkdir()
    kept = ("step", "loss", "lr", "step_seconds", "peak_device_bytes", "device_bytes", "device")
    lines = [json.dumps({name: record(s)[name] for name in kept}) for s in range(1, 4)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    return folder


def test_the_page_shows_everything_and_needs_no_network(
    run: Path, other: Path, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    command.main([str(run), str(other), "--output", str(path)])
    page = path.read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert "&#x27;&lt;&amp;&gt;&#x27;" in page  # the command
    assert ">1.234<" in page or ">1.235<" in page
    assert "not ended or interrupted: other." in page
    assert page.count("<h1>Runs a &lt;run&gt;, other</h1>") == 1
    sections = re.findall(r"<section.*?</section>", page, re.S)
    assert all(re.search(r"<h2>\w[^<]+</h2><p>\w[^<]+\.</p>", text) for text in sections)
    numbers = {name for name, value in record(1).items() if isinstance(value, (int, float))}
    assert numbers <= set(re.findall(r'scope="row">(\w+)</th>', page))
    for plot in PLOTS:
        assert f'id="{plot.name}"' in page, plot.name
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == len(PLOTS)
    for picture in pictures:
        assert base64.b64decode(picture).lstrip().startswith(b"<?xml")
    predicted = re.search(r"gpu: weights</th><td>a &lt;run&gt;</td>(.*?)</tr>", page)
    assert predicted is not None
    assert re.findall(r"<td>(.*?)</td>", predicted[1]) == ["2.0 MiB", "4.0 MiB", "2.00"]
    untimed = re.search(r"busy: gpu</th><td>a &lt;run&gt;</td>(.*?)</tr>", page)
    assert untimed is not None
    said = ["0.5 s", "–", "kernels are not timed one by one"]
    assert re.findall(r"<td>(.*?)</td>", untimed[1]) == said


def test_every_axis_says_what_it_shows_and_in_which_unit(run: Path, other: Path) -> None:
    """Or names runs, matrices or threads at its ticks; of panels that share it the first one does."""
    units = r"step|nats|rate|norm|share|rank|second|[KM]iB|measured / predicted"
    for runs in (read_runs([run]), read_runs([run, other])):
        for plot in PLOTS:
            figure = plot.draw(runs)
            assert figure is not None
            for axis in figure.axes:
                place = axis.get_subplotspec()  # None of a bar of colours
                ticks = [text.get_text() for text in axis.get_yticklabels()]
                named = any(re.search("[a-z]", text) for text in ticks)
                if place is None or place.is_first_col():
                    assert named or re.search(units, axis.get_ylabel()), plot.name
                assert place is None or re.search(units, axis.get_xlabel()), plot.name


def test_a_run_without_hmt_gets_the_sections_that_it_has_numbers_for(other: Path) -> None:
    command.main([str(other)])
    page = (other / "report.html").read_text(encoding="utf-8")
    found = {plot.name for plot in PLOTS if f'id="{plot.name}"' in page}
    assert found == {"learning", "memory"}


@pytest.mark.parametrize(
    ("plot", "name"), [("kinds", "activation_bytes"), ("memory", "host_bytes")]
)
def test_what_a_later_run_has_more_of_is_drawn_and_named(run: Path, plot: str, name: str) -> None:
    """Runs side by side share one axis: it fits all of them, whoever comes first."""
    gpu = {"device": "cuda:0"}  # elsewhere the host's memory is the device's
    lines = [json.dumps({**record(step), **gpu}) for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    larger = run.parent / "larger"
    larger.mkdir()
    lines = [json.dumps({**record(step), **gpu, name: 64 << 20}) for step in range(1, 5)]
    (larger / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    draw = {"kinds": plots._memory_by_kind, "memory": plots._memory}[plot]
    figure = draw(read_runs([run, larger]))
    assert figure is not None
    for axis in figure.axes:
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylim()[1] >= 64
    if plot == "kinds":
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert texts == ["activations, at most", "moments and bases", "weights"]


def test_markdown_names_its_pictures(run: Path) -> None:
    command.main([str(run), "--markdown"])
    text = (run / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\(([^)]+)\)", text)
    assert len(pictures) == len(PLOTS)
    assert all((run / picture).is_file() for picture in pictures)
    assert "| loss on held-out rows, nats per token | 1.23" in text


def test_matrices_keep_their_layers_apart_and_missing_values_open(run: Path) -> None:
    (one,) = read_runs([run])
    steps, names, values = one.per_matrix("rank_per_matrix")
    assert (steps, names) == ([1, 3], MATRICES)
    assert values == [[4, 12]] * 3


def test_a_timeline_is_of_the_last_step_and_counts_no_moment_twice(run: Path) -> None:
    found = read_trace(run / "trace.json")
    assert found is not None
    assert found.seconds == 5.0
    assert list(found.rows) == ["phase", "CPU thread", "GPU stream"]
    assert [bar.kind for bar in found.rows["phase"]] == ["forward", "backward"]
    thread = [(b.kind, round(b.begin, 1), round(b.end, 1)) for b in found.rows["CPU thread"]]
    assert thread == [("matrix products", 0.0, 2.0), ("copies", 3.0, 4.0)]
    (kernel,) = found.rows["GPU stream"]
    assert (kernel.kind, round(kernel.begin, 1), round(kernel.end, 1)) == (
        "matrix products",
        1.0,
        4.0,
    )


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "holds no metrics.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no step yet"),
        (lambda run: (run / "metrics.jsonl").write_text("x\n{}\n"), "line 1 is no metrics record"),
        (lambda run: (run / "summary.json").write_text("{"), "summary.json is not readable"),
        (lambda run: (run / "trace.json").write_text("[]"), "is no profiler trace"),
    ],
)
def test_what_cannot_be_read_is_named(run: Path, break_it: Any, says: str) -> None:
    break_it(run)
    with pytest.raises(SystemExit, match=says):
        command.main([str(run)])


def test_a_run_given_twice_is_refused(run: Path) -> None:
    with pytest.raises(SystemExit, match="given twice"):
        command.main([str(run), str(run)])


def test_without_matplotlib_it_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install 'hmt_deepspeed\[report\]'"):
        command.main([str(run)])
