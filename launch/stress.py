"""What a run does under stress: random configs, kills, full disks, many steps.

examples:
  python launch/stress.py random_configs  one case
  python launch/stress.py all             every case
  python launch/stress.py table           the committed results as Markdown

Results: launch/results/MACHINE/stress/CASE.json. A case that is run again
replaces its file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.results import RESULTS, machine, machine_slug  # noqa: E402
from reliability.cases import CASES  # noqa: E402
from reliability.results import markdown, read_records, write_case  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cases = (*CASES, "all", "table")
    add("case", choices=cases, metavar="CASE", help=f"one of: {', '.join(cases)}")
    add("--seed", type=int, default=0, help="of everything that is random (default: %(default)s)")
    add("--small", action="store_true", help="few repetitions, to try the code out")
    text = f"where the machines' folders are (default: {os.path.relpath(RESULTS)})"
    add("--output", type=Path, metavar="FOLDER", help=text)
    args = parser.parse_args()
    if args.small and args.output is None:
        parser.error("--small needs --output: small numbers do not belong among the results")
    return args


def main(args: argparse.Namespace) -> int:
    """Exit status: 1 when something failed that must not."""
    results = args.output or RESULTS
    if args.case == "table":
        print(markdown(read_records(results)))
        return 0
    failed = 0
    for name in CASES if args.case == "all" else (args.case,):
        begin = time.monotonic()
        report = CASES[name](args.seed, args.small)
        folder = results / machine_slug(machine()) / "stress"
        path = write_case(folder, name, report, time.monotonic() - begin, args.seed)
        print(f"{name}: {report.counts}, {len(report.failures)} failed; {path}")
        failed += len(report.failures)
        for failure in report.failures:
            print(f"--- {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
