"""DeepSpeed's ``safe_get_*`` and ``safe_set_*`` tools on HMT's states.

Keys are DeepSpeed's: ``None`` is the fp32 weight, ``exp_avg`` and ``exp_avg_sq`` the moments. Moments
of a low-rank matrix live in its projected space and come back as m x r (E x m x r of experts); a factored second moment as
``exp_avg_sq_row`` (m x 1), ``exp_avg_sq_col`` (1 x r) and ``exp_avg_sq_mean``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from hmt_deepspeed.zero.interfaces import Optimizer
from hmt_deepspeed.zero.optimizer.gradient_access import GradientAccess, unpadded
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.shards import padded, whole_shape
from hmt_deepspeed.zero.state import whole_experts, whole_flat, whole_rows
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight

__all__ = ["StateAccess", "link", "local_state"]


def local_state(param_state: ParamState) -> dict[str, Tensor]:
    """States of one parameter held by this rank, by DeepSpeed's keys.

    Args:
        param_state: of the parameter.

    Returns:
        Of a matrix tensors of the rows that this rank touches, decoded to fp32, of experts of those that it holds; of a
        dense parameter flat ones of the shard.
    """
    if param_state.matrix is not None:
        return {key: state.read() for key, state in param_state.matrix.states().items()}
    assert param_state.dense_state is not None
    first, second, step = param_state.dense_state
    return {"exp_avg": first.read(), "exp_avg_sq": second.read(), "step": step}


class StateAccess(GradientAccess):
    """The methods that DeepSpeed's tools call, for one optimizer; frozen parameters have nothing to read or set."""

    def _synchronized(self, param: nn.Parameter) -> ParamState | None:
        """The state of a parameter, when no update of it is under way; None of a frozen one."""
        self.optimizer.synchronize()
        return self._param_states.get(param)

    def get_full_hp_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """A whole weight or state. A collective.

        Args:
            param: of the model. optim_state_key: of the state; None for the weight.

        Returns:
            fp32 of the parameter's shape; of a low-rank matrix's moments m x r.
        """
        param_state = self._synchronized(param)
        if param_state is None:
            return None
        if optim_state_key is None:
            if isinstance(param_state.weight, EncodedWeight):
                return param_state.weight.whole_values().view(whole_shape(param))
            whole = whole_flat(param_state, param_state.weight.master_values())
            return whole.view(whole_shape(param))
        state = self._state(param_state, optim_state_key)
        if param_state.matrix is None:
            return whole_flat(param_state, state).view(whole_shape(param))
        is_by_rows = optim_state_key in param_state.matrix.settings.rule.row_states
        if param_state.matrix.count > 1:
            return whole_experts(param_state, state, is_by_rows)
        # a core is whole on every rank
        return whole_rows(param_state, state) if is_by_rows else state.clone()

    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite a whole weight or state; every rank passes the same value.

        Args:
            value: of the shape that :meth:`get_full_hp_param` returns. param: of the model.
            optim_state_key: of the state; None for the weight.
        """
        param_state = self._synchronized(param)
        if param_state is None:
            return
        if optim_state_key is None:
            param_state.weight.set_whole(value.reshape(-1).float())
            self.optimizer.partitions.order_gathers()
        elif param_state.matrix is None:
            shard = param_state.weight.shards.shard_of(value.reshape(-1), param_state.weight.rank)
            self._set_state(param_state, optim_state_key, shard)
        else:
            matrix = param_state.matrix
            if matrix.count > 1:
                value = value[matrix.held]
            if optim_state_key in matrix.settings.rule.row_states:
                value = value[..., slice(*matrix.rows), :]
            self._set_state(param_state, optim_state_key, value)

    def get_local_fp32_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """This rank's part of a weight or of a state.

        Args:
            param: of the model. optim_state_key: of the state; None for the weight.

        Returns:
            fp32, flat, as long as the parameter's partition; of a low-rank matrix's state the rows that this rank
            touches x r.
        """
        param_state = self._synchronized(param)
        if param_state is None:
            return None
        if optim_state_key is None:
            return padded(param_state.weight.master_values(), param_state.weight.shards.partition)
        state = self._state(param_state, optim_state_key)
        is_flat = param_state.matrix is None and state.dim() > 0
        return padded(state, param_state.weight.shards.partition) if is_flat else state

    def set_local_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Overwrite what :meth:`get_local_fp32_param` reads.

        Args:
            value: of the shape that it returns, flat ones with padding or without. param: of the model.
            optim_state_key: of the state; None for the weight.

        Raises:
            ValueError: a flat part has another number of elements.
        """
        param_state = self._synchronized(param)
        if param_state is None:
            return
        if optim_state_key is None:
            param_state.weight.set_values(unpadded(param_state, value).float())
            self.optimizer.partitions.order_gathers()
        elif param_state.matrix is None and value.dim() > 0:
            self._set_state(param_state, optim_state_key, unpadded(param_state, value))
        else:
            self._set_state(param_state, optim_state_key, value)

    def _state(self, param_state: ParamState, key: str) -> Tensor:
        states = local_state(param_state)
        if key not in states:
            raise ValueError(
                f"{param_state.name} has no state {key!r}; legal keys: {sorted(states)}"
            )
        return states[key]

    def _set_state(self, param_state: ParamState, key: str, value: Tensor) -> None:
        current = self._state(param_state, key)
        if key == "step" and param_state.dense_state is not None:
            param_state.dense_state[2].copy_(value)
            return
        if param_state.matrix is not None:
            stored = param_state.matrix.states()[key]
        else:
            assert param_state.dense_state is not None
            stored = param_state.dense_state[0] if key == "exp_avg" else param_state.dense_state[1]
        stored.write(value.to(current).view_as(current).clone(), None)


def link(optimizer: Optimizer) -> None:
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


def unlink(optimizer: Optimizer) -> None:
    """Undo :func:`link`."""
    for param in _linked(optimizer):
        for name in ("_z3_optimizer", "_hp_mapping", "get_full_hp_param", "set_full_hp_param"):
            vars(param).pop(name, None)
        for name in ("get_full_hp_grad", "set_full_hp_grad"):
            vars(param).pop(name, None)


def _linked(optimizer: Optimizer) -> list[Any]:
    """At stage 3 DeepSpeed's tools ask frozen parameters too."""
    if optimizer.parameter_offload is not None:
        return list(optimizer.module.parameters())
    return [param_state.gradient.param for param_state in optimizer.zero.param_states]


def _get_param(self: Any, optim_state_key: str | None = None) -> Tensor | None:
    return self._hp_mapping.get_full_hp_param(self, optim_state_key)


def _set_param(self: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    self._hp_mapping.set_full_hp_param(value, self, optim_state_key)


def _get_grad(self: Any) -> Tensor | None:
    return self._hp_mapping.get_fp32_grad_for_param(self)


def _set_grad(self: Any, value: Tensor) -> None:
    self._hp_mapping.set_fp32_grad_for_param(value, self)
