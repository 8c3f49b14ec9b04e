"""The basis cache alone: bytes come back, in time where the order is known, within its bounds."""

from __future__ import annotations

import pytest
import torch

from hmt_deepspeed.memory import basis_cache
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
        monkeypatch.setattr(basis_cache, "PREFETCH", prefetch)
        made.append(BasisCache(TransferEngine("cpu", 8 * PAGE), pages * PAGE))
        return made[-1]

    yield build
    for cache in made:
        cache.close()


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
    cache.begin_round(["d", "b", "a", "c"])
    assert misses(cache, ["d", "b", "a", "c"]) == []
    assert cache.hits.total() == 4
    assert filled(make(prefetch=0)).hits.total() == 0


def test_without_prefetch_everything_is_waited_for(make):
    cache = filled(make(prefetch=0))
    cache.begin_round(NAMES)
    assert misses(cache, NAMES) == NAMES
    assert cache.peak_device_bytes == PAGE


def test_an_unknown_order_is_that_of_arrival_and_then_of_the_round_before(make):
    cache = filled(make(prefetch=1))
    cache.begin_round()
    assert misses(cache, NAMES) == []
    cache.begin_round(NAMES)
    assert misses(cache, NAMES) == []
    cache.begin_round()
    cache.get("c")  # now no longer d, which was here still
    cache.begin_round(NAMES)
    cache.begin_round()
    assert misses(cache, ["d", "a", "c", "b"]) == ["d", "a", "b"]
    cache.begin_round(["b"])
    cache.begin_round()
    assert misses(cache, ["d", "a", "c", "b"]) == []


def test_a_basis_left_out_or_put_in_does_not_lose_the_order(make):
    cache = filled(make(prefetch=2))
    cache.begin_round()
    misses(cache, ["a", "c", "d"])
    cache.begin_round(NAMES)
    cache.begin_round()
    assert misses(cache, ["a", "b", "c", "d"]) == ["b"]  # had no use in the last round
    cache.begin_round(NAMES)
    cache.begin_round()
    assert misses(cache, ["a", "d"]) == ["d"]  # two uses earlier than expected
    cache.begin_round(NAMES)
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
    cache.begin_round(NAMES)
    with cache.together({"a", "c"}):
        for name, pages in (("a", 2), ("b", 3), ("c", 3), ("a", 3)):
            cache.get(name)
            assert cache.device_bytes == pages * PAGE
    assert cache.device_bytes == 2 * PAGE
    assert misses(cache, ["c", "d"]) == []
    assert cache.device_bytes == PAGE
    with cache.together(NAMES):
        for name in NAMES:
            cache.get(name)
        assert cache.device_bytes == len(NAMES) * PAGE
        cache.drop("b")
        assert cache.device_bytes == (len(NAMES) - 1) * PAGE


def test_what_turns_out_not_to_be_next_is_given_up(make):
    cache = filled(make(prefetch=2))
    cache.begin_round(["a", "b", "c"])
    cache.begin_round(["d"])
    assert cache.device_bytes == PAGE


def test_a_basis_without_room_stays_with_its_owner(make):
    cache = make(pages=2)
    assert [cache.put(name, basis(0)) for name in NAMES] == [True, True, False, False]
    assert "c" not in cache
    assert cache.put("a", basis(5))  # its own place
    cache.drop("b")
    assert cache.put("c", basis(6))
    assert torch.equal(cache.get("c"), basis(6))


def test_a_new_basis_goes_beside_the_one_before_while_there_is_room(make):
    """Its copies may be under way: with room the host does not wait for them, without it does."""
    for pages, waited in ((5, False), (4, True)):
        cache = filled(make(pages=pages))
        cache.begin_round(["a"])  # a copy under way; the twin runs it when it is waited for
        assert len(cache.engine.streams.pending[Direction.TO_DEVICE]) == 1
        assert cache.put("a", basis(5))
        assert (not cache.engine.streams.pending[Direction.TO_DEVICE]) == waited
        assert torch.equal(cache.get("a"), basis(5))
        assert cache.host_bytes == 4 * PAGE


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
