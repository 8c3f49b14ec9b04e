"""``--help`` of every command, as a terminal of 80 columns shows it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from hmt_deepspeed import __main__, doctor
from hmt_deepspeed.planner import command as plan
from hmt_deepspeed.report import command as report

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
COMMANDS = {"hmt-plan": plan.main, "hmt-report": report.main, "hmt-doctor": doctor.main}
COMMANDS["python -m hmt_deepspeed"] = __main__.main
SCRIPTS = ("run", "plan", "bench", "compare", "stress")


@pytest.mark.parametrize("name", [*COMMANDS, *SCRIPTS])
def test_it_fits_and_shows_an_example_and_every_default(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setattr(sys, "path", [str(LAUNCH), *sys.path])
    start = COMMANDS.get(name, lambda: runpy.run_path(f"{LAUNCH}/{name}.py", run_name="__main__"))
    with pytest.raises(SystemExit) as end:
        start()
    assert end.value.code == 0
    told = capsys.readouterr().out
    told = told[told.index("usage: ") :]  # DeepSpeed may have logged something first
    assert [line for line in told.splitlines() if len(line) > 80] == []
    assert re.search(r"^examples?:\n  \S", told, re.M)
    assert "None" not in told
    assert str(LAUNCH.parent) not in told  # a reader's checkout lies elsewhere
    options = re.split(r"\n  (?=-)", told)[1:]
    for option in (" ".join(text.split()) for text in options):
        assert re.match(r"(-\w, )?--\w+ (\S+ )?\w", option), option  # it says what it is
        if re.match(r"--\w+ N ", option):
            assert "default" in option, option
