"""Measure what we claim, each comparison side by side in one process.

examples:
  python launch/bench.py foundations                the suite, a process a case
  python launch/bench.py foundations --case galore  one case
  python launch/bench.py all                        every suite
  python launch/bench.py gpu --case 1b --contender HMT --memory 80
  python launch/bench.py table                      the Markdown files' tables
  python launch/bench.py table --write              the same, into the files
  python launch/bench.py papers --write             into launch/results/planner

Results: launch/results/MACHINE/SUITE.json and .md. A case that is run again
replaces its entry. The papers' figures are of no machine: they follow from the
planner's numbers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.results import RESULTS, machine, machine_slug, markdown  # noqa: E402
from benchmarks.setting import DTYPES, choose_setting  # noqa: E402
from benchmarks.suites import SUITES, options, run_case, why_skipped  # noqa: E402

ALL = "all"
PAPERS = RESULTS / "planner"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    commands = parser.add_subparsers(
        title="what to run; SUITE --help shows its options",
        dest="command",
        metavar="SUITE",
        required=True,
    )
    helps = {name: (module.__doc__ or "").partition(":")[0] for name, module in SUITES.items()}
    results = os.path.relpath(RESULTS)
    for name, text in {**helps, ALL: "every suite"}.items():
        suite = commands.add_parser(name, help=text)
        if name != ALL:
            cases = list(SUITES[name].CASES)
            text = f"{', '.join(cases)}; default: all; repeat for several"
            suite.add_argument("--case", action="append", choices=cases, metavar="CASE", help=text)
        add = suite.add_argument
        add("--dtype", choices=list(DTYPES), help="default: bf16 where it is fast")
        add("--rounds", type=_at_least_two, metavar="N", help="default: each case's own number")
        add("--toy", action="store_true", help="tiny sizes, to try the code out")
        text = f"where the machines' folders are (default: {results})"
        add("--output", type=Path, metavar="FOLDER", help=text)
        for option, declared in options(name).items() if name != ALL else ():
            add(f"--{option}", **declared)
    table = commands.add_parser("table", help="the generated tables of the Markdown files")
    table.add_argument("--write", action="store_true", help="write them into their files")
    text = "print what the suites wrote to this folder instead"
    table.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    papers = commands.add_parser("papers", help="the papers' figures beside the planner's")
    papers.add_argument(
        "--write", action="store_true", help=f"write them into {os.path.relpath(PAPERS)}"
    )
    args = parser.parse_args()
    if args.command == "table" and args.write and args.output is not None:
        parser.error("--write is of the committed results: it does not go with --output")
    if args.command not in ("table", "papers") and args.toy and args.output is None:
        parser.error("--toy needs --output: toy numbers do not belong among the results")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("run one process (--num_gpus 1): cases that need two ranks start them")
    return args


def _at_least_two(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError(
            f"{rounds}: give at least 2, an ordinary step and a refreshing one"
        )
    return rounds


def run_suite(args: argparse.Namespace) -> int:
    """Exit status: 1 when a case failed. Whether targets were reached is in the report."""
    if args.command == ALL:
        failed = [
            f"{s} {case}" for s in SUITES for case in SUITES[s].CASES if _run_alone(s, case, args)
        ]
        return _failed(failed)
    cases = args.case or list(SUITES[args.command].CASES)
    folder = (args.output or RESULTS) / machine_slug(machine())
    setting = choose_setting(args.dtype, args.rounds, args.toy, _own(args))
    reason = why_skipped(args.command, setting)
    if reason is not None:
        print(f"skipped {args.command} {', '.join(cases)}: {reason}")
        return 0
    if len(cases) == 1:
        path = run_case(args.command, cases[0], setting, folder)
        report = json.loads(path.read_text(encoding="utf-8"))
        print(markdown({**report, "cases": {cases[0]: report["cases"][cases[0]]}}))
        print(f"\n{path}")
        return 0
    return _failed([case for case in cases if _run_alone(args.command, case, args)])


def _own(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the suite alone that were given."""
    given = {name: getattr(args, name, None) for name in options(args.command)}
    return {name: value for name, value in given.items() if value is not None}


def _failed(cases: list[str]) -> int:
    if cases:
        print(f"failed: {', '.join(cases)}", file=sys.stderr)
    return 1 if cases else 0


def _run_alone(suite: str, case: str, args: argparse.Namespace) -> int:
    """One case in a fresh process: no other case's memory, threads or engines."""
    command = [sys.executable, os.path.relpath(__file__), suite, "--case", case]
    command += ["--dtype", args.dtype] if args.dtype else []
    command += ["--rounds", str(args.rounds)] if args.rounds else []
    command += ["--toy"] if args.toy else []
    command += ["--output", str(args.output)] if args.output else []
    for name, value in _own(args).items() if args.command == suite else ():
        for part in value if isinstance(value, list) else [value]:
            command += [f"--{name}", str(part)]
    print(f"=== {suite} {case}", flush=True)
    return subprocess.run(command, check=False).returncode


def show_tables(output: Path | None, write: bool) -> int:
    """Exit status: 1 where there is nothing to show."""
    from benchmarks.tables import TABLES, markdown_files, results_table, with_tables

    try:
        if output is not None:
            print(results_table(output))
        elif not write:
            for name, make in TABLES.items():
                print(f"<!-- table: {name} -->\n{make()}\n<!-- end -->\n")
        else:
            for path in markdown_files():
                old = path.read_text(encoding="utf-8")
                if (new := with_tables(old)) != old:
                    path.write_text(new, encoding="utf-8")
                    print(f"wrote {os.path.relpath(path)}")
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    return 0


def show_papers(write: bool) -> int:
    """Exit status."""
    from papers.lohan_figures import lohan_rows
    from papers.zero_fpdt import fpdt_rows, playbook_rows, table, zero_rows

    rows = [*lohan_rows(), *zero_rows(), *playbook_rows(), *fpdt_rows()]
    print(table(rows))
    if write:
        PAPERS.mkdir(parents=True, exist_ok=True)
        records = json.dumps([row.as_json() for row in rows], indent=2)
        for name, text in (("reproduce.json", records), ("reproduce.md", table(rows))):
            (PAPERS / name).write_text(text + "\n", encoding="utf-8")
            print(f"wrote {os.path.relpath(PAPERS / name)}")
    return 0


def main() -> int:
    """Exit status."""
    args = parse_arguments()
    if args.command == "table":
        return show_tables(args.output, args.write)
    return show_papers(args.write) if args.command == "papers" else run_suite(args)


if __name__ == "__main__":
    sys.exit(main())
