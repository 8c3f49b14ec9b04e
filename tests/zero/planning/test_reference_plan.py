"""The plan that a run executes until there is another: the JSON's own policy, under DeepSpeed's keys."""

from types import SimpleNamespace
from typing import Any

import pytest
from problems import MACHINE, small_problem

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.planning.run_profile import reference_plan


@pytest.mark.parametrize(
    ("policy", "on_host", "expected"),
    [({}, False, "keep"), ({}, True, "swap_host"), ({"layer_input": "swap_ssd"}, True, "swap_ssd")],
)
def test_cpu_checkpointing_moves_the_inputs_that_would_be_kept(
    policy: dict[str, str], on_host: bool, expected: str
) -> None:
    section = {"policy": policy, **({"nvme_path": "/ssd"} if policy else {})}
    facts: Any = SimpleNamespace(inputs={"layer_input": "swap_host"} if on_host else {})
    hmt = HMTConfig.from_block({"activations": section})
    plan = reference_plan(hmt, facts, small_problem().workload, MACHINE)
    assert set(plan.counts()["layer_input"]) == {expected}
    assert set(plan.counts()["residual"]) == {"keep"}
