"""``deepspeed --module hmt_deepspeed script.py``: a script that nobody changed runs with HMT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harness import Ranks

from hmt_deepspeed.__main__ import main, split_arguments

SCRIPT = """
import argparse
import sibling
import deepspeed, torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--name")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Linear(24, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    for _ in range(2):
        loss = engine(torch.ones(4, 16)).square().mean()
        engine.backward(loss)
        engine.step()
    words = [type(engine).__name__, type(engine.optimizer).__name__, sibling.WORD, args.name]
    # one write: the launcher runs python unbuffered, and the ranks share one stdout
    print(" ".join(["RESULT", *words, str(args.local_rank)]), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""
CONFIG = """{"train_batch_size": 8, "zero_optimization": {"stage": 2},
 "optimizer": {"type": "HMT", "params": {"lr": 0.001}},
 "hmt": {"optimizer": {"rank": 4}}}"""


def launch(folder: str, *arguments: str) -> None:
    """The command ``deepspeed``, by its entry point."""
    from deepspeed.launcher.runner import main as deepspeed

    os.chdir(folder)
    port = str(10000 + os.getpid() % 20000)
    deepspeed(["--num_gpus", "2", "--master_port", port, "--module", "hmt_deepspeed", *arguments])


def test_an_unchanged_script_trains_with_hmt(ranks: Ranks, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "sibling.py").write_text("WORD = 'beside'\n")
    (tmp_path / "x.json").write_text(CONFIG)
    script = ("scripts/train.py", "--deepspeed_config", "x.json", "--name", "a b")
    (code,), _, (output,) = ranks.attempt(launch, 1, str(tmp_path), *script)
    assert code == 0, output[-3000:]
    for rank in (0, 1):
        assert f"RESULT HMTEngine HMTZeroOptimizer beside a b {rank}" in output


def test_a_missing_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hmt_deepspeed", "--local_rank=0", "no_such.py"])
    with pytest.raises(SystemExit, match=r"^error: script 'no_such\.py' does not exist"):
        main()


def test_arguments_are_split_at_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    arguments = ["--local_rank=1", str(script), "--lr", "1", "other.py"]
    assert split_arguments(arguments) == (str(script), ["--local_rank=1", "--lr", "1", "other.py"])
    with pytest.raises(ValueError, match="no script among"):
        split_arguments(["--local_rank=0"])
