"""The table of variants: what is legal, what a machine lacks, what the options do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from compare_runs import ROOT

from comparison import variants as table
from comparison.cells import Setting
from comparison.contenders import Unavailable, build
from comparison.stages import check_variants
from comparison.training import build_model
from comparison.variants import VARIANTS, Variant, select


def test_an_unknown_variant_is_refused_with_the_table() -> None:
    with pytest.raises(ValueError, match="legal: adamw, galore_interval_200, fira_interval_200"):
        select(["adamw", "adamm"], "sweep")
    with pytest.raises(ValueError, match="legal for it: the finetune stage"):
        select(["lora"], "sweep")


def test_the_default_is_the_whole_table_and_adapters_only_tune() -> None:
    tuned, pretrained = select(None, "finetune"), select(None, "sweep")
    assert [name for name in tuned if name not in pretrained] == ["lora", "qlora"]
    kinds = {VARIANTS[name].kind for name in tuned}
    peers = {"muon", "soap", "adam_mini", "lion", "adamw_8bit"}
    assert kinds == {"adamw", "galore", "fira", "apollo", "hmt", "lora", "qlora", *peers}


def test_the_default_block_and_the_presets_are_variants() -> None:
    assert VARIANTS["hmt"].options == {}
    assert VARIANTS["hmt_memory"].options == {"preset": "memory"}
    assert VARIANTS["hmt_paper"].options == {"preset": "paper"}


@pytest.mark.parametrize(
    ("name", "lr"), [("adamw", 1e-3), ("adamw", 4e-3), ("galore", 1e-2), ("hmt_d4", 1e-2)]
)
def test_decay_takes_the_same_of_a_weight_at_every_rate(
    name: str, lr: float, setting: Setting
) -> None:
    model = build_model(setting, 0)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    contender = build(name, model, setting.shape.hidden, setting.hyper(lr, 0))
    contender.set_learning_rate(lr)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    (0 * model(input_ids=tokens, labels=tokens).loss).backward()
    contender.optimizer.step()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), (1 - 1e-4) * before[key], atol=1e-7, rtol=1e-6)
    contender.close()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("hmt", {"rnak": 16}, "unknown option rnak; legal for hmt: .*optimizer"),
        ("hmt", {"optimizer": {"residual": "some"}}, "hmt.optimizer.residual: got 'some'"),
        ("galore", {"rank": 4, "gap": 200}, "unknown option gap; legal for galore: rank"),
        ("adamw", {"rank": 4}, "legal for adamw: none"),
        ("galore", {"activations": {}}, "unknown option activations"),
        (
            "hmt",
            {"activations": {"policy": {"lm_head": "project"}}},
            r"policy\.lm_head: got 'project'",
        ),
        ("hmt", {"activations": {"policy": "plan"}}, "write the policy out"),
    ],
)
def test_a_wrong_option_stops_the_command(
    kind: str,
    options: dict[str, Any],
    text: str,
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(table.VARIANTS, "wrong", Variant(kind, options, (1e-3,)))
    with pytest.raises(ValueError, match="(?s)wrong.*" + text):
        check_variants(["wrong"], setting)


def test_every_variant_of_the_table_can_be_constructed(setting: Setting) -> None:
    check_variants(VARIANTS, replace(setting, model="3m"))


def test_what_a_machine_lacks_is_a_reason_to_skip(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hyper = build_model(setting, 0), setting.hyper(1e-3, 0)
    with pytest.raises(Unavailable, match="NF4 on CUDA only"):
        build("qlora", model, 64, hyper)
    monkeypatch.setitem(sys.modules, "galore_torch.adamw", None)
    with pytest.raises(Unavailable, match=r"galore_torch.* is not installed: pip install"):
        build("galore", model, 64, hyper)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "compare.py"), "sweep", "--model", "toy"]
    command += ["--variants", "sgd", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1].startswith("compare.py: --variants 'sgd' is unknown")
    )


def test_toy_results_are_kept_from_the_committed_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "sweep", "--model", "toy"])
    with pytest.raises(SystemExit):
        compare.parse_arguments()
    assert "--model toy needs --output" in capsys.readouterr().err
