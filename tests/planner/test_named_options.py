"""Nothing that a plan names is missing: keys of JSONs, fields in messages, options of commands."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.config.components import COMPONENTS
from hmt_deepspeed.families.table import FAMILIES
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.planner import command
from hmt_deepspeed.planner.advise.advise import Advice, advise
from hmt_deepspeed.planner.advise.deepspeed_json import deepspeed_json
from hmt_deepspeed.planner.advise.describe import describe
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.shapes import plain_shape
from hmt_deepspeed.planner.run.fpdt import runs_in_chunks
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.zero.engine.support import check_activations

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# Which keys there are does not depend on the search for the best choices.
KEPT: dict[Any, Any] = {**dict.fromkeys(COMPONENTS, "keep"), "projected_inputs": "project"}


def plans() -> list[Advice]:
    """One GPU and several, exact and lossy, with SSDs and without, and one that does not fit."""
    found = []
    methods: tuple[str, ...] = ("lowrank_adamw", "adamw", "apollo")
    shape = plain_shape(layers=2, hidden=128, heads=4, vocab=256, gated=True, tied=False)
    for gpus, ssds, method in (
        (1, 1, methods[0]),
        (2, 0, methods[1]),
        *((1, 0, m) for m in methods[2:]),
    ):
        machine = named_machine("rtx4090", num_gpus=gpus, num_ssds=ssds, host_memory=64 * GIB)
        modes = (OptimizerMode(method=method, rank=8),)
        lossy = tuple(
            OptimizerMode(method=method, rank=8, master_weights="none", state_dtype=dtype)
            for dtype in ("fp32", "int8")
        )
        fixed = {**KEPT, "mlp_intermediate": "swap_ssd"} if ssds else KEPT
        found.append(advise(Request(shape, machine, 64, 1, 4, modes, lossy, fixed=fixed)))
    tight = Request(shape, machine, 64, modes=modes, gpu_memory=2**20, fixed=KEPT)
    return [*found, advise(tight)]


@pytest.fixture(scope="module")
def walked() -> list[Advice]:
    return plans()


def test_every_key_of_every_json_is_read(walked: list[Advice]) -> None:
    of_deepspeed = {value for value in vars(constants).values() if isinstance(value, str)}
    of_deepspeed |= {"zero_optimization", ACT_CHKPT}
    written = 0
    for advice in walked:
        for answer in advice.answers:
            if answer.plan is None:
                continue
            config = deepspeed_json(advice.request, answer, nvme_path="/ssd")
            config = json.loads(json.dumps(config))
            if "hmt" in config:
                hmt = HMTConfig.from_block(config.pop("hmt"))
                check_activations(config, hmt, hmt.optimizer.model_dump())
                of_optimizer = set(inspect.signature(HMT).parameters)
                assert set(config["optimizer"]["params"]) <= of_optimizer
            DeepSpeedZeroConfig(**config["zero_optimization"])  # refuses what it does not know
            ActivationCheckpointing.from_section(config.get(ACT_CHKPT))  # as strict
            assert set(config) <= of_deepspeed
            written += 1
    assert written > 20
    with pytest.raises(ValueError, match="Extra inputs"):
        DeepSpeedZeroConfig(stagee=3)


def named_in(text: str) -> set[str]:
    """Options of a command line."""
    return set(re.findall(r"(?<![\w-])--([a-z][a-z_]+)", text))


def options() -> set[str]:
    """Of hmt-plan, and of the commands that its texts name."""
    other = (ROOT / "launch" / "run.py").read_text() + (
        ROOT / "hmt_deepspeed" / "doctor.py"
    ).read_text()
    found = set(re.findall(r'add(?:_argument)?\("--([a-z_]+)"', other))
    return found | {action.dest for action in command._parser()._actions}


def texts() -> list[str]:
    """Every string in the planner and in the doctor, docstrings too."""
    files = [
        *(ROOT / "hmt_deepspeed" / "planner").rglob("*.py"),
        ROOT / "hmt_deepspeed" / "doctor.py",
    ]
    files.append(ROOT / "hmt_deepspeed" / "architectures.py")
    trees = [ast.parse(path.read_text()) for path in files]
    constants = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    return [node.value for node in constants if isinstance(node.value, str)]


def test_every_option_that_is_named_exists(walked: list[Advice]) -> None:
    told = [describe(advice) for advice in walked]
    assert any("--lossy" in text for text in told)
    legal = options() | {"help", "check"}  # of python -m hmt_deepspeed
    for text in [*told, *texts()]:
        assert named_in(text) <= legal, text


def field_of(path: list[str]) -> bool:
    model: Any = HMTConfig
    for name in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return True  # inside a mapping
        if name not in model.model_fields:
            return False
        model = model.model_fields[name].annotation
    return True


def test_every_field_that_is_named_exists(walked: list[Advice]) -> None:
    named = {
        match
        for text in [*texts(), *map(describe, walked)]
        for match in re.findall(r"\bhmt\.((?:[a-z][a-z_]+\.)*[a-z][a-z_]+)", text)
    }
    assert {"activations.policy", "fpdt", "basis_cache", "optimizer.rank"} & named
    assert [name for name in named if not field_of(name.split("."))] == []
    zero = DeepSpeedZeroConfig.model_fields
    keys = {k for text in texts() for k in re.findall(r"zero_optimization\.([a-z_]+)", text)}
    assert keys <= set(zero)


def test_chunks_are_named_for_families_that_have_them() -> None:
    shape = plain_shape(layers=2, hidden=64, heads=4, vocab=9)
    assert runs_in_chunks(shape)
    for name, row in FAMILIES.items():
        assert runs_in_chunks(replace(shape, family=name)) == bool(row.layer)
