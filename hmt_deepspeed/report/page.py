"""Runs as one self-contained HTML page, or as Markdown with pictures beside it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from hmt_deepspeed.report.metrics import format_bytes
from hmt_deepspeed.report.plots import PLOTS, Plot, draw
from hmt_deepspeed.report.runs import Run

__all__ = ["html_page", "write_markdown"]

_RESULTS = {  # field of summary.json -> what it is called, with its unit
    "steps": "steps",
    "tokens": "tokens",
    "final_train_loss": "training loss, last step, nats per token",
    "eval_loss": "loss on held-out rows, nats per token",
    "tokens_per_second": "tokens per second",
    "step_seconds_median": "median step, seconds",
    "mean_rank": "mean rank",
    "mean_captured_energy": "mean captured energy, share of ||G||²",
    "optimizer_state_bytes": "moments and bases",
    "gradient_buffer_bytes": "gradients, at most",
    "activation_bytes": "activations, at most",
    "average_device_bytes": "device memory, mean of the last step",
    "peak_device_bytes": "device memory, peak of the largest rank",
    "peak_host_bytes": "host memory, peak of the largest rank",
    "communication_bytes_per_step": "sent to other ranks, a step",
    "stock_zero_communication_bytes_per_step": "the same under stock ZeRO",
    "checkpoint_bytes": "checkpoint",
    "skipped_steps": "skipped steps",
}
_SETUP = {
    "model_parameters": "parameters",
    "world_size": "ranks",
    "zero_stage": "ZeRO stage",
    "seed": "seed",
    "command": "command",
}

_RESULTS_TEXT = "What each run ended with. Captured energy is the part of the gradients' squared norm that lies inside the bases."
_LAST_TEXT = "Every number of the metrics, as rank 0 last recorded it."
_SETUP_TEXT = "The command, the machine and the DeepSpeed config of each run."

_CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.4rem 0 .2rem}
p{margin:.2rem 0 .8rem;color:#555}nav a{margin-right:.9rem;white-space:nowrap}a{color:#0072B2}
table{border-collapse:collapse;margin:.6rem 0}th,td{padding:.25rem .8rem;border-bottom:1px solid #e3e3e3;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}thead th{border-bottom:2px solid #999}tbody th{font-weight:400}
.numbers td{white-space:nowrap}.numbers tbody th{min-width:9rem}.text th,.text td{text-align:left}.text td{max-width:26rem;overflow-wrap:anywhere}img{width:100%;min-width:720px;height:auto}.scroll{overflow-x:auto}
pre{background:#f6f6f6;padding:.7rem;overflow-x:auto;font-size:13px}summary{cursor:pointer;color:#0072B2}
footer{margin:3rem 0 1rem;color:#666;font-size:.85rem}
""".strip()


class _Table(NamedTuple):
    """headers and rows of cells; the first column names what the others hold."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


# -- tables, whatever they are written in ------------------------------------------------------------


def _results(runs: Sequence[Run]) -> _Table:
    return _fields(runs, _RESULTS)


def _setup(runs: Sequence[Run]) -> _Table:
    """What was run, and on what."""
    table = _fields(runs, _SETUP)
    machines = [_machine(run.summary.get("machine") or {}) for run in runs]
    return _Table(table.headers, [*table.rows, ["machine", *machines]])


def _machine(info: Mapping[str, Any]) -> str:
    if not info:
        return ""
    where = f"{info['cpu']}, {info['cpu_cores']} cores"
    if info["accelerator"] != "cpu":
        where = f"{info['accelerator']}; {where}"
    versions = [f"{name} {info[name]}" for name in ("torch", "deepspeed", "transformers")]
    return f"{where}; {', '.join(versions)}"


def _fields(runs: Sequence[Run], names: Mapping[str, str]) -> _Table:
    rows = []
    for name, text in names.items():
        values = [_value_of(run, name) for run in runs]
        if any(value or (value == 0 and "_bytes" not in name) for value in values):
            rows.append([text, *(_cell(name, value) for value in values)])
    return _Table(["", *(run.name for run in runs)], rows)


def _value_of(run: Run, name: str) -> Any:
    """From the summary; of a run that has not ended, from its last record."""
    if run.summary:
        return run.summary.get(name)
    return run.last({"final_train_loss": "loss", "steps": "step"}.get(name, name))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if "_bytes" in name or name.startswith("bytes_"):
        return format_bytes(value)
    unit = " s" if name.endswith("_seconds") else ""
    if isinstance(value, float):
        is_whole = value.is_integer() or abs(value) >= 1000
        return (f"{value:,.0f}" if is_whole else f"{value:.4g}") + unit
    return f"{value:,}" if isinstance(value, int) else str(value)


def _predictions(runs: Sequence[Run]) -> _Table | None:
    """The plan's numbers beside what the run measured of the same quantity; with several runs, of which one."""
    rows = []
    for run in runs:
        for name, row in run.planned().items():
            predicted, measured = row["predicted"], row["measured"]
            cells = [_quantity(value, row["unit"]) for value in (predicted, measured)]
            ratio = row.get("note", "–")
            if predicted and measured is not None:
                ratio = f"{measured / predicted:.2f}"
            which = [run.name] if len(runs) > 1 else []
            rows.append([name.replace("_", " "), *which, *cells, ratio])
    headers = ["", *["run"][: len(runs) - 1], "predicted", "measured", "measured / predicted"]
    return _Table(headers, rows) if rows else None


