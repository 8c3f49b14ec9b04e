"""The basis cache alone: bytes come back, in time where the order is known, within its bounds."""

from __future__ import annotations

import pytest
import torch

from hmt_deepspeed.memory import fetch_ahead
from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.memory.streams import Direction
from hmt_deepspeed.memory.transfer import TransferEngine

PAGE = 4096
NAMES = ["a", "b", "c", "d"]


def basis(seed: int, columns: int = 16) -> torch.Tensor:
    """64 x 16 in fp32 is a page."""
    return torch.randn(64, columns, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    made = []

    def build(pages: int = 100, prefetch: int = 2) -> BasisCache:
        monkeypatch.setattr(fetch_ahead, "PREFETCH", prefetch)
        made.append(BasisCache(TransferEngine("cpu", 8 * PAGE), pages * PAGE))
        return made[-1]

    yield build
    for cache in made:
        cache.close()


def singly(names: list[str]) -> list[list[str]]:
    """Batches of one."""
    return [[name] for name in names]


def filled(cache: BasisCache) -> BasisCache:
    for seed, name in enumerate(NAMES):
        assert cache.put(name, basis(seed))
    return cache


def misses(cache: BasisCache, names: list[str]) -> list[str]:
    """Those of ``names`` that were not on their way when asked for, in turn."""
    found = []
    for name in names:
        before = cache.misses.total()
        cache.get(name)
        found += [name] * (cache.misses.total() - before)
    return found


def test_a_basis_comes_back_as_it_was_put_whoever_frees_it(make):
    cache = filled(make())
    for seed, name in enumerate(NAMES):
        assert torch.equal(cache.get(name), basis(seed))
    assert cache.put("b", basis(9, columns=32))  # wider than before
    assert torch.equal(cache.get("b"), basis(9, columns=32))
    assert cache.host_bytes == 5 * PAGE


def test_what_is_announced_is_on_its_way_when_it_is_asked_for(make):
    cache = filled(make())
    cache.begin_round(singly(["d", "b", "a", "c"]))
    assert misses(cache, ["d", "b", "a", "c"]) == []
    assert cache.hits.total() == 4
    assert filled(make(prefetch=0)).hits.total() == 0


def test_without_prefetch_everything_is_waited_for(make):
    cache = filled(make(prefetch=0))
    cache.begin_round(singly(NAMES))
    assert misses(cache, NAMES) == NAMES
    assert cache.peak_device_bytes == PAGE


def test_an_unknown_order_is_that_of_arrival_and_then_of_the_round_before(make):
    cache = filled(make(prefetch=1))
    cache.begin_round()
    assert misses(cache, NAMES) == []
    cache.begin_round(singly(NAMES))
    assert misses(cache, NAMES) == []
    cache.begin_round()
    cache.get("c")  # now no longer d, which was here still
    cache.begin_round(singly(NAMES))
    cache.begin_round()
    assert misses(cache, ["d", "a", "c", "b"]) == ["d", "a", "b"]
    cache.begin_round(singly(["b"]))
    cache.begin_round()
    assert misses(cache, ["d", "a", "c", "b"]) == []


def test_a_basis_left_out_or_put_in_does_not_lose_the_order(make):
    cache = filled(make(prefetch=2))
    cache.begin_round()
    misses(cache, ["a", "c", "d"])
    cache.begin_round(singly(NAMES))
    cache.begin_round()
    assert misses(cache, ["a", "b", "c", "d"]) == ["b"]  # had no use in the last round
    cache.begin_round(singly(NAMES))
    cache.begin_round()
    assert misses(cache, ["a", "d"]) == ["d"]  # two uses earlier than expected
    cache.begin_round(singly(NAMES))
    cache.begin_round()
    assert misses(cache, ["a", "d"]) == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_the_device_holds_one_basis_and_those_on_their_way(make, prefetch):
    cache = filled(make(prefetch=prefetch))
    for _ in range(2):
        cache.begin_round()
        for name in NAMES:
            cache.get(name)
            assert cache.device_bytes <= (prefetch + 1) * PAGE
    assert cache.peak_device_bytes == (prefetch + 1) * PAGE


def test_those_used_together_stay_until_the_end_of_their_block(make):
    cache = filled(make(prefetch=1))
    cache.begin_round(singly(NAMES))
    with cache.together({"a", "c"}):
        for name, pages in (("a", 2), ("b", 3), ("c", 3), ("a", 3)):
            cache.get(name)
            assert cache.device_bytes == pages * PAGE
    assert cache.device_bytes == 2 * PAGE
    assert misses(cache, ["a", "b"]) == []
    cache.begin_round([])
    assert cache.device_bytes == 0
    with cache.together(NAMES):
        for name in NAMES:
            cache.get(name)
        assert cache.device_bytes == len(NAMES) * PAGE
        cache.drop("b")
        assert cache.device_bytes == (len(NAMES) - 1) * PAGE


def test_what_turns_out_not_to_be_next_is_given_up(make):
    cache = filled(make(prefetch=2))
    cache.begin_round(singly(["a", "b", "c"]))
    cache.begin_round(singly(["d"]))
    assert cache.device_bytes == PAGE


def test_a_basis_without_room_stays_with_its_owner(make):
    cache = make(pages=2)
    assert [cache.put(name, basis(0)) for name in NAMES] == [True, True, False, False]
    assert "c" not in cache
    assert cache.put("a", basis(5))  # its own place
    cache.drop("b")
    assert cache.put("c", basis(6))
    assert torch.equal(cache.get("c"), basis(6))


def pending(cache: BasisCache, way: Direction) -> int:
    return len(cache.engine.streams.pending[way])


@pytest.mark.parametrize(("pages", "waited"), [(6, False), (4, True)])
def test_a_wider_basis_goes_beside_the_one_before_while_there_is_room(make, pages, waited):
    """Its copies may be under way: with room the host does not wait for them, without it does."""
    cache = filled(make(pages=pages))
    cache.drop("b")
    cache.begin_round(singly(["a"]))  # a copy under way; the twin runs it when it is waited for
    assert pending(cache, Direction.TO_DEVICE) == 1
    assert cache.put("a", basis(5, columns=32))
    assert (not pending(cache, Direction.TO_DEVICE)) == waited
    assert torch.equal(cache.get("a"), basis(5, columns=32))
    assert cache.host_bytes == 4 * PAGE


def test_a_new_basis_of_the_same_shape_takes_the_place_of_the_one_before_without_a_wait(make):
    cache = filled(make(pages=4))
    cache.begin_round(singly(["a"]))
    assert cache.put("a", basis(5))
    assert pending(cache, Direction.TO_DEVICE) == 1
    assert torch.equal(cache.get("a"), basis(5))
    assert torch.equal(cache.get("b"), basis(1))


def side_by_side(seeds: list[int], columns: int = 16) -> dict[str, torch.Tensor]:
    """Bases by name in one tensor."""
    whole = torch.stack([basis(seed, columns) for seed in seeds])
    return dict(zip(NAMES, whole.unbind(), strict=False))


def counted(cache: BasisCache) -> tuple[int, int]:
    """Copies to the host and to the device so far."""
    return cache.engine.counters.num_out, cache.engine.counters.num_in


def test_bases_side_by_side_travel_in_one_copy_each_way(make):
    cache = make()
    assert cache.put_all(side_by_side([0, 1, 2, 3])) == set(NAMES)
    cache.begin_round([NAMES[:3], NAMES[3:]])
    assert misses(cache, NAMES[:3]) == []
    assert cache.device_bytes == 4 * PAGE  # three in use, one on its way
    assert [bool(torch.equal(cache.get(n), basis(i))) for i, n in enumerate(NAMES)] == [True] * 4
    assert cache.device_bytes == PAGE
    assert counted(cache) == (1, 2)
    assert cache.put_all(side_by_side([4, 5, 6, 7])) == set(NAMES)
    cache.begin_round()  # one by one
    for seed, name in enumerate(NAMES, 4):
        assert torch.equal(cache.get(name), basis(seed))
    assert counted(cache) == (2, 6)
    assert cache._store.pinned_bytes == 100 * PAGE
    assert sum(host.pool.used_bytes for host in cache._store._hosts) == 4 * PAGE
    # others, in other memory, in one call
    assert cache.put_all({name: basis(9) for name in NAMES}) == set(NAMES)
    assert counted(cache) == (6, 6)


def test_one_of_those_side_by_side_may_leave_and_come_back(make):
    cache = make(pages=6)
    cache.put_all(side_by_side([0, 1, 2, 3]))
    assert cache.put("b", basis(9, columns=32))
    cache.begin_round([NAMES])
    found = [cache.get(name) for name in NAMES]
    for seed, (name, one) in enumerate(zip(NAMES, found, strict=True)):
        assert torch.equal(one, basis(9, columns=32) if name == "b" else basis(seed))
    assert counted(cache)[1] == 3  # a; b, elsewhere; c and d
    assert cache.put_all(side_by_side([4, 5, 6, 7])) == set(NAMES)
    assert sum(host.pool.used_bytes for host in cache._store._hosts) == 4 * PAGE
    cache.begin_round([NAMES])
    for seed, name in enumerate(NAMES, 4):
        assert torch.equal(cache.get(name), basis(seed))
    assert counted(cache)[1] == 4
    for name in NAMES:
        cache.drop(name)
    assert sum(host.pool.used_bytes for host in cache._store._hosts) == 0


def test_where_there_is_no_room_for_all_some_of_those_side_by_side_have_it(make):
    cache = make(pages=3)
    cache.keep("old", [basis(8)])
    assert cache.put_all(side_by_side([0, 1, 2, 3])) == set(NAMES[:3])
    assert cache.kept_keys() == []
    for seed, name in enumerate(NAMES[:3]):
        assert torch.equal(cache.get(name), basis(seed))
    assert "d" not in cache


def test_a_basis_put_anew_while_its_batch_is_on_the_way_is_the_new_one(make):
    cache = make()
    cache.put_all(side_by_side([0, 1, 2, 3]))
    cache.begin_round([NAMES])
    cache.put("a", basis(9))
    for seed, name in enumerate(NAMES):
        assert torch.equal(cache.get(name), basis(seed) if seed else basis(9))


def test_old_bases_make_room_the_least_recently_used_first(make):
    cache = make(pages=3)
    for seed, name in enumerate("xyz"):
        cache.remember(name, basis(seed))
    assert torch.equal(cache.recall("x"), basis(0))
    assert cache.put("a", basis(7))
    assert cache.old_names() == ["z", "x"]
    assert cache.recall("y") is None
    assert (cache.old_hits, cache.old_misses, cache.num_evicted) == (1, 1, 1)
    assert cache.old_width("x") == 16
    assert cache.put("b", basis(8))
    assert cache.put("c", basis(9))
    assert cache.old_names() == []
    cache.remember("x", basis(0))  # no room, and no current basis goes for an old one
    assert cache.recall("x") is None
    assert torch.equal(cache.get("a"), basis(7))


def test_only_what_is_still_used_is_kept(make):
    cache = filled(make())
    cache.remember("a", basis(0))
    cache.remember("d", basis(0))
    cache.keep_only({"a", "c"})
    assert [name for name in NAMES if name in cache] == ["a", "c"]
    assert cache.old_names() == ["a"]


def test_what_is_kept_together_comes_back_and_goes_together(make):
    cache = make()
    parts = [basis(0), torch.arange(3, dtype=torch.uint8), torch.zeros(0, 4)]
    assert cache.keep("x", parts)
    cache.expect("x")
    assert (
        len(cache.engine.streams.pending[Direction.TO_DEVICE]) >= 2
    )  # the empty one moves nothing
    for found, part in zip(cache.kept("x"), parts, strict=True):
        assert torch.equal(found, part)
    assert cache.host_bytes == cache.kept_bytes("x") == PAGE + 3
    assert cache.keep("x", [basis(1)])  # in its place
    assert torch.equal(cache.kept("x")[0], basis(1))
    cache.discard("x")
    assert not cache.has_kept("x")
    assert cache.host_bytes == 0
    assert cache._store.peak_bytes > 0
    assert sum(host.pool.used_bytes for host in cache._store._hosts) == 0


def test_all_of_what_belongs_together_has_room_or_none_of_it(make):
    cache = make(pages=3)
    assert cache.put("a", basis(0))
    cache.keep("old", [basis(4)])
    assert not cache.keep("x", [basis(1), basis(2), basis(3)])
    assert cache.kept_keys() == ["old"]  # which would not have helped
    cache.held.add("old")
    assert not cache.keep("x", [basis(1), basis(2)])
    cache.held.clear()
    assert cache.keep("y", [basis(1), basis(2)])  # nothing of x is left
    assert cache.kept_keys() == ["y"]
    assert torch.equal(cache.get("a"), basis(0))


def test_what_is_held_does_not_make_room(make):
    cache = make(pages=3)
    for seed, key in enumerate("xyz"):
        cache.keep(key, [basis(seed)])
    cache.touch("x")
    cache.held |= {"y", "z"}
    assert cache.keep("w", [basis(5)])
    assert cache.kept_keys() == ["y", "z", "w"]
    cache.held.add("w")
    assert not cache.keep("v", [basis(6)])
    assert not cache.put("a", basis(7))
    cache.held.clear()
    assert cache.put("a", basis(7))
    assert cache.kept_keys() == ["z", "w"]
    assert cache.num_evicted == 2
