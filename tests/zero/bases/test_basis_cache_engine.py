"""``hmt.basis_cache``: bases wait in host memory, and nothing changes but where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cached_runs import assert_equal, cached_engine, outcome
from harness import Ranks
from modes import MODES
from torch.multiprocessing.reductions import StorageWeakRef
from training import LOW_RANK, train

from hmt_deepspeed.memory import fetch_ahead
from hmt_deepspeed.zero.bases import cache as basis_cache
from hmt_deepspeed.zero.bases import storage
from hmt_deepspeed.zero.engine import resolve as engine_settings

CACHE: dict[str, Any] = {}
STAGING = 4096  # bytes that may be on their way to the host
STEPS = 5  # every matrix refreshes, some change their rank


def runs(jobs: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Each (stage, mode, changes) without a cache and with it."""
    found = []
    for stage, mode, changes in jobs:
        pair = []
        for cache in (None, CACHE):
            engine = cached_engine(stage, mode, cache, **changes)
            pair.append(outcome(engine, train(engine, STEPS)))
            engine.destroy()
        found.append(pair)
    return found


SHARDED: dict[str, Any] = {"bf16": {"enabled": True}}
# Every side and place of a basis, and who reads it: forward, backward, gradient hooks.
JOBS = {
    1: [
        (0, LOW_RANK, {}),
        (1, MODES["two_sided"], {}),
        (2, MODES["left"], {"gas": 2}),
        (2, MODES["share_basis"], {}),
        (2, {**LOW_RANK, "projected_backward": False}, {}),
        (2, MODES["full_rank_budget"], {}),
        (3, MODES["module_rules"], SHARDED),
    ],
    2: [
        (2, LOW_RANK, SHARDED),
        (3, LOW_RANK, {"gas": 2}),
        (3, MODES["share_basis"], {}),
        (3, MODES["left"], {}),
    ],
}


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_with_a_cache_is_the_run_without_bit_for_bit(ranks: Ranks, world: int) -> None:
    for plain, cached in ranks.run(runs, world, JOBS[world])[0]:
        assert_equal(plain, cached)


# -- bytes and counters ----------------------------------------------------------------------------------


class AliveBytes:
    """Most bytes alive at once of the tensors that a function returned, counted by their storages."""

    def __init__(self, owner: Any, name: str) -> None:
        self.peak, self._alive, self._plain = 0, [], getattr(owner, name)
        setattr(owner, name, self._call)

    def _call(self, *args: Any) -> Any:
        tensor = self._plain(*args)
        storage = tensor.untyped_storage()
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]
        self._alive.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive))
        return tensor


LARGEST = 77 * (8 + 8) * 4  # [Q | P] of down_proj in fp32
DRAWN = (
    4 * 40 * (8 + 8) * 4
)  # of four matrices, whose probes are drawn together; of two of down_proj they are less


def measured() -> dict[str, Any]:
    """Ordinary steps at a fixed rank, after every basis was found."""
    mode = {"rank": 8, "update_interval": 100, "max_full_gradient_bytes": 10**6}
    basis_cache._STAGING, storage.MOST_WHOLE = STAGING, DRAWN
    found: dict[str, Any] = {}
    for name, prefetch, room in (
        ("none", 2, 2**20),
        ("cache", 2, 2**20),
        ("no prefetch", 0, 2**20),
        ("five", 2, 5 * 4096),  # four side by side take three pages, one alone takes one
    ):
        fetch_ahead.PREFETCH, engine_settings.host_memory_share = prefetch, lambda n=room: n
        engine = cached_engine(2, mode, None if name == "none" else CACHE, layers=2)
        train(engine, 2)
        if name == "cache":
            alive = AliveBytes(engine.optimizer.zero.bases.cache.engine, "receive")
        before = engine.optimizer.metrics()
        train(engine, 3, first=2)
        found[name] = engine.optimizer.metrics(), before
        found[f"table of {name}"] = engine.optimizer.describe()
        engine.destroy()
    found["alive"] = alive.peak
    return found


