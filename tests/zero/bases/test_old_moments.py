"""``hmt.basis_cache.history``: what is remembered of bases that were left, on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import assert_equal, cached_engine, outcome
from harness import Ranks
from training import assert_same, result, train, weights

from hmt_deepspeed.zero.engine import resolve as engine_settings

STEPS = 7
# Batches repeat after three steps and bases are found every second one, so that subspaces come back.
MODE: dict[str, Any] = {
    "rank": 6,
    "update_interval": 2,
    "max_full_gradient_bytes": 10**6,
    "scale": 1.0,
}
CACHE: dict[str, Any] = {"history": 2}


def evidence(engine: Any) -> dict[str, torch.Tensor]:
    return {e.name: e.matrix.moments.evidence.clone() for e in engine.optimizer.zero.low_rank}


def numbers(engine: Any) -> dict[str, Any]:
    cache, history = engine.optimizer.zero.bases.cache, engine.optimizer.zero.bases.history
    return {
        "hits": history.hits,
        "misses": history.misses,
        "kept": cache.kept_keys(),
        "bytes": cache.host_bytes,
        "held": set(cache.held),
    }


def followed(jobs: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Each (stage, mode, cache, changes), trained."""
    found = []
    for stage, mode, cache, changes in jobs:
        engine = cached_engine(stage, {**MODE, **mode}, cache, **changes)
        losses = train(engine, STEPS)
        found.append({**result(engine, losses), "evidence": evidence(engine), **numbers(engine)})
        engine.destroy()
    return found


FACTORED = {"second_moment": "factored"}
LEFT, SHARED = {"projection": "left"}, {"share_basis": True}
JOBS: dict[int, list[Any]] = {
    1: [
        (1, {}, CACHE, {}),
        (1, {}, {}, {}),
        (2, LEFT, CACHE, {}),
        (2, SHARED, CACHE, {}),
        (1, FACTORED, CACHE, {}),
    ],
    2: [(0, {}, CACHE, {}), (2, LEFT, CACHE, {}), (3, SHARED, CACHE, {}), (2, FACTORED, CACHE, {})],
}


@pytest.fixture(scope="module")
def runs(ranks: Ranks) -> dict[int, list[Any]]:
    return {world: ranks.run(followed, world, jobs)[0] for world, jobs in JOBS.items()}


def test_every_world_size_and_stage_remembers_the_same(runs: dict[int, list[Any]]) -> None:
    right, _, left, shared, factored = runs[1]
    for one, other in zip((right, left, shared, factored), runs[2], strict=True):
        assert_same(one, other)
        assert one["hits"] == other["hits"] > 0
        assert one["misses"] == other["misses"] == 0
        assert one["kept"] == other["kept"]
        for name, kept in one["evidence"].items():
            # squares of overlaps of bases, which differ by the order of summation
            torch.testing.assert_close(kept, other["evidence"][name], rtol=1e-3, atol=1e-6)


def test_directions_that_come_back_bring_evidence(runs: dict[int, list[Any]]) -> None:
    remembering, plain = runs[1][:2]
    # first left at the second refresh: one entry found at the third, two at the fourth
    assert (remembering["hits"], plain["hits"]) == (7 * 3, 0)
    sums = [sum(float(kept.sum()) for kept in run["evidence"].values()) for run in runs[1][:2]]
    assert sums[0] > 1.01 * sums[1]
    assert remembering["losses"][:4] == plain["losses"][:4]
    assert remembering["losses"][4:] != plain["losses"][4:]


def test_a_rank_keeps_its_rows_and_one_of_them_the_basis(runs: dict[int, list[Any]]) -> None:
    rows, columns, rank = 314, 6 * 40 + 77, 6
    moments, bases = 2 * rows * rank * 4, columns * rank * 4
    whole = runs[1][0]["bytes"] - runs[1][1]["bytes"]
    assert whole == 2 * (moments + bases + 7 * (rank + 1) * 4)  # evidence of both moments
    assert len(runs[1][0]["kept"]) == 2 * 7
    # of a factored second moment the means of the columns, which every rank has
    factored = runs[1][4]["bytes"] - runs[1][1]["bytes"]
    assert factored == 2 * (bases + 7 * (2 * rank + 1) * 4)
    # q, k, v and gate, up share one
    assert len(runs[1][3]["kept"]) == 2 * 4
    assert not any(run["held"] for world in runs.values() for run in world)


# -- bounds -----------------------------------------------------------------------------------------------


PAGES = 40  # of which the current bases take 7, and 7 more while new ones come


def bounded() -> dict[str, Any]:
    """A cache that has no room for all that would be kept."""
    engine_settings.host_memory_share = lambda: PAGES * 4096
    engine = cached_engine(2, MODE, CACHE)
    losses = train(engine, STEPS)
    cache = engine.optimizer.zero.bases.cache
    waiting = sum(e.name in cache for e in engine.optimizer.zero.low_rank)
    found = {"losses": losses, "waiting": waiting, **numbers(engine)}
    found["pages"] = cache._store.pinned_bytes // 4096
    engine.destroy()
    return found


