"""Gradients for DeepSpeed's ``safe_get_*_grad``, ``safe_set_*_grad`` and ``safe_update_full_grad_vectorized``.

What there is to read depends on when, at every stage alike:

- once gradients are reduced (after each backward at stages 2 and 3, at the accumulation boundary at 0 and 1):
  the mean over ranks of what the accumulation window has summed until now;
- before that (earlier micro-batches at stages 0 and 1; inside ``no_sync`` and ``coalesce_grad_reduction``):
  what this rank's backwards have summed, as DeepSpeed's stages 0 and 1 have it in ``param.grad``;
- from a step until the next backward has ended: an error.

Of a low-rank matrix it is the part inside its basis, ``A Q^T``, all that is kept; in a step that refreshes the
basis, the gradient itself. A loss scale is still in it, as in DeepSpeed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hmt_deepspeed.zero.gradients.gradient import Accumulated
from hmt_deepspeed.zero.interfaces import Optimizer
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.shards import padded, whole_shape
from hmt_deepspeed.zero.state import ZeroState, whole_rows

__all__ = ["GradientAccess", "unpadded"]


class GradientAccess:
    """The methods for gradients that DeepSpeed's tools call, for one optimizer; None of a frozen parameter.

    Every rank calls them for the same parameters in the same order: they gather, but for dense parameters at stage
    0 and what is not reduced yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # parameters hold this object, and must not hold the optimizer
        self._optimizer = weakref.ref(optimizer)
        self._param_states = {p.gradient.param: p for p in optimizer.zero.param_states}

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "unlinked when it goes"
        return optimizer

    @property
    def zero(self) -> ZeroState:
        return self.optimizer.zero

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """A copy of the gradient; zeros when no backward used the parameter. A collective but for dense ones at stage 0.

        Args:
            param: of the model.

        Returns:
            fp32 of the parameter's whole shape, on the device.

        Raises:
            ValueError: there is none now, or one part of it is reduced and another is not.
        """
        param_state = self._param_states.get(param)
        return (
            None
            if param_state is None
            else self._whole_gradient(param_state, self._readable(param_state))
        )

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """This rank's part of the mean gradient.

        Args:
            param: of the model.

        Returns:
            fp32, flat, as long as the parameter's partition, on the device.

        Raises:
            ValueError: as above; or gradients are not reduced yet.
        """
        param_state = self._param_states.get(param)
        if param_state is None:
            return None
        self._check_reduced(param_state)
        shards = param_state.weight.shards
        if param_state.matrix is None:
            part = self._reduced(param_state).reshape(-1).clone()
        else:
            part = shards.shard_of(
                self._whole_gradient(param_state, Accumulated.MEAN).reshape(-1),
                param_state.weight.rank,
            )
        return padded(part.to(param_state.weight.device, torch.float32), shards.partition)

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Overwrite what :meth:`get_fp32_grad_for_param` reads, of a dense parameter.

        Args:
            value: of the parameter's whole shape, any float dtype, the same on every rank. param: of the model.

        Raises:
            ValueError: as there; or for a low-rank matrix.
        """
        param_state = self._param_states.get(param)
        if param_state is None:
            return
        self._check_dense(param_state)
        found, gradient = self._readable(param_state), param_state.gradient
        if found is Accumulated.OWN:
            gradient.local = self._kept(param_state, value)
        else:
            gradient.local = None
            shard = param_state.weight.shards.shard_of(value.reshape(-1), param_state.weight.rank)
            self._set_reduced(param_state, shard)

    def set_local_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Overwrite what :meth:`get_local_fp32_grad_for_param` reads, of a dense parameter.

        Args:
            value: flat, with the partition's padding or without. param: of the model.

        Raises:
            ValueError: as there; or for a low-rank matrix.
        """
        param_state = self._param_states.get(param)
        if param_state is None:
            return
        self._check_dense(param_state)
        self._check_reduced(param_state)
        self._set_reduced(param_state, unpadded(param_state, value))

    def update_fp32_grad_for_param_vectorized(
        self,
        update_func: Callable[[Tensor, nn.Parameter], Tensor],
        param_list: Iterable[nn.Parameter],
    ) -> None:
        """``gradient = update_func(gradient, param)`` for dense parameters.

        Args:
            update_func: maps a whole fp32 gradient of the parameter's shape to one of that shape.
            param_list: the parameters.

        Raises:
            ValueError: one is a low-rank matrix, and none is changed; or as :meth:`get_fp32_grad_for_param`.
        """
        params = [param for param in param_list if param in self._param_states]
        for param in params:
            self._check_dense(self._param_states[param])
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            assert gradient is not None
            self.set_fp32_grad_for_param(update_func(gradient, param), param)

    # -- what may be read now -------------------------------------------------------------------

    def _readable(self, param_state: ParamState) -> Accumulated:
        found = self.optimizer.reducer.accumulated
        if found in (Accumulated.NOTHING, Accumulated.PART):
            raise ValueError(
                f"there is no gradient of {param_state.name} now: {found.value}. Read and set gradients after backward() "
                "has returned and before step(). After a backward that was broken off call engine.zero_grad()."
            )
        if found is Accumulated.BOTH and self.zero.collectives.world > 1:
            raise ValueError(
                f"the gradient of {param_state.name} lies in two parts: {found.value}. Read and set gradients before "
                "no_sync() and coalesce_grad_reduction(), or after the next reduction."
            )
        return found

    def _check_reduced(self, param_state: ParamState) -> None:
        if self._readable(param_state) is not Accumulated.MEAN:
            raise ValueError(
                f"no rank has a part of the mean gradient of {param_state.name} before gradients are reduced, here when "
                "coalesce_grad_reduction() ends. Until then safe_get_full_grad reads the sum of this rank's backwards."
            )

    def _check_dense(self, param_state: ParamState) -> None:
        if param_state.matrix is not None:
            raise ValueError(
                f"{param_state.name} is a low-rank matrix: its full gradient is never kept, so it cannot be "
                "set. Leave the module to adamw in hmt.optimizer.module_rules to keep it dense."
            )

    # -- reading and writing --------------------------------------------------------------------

    def _whole_gradient(self, param_state: ParamState, found: Accumulated) -> Tensor:
        matrix = param_state.matrix
        columns = self._own(param_state) if found is Accumulated.OWN else self._mean(param_state)
        if found is Accumulated.BOTH:  # of the only rank
            columns = columns + self._own(param_state)
        if matrix is None:
            return columns.view(whole_shape(param_state.gradient.param))
        if matrix.count > 1:
            columns = columns.unflatten(0, (matrix.count, -1))
        if not param_state.gradient.refreshing and not matrix.takes_whole:
            with self.zero.bases.whole(param_state):
                assert matrix.projection is not None
                basis = matrix.projection[..., : matrix.rank].to(columns)
                columns = columns[..., : matrix.rank] @ basis.mT
        return columns.mT if matrix.transposed else columns

    def _own(self, param_state: ParamState) -> Tensor:
        """Sum of this rank's backwards, all rows, fp32."""
        gradient = param_state.gradient
        if gradient.local is None:
            return self._zeros(param_state, gradient.shards.m).float()
        return gradient.local.to(param_state.weight.device, torch.float32, copy=True)

    def _mean(self, param_state: ParamState) -> Tensor:
        """Mean over ranks, all rows, fp32."""
        gradient = param_state.gradient
        if not gradient.refreshing:
            return whole_rows(param_state, self._reduced(param_state)).float()
        full = self._zeros(param_state, gradient.shards.m)
        if gradient.full is not None:
            full.copy_(gradient.full)
        gradient.holders.broadcast(full, gradient.owner)
        return full.float()

    def _reduced(self, param_state: ParamState) -> Tensor:
        """Mean over ranks of the rows held here, where they are."""
        gradient = param_state.gradient
        part = gradient.reduced if gradient.host is None else gradient.host.read()
        if part is None:  # no backward reached it
            begin, end = gradient.shards.rows(param_state.weight.rank)
            return self._zeros(param_state, end - begin)
        return part.view(-1, gradient.width)

    def _zeros(self, param_state: ParamState, rows: int) -> Tensor:
        gradient, dtype = param_state.gradient, self.zero.settings.accumulate_dtype
        width = gradient.shards.n if gradient.refreshing else gradient.width
        return torch.zeros(rows, width, dtype=dtype, device=param_state.weight.device)

    def _set_reduced(self, param_state: ParamState, flat: Tensor) -> None:
        self.optimizer.synchronize()  # an update may have begun during backward
        host = param_state.gradient.host
        if host is None:
            param_state.gradient.reduced = self._kept(param_state, flat)
        else:
            host.replace(flat.to(param_state.weight.device, copy=True))

    def _kept(self, param_state: ParamState, values: Tensor) -> Tensor:
        dtype = self.zero.settings.accumulate_dtype
        return values.to(param_state.weight.device, dtype, copy=True).view(-1, 1)


def unpadded(param_state: ParamState, value: Tensor) -> Tensor:
    """The elements that this rank holds of a flat partition.

    Args:
        param_state: of the parameter. value: any shape, with the partition's padding or without.

    Raises:
        ValueError: another number of elements.
    """
    own, partition = param_state.weight.num_elements, param_state.weight.shards.partition
    if value.numel() not in (own, partition):
        raise ValueError(
            f"this rank's part of {param_state.name} was given {value.numel()} elements; legal is {partition}, as many "
            "as param.ds_tensor has."
        )
    return value.reshape(-1)[:own]
