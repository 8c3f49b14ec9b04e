"""Rectangles against the rule, pair by pair."""

import itertools
import random

import pytest

from hmt_deepspeed.fpdt.visibility import Tile, Visibility, bands, spans_of


def seen_by_tile(tile, query, key):
    """What attention computes for a tile of this shape."""
    if tile.shape == "full":
        return True
    if tile.shape == "causal":
        return key - tile.keys[0] <= query - tile.queries[0]
    return key <= query and (tile.window is None or query - key < tile.window)


def random_visibility(rng):
    length = rng.randint(1, 40)
    rows = rng.randint(1, 2)
    documents = tuple(
        (0, *sorted(rng.sample(range(1, length), rng.randint(0, min(4, length - 1)))))
        for _ in range(rows)
    )
    lengths = tuple(rng.choice([length, rng.randint(1, length)]) for _ in range(rows))
    return Visibility(length, documents, lengths, rng.choice([None, 1, 2, 5, 17]))


@pytest.mark.parametrize("seed", range(40))
def test_tiles_cover_each_visible_pair_once(seed):
    rng = random.Random(seed)
    visibility = random_visibility(rng)
    spans = spans_of(visibility.length, rng.choice([1, 3, 8, 40]))
    found = []
    for queries, keys in itertools.product(spans, spans):
        for whole in visibility.tiles(queries, keys):
            near = whole.keys[0], whole.queries[0]
            assert seen_by_tile(whole, near[1], near[0]), "nobody sees its first key"
            for tile in bands(whole, 4) if whole.shape == "band" else [whole]:
                rows = range(*tile.batch)
                pairs = list(itertools.product(rows, range(*tile.queries), range(*tile.keys)))
                seen = [p for p in pairs if seen_by_tile(tile, *p[1:])]
                assert {q for _, q, _ in seen} == set(range(*tile.queries)), "a query sees nothing"
                found += seen
    every = itertools.product(
        range(len(visibility.lengths)), range(visibility.length), range(visibility.length)
    )
    assert sorted(found) == [pair for pair in every if visibility.allowed(*pair)]


def test_causal_attention_needs_no_band():
    visibility = Visibility.causal(64, batch=3)
    assert [t.shape for t in visibility.tiles((16, 32), (16, 32))] == ["causal"]
    assert [t.shape for t in visibility.tiles((32, 48), (0, 16))] == ["full"]
    assert visibility.tiles((0, 16), (16, 32)) == ()


def test_documents_and_padding_need_no_band():
    visibility = Visibility(64, ((0, 10, 40), (0,)), (64, 20))
    shapes = {
        tile.shape
        for queries, keys in itertools.product(spans_of(64, 16), repeat=2)
        for tile in visibility.tiles(queries, keys)
    }
    assert shapes == {"causal", "full"}


def test_what_is_out_of_the_window_costs_nothing():
    visibility = Visibility.causal(1024, window=64)
    assert not visibility.sees((512, 576), (0, 64))
    pairs = sum(
        (t.queries[1] - t.queries[0]) * (t.keys[1] - t.keys[0])
        for span in spans_of(1024, 256)
        for keys in spans_of(1024, 256)
        for whole in visibility.tiles(span, keys)
        for t in bands(whole, 64)
    )
    assert pairs <= 2 * 64 * 1024  # a piece of 64 queries sees at most 127 keys; all would be 1024


def test_bands_drop_the_window_where_it_does_not_cut():
    tile = Tile((0, 1), (0, 8), (0, 8), window=4)
    assert [piece.window for piece in bands(tile, 4)] == [None, 4]
