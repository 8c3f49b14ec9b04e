"""The arithmetic of one optimizer step over shards: overflow decision, norm, moments, weights, gather."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor

from hmt_deepspeed.optim.bases.basis import keyed_seed
from hmt_deepspeed.optim.rules.dense import state_keys
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.sharding.transpose import rows_from_columns
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.weight import GatherPipeline

__all__ = ["ZeroStep"]


class ZeroStep:
    """Steps of one optimizer; the caller keeps the loss scale and opens accumulation windows.

    Args:
        zero: the states of the optimizer.
        order: places of the parameters in the order in which their new weights are needed.

    Attributes:
        written: called when new weights are in place, by default nothing.
        gathers_apart: whether :meth:`finish` gathers each weight by itself, not in buckets.
    """

    def __init__(self, zero: ZeroState, order: Sequence[int]) -> None:
        self.written: Callable[[], None] = lambda: None
        self.gathers_apart = False
        self.param_states, self.order = zero.param_states, order
        self.collectives, self.bases, self.host = zero.collectives, zero.bases, zero.host
        self.settings, self.options = zero.settings, zero.options
        self.shard_rank, self.sharded = zero.shard_rank, zero.is_sharded
        self._unfinished: deque[ParamState] = deque()  # updates begun in host memory, in order
        # by place: sums that the overflow decision took, for the norm
        self._measured: dict[int, Tensor] = {}
        # what the overflow decision has let pass may be on an SSD, and does not count yet
        self._uncommitted = False
        self._when_committed: list[Callable[[], None]] = []

    def found_overflow(self) -> bool:
        """Whether any rank holds a gradient that is not finite, or whose squared norm is not.

        What is measured here is not measured again by :meth:`norm_and_clip_factor`.
        """
        self._measured = {
            place: self._measure(param_state)
            for place, param_state in enumerate(self.param_states)
            if param_state.gradient.reduced is not None
        }
        sums = [part.sum() for part in self._measured.values()]
        full = [p.gradient.full for p in self.param_states if p.gradient.full is not None]
        sums += [gradient.sum(dtype=torch.float32) for gradient in full]
        device = self.param_states[0].weight.device
        sums += [squares.sum() for squares in self._host_square_norms(device)]
        bad = torch.zeros((), device=device)
        if sums:
            bad = (~torch.isfinite(torch.stack(sums))).any().float()
        self.collectives.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad.item())

    def _measure(self, param_state: ParamState) -> Tensor:
        """The parameter's part of the sums behind the norm, of its reduced gradient."""
        gradient = param_state.gradient
        assert gradient.reduced is not None
        counted = gradient.shards.counted(self.shard_rank)
        if param_state.matrix is not None:
            return param_state.matrix.measure(gradient.reduced, counted)
        norm = torch.linalg.vector_norm(gradient.reduced[counted], dtype=torch.float32)
        return norm.square().view(1)

    def _host_square_norms(self, device: torch.device) -> list[Tensor]:
        """Squared norms of the gradients in host memory, in order, as views of one device tensor."""
        hosts = [p.gradient.host for p in self.param_states if p.gradient.host is not None]
        if not hosts:
            return []
        squares = torch.stack([host.square_norm() for host in hosts]).to(device)
        return list(squares.split(1))

    def norm_and_clip_factor(self, scale: float) -> tuple[Tensor, Tensor]:
        """Estimated ``||G||`` over all parameters, and the factor that unscales and clips.

        Args:
            scale: what the losses were multiplied by.

        Returns:
            The norm without the loss scale, and the factor; both 0-dim fp32 on the device.
        """
        device = self.param_states[0].weight.device
        parts, on_host = [], iter(self._host_square_norms(device))
        for place, param_state in enumerate(self.param_states):
            matrix, gradient = param_state.matrix, param_state.gradient
            if gradient.host is not None:
                parts.append(next(on_host))
                continue
            if matrix is not None and gradient.reduced is None:
                gradient.reduced = torch.zeros(matrix.num_rows, matrix.width, device=device)
            if gradient.reduced is None:
                parts.append(torch.zeros(1, device=device))
            else:
                measured = self._measured.get(place)
                parts.append(self._measure(param_state) if measured is None else measured)
        self._measured = {}
        sums = torch.cat(parts)
        if self.sharded:
            self.collectives.all_reduce(sums)
        total = torch.zeros((), device=device)
        lengths = [part.numel() for part in parts]
        for param_state, part in zip(self.param_states, sums.split(lengths), strict=True):
            total = total + (
                part[0] if param_state.matrix is None else param_state.matrix.observe(part, scale)
            )
        norm = total.sqrt() / scale
        factor = torch.full((), 1.0 / scale, device=device)
        if self.settings.clip > 0:
            factor = factor / ((norm + 1e-6) / self.settings.clip).clamp(min=1.0)
        return norm, factor

    def update(self, factor: Tensor, step_count: int) -> None:
        """Moments, weights of the rows held here, and their gather; uses the gradients up.

        Weights in host memory are left to :meth:`finish`.

        Args:
            factor: of :meth:`norm_and_clip_factor`. step_count: number of steps taken, which keys random rounding.
        """
        on_host = any(p.host is not None for p in self.param_states)
        host_factor = float(factor) if on_host else 0.0  # waits for the device, once
        gather = GatherPipeline(self.collectives, self.settings.gather_elements)
        self.bases.will_use(self.param_states[place] for place in self.order)
        for portion in self._portions():
            updates = self._advance(portion, factor)
            for place in portion:
                param_state = self.param_states[place]
                key = keyed_seed(self.options["seed"], param_state.name, "round", step_count)
                if param_state.matrix is not None:
                    update = param_state.matrix.finish(*updates.pop(place))
                    with self.bases.whole(param_state):
                        self._apply(param_state, param_state.matrix, update, key, gather)
                elif param_state.host is not None:
                    param_state.host.step(host_factor, key, param_state.hyper())
                    self._gather_weight(param_state, gather)
                else:
                    self._step_dense(param_state, factor, key, step_count)
                    self._gather_weight(param_state, gather)
                param_state.gradient.clear()
        gather.finish()
        self.written()
        self._uncommitted = bool(self._unfinished)

    def _portions(self) -> Iterator[list[int]]:
        """Places in order, in parts whose updates are alive at once: one all-reduce of sums for each part.

        A rule that takes whole gradients makes an fp32 update as large as its weight.
        """
        most = self.settings.gather_elements if self.sharded else 0
        portion: list[int] = []
        alive = 0
        for place in self.order:
            matrix, shards = (
                self.param_states[place].matrix,
                self.param_states[place].gradient.shards,
            )
            size = 0 if matrix is None else shards.max_rows * matrix.width  # equal on all ranks
            if portion and alive + size > most:
                yield portion
                portion, alive = [], 0
            portion.append(place)
            alive += size
        yield portion

    def _advance(self, places: Sequence[int], factor: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Steps of the states of the matrices among places; (update, sums over all rows) by place."""
        updates: dict[int, tuple[Tensor, Tensor]] = {}
        limited: list[int] = []
        for place in places:
            param_state = self.param_states[place]
            matrix, reduced = param_state.matrix, param_state.gradient.reduced
            if matrix is None or reduced is None:
                continue
            hyper = param_state.hyper()
            updates[place] = matrix.advance(
                reduced.float(),
                factor,
                betas=hyper["betas"],
                eps=hyper["eps"],
                counted=param_state.gradient.shards.counted(self.shard_rank),
            )
            param_state.gradient.reduced = None  # used up: a 16-bit one was copied to fp32
            limited += [place] if matrix.limits else []
        if self.sharded and limited:
            sums = torch.cat([updates[place][1] for place in limited])
            self.collectives.all_reduce(sums)
            lengths = [updates[place][1].numel() for place in limited]
            for place, part in zip(limited, sums.split(lengths), strict=True):
                updates[place] = (updates[place][0], part)
        return updates

    def _step_dense(
        self, param_state: ParamState, factor: Tensor, key: int, step_count: int
    ) -> None:
        reduced, state = param_state.gradient.reduced, param_state.dense_state
        assert state is not None
        # unused in this accumulation window: DeepSpeed's ZeRO counts it as zero too
        gradient = None if reduced is None else reduced.reshape(-1)
        keys = state_keys(self.options["seed"], param_state.name, step_count)
        hyper = {"factor": factor, "state_keys": keys, **param_state.hyper()}
        param_state.weight.step_dense(gradient, state, key, **hyper)

    @property
    def has_unfinished(self) -> bool:
        """Whether updates in host memory have begun and not been finished; the same on all ranks."""
        return bool(self._unfinished)

    @torch.no_grad()
    def finish(self, last: ParamState | None = None) -> None:
        """Finish begun updates in host memory, in their order, up to the one of ``last`` (default: all).

        Each weight is gathered as its update ends, while the worker goes on with later ones. Ranks may stop at
        different places where each is gathered by itself: they all gather the same in the same order.
        """
        if not self._unfinished:
            return
        gather = GatherPipeline(
            self.collectives, 0 if self.gathers_apart else self.settings.gather_elements
        )
        while self._unfinished:
            param_state = self._unfinished.popleft()
            assert isinstance(param_state.weight, HostWeight)
            param_state.weight.finish()
            self._gather_weight(param_state, gather)
            if param_state is last:
                break
        gather.finish()
        self.written()

    def commit(self) -> None:
        """Commit a finished step's writes to an SSD; waits for the last of them.

        Called before anything of the next step is written, so that those writes have a forward's time.
        """
        if self._uncommitted and not self._unfinished and self.host is not None:
            self._uncommitted = False
            self.host.commit()
            actions, self._when_committed = self._when_committed, []
            for action in actions:
                action()

    def when_committed(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the last step's writes to an SSD are committed: now or at the commit."""
        if self._uncommitted:
            self._when_committed.append(action)
        else:
            action()

    # -- weights --------------------------------------------------------------------------------

    def _apply(
        self,
        param_state: ParamState,
        matrix: MatrixRule,
        update: Tensor,
        key: int,
        gather: GatherPipeline,
    ) -> None:
        projection = matrix.projection
        if projection is None:
            self._apply_whole(param_state, matrix, update, key, gather)
        elif not self.sharded or (not matrix.transposed and param_state.weight.by_rows):
            left, right = update, projection
            if matrix.transposed:
                left, right = right, update
            self._apply_factors(param_state, left, right, key, gather)
        else:
            # The low-rank update travels: every rank needs all of it for its own rows of the weight.
            shards, width = param_state.gradient.shards, projection.shape[1]
            exact = matrix.transposed and param_state.weight.by_rows

            def deliver(packed: Tensor) -> None:
                whole = _whole_rows(packed, shards, width)
                left, right = (projection, whole) if matrix.transposed else (whole, projection)
                self._apply_factors(param_state, left, right, key, gather)

            part = update if exact else update.to(self.settings.comm_dtype)
            gather.add(part.reshape(-1), shards.max_rows * width, deliver)

    def _apply_factors(
        self, param_state: ParamState, left: Tensor, right: Tensor, key: int, gather: GatherPipeline
    ) -> None:
        """``W <- (1 - lr wd) W - lr left right^T``; ``left`` of the rows held here, or of all rows."""
        weight, hyper = param_state.weight, param_state.hyper()
        lr, decay = hyper["lr"], hyper["weight_decay"]
        if weight.by_rows:
            begin, end = weight.shards.rows(self.shard_rank)
            own = left if left.shape[0] == end - begin else left[begin:end]
            weight.step_rows(own, right, lr, decay, key)
            self._gather_weight(param_state, gather)
        else:
            weight.step_whole(left, right, lr, decay, key)

    def _apply_whole(
        self,
        param_state: ParamState,
        matrix: MatrixRule,
        update: Tensor,
        key: int,
        gather: GatherPipeline,
    ) -> None:
        weight = param_state.weight
        if self.sharded and isinstance(weight, EncodedWeight):
            self._exchange_whole(param_state, matrix, update, key, gather)
            return
        if matrix.transposed:
            columns = param_state.gradient.shards
            update = rows_from_columns(update, columns, weight.shards, self.collectives)
        hyper = param_state.hyper()
        weight.step_update(update, hyper["lr"], hyper["weight_decay"], key)
        self._gather_weight(param_state, gather)

    def _exchange_whole(
        self,
        param_state: ParamState,
        matrix: MatrixRule,
        update: Tensor,
        key: int,
        gather: GatherPipeline,
    ) -> None:
        """An INT8 weight has no part that is this rank's: the update travels, also a full-rank one."""
        weight, shards, width = param_state.weight, param_state.gradient.shards, update.shape[1]
        hyper = param_state.hyper()

        def deliver(packed: Tensor) -> None:
            whole = _whole_rows(packed, shards, width)
            update = whole.t() if matrix.transposed else whole
            weight.step_update(update, hyper["lr"], hyper["weight_decay"], key)

        part = update.to(self.settings.comm_dtype)
        gather.add(part.reshape(-1), shards.max_rows * width, deliver)

    def _gather_weight(self, param_state: ParamState, gather: GatherPipeline) -> None:
        if isinstance(param_state.weight, HostWeight) and param_state.weight.pending:
            self._unfinished.append(param_state)
            return
        if not self.sharded or param_state.weight.partitioned:
            return
        shards, flat = param_state.weight.shards, param_state.gradient.param.detach().view(-1)
        with param_state.weight.shard() as shard:
            gather.add(shard, shards.partition, lambda packed: shards.unpack_flat(packed, flat))


def _whole_rows(packed: Tensor, shards: RowShards, width: int) -> Tensor:
    """The rows that all ranks sent, in order: m x width."""
    rows = packed.reshape(shards.world, shards.max_rows, width)
    whole = torch.empty(shards.m, width, dtype=packed.dtype, device=packed.device)
    shards.unpack(rows, whole)
    return whole
