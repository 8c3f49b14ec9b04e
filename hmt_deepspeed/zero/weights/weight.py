"""A parameter's weights on this rank: its shard, the shard's fp32 master, and the gather of new weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.kernels.noise import Key
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.optim.rules.apply import apply_whole_
from hmt_deepspeed.optim.rules.dense import DenseState, SmallParameter, dense_adamw_
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.weights.host_parts import HostParts
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange
from hmt_deepspeed.zero.weights.residency import on_ssd, resident

__all__ = ["Weight", "move_parameter"]


class Weight:
    """One parameter's weights on this rank.

    Args:
        param: m x n, or any shape of as many elements; of the model's dtype, at stage 3 DeepSpeed's placeholder.
        shards: which of its flat elements each rank holds. rank: this process's place in them.
        keep_master: keep fp32 values of the shard beside weights of 16 bits.
        away: of weights that are in host memory, what brings the shard for an update; else None.

    Attributes:
        master: flat fp32 master of the shard; the shard itself for an fp32 model whose weights are not
            offloaded; None when the weights are their own master (bf16 with stochastic rounding).
    """

    away: HostParts | None = None

    def __init__(
        self,
        param: nn.Parameter,
        shards: RowShards,
        rank: int,
        keep_master: bool,
        away: HostParts | None = None,
    ) -> None:
        self.away = away
        self.param: Any = param  # DeepSpeed adds ds_tensor to a partitioned one
        self.shards, self.rank = shards, rank
        self.partitioned = hasattr(param, "ds_tensor")
        self.device = param.device
        self.master: Tensor | None = None
        with self.shard() as shard:
            if param.dtype == torch.float32 and not self._offloaded:
                self.master = shard
            elif keep_master or param.dtype == torch.float32:
                self.master = shard.to(device=self.device, dtype=torch.float32, copy=True)

    @property
    def _offloaded(self) -> bool:
        if not self.partitioned:
            return False
        is_elsewhere = self.param.ds_tensor.device != self.device
        return self.away is not None or on_ssd(self.param) or bool(is_elsewhere)

    @property
    def by_rows(self) -> bool:
        """Whether this rank updates its own rows; else every rank updates all of a bf16 weight alike."""
        return self.has_master or self.partitioned

    @property
    def alone(self) -> bool:
        """Whether a low-rank update comes to it alone, its scale in it, not with those of weights alike."""
        return self._offloaded or not self.shards.aligned

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 values of the shard, wherever they live."""
        return self.master is not None

    @property
    def num_elements(self) -> int:
        """Elements of the shard."""
        begin, end = self._range
        return end - begin

    @cached_property
    def _range(self) -> tuple[int, int]:
        """Of the flat elements that are the shard."""
        return self.shards.flat(self.rank)

    @contextmanager
    def shard(self, overwrite: bool = False) -> Iterator[Tensor]:
        """The shard's elements, valid inside the block.

        Args:
            overwrite: as in :func:`resident`.

        Returns:
            Flat, :attr:`num_elements` of the model's dtype: part of the partition at stage 3, else a view of the
            parameter.
        """
        if self.partitioned:
            with resident(self.param, overwrite) as part:
                yield part[: self.num_elements]
        else:
            yield self._in_memory()

    def _in_memory(self, columns: int | None = None) -> Tensor:
        """:meth:`shard` of weights that are not on an SSD, in rows of so many columns, or flat."""
        begin, end = (0, self.num_elements) if self.partitioned else self._range
        values: Tensor = (self.param.ds_tensor if self.partitioned else self.param).detach()
        if end - begin < values.numel():
            values = values.view(-1)[begin:end]
        if values.dim() == (1 if columns is None else 2):
            return values
        return values.view(-1) if columns is None else values.view(-1, columns)

    def _master_is_shard(self) -> bool:
        if self.master is None or self.param.dtype != torch.float32 or on_ssd(self.param):
            return False
        shard = self._in_memory()
        return self.master.device == shard.device and self.master.data_ptr() == shard.data_ptr()

    def move_master(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move a master that is not the weights themselves.

        Args:
            place: copies a tensor to another device.
        """
        if self.master is not None and not self._master_is_shard():
            self.master = place(self.master)

    def move_weights(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the weights held here, and a master that is a part of them.

        Args:
            place: copies a tensor to another device.
        """
        was_shard = self._master_is_shard()
        move_parameter(self.param, place)
        if was_shard:
            with self.shard() as shard:
                self.master = shard

    def master_bytes(self) -> int:
        """Bytes of a master that is not the weights themselves."""
        if self.master is None or self._master_is_shard():
            return 0
        return self.master.numel() * self.master.element_size()

    def weight_bytes(self) -> int:
        """Bytes of the weights themselves on this rank."""
        count = self.num_elements if self.partitioned else self.param.numel()
        return int(count * self.param.element_size())

    @property
    def kind(self) -> str:
        """Name of the dtype of the stored weights."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.param.dtype, "fp16")

    def master_values(self) -> Tensor:
        """fp32 values of the shard: the master, or a copy of weights that are their own."""
        if self.master is not None:
            return self.master
        with self.shard() as shard:
            return shard.to(self.device).float()

    def set_values(self, values: Tensor) -> None:
        """Overwrite master and shard from flat fp32 values of the shard.

        Args:
            values: flat, as many as :attr:`num_elements`, from any device.
        """
        values = values.to(self.device)
        if self.master is not None:
            self.master.copy_(values)
        with self.shard(overwrite=True) as shard:
            shard.copy_(values)

    def set_whole(self, flat: Tensor) -> None:
        """Overwrite everything held here from the flat fp32 values of the whole weight.

        Args:
            flat: m n fp32 values, from any device.
        """
        self.set_values(self.shards.shard_of(flat, self.rank))
        if not self.partitioned:
            self.param.data.copy_(flat.view(self.param.shape))

    def refresh_master(self) -> None:
        """Take the shard's values into the master, after someone loaded weights."""
        if self.master is not None:
            with self.shard() as shard:
                self.master.copy_(shard)

    # -- updates --------------------------------------------------------------------------------

    @property
    def rounds(self) -> bool:
        """Whether the device rounds these weights stochastically."""
        return not self.has_master

    @property
    def together(self) -> Hashable:
        """Equal for weights of one shape that can be updated together."""
        own = self.master is None or self._master_is_shard()
        return self.param.dtype, self.by_rows, self._offloaded, own, self.shards.aligned

    def as_small(
        self, gradient: Tensor | None, state: DenseState, base: int
    ) -> SmallParameter | None:
        """The shard for a step with others; None of one that is not on the device.

        Args:
            gradient: flat, of the shard; None counts as zero. state: the shard's moments and count of steps.
            base: key of the parameter.
        """
        if self._offloaded or (self.master is not None and self.master.device != self.device):
            return None
        if self.master is None:
            return SmallParameter(self._in_memory(), gradient, state, None, base, self._range[0])
        copy = None if self._master_is_shard() else self._in_memory()
        return SmallParameter(self.master, gradient, state, copy)

    def step_dense(
        self,
        gradient: Tensor | None,
        state: DenseState,
        base: int,
        number: Tensor | int,
        **hyper: Any,
    ) -> None:
        """AdamW on the shard; see :func:`hmt_deepspeed.optim.rules.dense.dense_adamw_`.

        Args:
            gradient: flat, of the shard; None counts as zero. state: the shard's moments and count of steps.
            base: key of the parameter. number: of the step, on the device or not.
            hyper: lr, betas, eps, weight_decay, factor, taken.
        """
        hyper["offset"] = self.shards.flat(self.rank)[0]
        if self.master is not None:
            dense_adamw_(self.master, gradient, state, base, number, **hyper)
            self._write(self.master, None)  # rounds to nearest
            return
        values = self._taken()
        dense_adamw_(values, gradient, state, base, number, **hyper)
        self._give_back(values)

    def step_update(
        self, update: Tensor, scale: Tensor, lr: float | Tensor, weight_decay: float, key: Key
    ) -> None:
        """``W <- (1 - lr wd) W - lr scale update`` on the shard.

        Args:
            update: fp32, rows that this rank touches x n. scale: 0-dim; where it is 0 nothing changes.
            lr, weight_decay: of this step. key: seed of stochastic rounding, a new one every step.
        """
        values = self._current()
        if values.numel():
            own = self.shards.rows_to_shard(update, self.rank)
            apply_whole_(values, own, lr, weight_decay, scale)
            self._write(values, key)

    @staticmethod
    def step_rows(weights: Sequence[Weight], change: LowRankChange) -> None:
        """Low-rank updates of the shards of weights alike.

        Args:
            change: of the rows that this rank touches.
        """
        first = weights[0]
        if not first.num_elements:
            return
        if first.alone:
            if change.experts is None:
                first._step_rows_alone(change)
            else:
                first._step_experts_alone(change)
            return
        n, begin = first.shards.n, first._range[0]
        if change.experts is not None:
            flats = [weight._in_memory() for weight in weights]
            owned = [weight.master for weight in weights if weight.master is not None]
            if owned and not first._master_is_shard():
                change.apply_to_rows(owned, begin // n, flats)
            else:
                change.apply_to_rows(flats, begin // n)
            return
        masters = [weight.master.view(-1, n) for weight in weights if weight.master is not None]
        if masters and first._master_is_shard():
            change.apply(masters, begin)
            return
        shards = [weight._in_memory(n) for weight in weights]
        change.apply(masters or shards, begin, shards if masters else None)

    def _step_rows_alone(self, change: LowRankChange) -> None:
        """Of a shard on the host, or of one that begins or ends inside a row."""
        values = self._current()
        if self.shards.aligned:
            change.apply([values.view(-1, self.shards.n)])
        else:
            own = self.shards.rows_to_shard(change.whole(), self.rank)
            taken = (change.scale[0, 0] != 0).float()
            apply_whole_(values, own, change.lr, change.weight_decay, taken)
        self._write(values, change.keys)

    def _step_experts_alone(self, change: LowRankChange) -> None:
        """Of experts, of a shard on the host or one that begins or ends inside a row, which is made whole for it."""
        n, (begin, end) = self.shards.n, self._range
        values = self._taken() if self.master is None else self.master
        rows = torch.nn.functional.pad(values, (begin % n, -end % n))
        change.apply_to_rows([rows], begin // n)
        values.copy_(rows[begin % n :][: end - begin])
        if not self._master_is_shard():
            self._give_back(values)

    @staticmethod
    def step_whole(weights: Sequence[Weight], change: LowRankChange) -> None:
        """Low-rank updates of all rows of replicated bf16 weights, rounded stochastically, on every rank alike."""
        shards = weights[0].shards
        if change.experts is not None:
            change.apply([weight.param.detach() for weight in weights])
            return
        change.apply([w.param.detach().view(shards.m, shards.n) for w in weights])

    def _write(self, values: Tensor, key: Key | Tensor | None) -> None:
        """Give the shard the values; without a master rounded by ``key``."""
        if self._master_is_shard():
            return
        if self.master is not None:
            self._give_back(values)
            return
        assert key is not None
        rounded = self._in_memory() if not self._offloaded else None
        if rounded is None:
            rounded = torch.empty_like(values, dtype=self.param.dtype)
        stochastic_round(values, rounded, key, self._range[0])
        self._give_back(rounded)

    def _current(self) -> Tensor:
        """fp32 values of the shard for an update, which :meth:`_write` ends: the master, or a copy."""
        return self._taken().float() if self.master is None else self.master

    def _taken(self) -> Tensor:
        """The shard's values on the device, which :meth:`_give_back` writes: itself, but for one that is offloaded."""
        if self.away is not None:
            return self.away.take(self.param)[: self.num_elements]
        with self.shard() as shard:  # lent, from an SSD
            return shard.to(self.device, copy=self._offloaded)

    def _give_back(self, values: Tensor) -> None:
        """Give the shard these values, rounded to nearest where they are wider."""
        if self.away is not None:
            self.away.put(self.param, values.to(self.param.dtype))
        elif self._offloaded:
            with self.shard(overwrite=True) as shard:
                # torch would convert on the host, and move more bytes
                shard.copy_(values.to(shard.dtype))
        elif values.data_ptr() != (shard := self._in_memory()).data_ptr():
            shard.copy_(values)


def move_parameter(param: Any, place: Callable[[Tensor], Tensor]) -> None:
    """Move a parameter's values; at stage 3 this rank's partition of them.

    Args:
        place: copies a tensor to another device.
    """
    values = param.ds_tensor if hasattr(param, "ds_tensor") else param
    values.data = place(values.data)
