"""``hmt-report``: what runs did, as one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hmt_deepspeed.report.page import html_page, write_markdown
from hmt_deepspeed.report.plots import check_matplotlib
from hmt_deepspeed.report.runs import read_runs

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hmt-report",
        description="Write one HTML page, which needs no network, about runs side by side.",
        epilog="example:\n  hmt-report runs/hmt-tiny runs/hmt_adamw-tiny --output both.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="folder of a run of launch/run.py")
    add(
        "--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder"
    )
    add(
        "--markdown",
        action="store_true",
        help="write report.md, its pictures in a folder beside it",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; bad input ends it with one line and status 1."""
    args = _parser().parse_args(arguments)
    path = args.output or Path(args.runs[0]) / ("report.md" if args.markdown else "report.html")
    try:
        check_matplotlib()
        runs = read_runs(args.runs)
        if not path.parent.is_dir():
            raise ValueError(
                f"--output {path}: {path.parent} is no folder; make it, or name another"
            )
        if args.markdown:
            write_markdown(runs, path)
        else:
            path.write_text(html_page(runs), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
