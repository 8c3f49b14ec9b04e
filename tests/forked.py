"""Commands that are forks of one interpreter, which imports once what they need.

Importing torch, DeepSpeed and transformers takes longer than most of what tests run by a command. A fork has its own
arguments, output, exit status and process group, as a process that was started for the command has.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TextIO


class Interpreter:
    """A script that imports, then calls :func:`serve`; it starts with the first command."""

    def __init__(self, script: str, env: dict[str, str]) -> None:
        self._script, self._env = script, env
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What ``python COMMAND ARGUMENTS`` returns and prints."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, self._script],
                env=self._env,
                stdin=subprocess.PIPE,  # whose end ends it
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self._process.communicate)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            line = json.dumps([str(command), arguments, folder])
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the interpreter is gone"
            out, err = output_of(folder)
        return subprocess.CompletedProcess([str(command), *arguments], json.loads(answer), out, err)


def answers() -> TextIO:
    """For :func:`serve`, before anything is imported: what libraries print is no answer."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return found


def serve(to: TextIO) -> None:
    import torch

    assert torch.get_num_threads() == 1  # a pool of threads would not survive the fork
    for line in sys.stdin:
        print(fork(*json.loads(line)), file=to, flush=True)


def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """For :func:`subprocess.run` of a Python script, in an interpreter that serves: a fork of it too."""
    with tempfile.TemporaryDirectory() as folder:
        code = fork(command[1], command[2:], folder)
        out, err = output_of(folder)
    return subprocess.CompletedProcess(command, code, out, err)


def output_of(folder: str) -> tuple[str, str]:
    """What a fork has printed: stdout and stderr."""
    out, err = (Path(folder, name).read_text("utf-8") for name in ("stdout", "stderr"))
    return out, err


def fork(command: str, arguments: list[str], folder: str) -> int:
    """Exit status of a Python script, run by a fork that prints into files of an empty folder."""
    if (pid := os.fork()) == 0:
        _become(command, arguments, folder)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _become(command: str, arguments: list[str], folder: str) -> None:
    """Never returns."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [command, *arguments]
    code: int | str | None = 1
    try:
        runpy.run_path(command, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
