"""Resuming: the same run in new processes, bit for bit, and on any other layout."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from harness import Ranks
from torch.optim.lr_scheduler import LambdaLR
from training import (
    LOW_RANK,
    bases,
    ds_config,
    furthest,
    make_engine,
    matrix_ranks,
    model_weights,
    subspace_distance,
    tiny_llama,
    train,
    weights,
)

from hmt_deepspeed.zero.saving.saved_state import SavedState

STEPS = 2  # every matrix refreshes before a save and again after it, three to six in a step
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "no masters": {"bf16": {"enabled": True}},
    "scheduler": {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3, "total_num_steps": 30},
        }
    },
}


def config_of(stage: int, variant: str = "fp32", **changes: Any) -> dict[str, Any]:
    masters = {"master_weights": "none"} if variant == "no masters" else {}
    return ds_config(
        stage, {**LOW_RANK, "update_interval": STEPS, **masters}, **VARIANTS[variant], **changes
    )


def lr_of(engine: Any) -> float:
    return float(engine.optimizer.param_groups[0]["lr"])


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    """All that must be the same after a resumed run."""
    return {
        "losses": losses,
        "weights": weights(engine),
        "model": model_weights(engine),
        "bases": bases(engine),
        "ranks": matrix_ranks(engine),
        "lr": lr_of(engine),
        "step": engine.optimizer.zero.step_count,
        "random": torch.rand(3),
    }


# -- cases: a run, and its continuation ------------------------------------------------------------------


def straight_run(stage: int, variant: str, folder: str | None, goes_on: bool = True) -> Any:
    """Saved halfway when given a folder."""
    engine = make_engine(config_of(stage, variant))
    losses = train(engine, STEPS)
    if folder is not None:
        torch.rand(5)  # the random state that is saved is not the one a new process starts with
        engine.save_checkpoint(folder, client_state={"position": 120})
    return outcome(engine, losses + train(engine, STEPS, first=STEPS)) if goes_on else None


def resumed_run(stage: int, variant: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(999)
    engine = make_engine(config_of(stage, variant), tiny_llama(seed=7))
    path, client = engine.load_checkpoint(folder)
    assert path == os.path.join(folder, f"global_step{STEPS}")
    assert client["position"] == 120
    assert engine.global_steps == STEPS
    return outcome(engine, train(engine, STEPS, first=STEPS))


def resumed_at_stages(wanted: list[tuple[str, int]]) -> dict[Any, Any]:
    """As many steps from a folder at a stage, one engine after another."""
    found = {}
    for folder, stage in wanted:
        engine = make_engine(config_of(stage), tiny_llama(seed=7))
        engine.load_checkpoint(folder)
        loaded = weights(engine)
        losses = train(engine, STEPS, first=STEPS)
        found[folder, stage] = (losses, weights(engine), bases(engine), loaded)
        engine.destroy()
    return found


def partial_loads(stage: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, keyword in {
        "module": {"load_module_only": True},
        "no states": {"load_optimizer_states": False},
        "no scheduler": {"load_lr_scheduler_states": False},
    }.items():
        engine = make_engine(config_of(stage, "scheduler"), tiny_llama(seed=7))
        engine.load_checkpoint(folder, **keyword)
        moments = max(
            float(t.abs().max()) if t.numel() else 0.0
            for state in engine.optimizer.state.values()
            for name, t in state.items()
            if name != "step"
        )
        found[key] = {
            "weights": weights(engine),
            "model": model_weights(engine),
            "moments": moments,
            "steps": engine.global_steps,
            "own steps": engine.optimizer.zero.step_count,
            "scheduler": engine.lr_scheduler.last_batch_iteration,
        }
        engine.destroy()
    return found


def lr_set_by_hand(folder: str) -> tuple[float, float]:
    engine = make_engine(config_of(2), tiny_llama(layers=1))
    train(engine, 1)
    engine.optimizer.param_groups[0]["lr"] = 1.25e-4
    engine.save_checkpoint(folder)
    fresh = make_engine(config_of(2), tiny_llama(layers=1))
    before = lr_of(fresh)
    fresh.load_checkpoint(folder)
    return before, lr_of(fresh)


def other_precision(folder: str) -> dict[str, Any]:
    """A dynamic loss scale stays with fp16; other groups are refused."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    engine = make_engine(ds_config(2, fp16=fp16), tiny_llama(layers=1))
    train(engine, 4)
    engine.save_checkpoint(folder)
    again = make_engine(ds_config(2, fp16=fp16), tiny_llama(layers=1))
    again.load_checkpoint(folder)
    other = make_engine(ds_config(2), tiny_llama(layers=1))
    other.load_checkpoint(folder)
    scales = [e.optimizer.loss_scale for e in (engine, again, other)]
    model = tiny_llama(layers=1)
    groups = [{"params": [p]} for p in model.parameters()]
    grouped = make_engine(ds_config(2), model, model_parameters=groups)
    with pytest.raises(ValueError, match="Group them as in the saved run"):
        grouped.load_checkpoint(folder)
    return {"scales": scales, "losses": train(other, 2)}


