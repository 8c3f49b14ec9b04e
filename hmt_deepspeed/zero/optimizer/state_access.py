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

from hmt_deepspeed.zero.optimizer.gradient_access import GradientAccess, unpadded, whole_rows
from hmt_deepspeed.zero.sharding.shards import padded, whole_shape
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight

if TYPE_CHECKING:
    from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer
    from hmt_deepspeed.zero.parameters.param_state import Entry

__all__ = ["StateAccess", "link", "local_state"]


def local_state(entry: Entry) -> dict[str, Tensor]:
    """States of one parameter held by this rank, by DeepSpeed's keys."""
    if entry.matrix is not None:
        return {key: state.read() for key, state in entry.matrix.states().items()}
    assert entry.dense_state is not None
    first, second, step = entry.dense_state
    return {"exp_avg": first.read(), "exp_avg_sq": second.read(), "step": step}


class StateAccess(GradientAccess):
    """The methods that DeepSpeed's tools call, for one optimizer; frozen parameters have nothing to read or set."""

    def _settled(self, param: nn.Parameter) -> Entry | None:
        """The entry of a parameter, when no update of it is under way; None of a frozen one."""
        self.optimizer.settle()
        return self._entries.get(param)

    def get_full_hp_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Whole fp32 weight (shape of the parameter) or whole state (m x r for low-rank moments)."""
        entry = self._settled(param)
        if entry is None:
            return None
        if optim_state_key is None:
            if isinstance(entry.weight, EncodedWeight):
                return entry.weight.whole_values()
            return self._whole_flat(entry, entry.weight.master_values()).view(whole_shape(param))
        state = self._state(entry, optim_state_key)
        if entry.matrix is None:
            return self._whole_flat(entry, state).view(whole_shape(param))
        if optim_state_key not in entry.matrix.ROW_STATES:  # a core is whole on every rank
            return state.clone()
        return whole_rows(entry, state, self.optimizer)

    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite a whole weight or state; every rank passes the same value."""
        entry, rank = self._settled(param), self.optimizer.shard_rank
        if entry is None:
            return
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

    def get_local_fp32_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """This rank's flat part of a weight or of a dense parameter's state, as long as the parameter's
        partition; of a low-rank matrix's state its rows."""
        entry = self._settled(param)
        if entry is None:
            return None
        if optim_state_key is None:
            return padded(entry.weight.master_values(), entry.weight.shards.partition)
        state = self._state(entry, optim_state_key)
        is_flat = entry.matrix is None and state.dim() > 0
        return padded(state, entry.weight.shards.partition) if is_flat else state

    def set_local_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite what :meth:`get_local_fp32_param` reads.

        Raises:
            ValueError: a flat part has another number of elements.
        """
        entry = self._settled(param)
        if entry is None:
            return
        if optim_state_key is None:
            entry.weight.set_values(unpadded(entry, value).float())
            self.optimizer.order_gathers()
        elif entry.matrix is None and value.dim() > 0:
            self._set_state(entry, optim_state_key, unpadded(entry, value))
        else:
            self._set_state(entry, optim_state_key, value)

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


def link(optimizer: HMTZeroOptimizer) -> None:
    """Attach to every parameter what ``deepspeed.utils.safe_*`` look for."""
    access = StateAccess(optimizer)
    optimizer.state_access = access
    for param in _linked(optimizer):
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
    for param in _linked(optimizer):
        for name in ("_z3_optimizer", "_hp_mapping", "get_full_hp_param", "set_full_hp_param"):
            vars(param).pop(name, None)
        for name in ("get_full_hp_grad", "set_full_hp_grad"):
            vars(param).pop(name, None)


def _linked(optimizer: HMTZeroOptimizer) -> list[Any]:
    """At stage 3 DeepSpeed's tools ask frozen parameters too."""
    if optimizer.parameter_offload is not None:
        return list(optimizer.module.parameters())
    return [entry.gradient.param for entry in optimizer.entries]


def _get_param(self: Any, optim_state_key: str | None = None) -> Tensor | None:
    return self._hp_mapping.get_full_hp_param(self, optim_state_key)


def _set_param(self: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    self._hp_mapping.set_full_hp_param(value, self, optim_state_key)


def _get_grad(self: Any) -> Tensor | None:
    return self._hp_mapping.get_fp32_grad_for_param(self)


def _set_grad(self: Any, value: Tensor) -> None:
    self._hp_mapping.set_fp32_grad_for_param(value, self)
