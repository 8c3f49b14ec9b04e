"""Who shares a basis under a checkpoint of a run that shared otherwise, or under a budget too small for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ranks
from modes import LOW_RANK, mode_engine, trained
from torch import Tensor
from training import bases, train

SHARING = {**LOW_RANK, "share_basis": True}
CACHE = {"hmt": {"optimizer": SHARING, "basis_cache": {}}}


def first_moments(engine: Any) -> dict[str, Tensor]:
    """Of the rows held here."""
    return {e.name: e.matrix.moments.exp_avg.read().clone() for e in engine.optimizer.zero.low_rank}


def held(engine: Any) -> dict[str, Any]:
    owners = {e.name: e.matrix.columns.owner for e in engine.optimizer.zero.low_rank}
    return {"bases": bases(engine), "moments": first_moments(engine), "owners": owners}


def loaded_the_other_way(stage: int, folder: str, saves: dict, loads: dict) -> Any:
    """What is held when saved, and after loading under other options; losses of both continuations."""
    engine = mode_engine(saves, stage)
    train(engine, 4)
    engine.save_checkpoint(folder)
    saved, straight = held(engine), train(engine, 2, first=4)
    engine.destroy()
    engine = mode_engine(loads, stage)
    train(engine, 2)  # it shares, or not, before it loads
    engine.load_checkpoint(folder)
    found = held(engine), train(engine, 2, first=4)
    engine.destroy()
    return saved, straight, *found


def rolled_back(stage: int, folder: str, changes: dict[str, Any]) -> Any:
    engine = mode_engine(SHARING, stage, **changes)
    engine.save_checkpoint(folder)
    first = trained(engine, 4)
    engine.load_checkpoint(folder)
    again = trained(engine, 4)
    engine.destroy()
    return first, again


def trained_with_little_room(stage: int) -> Any:
    """For the gradients of q, k and v together, 12800 bytes, but not for those of gate and up, 24640."""
    engine = mode_engine({**SHARING, "max_full_gradient_bytes": 13_000}, stage)
    said: list[str] = []
    engine.optimizer.zero.basis_groups._warn = said.append
    train(engine, 8)
    found = (
        held(engine)["owners"],
        list(engine.optimizer.zero.basis_groups.schedule.num_refreshes),
        said,
    )
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_of_own_bases_are_rotated_into_the_shared_one(
    ranks: Ranks, tmp_path: Any, stage: int
) -> None:
    case = (stage, str(tmp_path), LOW_RANK, SHARING)
    for saved, straight, found, losses in ranks.run(loaded_the_other_way, 2, *case):
        widths = {
            n: b.shape[1] for n, b in saved["bases"].items() if n[-13:-7] in ("q_proj", "k_proj")
        }
        assert len(set(widths.values())) > 1
        for name, owner in found["owners"].items():
            leaders = saved["bases"][owner]
            assert torch.equal(found["bases"][name], leaders)
            turned = saved["moments"][name]
            if owner != name:
                turned = turned @ (saved["bases"][name].t() @ leaders)
            torch.testing.assert_close(found["moments"][name], turned)
        assert len(set(found["owners"].values())) == len(found["owners"]) - 3
        assert losses[0] == pytest.approx(straight[0], rel=1e-6)  # the weights are the same


@pytest.mark.parametrize("stage", [2, 3])
def test_a_shared_basis_becomes_each_ones_own(ranks: Ranks, tmp_path: Any, stage: int) -> None:
    case = (stage, str(tmp_path), SHARING, LOW_RANK)
    for saved, straight, found, losses in ranks.run(loaded_the_other_way, 2, *case):
        assert all(name == owner for name, owner in found["owners"].items())
        for kind in ("bases", "moments"):
            for name, tensor in saved[kind].items():
                assert torch.equal(found[kind][name], tensor), (kind, name)
        assert losses[0] == pytest.approx(straight[0], rel=1e-6)


@pytest.mark.parametrize(("stage", "changes"), [(2, {}), (3, {}), (2, CACHE)])
def test_going_back_to_before_it_was_known_who_shares(
    ranks: Ranks, tmp_path: Any, stage: int, changes: dict[str, Any]
) -> None:
    for first, again in ranks.run(rolled_back, 2, stage, str(tmp_path), changes):
        for key in ("losses", "norms", "ranks", "refreshes", "shared"):
            assert first[key] == again[key], key
        for name, basis in first["bases"].items():
            assert torch.equal(basis, again["bases"][name]), name


def test_groups_above_a_fixed_budget_do_not_share(ranks: Ranks) -> None:
    """They are found at the end of a step whose weights are written: nothing may fail there."""
    for owners, refreshes, said in ranks.run(trained_with_little_room, 2, 2):
        shared = [name.split(".")[-2] for name, owner in owners.items() if name != owner]
        assert shared == ["k_proj", "v_proj"]
        assert min(refreshes) >= 1
        assert "max_full_gradient_bytes is 13000" in said[0]
        assert "gate_proj.weight" in said[0]
        assert "24640" in said[0]
        assert len(said) == 1
