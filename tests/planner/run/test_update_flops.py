"""FLOPs of the optimizer's pass: the plan against what a step computes."""

from __future__ import annotations

import pytest
import torch
from real_models import config, fresh, run
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from hmt_deepspeed import rules
from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.models import model_shape
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.modes import OptimizerMode, Sharding
from hmt_deepspeed.planner.run.problem import RunSetup, make_problem
from hmt_deepspeed.planner.run.update_flops import update_flops
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import uniform_plan

KEEP = dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"}
MODES = {
    "right": {"method": "lowrank_adamw", "rank": 32},
    "auto side": {"method": "lowrank_adamw", "rank": 32, "projection": "auto"},
    "adamw": {"method": "adamw"},
    "muon": {"method": "muon", "rank": 32},
    "muon, whole": {"method": "muon", "rank": "full"},
    "apollo": {"method": "apollo", "rank": 32},
}


@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("case", MODES)
def test_flops_are_those_of_a_step_between_two_refreshes(case, rows, monkeypatch):
    monkeypatch.setitem(rules._ROWS_OF_BLOCK, "cpu", rows)
    update_flops.cache_clear()
    network = fresh("llama", torch.float32).train()
    bases = {} if case in ("adamw", "muon, whole", "apollo") else {"max_full_gradient_bytes": 2**30}
    optimizer = HMT(network, lr=1e-3, **bases, **MODES[case])
    for _ in range(2):  # the first step finds bases
        run(network).backward()
        in_place = {torch.ops.aten.addmm_: lambda added, a, b, *_, **__: mm_flop(a, b)}
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            optimizer.step()
        optimizer.zero_grad()
    shape = shape_of_config(config("llama"))
    planned = sum(update_flops(shape, OptimizerMode(**MODES[case], on_gpu=False), Sharding()))
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.02)  # of sums and norms


def test_a_step_of_muon_takes_its_roots_time():
    """A 7B at half the width, no gradient accumulated, on an A100, whose fp32 products are a fifteenth as fast: as long
    as 3 products of 2048 x 2048 matrices and one of all rows, and five eighths of 10 and one, for each linear."""
    machine = named_machine("a100-80g")
    shape = model_shape("7b")
    seconds = {}
    for method in ("lowrank_adamw", "muon"):
        mode = OptimizerMode(method, rank=2048)
        workload = build_workload(shape, micro_batch=1, seq_length=2048, projected=mode.backward())
        problem = make_problem(workload, machine, RunSetup(), mode)
        plan = uniform_plan(workload, machine, KEEP)
        seconds[method] = estimate(problem, plan).seconds
    roots = 32 * 7 * (3 + 10 * 5 / 8) * 2 * 2048**3
    rows = 32 * (4 * 4096 + 2 * 11008 + 4096) * (1 + 5 / 8) * 2 * 2048**2
    more = (roots + rows) / machine.matmul.fp32
    assert seconds["muon"] - seconds["lowrank_adamw"] == pytest.approx(more, rel=0.01)