@pytest.fixture(scope="module")
def numbers(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(measured, 1)[0]


def test_of_all_bases_the_device_holds_those_in_use_and_on_their_way(
    numbers: dict[str, Any],
) -> None:
    whole, cached = numbers["none"][0], numbers["cache"][0]
    every = 2 * (6 * 40 + 77) * (8 + 8) * 4
    # Without a cache q, k, v and gate, up are held once more, side by side.
    assert whole["basis_device_bytes"] == every + 2 * 5 * 40 * (8 + 8) * 4
    assert cached["basis_host_bytes"] == every
    assert (
        cached["basis_peak_fetched_bytes"] == 2 * DRAWN
    )  # while those in use are drawn the next come
    assert cached["basis_device_bytes"] <= 3 * LARGEST
    # As storages: q, k and v until they stand side by side, or two runs.
    assert numbers["alive"] <= 2 * DRAWN < 0.7 * every
    assert numbers["no prefetch"][0]["basis_peak_fetched_bytes"] == DRAWN
    assert cached["optimizer_state_bytes"] == whole["optimizer_state_bytes"]
    assert "14 bases" in numbers["table of cache"].splitlines()[-1]


def test_an_ordinary_step_waits_for_no_basis_that_it_did_not_ask_for_ahead(
    numbers: dict[str, Any],
) -> None:
    def in_three_steps(name: str, key: str) -> int:
        after, before = numbers[name]
        return int(after[key] - before[key])

    assert in_three_steps("cache", "basis_cache_misses") == 0
    # forward, update, and the next window's probes
    assert in_three_steps("cache", "basis_cache_hits") == 3 * 3 * 14
    assert in_three_steps("no prefetch", "basis_cache_misses") == 3 * 3 * 14
    every = numbers["cache"][0]["basis_host_bytes"]
    assert in_three_steps("cache", "basis_bytes_to_host") == 3 * every  # with new probes
    assert in_three_steps("no prefetch", "basis_bytes_from_host") == 3 * 3 * every


def test_bases_beyond_the_bound_stay_on_the_device(numbers: dict[str, Any]) -> None:
    found, line = numbers["five"][0], numbers["table of five"].partition("\nbasis_cache: ")[2]
    assert line.startswith("6 bases, ")
    assert "8 have no room and stay on the device" in line
    assert found["basis_host_bytes"] == 6 * 40 * 16 * 4
    left = 2 * (6 * 40 + 77) * 16 * 4 - found["basis_host_bytes"]
    assert found["basis_device_bytes"] >= left


# -- old bases, and resuming -----------------------------------------------------------------------------

RANKS = (16, 16, 4, 16, 8, 16)  # of a matrix's refreshes, in turn


def follow_ranks(engine: Any) -> None:
    """The rank falls and rises at successive refreshes, whatever the energies say."""
    policy, schedule = (
        engine.optimizer.zero.basis_groups.policy,
        engine.optimizer.zero.basis_groups.schedule,
    )

    def rank(index: int, *_: object) -> int:
        return RANKS[
            schedule.num_refreshes[engine.optimizer.zero.basis_groups.groups[index][0]] % len(RANKS)
        ]

    policy.first_width = policy.choose = rank


OLD = {"history": 1}
FALLING = {**LOW_RANK, "update_interval": 2, "max_full_gradient_bytes": 10**6}


def old_run(stage: int, folder: str, resume: bool) -> dict[str, Any]:
    engine = cached_engine(stage, FALLING, OLD)
    follow_ranks(engine)
    first = 5
    if resume:
        engine.load_checkpoint(folder)
        follow_ranks(engine)  # loading makes the policy anew
    else:
        train(engine, first)
        engine.save_checkpoint(folder)
    cache = engine.optimizer.zero.bases.cache
    hits, kept = cache.old_hits, cache.kept_keys()
    losses = train(engine, 6, first=first)
    found = {**outcome(engine, losses), "hits": cache.old_hits - hits, "kept": kept}
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_same_old_bases_and_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    straight = ranks.run(old_run, world, 3, str(tmp_path), False)
    resumed = ranks.run(old_run, world, 3, str(tmp_path), True)
    assert_equal(straight[0], resumed[0])
    for one, other in zip(straight, resumed, strict=True):
        assert one["kept"] == other["kept"] != []
        assert one["hits"] == other["hits"] > 0
    bases = [key for one in straight for key in one["kept"] if key.startswith("old basis of")]
    assert len(bases) == 7  # each at the rank that finds it


# -- refusals --------------------------------------------------------------------------------------------


def messages() -> dict[str, str]:
    found = {}
    for name, mode in {
        "adamw": {"method": "adamw"},
        "muon": {"method": "muon", "rank": "full"},
        "random": MODES["random"],
        "full residual": MODES["full residual"],
        "nothing older": {"projection": "two_sided", "rank": 8},
    }.items():
        with pytest.raises(ValueError, match=r"hmt\.basis_cache") as error:
            cached_engine(2, mode, OLD)
        found[name] = str(error.value)
    return found


def test_a_cache_that_nothing_could_use_is_refused(ranks: Ranks) -> None:
    found = ranks.run(messages, 1)[0]
    for name in ("adamw", "muon", "random", "full residual"):
        assert "Remove the section" in found[name]
    assert '"rank": "full", "method": "apollo"' in found["muon"]
    assert "history is 1" in found["nothing older"]