CLIENT = {
    "args": Namespace(lr=1e-3, name="run"),
    "best": np.float64(1.5),
    "random": np.random.RandomState(3).get_state(),
    "position": 120,
    "moved": {"nested": [torch.arange(3), np.int64(4)]},
}


def falling(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: np.cos(step / 100))


def saved_beside(folder: str) -> Any:
    """What scripts save with ours: a checkpoint and a snapshot, loaded again."""
    config = config_of(2)
    config["hmt"] = {**config["hmt"], "snapshot": {"path": f"{folder}/snapshots", "interval": 2}}
    engine = make_engine(config, tiny_llama(layers=1), lr_scheduler=falling)
    engine.snapshot_client_state = lambda: CLIENT
    train(engine, 2)
    lr = engine.optimizer.param_groups[0]["lr"]
    assert type(lr) is np.float64
    engine.save_checkpoint(f"{folder}/saved", client_state=CLIENT)
    engine.destroy()  # writes the snapshot
    found = []
    for path in ("saved", "snapshots"):
        engine = make_engine(config_of(2), tiny_llama(layers=1), lr_scheduler=falling)
        client = engine.load_checkpoint(f"{folder}/{path}")[1]
        assert lr_of(engine) == lr
        assert engine.lr_scheduler.last_epoch == 2
        found.append({key: client[key] for key in CLIENT})
        engine.destroy()
    return found


# -- tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "world", "variant"),
    [
        (2, 1, "fp32"),
        (0, 2, "scheduler"),
        (1, 2, "no masters"),
        (2, 2, "bf16"),
        (3, 2, "no masters"),
    ],
)
def test_resume_is_bit_for_bit(
    ranks: Ranks, tmp_path: Path, stage: int, world: int, variant: str
) -> None:
    """What else a run is beside its mode, in turn with the layouts; test_modes.py resumes all modes in fp32."""
    straight = ranks.run(straight_run, world, stage, variant, str(tmp_path))
    resumed = ranks.run(resumed_run, world, stage, variant, str(tmp_path))
    for one, other in zip(straight, resumed, strict=True):
        assert one["losses"][STEPS:] == other["losses"]
        for key in ("weights", "model", "bases"):
            for name, value in one[key].items():
                assert torch.equal(value, other[key][name]), (key, name)
        assert one["ranks"] == other["ranks"]
        assert (one["lr"], one["step"]) == (other["lr"], other["step"])
        assert torch.equal(one["random"], other["random"])


@pytest.fixture(scope="module")
def saved_runs(ranks: Ranks, tmp_path_factory: Any) -> tuple[dict[Any, str], dict[str, Any]]:
    """The same run saved at every stage and on 1 or 2 ranks; and its straight continuation."""
    folders = {}
    for stage, world in [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2)]:
        folder = str(tmp_path_factory.mktemp(f"stage{stage}_world{world}"))
        last = (stage, world) == (3, 2)
        straight = ranks.run(straight_run, world, stage, "fp32", folder, last)[0]
        folders[stage, world] = folder
    return folders, straight


