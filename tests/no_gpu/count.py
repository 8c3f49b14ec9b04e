"""Launches, host waits and unpinned copies of a step on a CUDA device that is not there.

python tests/no_gpu/count.py right 32            the bare optimizer, 7B widths, 32 layers
python tests/no_gpu/count.py right 32 --json     for programs
"""

from __future__ import annotations

import device

device.require()

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from dataclasses import replace  # noqa: E402
from typing import Any  # noqa: E402

from subjects import MODES, SUBJECTS, Case, Step, fake_device, measure  # noqa: E402


def show(name: str, step: Step, top: int) -> None:
    print(f"\n{name} step, {step.fresh} new bases")
    titles = ("launches", "of Triton", "waits", "DeepSpeed's", "unpinned")
    print(" " * 12 + "".join(f"{title:>12}" for title in titles))
    for phase, counts in step.phases.items():
        print(f"  {phase:10}" + "".join(f"{n:>12}" for n in counts.totals().values()))
    for phase, counts in step.phases.items():
        for title, found in (("waits", counts.waits), ("unpinned", counts.unpinned)):
            for (what, line), number in found.most_common(top):
                print(f"  {phase} {title}: {number:6} {what:20} {line}")
    for (what, line, numbers), times in step.renewed.most_common(top):
        print(f"  renewed: {times:6} {what:20} {line} {numbers}")
    for (what, line), number in step.phases["step"].all_launches.most_common(top):
        print(f"  {number:8} {what:32} {line}")


COLUMNS = ("launches", "a_layer", "refresh", "first")
COLUMNS += ("waits", "at_refresh", "at_first", "deepspeed", "unpinned", "renewed")
HEADER = f"{'subject':18}{'ranks':6}{'mode':15}" + "".join(f"{c:>11}" for c in COLUMNS)


def row(case: Case, one: dict[str, Step], two: dict[str, Step]) -> str:
    """Of the table in `test_launches.py`: launches of the optimizer's step, waits and copies of the whole one."""
    numbers = columns(_numbers(one), _numbers(two))
    numbers["renewed"] = two["ordinary"].renewed.total()
    start = f"{case.subject:18}{case.ranks:<6}{case.mode:15}"
    return start + "".join(f"{numbers[c]:>11}" for c in COLUMNS)


def columns(one: dict[str, Any], two: dict[str, Any]) -> dict[str, int]:
    """Numbers of a mode by name of the column, of its steps with one layer and with two.

    launches: of an ordinary ``step()`` with two layers. a_layer: what the second adds. refresh, first: of these
    steps. waits, at_refresh, at_first: of forward, backward and step. deepspeed, unpinned: of an ordinary one. renewed,
    of :func:`row` alone: see :class:`Step`.
    """

    def whole(step: dict[str, Any], key: str) -> int:
        return sum(phase[key] for phase in step.values())

    ordinary = two["ordinary"]
    refresh = two.get("refresh", ordinary)
    launches = ordinary["step"]["launches"]
    return {
        "launches": launches,
        "a_layer": launches - one["ordinary"]["step"]["launches"],
        "refresh": refresh["step"]["launches"],
        "first": two["first"]["step"]["launches"],
        "waits": whole(ordinary, "waits"),
        "at_refresh": whole(refresh, "waits"),
        "at_first": whole(two["first"], "waits"),
        "deepspeed": whole(ordinary, "deepspeed_waits"),
        "unpinned": whole(ordinary, "unpinned"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("modes", type=_modes, metavar="MODE[,MODE]", help=f"all, or of {', '.join(MODES)}")
    add("layers", type=int, nargs="*", default=[2], help="default: 2")
    add("--subject", choices=SUBJECTS, default="bare")
    add("--ranks", type=int, default=1, help="of the engine; one of them is counted")
    add("--hidden", type=int, default=4096, help="width of the model; 4096, the 7B's")
    add("--top", type=int, default=15, help="operations shown of each step")
    add("--table", action="store_true", help="rows of test_launches.py, of one and two layers")
    add("--json", action="store_true", help="a line for each mode and number of layers")
    add("--architecture", type=int, help="compile the kernels for it: 80, 90, ...")
    args = parser.parse_args()
    if args.architecture:
        device.compile_for(args.architecture)
    if args.table:
        print(HEADER, flush=True)
    with fake_device(bool(args.architecture)) as recorder:
        for mode in args.modes:
            one, two = (Case(args.subject, mode, n, args.hidden, args.ranks) for n in (1, 2))
            if not two.exists:
                continue
            if args.table:
                print(row(two, measure(one, recorder, 3), measure(two, recorder)), flush=True)
                continue
            for layers in args.layers:
                begin = time.monotonic()
                found = measure(replace(two, layers=layers), recorder)
                if args.json:
                    line = {"mode": mode, "layers": layers, "steps": _numbers(found)}
                    print(json.dumps(line), flush=True)
                    continue
                seconds = time.monotonic() - begin
                print(f"\n=== {args.subject}, {mode}, {layers} layers ({seconds:.0f} s)")
                for name, step in found.items():
                    show(name, step, args.top)


def _modes(text: str) -> list[str]:
    names = list(MODES) if text == "all" else text.split(",")
    for name in names:
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"{name}: legal: {', '.join(MODES)}")
    return names


def _numbers(found: dict[str, Step]) -> dict[str, Any]:
    return {
        name: {phase: counts.totals() for phase, counts in step.phases.items()}
        for name, step in found.items()
    }


if __name__ == "__main__":
    main()
