"""DeepSpeed's ``safe_get_*`` and ``safe_set_*`` tools on HMT's states.

Keys are DeepSpeed's: ``None`` is the fp32 weight, ``exp_avg`` and ``exp_avg_sq`` the moments. Moments
of a low-rank matrix live in its projected space and come back as m x r; a factored second moment as
``exp_avg_sq_row`` (m x 1), ``exp_avg_sq_col`` (1 x r) and ``exp_avg_sq_mean``.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.zero.encoded import EncodedWeight
from hmt_deepspeed.zero.entries import whole_shape
from hmt_deepspeed.zero.shards import padded

if TYPE_CHECKING:
    from hmt_deepspeed.zero.entries import Entry
    from hmt_deepspeed.zero.optimizer import HMTZeroOptimizer

__all__ = ["StateAccess", "link", "local_state"]


def local_state(entry: Entry) -> dict[str, Tensor]:
    """States of one parameter held by this rank, by DeepSpeed's keys."""
    if entry.matrix is not None:
        return {key: state.read() for key, state in entry.matrix.states().items()}
    assert entry.dense_state is not None
    first, second, step = entry.dense_state
    return {"exp_avg": first.read(), "exp_avg_sq": second.read(), "step": step}


class StateAccess:
    """The methods that DeepSpeed's tools call, for one optimizer."""

    def __init__(self, optimizer: HMTZeroOptimizer) -> None:
        self.optimizer = optimizer
        self._entries = {e.gradient.param: e for e in optimizer.entries}

    def _settled(self, param: nn.Parameter) -> Entry:
        """The entry of a parameter, when no update of it is under way."""
        self.optimizer.settle()
        return self._entries[param]

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor:
        """Whole fp32 weight (shape of the parameter) or whole state (m x r for low-rank moments)."""
        entry = self._settled(param)
        if optim_state_key is None:
            if isinstance(entry.weight, EncodedWeight):
                return entry.weight.whole_values()
            return self._whole_flat(entry, entry.weight.master_values()).view(whole_shape(param))
        state = self._state(entry, optim_state_key)
        if entry.matrix is None:
            return self._whole_flat(entry, state).view(whole_shape(param))
        if optim_state_key not in entry.matrix.ROW_STATES:  # a core is whole on every rank
            return state.clone()
        return self._whole_rows(entry, state)

    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite a whole weight or state; every rank passes the same value."""
        entry, rank = self._settled(param), self.optimizer.shard_rank
        if optim_state_key is None:
            entry.weight.set_whole(value.reshape(-1).float())
            self.optimizer.order_gathers()
        elif entry.matrix is None:
            shard = entry.gradient.shards.shard_of(value.reshape(-1), rank)
            self._set_state(entry, optim_state_key, shard)
        elif optim_state_key in entry.matrix.ROW_STATES:
            begin, end = entry.matrix.rows
            self._set_state(entry, optim_state_key, value[begin:end])
        else:
            self._set_state(entry, optim_state_key, value)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """Whole mean gradient; of a projected matrix the part that was kept, ``A Q^T``, m x n."""
        entry = self._entries[param]
        matrix, reduced = entry.matrix, self.get_local_fp32_grad_for_param(param)
        if matrix is None:
            if reduced is None:
                return None
            return self._whole_flat(entry, reduced.reshape(-1).float()).view(whole_shape(param))
        if entry.gradient.full is not None and self.optimizer.collectives.world == 1:
            whole = entry.gradient.full.float()
        elif reduced is None:
            return None
        elif matrix.takes_whole:
            whole = self._whole_rows(entry, reduced.float())
        else:
            rows = self._whole_rows(entry, reduced[:, : matrix.rank].float())
            with self.optimizer.bases.whole(entry):
                assert matrix.projection is not None
                whole = rows @ matrix.projection[:, : matrix.rank].float().t()
        return whole.t() if matrix.transposed else whole

    def get_local_fp32_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor:
        """This rank's flat part of the weight, or its rows of a state."""
        entry = self._settled(param)
        if optim_state_key is None:
            return entry.weight.master_values()
        return self._state(entry, optim_state_key)

    def set_local_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite this rank's part."""
        entry = self._settled(param)
        if optim_state_key is None:
            entry.weight.set_values(value.reshape(-1).float())
            self.optimizer.order_gathers()
        else:
            self._set_state(entry, optim_state_key, value)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """This rank's rows of the reduced gradient (projected for a low-rank matrix)."""
        gradient = self._entries[param].gradient
        return gradient.reduced if gradient.host is None else gradient.host.read()

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Overwrite the reduced gradient of a dense parameter.

        Raises:
            ValueError: for a low-rank matrix, whose full gradient is never kept.
        """
        entry = self._settled(param)
        if entry.matrix is not None:
            raise ValueError(
                f"{entry.name} is a low-rank matrix: its full gradient is never kept, so it cannot be "
                "set. Add the module to hmt.optimizer.exclude_modules to keep it dense."
            )
        flat = entry.gradient.shards.shard_of(value.reshape(-1), self.optimizer.shard_rank)
        if entry.gradient.host is not None:
            entry.gradient.host.replace(flat.to(entry.weight.device, copy=True))
            return
        dtype = self.optimizer.settings.accumulate_dtype
        entry.gradient.reduced = flat.to(dtype, copy=True).view(-1, 1)

    def _state(self, entry: Entry, key: str) -> Tensor:
        states = local_state(entry)
        if key not in states:
            raise ValueError(f"{entry.name} has no state {key!r}; legal keys: {sorted(states)}")
        return states[key]

    def _set_state(self, entry: Entry, key: str, value: Tensor) -> None:
        current = self._state(entry, key)
        if key == "step" and entry.dense_state is not None:
            entry.dense_state[2].copy_(value)
            return
        if entry.matrix is not None:
            stored = entry.matrix.states()[key]
        else:
            assert entry.dense_state is not None
            stored = entry.dense_state[0] if key == "exp_avg" else entry.dense_state[1]
        stored.write(value.to(current).view_as(current).clone(), None)

    def _whole_flat(self, entry: Entry, shard: Tensor) -> Tensor:
        shards, collectives = entry.gradient.shards, self.optimizer.collectives
        if shards.world == 1:
            return shard.to(entry.weight.device, copy=True)
        shard = shard.to(entry.weight.device)  # from the host, if it lives there
        part = padded(shard.contiguous(), shards.partition)
        packed = torch.empty(shards.world, shards.partition, dtype=shard.dtype, device=shard.device)
        collectives.all_gather(packed, part).wait()
        whole = torch.empty(shards.m * shards.n, dtype=shard.dtype, device=shard.device)
        shards.unpack_flat(packed, whole)
        return whole

    def _whole_rows(self, entry: Entry, rows: Tensor) -> Tensor:
        shards, collectives = entry.gradient.shards, self.optimizer.collectives
        rows = rows.to(entry.weight.device)  # from the host, if it lives there
        if shards.world == 1:
            return rows.clone()
        width = rows.shape[1]
        part = padded(rows.reshape(-1), shards.max_rows * width)
        packed = torch.empty(shards.world, part.numel(), dtype=rows.dtype, device=rows.device)
        collectives.all_gather(packed, part).wait()
        whole = torch.empty(shards.m, width, dtype=rows.dtype, device=rows.device)
        shards.unpack(packed.view(shards.world, shards.max_rows, width), whole)
        return whole


def link(optimizer: HMTZeroOptimizer) -> None:
    """Attach to every parameter what ``deepspeed.utils.safe_*`` look for."""
    access = StateAccess(optimizer)
    optimizer.state_access = access
    for entry in optimizer.entries:
        param: Any = entry.gradient.param
        if optimizer.parameter_offload is not None:
            param._z3_optimizer = access
            continue
        param._hp_mapping = access
        param.get_full_hp_param = MethodType(_get_param, param)
        param.set_full_hp_param = MethodType(_set_param, param)
        param.get_full_hp_grad = MethodType(_get_grad, param)
        param.set_full_hp_grad = MethodType(_set_grad, param)


def unlink(optimizer: HMTZeroOptimizer) -> None:
    """Undo :func:`link`."""
    for entry in optimizer.entries:
        for name in ("_z3_optimizer", "_hp_mapping", "get_full_hp_param", "set_full_hp_param"):
            vars(entry.gradient.param).pop(name, None)
        for name in ("get_full_hp_grad", "set_full_hp_grad"):
            vars(entry.gradient.param).pop(name, None)


def _get_param(self: Any, optim_state_key: str | None = None) -> Tensor:
    return self._hp_mapping.get_full_hp_param(self, optim_state_key)


def _set_param(self: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    self._hp_mapping.set_full_hp_param(value, self, optim_state_key)


def _get_grad(self: Any) -> Tensor | None:
    return self._hp_mapping.get_fp32_grad_for_param(self)


def _set_grad(self: Any, value: Tensor) -> None:
    self._hp_mapping.set_fp32_grad_for_param(value, self)