def test_the_cache_keeps_its_bounds_and_current_bases_come_first(ranks: Ranks) -> None:
    found = ranks.run(bounded, 1)[0]
    assert found["waiting"] == 7
    assert found["hits"] > 0
    assert found["misses"] > 0
    assert all(map(math.isfinite, found["losses"]))
    assert 0 < len(found["kept"]) < 2 * 7
    assert found["pages"] == PAGES


def lost_on_one_rank() -> dict[str, Any]:
    engine = cached_engine(3, MODE, CACHE)
    train(engine, 3)
    cache = engine.optimizer.zero.bases.cache
    if torch.distributed.get_rank() == 1:
        for key in cache.kept_keys()[:3]:
            cache.discard(key)
    before = len(cache.kept_keys())
    losses = train(engine, 2, first=3)
    found = {"before": before, "losses": losses, "weights": weights(engine), **numbers(engine)}
    engine.destroy()
    return found


def test_what_one_rank_has_lost_none_of_them_uses(ranks: Ranks) -> None:
    one, other = ranks.run(lost_on_one_rank, 2)
    assert (one["before"], other["before"]) == (7, 4)
    for run in (one, other):
        assert (run["hits"], run["misses"]) == (4, 3)
        assert len(run["kept"]) == 7 - 3 + 7
    assert_equal(one, other)


# -- resuming ---------------------------------------------------------------------------------------------


def resumable(stage: int, options: dict[str, Any], folder: str, resume: bool) -> dict[str, Any]:
    engine = cached_engine(stage, {**MODE, **options}, CACHE)
    if resume:
        engine.load_checkpoint(folder)
    else:
        train(engine, 5)
        engine.save_checkpoint(folder)
    before = numbers(engine)
    losses = train(engine, 4, first=5)
    found = {**outcome(engine, losses), "before": before, **numbers(engine)}
    engine.destroy()
    return found


BF16 = {"state_dtype": "bf16"}
BESIDE = {
    "module_rules": {"o_proj": {"method": "apollo"}}
}  # whose matrices have nothing to remember


@pytest.mark.parametrize(
    ("world", "stage", "options"),
    [(1, 1, {**BF16, **LEFT}), (2, 3, {**BF16, **SHARED}), (2, 2, FACTORED), (1, 2, BESIDE)],
)
def test_a_resumed_run_remembers_the_same_bit_for_bit(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, options: dict[str, Any]
) -> None:
    straight = ranks.run(resumable, world, stage, options, str(tmp_path), False)
    resumed = ranks.run(resumable, world, stage, options, str(tmp_path), True)
    assert_equal(straight[0], resumed[0])
    for one, other in zip(straight, resumed, strict=True):
        assert one["before"]["kept"] == other["before"]["kept"] != []
        assert one["before"]["bytes"] == other["before"]["bytes"]
        assert one["hits"] - one["before"]["hits"] == other["hits"] > 0
        assert other["misses"] == 0


def test_rows_are_dealt_again_where_the_number_of_ranks_changes(
    ranks: Ranks, tmp_path: Path
) -> None:
    straight = ranks.run(resumable, 2, 3, {}, str(tmp_path), False)[0]
    for world, stage in ((1, 0), (2, 2)):
        other = ranks.run(resumable, world, stage, {}, str(tmp_path), True)[0]
        assert other["hits"] == straight["hits"] - straight["before"]["hits"] > 0
        assert other["misses"] == 0
        # sums over ranks in another order: see training.py
        assert other["losses"] == pytest.approx(straight["losses"], rel=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------


def messages() -> dict[str, str]:
    with pytest.raises(ValueError, match=r"hmt\.basis_cache\.history is 2") as error:
        cached_engine(2, {"projection": "two_sided", "rank": 8}, CACHE)
    found = {"two-sided": str(error.value)}
    rules = {"down_proj": {"projection": "two_sided"}, "o_proj": {"method": "adamw"}}
    engine = cached_engine(2, {**MODE, "module_rules": rules}, CACHE)
    train(engine, 5)
    found["mixed"] = engine.optimizer.describe().splitlines()[-1]
    found["kept names"] = str(engine.optimizer.zero.bases.cache.kept_keys())
    return found


def test_moments_that_nothing_could_use_are_refused(ranks: Ranks) -> None:
    found = ranks.run(messages, 1)[0]
    assert "one-sided projection" in found["two-sided"]
    assert "moments of 2 old bases of 5 of 6 matrices" in found["mixed"]
    assert "down_proj" not in found["kept names"]
    assert "up_proj" in found["kept names"]
