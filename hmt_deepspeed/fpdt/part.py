"""Shards a batch whose sequences several ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.fpdt.masks import (
    shared_sequence,
    visibility_of_batch,
    visibility_on_host,
    with_mask,
)
from hmt_deepspeed.fpdt.sequence import SequenceParallel, TokenSharding

__all__ = ["SequencePart"]


@dataclass(frozen=True)
class SequencePart:
    """Takes whole rows, the same on every rank, and shards their tokens; with one rank nothing changes."""

    family: Family
    sequence: SequenceParallel
    chunk_size: int

    def check_alone(self) -> None:
        """Raises ValueError where logits are asked for, of which a rank has a part only."""
        if self.sequence.size > 1:
            raise ValueError(
                f"{self.sequence.size} ranks share the sequence, so that no rank has all logits: pass labels"
            )

    @contextmanager
    def masks(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A rank's own arguments of the base model, whose masks the host knows inside without a wait, if it can.

        Raises:
            ValueError: padding that is not on the right.
        """
        visibility = visibility_on_host(given, not self.family.mask_positions)
        if visibility is None:
            yield given
        else:
            with shared_sequence(visibility):
                yield with_mask(given)

    @contextmanager
    def of(self, given: dict[str, Any], targets: Tensor) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """This rank's arguments of the base model, and its targets, with masks of the whole sequence.

        Args:
            given: arguments for whole rows: ``input_ids`` [B, S], ``position_ids``, ``attention_mask``.
            targets: [B, S].

        Raises:
            ValueError: the ranks' rows differ, or come as embeddings.
        """
        if self.sequence.size == 1:
            with self.masks(given) as given:
                yield given, targets
            return
        ids = given.get("input_ids")
        if ids is None:
            raise ValueError("ranks that share a sequence take input_ids, got inputs_embeds")
        if ids.shape[1] < self.sequence.size:
            raise ValueError(
                f"{self.sequence.size} ranks cannot share a sequence of {ids.shape[1]} tokens: pad it"
            )
        self.sequence.check_same(ids)
        documents = not self.family.mask_positions
        visibility = visibility_on_host(given, documents)
        mask = given.get("attention_mask")
        given = with_mask(given)
        positions = self._positions(given)
        if visibility is None:
            visibility = visibility_of_batch(positions, mask, documents)
        sharding = TokenSharding(ids.shape[1], self.chunk_size, self.sequence.size)
        names = ("input_ids", "position_ids", "attention_mask")
        whole = {**given, "position_ids": positions}
        parts = {name: sharding.take(whole[name], self.sequence.rank) for name in names}
        with shared_sequence(visibility):
            yield given | parts, sharding.take(targets, self.sequence.rank)

    def share(self, count: Tensor) -> Tensor:
        """The divisor of this rank's sum, such that the mean over ranks is the whole loss."""
        return count / self.sequence.size

    def loss_of_all(self, loss: Tensor) -> Tensor:
        """The mean over ranks, with the gradient of this rank's."""
        size = self.sequence.size
        if size == 1:
            return loss
        own = loss.detach().view(1)
        every = self.sequence.group.exchange([own] * size, [(1,)] * size)
        return loss + (torch.cat(every).mean() - own).squeeze()

    def logits_of_all(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """What this rank's tokens have, [B T, E], as [B S, E] with that of the other ranks, in order.

        Gradients go to this rank's, times the ranks: their mean over the ranks is that of a loss which all compute.

        Args:
            shape: B and S, of the whole rows.
        """
        size, rank = self.sequence.size, self.sequence.rank
        if size == 1:
            return local
        sharding = TokenSharding(shape[1], self.chunk_size, size)
        own = local.unflatten(0, (shape[0], -1))
        held = [sum(part[other] for part in sharding.parts) for other in range(size)]
        every = self.sequence.group.exchange(
            [own.detach()] * size, [(shape[0], tokens, own.shape[2]) for tokens in held]
        )
        every[rank] = own.detach() + size * (own - own.detach())
        tokens = torch.arange(shape[1], device=own.device).unsqueeze(0)
        order = torch.cat([sharding.take(tokens, other) for other in range(size)], dim=1)
        return torch.cat(every, dim=1)[:, order[0].argsort()].flatten(0, 1)

    def _positions(self, given: dict[str, Any]) -> Tensor:
        ids: Tensor = given["input_ids"]
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is None and mask is not None and self.family.mask_positions:
            positions = mask.long().cumsum(dim=1) * mask.long() - 1
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return positions.expand(ids.shape[0], -1)