def test_saving_changes_nothing(ranks: Ranks, saved_runs: Any) -> None:
    saving = saved_runs[1]
    plain = ranks.run(straight_run, 2, 3, "fp32", None)[0]
    assert saving["losses"] == plain["losses"]
    assert furthest(saving["weights"], plain["weights"]) == 0


# A resumed run on another layout sums in another order, like a run on it from the start: the bars of
# training.py hold.
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_layout_loads_any_other(ranks: Ranks, saved_runs: Any, world: int) -> None:
    folders, straight = saved_runs
    # What is read is whole tensors by name, whoever wrote them, and what is done with them is the reader's: every
    # layout is read at another stage, every stage reads what one rank and what two wrote; those that shard their state
    # read it as whole, as sharded over as many ranks, and as sharded over fewer.
    wanted = {
        1: [(w, (w[0] + w[1]) % 4) for w in folders],
        2: [((0, 1), 2), ((3, 1), 3), ((3, 2), 0), ((2, 2), 3), ((3, 2), 1)],
        3: [((1, 2), 3), ((3, 2), 2)],
    }[world]
    found = ranks.run(resumed_at_stages, world, [(folders[w], stage) for w, stage in wanted])[0]
    reference = next(iter(found.values()))
    assert len(found) == len(wanted)
    for key, (losses, after, found_bases, loaded) in found.items():
        assert losses == pytest.approx(straight["losses"][STEPS:], rel=1e-5), key
        assert furthest(loaded, reference[3]) < 2e-3, key
        assert furthest(after, reference[1]) < 2e-3, key
        for name, basis in found_bases.items():
            assert subspace_distance(basis, reference[2][name]) < 1e-2, (key, name)


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2)])
def test_partial_loads(ranks: Ranks, tmp_path: Path, stage: int, world: int) -> None:
    straight = ranks.run(straight_run, world, stage, "scheduler", str(tmp_path))[0]
    found = ranks.run(partial_loads, world, stage, str(tmp_path))[0]
    for key, state in found.items():
        assert furthest(state["weights"], found["no scheduler"]["weights"]) == 0
        assert furthest(state["weights"], state["model"]) == 0  # fp32: masters are the weights
        assert furthest(state["weights"], straight["weights"]) > 1e-3  # steps earlier
        assert state["steps"] == (0 if key == "module" else STEPS)
        assert state["own steps"] == (STEPS if key == "no scheduler" else 0)
        assert (state["moments"] > 0) == (key == "no scheduler")
    assert found["no states"]["scheduler"] > found["no scheduler"]["scheduler"]
    assert found["module"]["scheduler"] == found["no scheduler"]["scheduler"]


def test_lr_set_by_hand_is_restored(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(lr_set_by_hand, 1, str(tmp_path))[0] == (3e-3, 1.25e-4)


def test_loss_scale_is_restored_where_there_is_one(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(other_precision, 1, str(tmp_path))[0]
    assert found["scales"] == [512.0, 512.0, 1.0]


def test_objects_of_the_caller_come_back_and_files_stay_plain(ranks: Ranks, tmp_path: Path) -> None:
    """Stock DeepSpeed pickles a client state; a NumPy schedule makes NumPy learning rates."""
    for client in ranks.run(saved_beside, 1, str(tmp_path))[0]:
        assert client["args"] == CLIENT["args"]
        assert (client["best"], type(client["best"])) == (1.5, np.float64)
        assert np.array_equal(client["random"][1], CLIENT["random"][1])
        assert client["position"] == 120
        assert torch.equal(client["moved"]["nested"][0], torch.arange(3))
    files = list(tmp_path.glob("*/*/*.pt"))
    assert len(files) == 4
    for path in files:
        torch.load(path, weights_only=True)


def test_an_unreadable_checkpoint_of_ours_is_not_called_foreign(tmp_path: Path) -> None:
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"hmt": Namespace()}}, path)
    assert not SavedState.is_ours(str(tmp_path))
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UnpicklingError):
        SavedState.is_ours(str(tmp_path))
