"""Lines of a report against AdamW's, and the frontier: what loss is reached at how many bytes.

An experiment is on it once AdamW's rate of embeddings, head and vectors was swept apart from that of its matrices, and
AdamW has run at the best rates of its sweep: before that a lead over AdamW may be the embeddings'. Its decay may be another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.cells import point_of
from comparison.stages import BASELINE
from comparison.variants import VARIANTS

Line = Mapping[str, Any]
HEADERS = (
    "variant",
    "moments",
    "with bases",
    "lr",
    "embeddings",
    "decay",
    "tried",
    "validation loss",
    "by seed",
    "against AdamW, by seed",
    "lowest",
)
HEAD = """## frontier

Variants of the table by the bytes of their moments, each at the best of its own sweep, AdamW too. embeddings: factor on \
the rate of embeddings, head and vectors, blank where a variant has more than one; decay: what a step takes of a weight; \
tried: learning rates, factors and decays; lowest: nothing that ran at AdamW's seeds ends lower at as many bytes or \
fewer.
"""


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows))


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def losses_by_seed(line: Line, baseline: Line) -> tuple[str, str]:
    """Losses, and their distances from AdamW's, at every seed of both."""
    losses, others = line["losses_by_seed"], baseline["losses_by_seed"]
    seeds = sorted({*losses, *others})
    against = [losses[s] / others[s] - 1 if s in losses and s in others else None for s in seeds]
    found = any(share is not None for share in against) and line is not baseline
    return (
        " / ".join(number(losses.get(seed), ".3f") or "-" for seed in seeds),
        " / ".join(number(share, "+.1%") or "-" for share in against) if found else "",
    )


def frontier(experiments: Sequence[Mapping[str, Any]]) -> str:
    """A table for each of the experiments that are on it; empty without any."""
    tables = [
        f"### {experiment['name']}\n\n{experiment['setting']['model']}, {experiment['tokens']:,} tokens, "
        f"{experiment['setting']['batch_rows']} x {experiment['setting']['seq_length']} a step.\n\n"
        + markdown_table(HEADERS, _rows(experiment))
        for experiment in experiments
        if _is_on(experiment, experiments)
    ]
    return "\n".join([HEAD, *(f"{table}\n" for table in tables)]) if tables else ""


def _is_on(experiment: Mapping[str, Any], experiments: Sequence[Mapping[str, Any]]) -> bool:
    baseline = experiment["variants"].get(BASELINE)
    if baseline is None or experiment["stage"] == "finetune" or baseline["tried"][1] < 2:
        return False
    sweeps = [
        own
        for own in experiments
        if own["stage"] == "sweep" and own["compared"] == experiment["compared"]
        if BASELINE in own["variants"]
    ]
    if experiment["stage"] == "sweep" or not sweeps:
        return True
    longest = max(sweeps, key=lambda own: int(own["tokens"]))
    best = point_of(longest["variants"][BASELINE])
    return best[:2] in [own[:2] for own in baseline["points"]]


def _rows(experiment: Mapping[str, Any]) -> list[list[str]]:
    lines = {name: own for name, own in experiment["variants"].items() if name in VARIANTS}
    baseline, decay = lines[BASELINE], experiment["setting"]["decay"]
    seeds = set(baseline["losses_by_seed"])
    whole = [own for own in lines.values() if seeds <= set(own["losses_by_seed"])]

    def place(name: str) -> tuple[float, float]:
        return -lines[name]["state_bytes"]["moments_share"], lines[name]["val_loss"]

    rows = []
    for name in sorted(lines, key=place):
        line = lines[name]
        states, below = line["state_bytes"], line["val_loss"]
        lower = [own for own in whole if own["val_loss"] < below and _share(own) <= _share(line)]
        rows.append(
            [
                name,
                number(states["moments_share"], ".3f"),
                number(states["moments_and_bases_share"], ".3f"),
                f"{line['lr']:g}",
                number(line["embeddings"], "g"),
                f"{decay if line['decay'] is None else line['decay']:g}",
                " / ".join(map(str, line["tried"])),
                f"{below:.3f}",
                *losses_by_seed(line, baseline),
                "yes" if line in whole and not lower else "",
            ]
        )
    return rows


def _share(line: Line) -> float:
    return float(line["state_bytes"]["moments_share"])
