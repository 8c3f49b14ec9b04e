"""The arithmetic of one optimizer step over shards: verdict, bases, norm, moments, weights, gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from hmt_deepspeed.optim.basis import keyed_seed
from hmt_deepspeed.optim.hmt import low_rank_settings
from hmt_deepspeed.optim.schedule import RefreshSchedule
from hmt_deepspeed.zero.bases import ShardedBases
from hmt_deepspeed.zero.collectives import Collectives
from hmt_deepspeed.zero.entries import Entry, ZeroSettings
from hmt_deepspeed.zero.weights import GatherPipeline

__all__ = ["ZeroStep"]


class ZeroStep:
    """Steps of one optimizer; the caller keeps the count of steps and the loss scale.

    Args:
        entries: of all trainable parameters. schedule: of the low-rank ones among them, in order.
        collectives: of the data-parallel group. settings, options: the JSON's and ``hmt.optimizer``'s.
        shard_rank: this process's place in the shards; 0 at stage 0.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        schedule: RefreshSchedule,
        bases: ShardedBases,
        collectives: Collectives,
        settings: ZeroSettings,
        options: Mapping[str, Any],
        shard_rank: int,
    ) -> None:
        self.entries, self.schedule, self.collectives = entries, schedule, collectives
        self.bases = bases
        self.low_rank = [entry for entry in entries if entry.matrix is not None]
        self.settings, self.options, self.shard_rank = settings, options, shard_rank
        self.sharded = settings.stage > 0 and collectives.world > 1

    def found_overflow(self) -> bool:
        """Whether any rank holds a gradient that is not finite."""
        held = [e.gradient for e in self.entries]
        sums = [
            t.sum(dtype=torch.float32) for g in held for t in (g.reduced, g.full) if t is not None
        ]
        device = self.entries[0].weight.device
        bad = torch.zeros((), device=device)
        if sums:
            bad = (~torch.isfinite(torch.stack(sums))).any().float()
        self.collectives.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad.item())

    def refresh_bases(self, step_count: int) -> None:
        """New bases from the mean full gradients: found once, at the owner, and broadcast."""
        refreshing = [(i, e) for i, e in enumerate(self.low_rank) if e.gradient.refreshing]
        found: dict[int, Tensor] = {}
        if not refreshing:
            return
        device = refreshing[0][1].weight.device
        ranks = torch.zeros(len(refreshing), dtype=torch.int64, device=device)
        for place, (_, entry) in enumerate(refreshing):
            full, matrix = entry.gradient.full, entry.matrix
            assert matrix is not None
            with self.bases.whole(entry):  # warm start, at the owner
                basis = None if full is None else matrix.find_basis(full, step_count)
            if basis is not None:
                found[place] = basis
                ranks[place] = basis.shape[1]
        self.collectives.all_reduce(ranks)
        for place, (index, entry) in enumerate(refreshing):
            rank = int(ranks[place])
            with self.bases.whole(entry):
                self._adopt(entry, rank, found.get(place), step_count)
            if rank:
                self.schedule.refreshed(index, step_count)

    def _adopt(self, entry: Entry, rank: int, basis: Tensor | None, step_count: int) -> None:
        """Rotate to the broadcast basis (rank 0 keeps the old one) and project the full gradient."""
        matrix, gradient = entry.matrix, entry.gradient
        assert matrix is not None
        if rank:
            if basis is None:
                basis = torch.empty(matrix.shape[1], rank, dtype=matrix.dtype, device=matrix.device)
            basis = basis.contiguous()
            self.collectives.broadcast(basis, gradient.owner)
            matrix.adopt(basis)
            matrix.draw_probes(step_count)
        projected = torch.zeros(matrix.shape[0], matrix.width, device=matrix.device)
        if gradient.full is not None:
            torch.mm(gradient.full.float(), matrix.projection.float(), out=projected)
        self.collectives.broadcast(projected, gradient.owner)
        begin, end = matrix.rows
        gradient.reduced, gradient.full = projected[begin:end], None

    def norm_and_clip_factor(self, scale: float) -> tuple[Tensor, Tensor]:
        """Estimated ``||G||`` over all parameters without the loss scale, and the factor that unscales
        and clips; 0-dim fp32."""
        device = self.entries[0].weight.device
        squares = torch.zeros(len(self.entries), 2, device=device)
        for place, entry in enumerate(self.entries):
            reduced = entry.gradient.reduced
            if reduced is None:
                continue
            own = reduced[entry.gradient.shards.counted(self.shard_rank)]
            if entry.matrix is not None:
                squares[place] = entry.matrix.square_norms(own)
            else:
                squares[place, 0] = torch.linalg.vector_norm(own, dtype=torch.float32).square()
        if self.sharded:
            self.collectives.all_reduce(squares)
        total = torch.zeros((), device=device)
        for place, entry in enumerate(self.entries):
            if entry.matrix is None:
                total = total + squares[place, 0]
            else:
                total = total + entry.matrix.observe(squares[place])
        norm = total.sqrt() / scale
        factor = torch.full((), 1.0 / scale, device=device)
        if self.settings.clip > 0:
            factor = factor / ((norm + 1e-6) / self.settings.clip).clamp(min=1.0)
        return norm, factor

    def update(self, factor: Tensor, step_count: int) -> None:
        """Moments, weights of the rows held here, and their gather; uses the gradients up."""
        updates = self._advance(factor)
        gather = GatherPipeline(self.collectives, self.settings.gather_elements)
        for place, entry in enumerate(self.entries):
            key = keyed_seed(self.options["seed"], entry.name, "round", step_count)
            if entry.matrix is not None:
                update = entry.matrix.finish(*updates.pop(place))
                with self.bases.whole(entry):
                    self._apply_low_rank(entry, update, key, gather)
            else:
                gradient = self._dense_gradient(entry, factor)
                assert entry.dense_state is not None
                entry.weight.step_dense(gradient, entry.dense_state, key, **entry.hyper())
                self._gather_weight(entry, gather)
            entry.gradient.clear()
        gather.finish()

    def _advance(self, factor: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Adam in every projected space; (update, squared residual norm over all rows) by place."""
        updates: dict[int, tuple[Tensor, Tensor]] = {}
        for place, entry in enumerate(self.entries):
            matrix, reduced = entry.matrix, entry.gradient.reduced
            if matrix is None:
                continue
            if reduced is None:
                reduced = torch.zeros(matrix.num_rows, matrix.width, device=matrix.device)
            projected = reduced.float().mul_(factor)  # in place: the gradient is used up here
            hyper = entry.hyper()
            update, squares = matrix.advance(projected, betas=hyper["betas"], eps=hyper["eps"])
            own = squares[entry.gradient.shards.counted(self.shard_rank)].sum()
            updates[place] = (update, own)
        if self.sharded and updates and low_rank_settings(self.options).norm_growth_limit:
            norms = torch.stack([square for _, square in updates.values()])
            self.collectives.all_reduce(norms)
            updates = {p: (u, norms[i]) for i, (p, (u, _)) in enumerate(updates.items())}
        return updates

    def _dense_gradient(self, entry: Entry, factor: Tensor) -> Tensor:
        reduced = entry.gradient.reduced
        if reduced is None:  # unused in this window: DeepSpeed's ZeRO counts it as zero too
            return torch.zeros(entry.weight.num_elements, device=entry.weight.device)
        return reduced.reshape(-1).float().mul_(factor)

    def _apply_low_rank(
        self, entry: Entry, update: Tensor, key: int, gather: GatherPipeline
    ) -> None:
        matrix, weight = entry.matrix, entry.weight
        assert matrix is not None
        lr, decay = entry.group["lr"], entry.group["weight_decay"]
        if weight.master is not None or weight.partitioned:
            weight.step_rows(update, matrix.projection, lr, decay, key)
            self._gather_weight(entry, gather)
        elif not self.sharded:
            weight.step_whole(update, matrix.projection, lr, decay, key)
        else:
            # The low-rank update travels, not the weights: every replica applies the same one.
            shards, width = entry.gradient.shards, matrix.width
            projection = matrix.projection

            def deliver(packed: Tensor) -> None:
                rows = packed.reshape(shards.world, shards.max_rows, width)
                whole = torch.empty(shards.m, width, dtype=packed.dtype, device=packed.device)
                shards.unpack(rows, whole)
                weight.step_whole(whole, projection, lr, decay, key)

            part = update.to(self.settings.comm_dtype).reshape(-1)
            gather.add(part, shards.max_rows * width, deliver)

    def _gather_weight(self, entry: Entry, gather: GatherPipeline) -> None:
        if not self.sharded or entry.weight.partitioned:
            return
        shards, flat = entry.gradient.shards, entry.gradient.param.detach().view(-1)
        with entry.weight.shard() as shard:
            gather.add(shard, shards.partition, lambda packed: shards.unpack_flat(packed, flat))
