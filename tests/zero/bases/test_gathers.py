"""Bases gathered ahead at stage 3: fewer collectives, at most two under way, the same on all ranks, and no bit changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from harness import Ranks
from torch import Tensor
from training import assert_same, ds_config, furthest, make_engine, result, tiny_llama, train

from hmt_deepspeed.zero.bases import gathers
from hmt_deepspeed.zero.bases.gathers import NUM_BLOCKS, GatherAhead

# -- the order alone, against a group of ranks that all hold the same ---------------------------------------


class Twins:
    """Two ranks with equal parts, as one process sees them; a collective is done when it is waited for."""

    world, rank = 2, 0

    def __init__(self) -> None:
        self.launched: list[int] = []  # elements of a part, by collective
        self.under_way = self.most = 0

    def all_gather(self, packed: Tensor, part: Tensor) -> Any:
        self.launched.append(part.numel())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        twins = self

        class Work:
            def wait(self) -> None:
                packed.view(2, -1).copy_(part)
                twins.under_way -= 1

        return Work()


class Key:
    def __init__(self, number: int, width: int = 3) -> None:
        self.rows: Tensor | None = torch.full((4, width), float(number))

    def whole(self) -> Tensor:
        assert self.rows is not None
        return torch.cat((self.rows, self.rows))


def ahead_of(keys: list[Key], per_block: int, monkeypatch: Any) -> tuple[GatherAhead[Key], Twins]:
    monkeypatch.setattr(gathers, "BLOCK_BYTES", per_block * 2 * 4 * 3 * 4)
    twins = Twins()
    ahead = GatherAhead[Key](twins, lambda key: key.rows)  # type: ignore[arg-type]
    ahead.expect(keys)
    return ahead, twins


def take(ahead: GatherAhead[Key], keys: list[Key]) -> None:
    for key in keys:
        assert torch.equal(ahead.take(key), key.whole())


def test_what_is_expected_comes_in_blocks_two_at_once(monkeypatch: Any) -> None:
    keys = [Key(i) for i in range(10)]
    ahead, twins = ahead_of(keys, 3, monkeypatch)
    take(ahead, keys)
    assert twins.launched == [36, 36, 36, 12]
    assert twins.under_way == 0
    assert twins.most <= NUM_BLOCKS


def test_a_round_repeats_the_last(monkeypatch: Any) -> None:
    keys = [Key(i) for i in range(6)]
    ahead, twins = ahead_of([], 3, monkeypatch)
    order = [*keys, *reversed(keys)]  # forward, and what backward computes again
    take(ahead, order)
    assert twins.launched == [12] * 12
    for _ in range(2):
        ahead.repeat()
        twins.launched.clear()
        take(ahead, order)
        assert twins.launched == [36] * 4


def test_what_is_not_gathered_at_present_keeps_its_place(monkeypatch: Any) -> None:
    keys = [Key(i) for i in range(6)]
    ahead, twins = ahead_of([], 3, monkeypatch)
    take(ahead, keys)
    for absent in (keys[2], keys[5], keys[0]):
        ahead.repeat()
        rows, absent.rows = absent.rows, None
        take(ahead, [key for key in keys if key is not absent])
        ahead.forget()
        absent.rows = rows
    ahead.repeat()
    twins.launched.clear()
    take(ahead, keys)
    assert twins.launched == [36, 36]


def test_what_is_no_more_and_what_is_closed_is_not_kept(monkeypatch: Any) -> None:
    keys = [Key(i) for i in range(4)]
    ahead, twins = ahead_of([], 2, monkeypatch)
    take(ahead, keys)
    gone, last = weakref.ref(keys[1]), weakref.ref(keys[3])
    ahead.repeat(lambda key: key is not keys[1])
    del keys[1]
    assert gone() is None
    twins.launched.clear()
    take(ahead, keys[:1])
    assert twins.launched == [24, 12]
    ahead.close()
    keys.clear()
    assert last() is None


def test_another_order_is_gathered_alone_and_learned(monkeypatch: Any) -> None:
    keys, other = [Key(i) for i in range(8)], Key(9)
    ahead, twins = ahead_of(keys, 2, monkeypatch)
    order = [keys[0], other, *keys[3:6], keys[0], *keys[6:]]  # one more, two fewer, one again
    take(ahead, order)
    ahead.repeat()
    assert twins.under_way == 0
    twins.launched.clear()
    take(ahead, order)
    assert twins.launched == [24] * 4


def test_rows_that_change_after_the_launch_are_gathered_again(monkeypatch: Any) -> None:
    keys = [Key(i) for i in range(4)]
    ahead, twins = ahead_of(keys, 4, monkeypatch)
    take(ahead, keys[:1])
    keys[2].rows = torch.full((4, 3), 7.0)
    ahead.changed(keys[2])
    take(ahead, keys[1:])
    assert twins.launched == [48, 12]


def test_a_block_has_one_dtype_and_a_large_key_is_alone(monkeypatch: Any) -> None:
    keys = [Key(0), Key(1, width=30), Key(2), Key(3), Key(4)]
    keys[4].rows = keys[4].whole()[:4].bfloat16()
    ahead, twins = ahead_of(keys, 3, monkeypatch)
    take(ahead, keys)
    assert twins.launched == [12, 120, 24, 12]


# -- training ---------------------------------------------------------------------------------------------

OPTIONS = {"rank": 8, "scale": 1.0, "update_interval": 3, "max_full_gradient_bytes": 30_000}


def counted(stage: int, block_bytes: int, again: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Six steps of two micro-batches; the collectives of each that gather bases, by bytes of a rank's part."""
    gathers.BLOCK_BYTES = block_bytes
    torch.manual_seed(0)
    model = tiny_llama(layers=3)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = make_engine(ds_config(stage, options, gas=2), model)
    sent: list[int] = []
    block, launch = gathers._Block, gathers._Block.__init__

    def count(self: Any, coming: Any, parts: list[Tensor], collectives: Any) -> None:
        sent.append(sum(part.nbytes for part in parts))
        launch(self, coming, parts, collectives)

    block.__init__ = count  # type: ignore[method-assign]
    losses, steps = [], []
    for step in range(6):
        sent.clear()
        losses += train(engine, 1, first=step)
        steps.append(list(sent))
    found = result(engine, losses) | {"sent": steps}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("again", "options"),
    [(False, {}), (True, {}), (True, {"share_basis": True})],
    ids=["", "recomputed", "recomputed-shared"],
)
def test_gathered_ahead_in_fewer_collectives(
    ranks: Ranks, again: bool, options: dict[str, Any]
) -> None:
    """Against one collective for each group of linears and each matrix; and against stage 0."""
    options = {**OPTIONS, **options}
    ahead = ranks.run(counted, 2, 3, 2**25, again, options)
    alone = ranks.run(counted, 2, 3, 0, again, options)
    whole = ranks.run(counted, 2, 0, 0, again, options)
    assert ahead[0]["sent"] == ahead[1]["sent"]
    assert ahead[0]["losses"] == alone[0]["losses"]
    assert furthest(ahead[0]["weights"], alone[0]["weights"]) == 0
    assert_same(ahead[0], whole[0])
    for step in range(2, 6):
        few, many = ahead[0]["sent"][step], alone[0]["sent"][step]
        assert len(few) <= 0.25 * len(many)
        assert sum(few) <= 1.1 * sum(many)  # what a refresh changes is gathered again
    assert whole[0]["sent"] == [[]] * 6
