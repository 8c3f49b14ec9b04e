"""Every mode is the same run on another stage, world size and accumulation; resumed, bit for bit on the same layout.

One table says which cells are run, and each is run once: the runs on two ranks are saved on the way, what is resumed is
compared with them, and they with one rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Ranks
from modes import LOW_RANK, MODES, SAME_LAYOUT, mode_engine, model_of, trained
from training import assert_same_run

SAVED, AFTER = 2, 2  # steps before and after saving: every matrix refreshes in both
PLAIN_BACKWARD = "plain backward"  # another way to the gradients of "right"
ALL = {
    name: {**mode, "update_interval": SAVED}
    for name, mode in {
        **MODES,
        PLAIN_BACKWARD: {**LOW_RANK, "projected_backward": False},
        **SAME_LAYOUT,
    }.items()
}
Run = tuple[str, int, int]  # mode, stage, accumulation

EVERYWHERE = {
    1: [(0, 1), (0, 4), (1, 1), (2, 1), (3, 2)],
    2: [(0, 1), (1, 1), (2, 2), (3, 1)],
    3: [(0, 1), (1, 1), (2, 4), (3, 1)],
}
ON_THREE_RANKS = {
    "left": (2, 2),
    "two_sided": (3, 1),
    "full residual": (3, 1),
    "muon": (2, 2),
    "apollo": (2, 2),
    "module_rules": (3, 1),
}
# Another way to the same basis, or two modes at once: what shards do differently is in the other modes.
SHARDED_ONLY = [
    "auto",
    "left, full residual",
    "no residual",
    "full_rank_budget",
    "subspace",
    "svd",
    "random",
    "random, left",
    "random, two_sided",
]
ON_TWO_RANKS = {
    "left": EVERYWHERE[2],
    "two_sided": EVERYWHERE[2],
    "muon": EVERYWHERE[2],  # the only one that sums twice
    PLAIN_BACKWARD: [(2, 1), (3, 1)],
    "bf16 states": [(1, 1)],
    "bf16 core": [(3, 1)],
    **{name: [(3, 1)] for name in SHARDED_ONLY},
    "int8": [(2, 1), (3, 1)],
    "int8, factored": [(0, 1), (3, 1)],
}


def layouts(name: str, world: int) -> list[tuple[int, int]]:
    """(stage, accumulation) of a mode's runs: the reference, stage 3 on two ranks, and others in turn.

    Modes reach ranks through the same shards and stages: on two ranks each stage meets a third of the modes. The
    default mode meets all stages at all world sizes.
    """
    if name == "right":
        return EVERYWHERE[world]
    index = list(ALL).index(name)
    if world == 2:
        return ON_TWO_RANKS.get(name, [[(0, 1), (1, 1), (2, 2)][index // 3 % 3], (3, 1)])
    if world == 3:
        return [ON_THREE_RANKS[name]] if name in ON_THREE_RANKS else []
    return [] if name in SAME_LAYOUT else [(0, 1)]


RUNS = {
    world: [(name, *way) for name in ALL for way in layouts(name, world)] for world in (1, 2, 3)
}


def resumed_layouts(name: str) -> list[tuple[int, int]]:
    """What is resumed: one of a mode's layouts on two ranks, the sharded one and the other in turn."""
    found = layouts(name, 2)
    if len(found) == 2 and name in MODES:
        return [found[list(ALL).index(name) % 2]]
    return found


# -- cases --------------------------------------------------------------------------------------------


def all_runs(wanted: list[Run], folder: str) -> dict[Run, Any]:
    """One engine after another, saved on the way to a folder: what it was when saved, and at the end."""
    found = {}
    for name, stage, gas in wanted:
        engine = mode_engine(ALL[name], stage, gas, model=model_of(name))
        held = trained(engine, SAVED)
        if folder:
            engine.save_checkpoint(f"{folder}/{name}/{stage}")
        found[name, stage, gas] = (held, trained(engine, AFTER, first=SAVED))
        engine.destroy()
    return found


def resumed_runs(folder: str, wanted: list[tuple[str, int, int, int]]) -> dict[Any, Any]:
    """Continuations of (mode, stage that saved it, stage and accumulation now) in a new process."""
    found = {}
    for name, saved, stage, gas in wanted:
        model = model_of(name)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)  # everything must come from the checkpoint
        engine = mode_engine(ALL[name], stage, gas, model=model)
        engine.load_checkpoint(f"{folder}/{name}/{saved}")
        held = trained(engine, 0)
        found[name, saved, stage] = (held, trained(engine, AFTER, first=SAVED))
        engine.destroy()
    return found


