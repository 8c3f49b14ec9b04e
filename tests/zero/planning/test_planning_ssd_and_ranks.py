"""A plan that is made in the run, beside states on an SSD and among several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Ranks
from planned_runs import (
    BATCH,
    FIRST_PLANNED,
    LAYERS,
    LENGTH,
    cache_in,
    cached,
    engine_of,
    refusal,
    steps,
)
from training import ds_config, make_engine, tiny_llama

from hmt_deepspeed.zero.planning import facts as plan_inputs

# -- states on an SSD -----------------------------------------------------------------------------------


def on_ssd(
    folder: str,
    activations: Any = None,
    options: Any = None,
    **section: bool,
) -> Any:
    from hmt_deepspeed.zero.offload import worker as host_worker

    host_worker.PIECE, host_worker.NUM_PIECES, host_worker.NUM_STAGED = (
        4096,
        2,
        2,
    )  # several pieces for the larger matrices
    config = ds_config(2, options or {"method": "adamw"})
    device = {"device": "nvme", "nvme_path": f"{folder}/states", **section}
    config["zero_optimization"]["offload_optimizer"] = device
    if activations is not None:
        config["hmt"] |= {"activations": activations}
    return make_engine(config, tiny_llama(layers=LAYERS))


def run_on_ssd(folder: str) -> dict[str, Any]:
    from hmt_deepspeed.planner.run.loads import Amount
    from hmt_deepspeed.planner.solve.cost import estimate
    from hmt_deepspeed.zero.planning import planner as planning

    cache_in(folder)
    search, allowed = planning.best_plan, []
    planning.best_plan = lambda problem, given: allowed.append(given) or search(problem, given)
    plain = on_ssd(folder)
    losses = steps(plain, FIRST_PLANNED + 3)
    plain.destroy()
    engine = on_ssd(folder, {"policy": "plan"})
    planner = engine.hmt_planner
    found = {"plain losses": losses, "losses": steps(engine, FIRST_PLANNED + 3)}
    update = estimate(planner.problem, planner.plan).phases[-1]
    pieces = [p for entry in engine.optimizer.zero.param_states for p in entry.weight.states.pieces]
    found |= {
        "allowed": {choice for given in allowed[0].values() for choice in given},
        "machine": planner.machine,
        "update": (update.name, update.load[Amount.SSD_READ], update.load[Amount.SSD_WRITE]),
        "comparison": planner.comparison.as_json(),
        "elements": sum(p.numel() for p in engine.module.parameters()),
        "pieces": len(pieces),
        "largest": max(piece.nbytes for piece in pieces) + 4096,
        "schedule": planner.facts.setup.schedule,
    }
    planner.save(Path(folder))
    engine.destroy()
    in_turn = on_ssd(folder, {"policy": "plan"}, pipeline_read=False, pipeline_write=False)
    found["in turn"] = in_turn.hmt_planner.facts.setup.schedule
    in_turn.destroy()
    low_rank = {"rank": 8, "max_full_gradient_bytes": 10**7}
    cached(f"{folder}/profile.json")
    engine = on_ssd(folder, {"policy": "plan"}, low_rank)
    steps(engine, 3)
    entries = engine.optimizer.zero.param_states
    found["low rank"] = {
        "comparison": engine.hmt_planner.comparison.as_json(),
        "masters": sum(4 * e.weight.num_elements for e in engine.optimizer.zero.low_rank),
        "dense": sum(12 * e.weight.num_elements for e in entries if e.matrix is None),
        "pieces": sum(len(entry.weight.states.pieces) for entry in entries),
    }
    engine.destroy()
    return found


def test_a_plan_beside_states_on_an_ssd(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(run_on_ssd, 1, str(tmp_path))[0]
    assert found["losses"] == pytest.approx(found["plain losses"], rel=1e-6)
    assert found["machine"].num_ssds == 1  # the folder of the states was measured
    assert "swap_ssd" not in found["allowed"]  # activations were given no folder
    assert "swap_host" in found["allowed"]

    states = 12 * found["elements"]  # fp32 master and moments
    assert found["update"] == ("update", states, states)
    rows, pages = found["comparison"], 4096 * found["pieces"]
    read, written = (rows[f"moved: ssd {way}"] for way in ("reading", "writing"))
    assert read["predicted"] == states <= read["measured"] < states + pages  # whole pages
    # a piece may be written behind, and counted in the iteration after
    assert written["predicted"] == states
    assert written["measured"] == pytest.approx(read["measured"], abs=5 * found["largest"])
    for way in ("reading", "writing"):
        assert rows[f"busy: ssd {way}"]["measured"] > 0
    held = rows["ssd: optimizer states"]
    assert held["predicted"] == 2 * states <= held["measured"] < 2 * (states + pages)
    # gradients leave and weights come back, both in fp32 here, and nothing of the activations moves
    for way in ("gpu to host", "host to gpu"):
        row = rows[f"moved: {way}"]
        assert row["predicted"] == row["measured"] == 4 * found["elements"]
        assert rows[f"busy: {way}"]["measured"] > 0
    adam = rows["busy: cpu"]
    nanoseconds = found["elements"] * found["machine"].cpu_adam_ns
    assert adam["predicted"] == pytest.approx(1e-9 * nanoseconds)
    assert 0 < adam["measured"] < rows["iteration"]["measured"]
    assert rows["busy: gpu"]["measured"] is None
    assert (found["schedule"], found["in turn"]) == ("optimised", "naive")
    for kind in ("gradients", "pools", "state buffers"):
        row = rows[f"host: {kind}"]
        assert row["predicted"] == row["measured"] > 0, kind
    assert "host: early updates" not in rows  # the updates wait for the verdict

    found = found["low rank"]  # of the matrices only masters are there
    rows, pages = found["comparison"], 4096 * found["pieces"]
    held, read = rows["ssd: optimizer states"], rows["moved: ssd reading"]
    states = found["masters"] + found["dense"]
    assert held["predicted"] == 2 * states <= held["measured"] < 2 * (states + pages)
    assert read["predicted"] == states <= read["measured"] < states + pages
    for row in ("moved: gpu to host", "moved: host to gpu", "host: gradients"):
        assert rows[row]["predicted"] == rows[row]["measured"] > 0, row
    assert rows["gpu: optimizer states"]["error"] == pytest.approx(0, abs=2e-3)
    assert 0 < rows["busy: cpu"]["measured"] < rows["iteration"]["measured"]


def test_unlike_disks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are on different file systems; legal: one SSD or array"):
        plan_inputs.ssd_folder(str(tmp_path / "new"), "/proc/states")
    assert plan_inputs.ssd_folder(None, None) is None
    both = [str(tmp_path / name) for name in ("activations", "states")]
    assert plan_inputs.ssd_folder(*both) == both[0]


# -- several ranks ------------------------------------------------------------------------------------


def run_together(folder: str) -> dict[str, Any]:
    """Ranks with unlike memory and batches of unlike length; the smaller memory and the longer batch count."""
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.zero.planning import planner as planning

    cache_in(folder)
    rank = dist.get_rank()
    taken, capacity = 2**20, 2**33 - rank * 2**30
    planning.device_capacity = lambda _: (taken, capacity)
    engine = engine_of({})
    length = LENGTH - 8 * (1 - rank)
    steps(engine, FIRST_PLANNED + 1, batch=BATCH // 2, length=length)
    planner = engine.hmt_planner
    settings = {"plan": folder}
    found = {
        "plan": planner.plan,
        "machine": planner.machine,
        "budget": planner.problem.budget.gpu,
    }
    planner._hmt = HMTConfig.from_block({"activations": {"policy": "plan"}, "planner": settings})
    return found | {"refusal": refusal(planner._use_files)}


def test_ranks_execute_one_plan(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(run_together, 2, str(tmp_path))
    assert first["plan"] == second["plan"]
    assert first["machine"] == second["machine"]
    assert first["budget"] == second["budget"] < 2**33 - 2**30
    assert (first["plan"].micro_batch, first["plan"].seq_length) == (BATCH // 2, LENGTH)
    assert first["refusal"] == second["refusal"]  # found by rank 0, raised by both
