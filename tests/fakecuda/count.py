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
    print(f"  {'':10}{'launches':>10}{'of Triton':>11}{'waits':>7}{'unpinned':>10}")
    for phase, counts in step.phases.items():
        t = counts.totals()
        print(f"  {phase:10}{t['launches']:>10}{t['triton']:>11}{t['waits']:>7}{t['unpinned']:>10}")
    counts = step.phases["step"]
    for title, found in (("waits", counts.waits), ("unpinned copies", counts.unpinned)):
        for (what, line), number in found.most_common(top):
            print(f"  {title}: {number:6} {what:20} {line}")
    for (what, line), number in counts.all_launches.most_common(top):
        print(f"  {number:8} {what:32} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("layers", type=int, nargs="?", default=32)
    parser.add_argument("--subject", choices=SUBJECTS, default="bare")
    parser.add_argument("--top", type=int, default=15, help="operations shown of each step")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--architecture", type=int, help="compile the kernels for it: 80, 90, ...")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.architecture:
        device.compile_for(args.architecture)
    found = measure(args.subject, args.mode, args.layers, bool(args.architecture))
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