def refusals(folder: str) -> dict[str, str]:
    """Loading a checkpoint of one mode into an engine of another."""
    factored = {"second_moment": "factored"}
    pairs = {
        "projection": ("left", MODES["full residual"]),
        "method": ("left", MODES["apollo"]),
        "apollo to low rank": ("apollo", LOW_RANK),
        "mini to apollo": ("apollo_mini", MODES["apollo"]),
        "factored to full": ("factored", MODES["auto"]),
        "full to factored": ("left", {**MODES["left"], **factored}),
        "core to one side": ("two_sided", LOW_RANK),
        "another rank that is drawn": ("apollo", {**MODES["apollo"], "rank": 3}),
        "one rule": ("left", {**MODES["left"], "module_rules": {"o_proj": {"method": "apollo"}}}),
    }
    said = {}
    for key, (saved, options) in pairs.items():
        engine = mode_engine(options, 2)
        try:
            engine.load_checkpoint(f"{folder}/{saved}/3")
            said[key] = "accepted"
        except ValueError as error:
            said[key] = str(error)
        engine.destroy()
    engine = mode_engine(MODES["apollo"], 2)
    engine.load_checkpoint(f"{folder}/left/3", load_optimizer_states=False)
    said["weights only"] = "loaded" if trained(engine, 1)["losses"][0] > 0 else ""
    return said


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, folder: str) -> list[dict[Run, Any]]:
    """The runs on two ranks, by rank."""
    return ranks.run(all_runs, 2, RUNS[2], folder)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, saved: Any) -> dict[int, dict[Run, dict[str, Any]]]:
    """All runs by world size, made by one launch each: the outcome of all steps."""
    found = {1: ranks.run(all_runs, 1, RUNS[1], "")[0], 2: saved[0]}
    found[3] = ranks.run(all_runs, 3, RUNS[3], "")[0]
    return {
        world: {run: joined(*parts) for run, parts in of.items()} for world, of in found.items()
    }