def _last_numbers(runs: Sequence[Run]) -> _Table:
    """Every number of the records, by its name in metrics.jsonl."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    rows = []
    for name in names:
        values = [run.last(name) for run in runs]
        if any(value is not None for value in values):
            rows.append([name, *(_cell(name, value) for value in values)])
    return _Table(["", *(run.name for run in runs)], rows)


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[Plot, _Table | None, str | None]]:
    """(plot, table, picture) of the sections that some run has the numbers for."""
    for plot in PLOTS:
        table = _predictions(runs) if plot.name == "planned" else None
        picture = draw(plot, runs)
        if table is not None or picture is not None:
            yield plot, table, picture


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return format_bytes(value) if unit == "bytes" else f"{value:.4g} {unit}"


def _differences(runs: Sequence[Run]) -> _Table | None:
    """Keys of the DeepSpeed configs in which the runs differ."""
    configs = [_flat(run.summary.get("config") or {}) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [
        [key, *(config.get(key, "–") for config in configs)]
        for key in keys
        if len({config.get(key) for config in configs}) > 1
    ]
    return _Table(["", *(run.name for run in runs)], rows) if rows else None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = json.dumps(value)
    return found


# -- HTML --------------------------------------------------------------------------------------------


def html_page(runs: Sequence[Run]) -> str:
    """The page: tables, pictures inside it, nothing fetched from anywhere."""
    sections = [_section("results", "Results", _about(runs), _html(_results(runs)))]
    for plot, table, picture in _drawn(runs):
        content = "" if table is None else _html(table)
        if picture is not None:
            data = base64.b64encode(picture.encode()).decode()
            image = f'<img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'
            content += f'<div class="scroll">{image}</div>'
        sections.append(_section(plot.name, plot.title, plot.text, content))
    numbers = f"<details><summary>Show them</summary>{_html(_last_numbers(runs))}</details>"
    setup = _html(_setup(runs), "text") + _configs(runs)
    sections.append(_section("numbers", "Every number", _LAST_TEXT, numbers))
    sections.append(_section("setup", "What was run", _SETUP_TEXT, setup))
    title = _title(runs)
    links = " ".join(f'<a href="#{name}">{escape(text)}</a>' for name, text, _ in sections)
    body = "".join(html for *_, html in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{escape(title)}</h1><nav>{links}</nav>{body}"
        "<footer>hmt-report: numbers from metrics.jsonl, summary.json and trace.json of the runs."
        "</footer></body></html>\n"
    )


def _title(runs: Sequence[Run]) -> str:
    return ("Run " if len(runs) == 1 else "Runs ") + ", ".join(run.name for run in runs)


def _section(name: str, title: str, text: str, content: str) -> tuple[str, str, str]:
    said = f"<p>{escape(text)}</p>" if text else ""
    html = f'<section id="{name}"><h2>{escape(title)}</h2>{said}{content}</section>'
    return name, title, html


def _about(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs if not run.summary]
    ended = f" Without a summary, so not ended or interrupted: {', '.join(names)}." if names else ""
    return _RESULTS_TEXT + ended


def _configs(runs: Sequence[Run]) -> str:
    differences = _differences(runs) if len(runs) > 1 else None
    parts = []
    if differences is not None:
        parts.append(f"<h3>Where the configs differ</h3>{_html(differences, 'text')}")
    for run in runs:
        if run.summary.get("config"):
            text = escape(json.dumps(run.summary["config"], indent=2))
            title = f"DeepSpeed config of {escape(run.name)}"
            parts.append(f"<details><summary>{title}</summary><pre>{text}</pre></details>")
    return "".join(parts)


def _html(table: _Table, kind: str = "numbers") -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.headers)
    rows = []
    for first, *cells in table.rows:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{row}</tr>')
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# -- Markdown -----------------------------------------------------------------------------------------


def write_markdown(runs: Sequence[Run], path: Path) -> None:
    """The same in Markdown; the pictures go into the folder ``NAME-plots`` beside the file."""
    folder = path.with_name(f"{path.stem}-plots")
    lines = [f"# {_title(runs)}", "", "## Results", "", _about(runs), ""]
    lines += _markdown(_results(runs))
    for plot, table, picture in _drawn(runs):
        lines += ["", f"## {plot.title}", "", plot.text, ""]
        lines += [] if table is None else [*_markdown(table), ""]
        if picture is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{plot.name}.svg").write_text(picture, encoding="utf-8")
            lines.append(f"![{plot.title}]({folder.name}/{plot.name}.svg)")
    lines += ["", "## Every number", "", _LAST_TEXT, "", *_markdown(_last_numbers(runs))]
    lines += ["", "## What was run", "", *_markdown(_setup(runs))]
    differences = _differences(runs) if len(runs) > 1 else None
    if differences is not None:
        lines += ["", "Where the configs differ:", "", *_markdown(differences)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _markdown(table: _Table) -> list[str]:
    rule = [":---", *("---:" for _ in table.headers[1:])]
    rows = [table.headers, rule, *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
