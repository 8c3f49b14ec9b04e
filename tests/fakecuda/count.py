"""Launches, host waits and unpinned copies of a step on a CUDA device that is not there.

python tests/fakecuda/count.py right 32            the bare optimizer, 7B widths, 32 layers
python tests/fakecuda/count.py right 32 --json     for programs
"""

from __future__ import annotations

import device

device.require()

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402

from subjects import MODES, SUBJECTS, Step, measure  # noqa: E402


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
    for (what, line), number in step.phases["step"].all_launches.most_common(top):
        print(f"  {number:8} {what:32} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("layers", type=int, nargs="?", default=32)
    parser.add_argument("--subject", choices=SUBJECTS, default="bare")
    parser.add_argument(
        "--ranks", type=int, default=1, help="of the engine; one of them is counted"
    )
    parser.add_argument("--top", type=int, default=15, help="operations shown of each step")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--architecture", type=int, help="compile the kernels for it: 80, 90, ...")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.architecture:
        device.compile_for(args.architecture)
    found = measure(args.subject, args.mode, args.layers, args.ranks, bool(args.architecture))
    if args.json:
        numbers = {
            name: {phase: counts.totals() for phase, counts in step.phases.items()}
            for name, step in found.items()
        }
        print(json.dumps(numbers))
        return
    print(f"{args.subject}, {args.mode}, {args.layers} layers ({time.monotonic() - begin:.0f} s)")
    for name, step in found.items():
        show(name, step, args.top)


if __name__ == "__main__":
    main()