def joined(held: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return after | {key: held[key] + after[key] for key in ("losses", "norms")}


def test_stage_world_and_accumulation_do_not_matter(runs: Any) -> None:
    compared = dict.fromkeys([*MODES, PLAIN_BACKWARD], 0)
    for of_world in runs.values():
        for (name, *_), run in of_world.items():
            if name in compared:
                twin = "right" if name == PLAIN_BACKWARD else name
                assert_same_run(run, runs[1][twin, 0, 1])
                compared[name] += 1
    assert min(compared.values()) >= 2
    assert compared["right"] == sum(map(len, EVERYWHERE.values()))


def test_the_runs_exercise_what_is_compared(runs: Any) -> None:
    """Clipping is active, matrices refresh twice, ranks change and differ, the loss falls."""
    for name in MODES:
        run = runs[1][name, 0, 1]
        assert min(run["norms"]) > 0.5, name
        assert min(run["refreshes"]) >= 2, name
        assert run["losses"][-1] < run["losses"][0] - 0.05, name
        if "rank_candidates" in MODES[name] and name != "module_rules":
            assert set(run["ranks"].values()) - {4}, name
    for name in ("right", "rank_budget", "out_of_sample"):
        assert len(set(runs[1][name, 0, 1]["ranks"].values())) > 1
    full = runs[1]["full_rank_budget", 0, 1]["ranks"].values()
    assert set(full) & {40, 77}
    assert set(full) & {4, 8, 16}
    assert runs[1]["share_basis", 0, 1]["shared"] == [
        [f"model.layers.0.{name}.weight" for name in names]
        for names in (
            ("mlp.gate_proj", "mlp.up_proj"),
            ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
        )
    ]


def test_modes_differ(runs: Any) -> None:
    """No mode silently runs as another one."""
    losses = {name: tuple(runs[1][name, 0, 1]["losses"]) for name in MODES}
    assert len(set(losses.values())) == len(losses)


def test_resume_is_bit_for_bit(ranks: Ranks, saved: Any, folder: str) -> None:
    """Losses, norms, weights, bases, ranks, refresh times, rank history, groups."""
    ways = [(name, *way) for name in ALL for way in resumed_layouts(name)]
    wanted = [(name, stage, stage, gas) for name, stage, gas in ways]
    for straight, resumed in zip(saved, ranks.run(resumed_runs, 2, folder, wanted), strict=True):
        for run in ways:
            name, stage, _ = run
            for one, two in zip(straight[run], resumed[name, stage, stage], strict=True):
                # Where nothing was trained there are no losses: the run that was saved has those of its steps.
                keys = ("losses", "norms") if two["losses"] else ()
                for key in (*keys, "ranks", "refreshes", "shared"):
                    assert one[key] == two[key], (run, key)
                assert one["policy"] == two["policy"], run
                for key in ("weights", "bases"):
                    assert one[key].keys() == two[key].keys()
                    for tensor in one[key]:
                        assert torch.equal(one[key][tensor], two[key][tensor]), (run, key, tensor)


def test_what_is_resumed_has_a_history(saved: Any) -> None:
    """Ranks are worth restoring: refreshes before and after, groups formed, energies."""
    for (name, *_), (held, after) in saved[0].items():
        assert after["refreshes"] != held["refreshes"], name
        if "apollo" not in name and "random" not in name:
            assert any(held["policy"]["histories"].values()), name
        if "share_basis" in ALL[name]:
            assert held["shared"], name


@pytest.mark.parametrize("world", [1, 3])
def test_another_layout_goes_on_the_same(ranks: Ranks, saved: Any, folder: str, world: int) -> None:
    """From stage 3 to a whole or half sharded one, or from another one to stage 3."""
    names = [*MODES] if world == 1 else ["left", "two_sided", "apollo"]
    wanted = {}
    for index, name in enumerate(names):
        origin = layouts(name, 2)[-1 if index % 2 else 0]
        wanted[name] = ((name, *origin), 3 if origin[0] < 3 else world // 2)
    ways = [(name, saved_run[1], stage, 1) for name, (saved_run, stage) in wanted.items()]
    found = ranks.run(resumed_runs, world, folder, ways)[0]
    assert len(found) == len(names)
    for (name, *_), (_, after) in found.items():
        straight = saved[0][wanted[name][0]][1]
        assert_same_run(after, straight)
        one, other = (run["policy"]["histories"] for run in (after, straight))
        steps = [{n: [entry[0] for entry in h] for n, h in p.items()} for p in (one, other)]
        assert steps[0] == steps[1], name


def test_states_that_do_not_fit_are_refused(ranks: Ranks, saved: Any, folder: str) -> None:
    said = ranks.run(refusals, 2, folder)[0]
    assert "lowrank_adamw left, now lowrank_adamw right" in said["projection"]
    assert "lowrank_adamw left, now apollo, random of rank" in said["method"]
    assert re.search(
        "apollo, random of rank .* now lowrank_adamw right", said["apollo to low rank"]
    )
    assert "apollo_mini, random of rank 1, now apollo" in said["mini to apollo"]
    assert "now apollo, random of rank 3" in said["another rank that is drawn"]
    assert "lowrank_adamw two_sided, now lowrank_adamw right" in said["core to one side"]
    assert "lowrank_adamw auto, factored, now lowrank_adamw auto" in said["factored to full"]
    assert "lowrank_adamw left, now lowrank_adamw left, factored" in said["full to factored"]
    assert "o_proj.weight (lowrank_adamw left, now apollo, random" in said["one rule"]
    for key, text in said.items():
        if key != "weights only":
            assert "Keep method, projection, second_moment, module_rules" in text, key
            assert "load_optimizer_states=False" in text, key
    assert said["weights only"] == "loaded"


def test_zero_to_fp32_reads_every_mode(saved: Any, folder: str) -> None:
    for (name, stage, _), (held, _) in saved[0].items():
        if stage > 1 or name in ("left", "two_sided"):
            consolidated = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}/{stage}")
            for key, weight in held["weights"].items():
                assert torch.equal(consolidated[key], weight), (name, stage, key)


def test_files_hold_plain_types_only(saved: Any, folder: str) -> None:
    for name, stage, _ in saved[0]:
        files = list(Path(f"{folder}/{name}/{stage}").glob("*/*.pt"))
        assert files
        for path in files:
            torch.load(path, weights_only=True)
