"""Several ranks that share a sequence: the same loss and gradients as one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import Ranks
from tiny import batch, error, fpdt, step, tiny

from hmt_deepspeed.fpdt.loader import SharedBatches
from hmt_deepspeed.fpdt.sequence import SequenceParallel, TokenSharding
from hmt_deepspeed.fpdt.visibility import spans_of

PACKED = torch.tensor([[*range(1), *range(9), *range(20), *range(7)], [*range(37)]])


@pytest.mark.parametrize(
    ("length", "chunk_size", "size"),
    list(itertools.product((1, 5, 37, 64), (3, 8, 100), (1, 2, 4))),
)
def test_every_chunk_is_dealt_contiguously_in_order_of_ranks(
    length: int, chunk_size: int, size: int
) -> None:
    sharding = TokenSharding(length, chunk_size, size)
    tokens = torch.arange(length).unsqueeze(0)
    held = [sharding.take(tokens, rank)[0] for rank in range(size)]
    for index, (begin, end) in enumerate(spans_of(length, chunk_size)):
        spans = [sharding.local_spans(rank)[index] for rank in range(size)]
        chunk = torch.cat([held[rank][a:b] for rank, (a, b) in enumerate(spans)])
        assert chunk.tolist() == list(range(begin, end)), "what the all-to-all of the chunk yields"
        sizes = [b - a for a, b in spans]
        assert max(sizes) - min(sizes) <= 1, "projections and MLP are even"


class Mailbox:
    """All ranks of a group in one process, one after the other: what each would receive."""

    def __init__(self, rank: int, size: int, sent: dict[tuple[int, int], torch.Tensor]) -> None:
        self.rank, self.size, self._sent = rank, size, sent

    def exchange(self, parts: Any, shapes: Any) -> list[torch.Tensor]:
        for other, part in enumerate(parts):
            self._sent[self.rank, other] = part.clone()
        return [
            self._sent.get((r, self.rank), torch.zeros(s)).view(s) for r, s in enumerate(shapes)
        ]


@pytest.mark.parametrize(("heads", "size"), [(4, 2), (4, 4), (2, 4), (1, 4), (1, 2)])
def test_heads_and_tokens_change_places_and_back(heads: int, size: int) -> None:
    """Where several ranks have one head, what comes back is the sum of theirs: a gradient's."""
    parts = (3, 3, 2, 2)[:size]
    whole = torch.randn(2, heads, sum(parts), 5)
    local = whole.split(list(parts), dim=2)
    sent: dict[tuple[int, int], torch.Tensor] = {}
    for _ in range(2):  # the second time everything was sent
        shards = [
            SequenceParallel(Mailbox(r, size, sent)).to_heads(local[r], parts) for r in range(size)
        ]
    for rank, shard in enumerate(shards):
        begin, end = SequenceParallel(Mailbox(rank, size, sent)).heads(heads, rank)
        assert torch.equal(shard, whole[:, begin:end])
    sent.clear()
    for _ in range(2):
        back = [
            SequenceParallel(Mailbox(r, size, sent)).to_tokens(shards[r], parts, heads)
            for r in range(size)
        ]
    copies = max(1, size // heads)
    for mine, expected in zip(back, local, strict=True):
        torch.testing.assert_close(mine, copies * expected)


def test_heads_that_cannot_be_shared_out() -> None:
    for heads in ((6, 6), (8, 3)):
        with pytest.raises(ValueError, match="must divide the first"):
            SequenceParallel(Mailbox(0, 4, {})).check_heads(*heads)


SHARED = [
    "llama, tied head",  # one key head on two ranks
    "mistral, window",
    "gpt2",
    "opt",
]

# -- on ranks ---------------------------------------------------------------------------------------


def shared(names: list[str], special: str = "") -> dict[str, tuple[float, float]]:
    """Per model the loss's and the gradients' error against this rank alone."""
    import torch.distributed as dist

    from hmt_deepspeed.fpdt.sequence import TorchGroup

    found = {}
    for name in names:
        model, inputs = tiny(name), batch()
        if special == "packed":
            inputs["position_ids"] = PACKED
        if special == "padded":
            inputs["attention_mask"] = torch.ones(2, 37, dtype=torch.long)
            inputs["attention_mask"][1, 21:] = 0
        if special == "ignored":
            inputs["labels"][:, 12:] = -100
        loss, expected = step(model, inputs, 0.25)
        # Of the last chunk, of one token, only rank 0 has any.
        with fpdt(model, chunk_size=9, piece_size=3, group=TorchGroup()):
            own_loss, grads = step(model, inputs, 0.25)
        for grad in grads.values():
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        found[name] = abs(float(own_loss / loss) - 1), error(grads, expected)
    return found


@pytest.mark.parametrize(
    ("world", "names", "special"),
    [
        (2, SHARED, ""),
        (2, ["llama, 4 heads on 2", "mistral, window", "gpt2", "opt"], "packed"),
        (2, ["llama, tied head", "opt"], "padded"),
        (2, ["llama, 4 heads on 2"], "ignored"),
        (4, ["llama, 4 heads on 2", "llama, tied head", "gpt_neox, serial residual"], "packed"),
    ],
)
def test_the_same_loss_and_gradients(
    ranks: Ranks, world: int, names: list[str], special: str
) -> None:
    for found in ranks.run(shared, world, names, special):
        for loss, gradients in found.values():
            assert loss <= 1e-5
            assert gradients <= 1e-5


def refusals() -> list[str]:
    import torch.distributed as dist

    from hmt_deepspeed.fpdt.sequence import TorchGroup

    model = tiny()
    mine, same = batch(seed=dist.get_rank()), batch()
    embedded = {"inputs_embeds": torch.zeros(2, 37, 32), "labels": same["labels"]}
    said = []
    with fpdt(model, group=TorchGroup()):
        for inputs in (mine, {"input_ids": same["input_ids"]}, embedded):
            try:
                model(**inputs)
            except ValueError as error:
                said.append(str(error))
    return said


def test_what_ranks_that_share_a_sequence_refuse(ranks: Ranks) -> None:
    for said in ranks.run(refusals, 2):
        rows, logits, embeddings = said
        assert "got different rows" in rows
        assert "pass labels" in logits
        assert "got inputs_embeds" in embeddings


# -- loaders ----------------------------------------------------------------------------------------


def batches_seen(group_size: int) -> tuple[int, list[int]]:
    """Of a loader of three rows of its own on rank 0, four on others."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from hmt_deepspeed.fpdt.sequence import TorchGroup

    rank = dist.get_rank()
    groups = [
        dist.new_group(list(range(first, first + group_size)))
        for first in range(0, dist.get_world_size(), group_size)
    ]
    sequence = SequenceParallel(TorchGroup(groups[rank // group_size]))
    rows = [10 * rank + row for row in range(3 if rank == 0 else 4)]
    shared = SharedBatches(DataLoader(rows, batch_size=1), sequence)
    return len(shared), [int(batch) for batch in shared]


def test_a_loader_of_rows_of_ones_own_is_shared(ranks: Ranks) -> None:
    """Every group sees each of its ranks' rows once, in the same order on all of its ranks."""
    first, second, third, fourth = ranks.run(batches_seen, 4, 2)
    assert first == (6, [0, 10, 1, 11, 2, 12])
    assert second == (8, first[1]), "up to the end of the shorter loader"
    assert third == fourth == (8, [20, 30, 21, 31, 22, 32, 23, 33])


def test_a_loader_of_one_rank_is_itself() -> None:
    assert list(SharedBatches([1, 2], SequenceParallel())) == [1, 2]
    with pytest.raises(TypeError, match="has no length"):
        len(SharedBatches(iter([1]), SequenceParallel()))
