"""Run a training script that nobody changed, with HMT registered; or check a JSON.

``deepspeed --num_gpus 2 --module hmt_deepspeed train.py --deepspeed_config ds.json ...``
``python -m hmt_deepspeed --check ds.json --model 7b``
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

USAGE = """\
usage: deepspeed [launcher options] --module hmt_deepspeed SCRIPT.py [options]
       python -m hmt_deepspeed --check DS.json [options of hmt-doctor]

The first runs a training script that nobody changed, with HMT registered. The
second prints what a DeepSpeed JSON will do here, and builds nothing.

example:
  deepspeed --num_gpus 2 --module hmt_deepspeed train.py \\
      --deepspeed_config ds.json"""


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The script and its arguments, the launcher's ``--local_rank=N`` first as without ``--module``.

    Raises:
        ValueError: no script among the arguments, or one that does not exist.
    """
    leading = 0
    while leading < len(arguments) and arguments[leading].startswith("-"):
        leading += 1
    if leading == len(arguments):
        raise ValueError(f"no script among the arguments {list(arguments)}.\n{USAGE}")
    script = arguments[leading]
    if not os.path.isfile(script):
        raise ValueError(
            f"script {script!r} does not exist (working folder {os.getcwd()}).\n{USAGE}"
        )
    return script, [*arguments[:leading], *arguments[leading + 1 :]]


def main() -> None:
    """Register HMT and run the script as ``__main__``, from its own folder's point of view."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE)
        sys.exit(0)
    if sys.argv[1:2] == ["--check"]:
        from hmt_deepspeed.doctor import main as check

        check(sys.argv[2:])
    try:
        script, rest = split_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    from hmt_deepspeed.zero.registration import register  # DeepSpeed takes seconds to import

    register()
    sys.argv = [script, *rest]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
