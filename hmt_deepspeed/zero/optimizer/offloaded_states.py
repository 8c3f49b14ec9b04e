"""``engine.offload_states`` and ``engine.reload_states``: host memory for what the next phase does not need.

Reinforcement learning trains, then generates with another engine on the same device, and trains again. The names are
DeepSpeed's; what each takes here is said in :class:`OffloadedStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.zero.interfaces import Optimizer
from hmt_deepspeed.zero.weights.weight import move_parameter

__all__ = ["OffloadedStates"]

Place = Callable[[Tensor], Tensor]
TRAINED = ("optim_states", "hp_params", "lp_params", "lp_grads")  # what a step reads


class _Mover:
    """Moves each tensor once, so that what was one tensor to several owners still is.

    Keeps what it moved until it is dropped itself: a copy that waits for no one may still read it.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, self._place(tensor)
        return self._moved[id(tensor)][1]


class OffloadedStates:
    """Moves states of an optimizer to host memory between ``offload_states`` and ``reload_states``.

    - ``optim_states``: moments, and left bases of two-sided matrices.
    - ``hp_params``: fp32 masters. Those of an fp32 model are its weights, which are ``lp_params``.
    - ``lp_params``: all of the model's weights, at stage 3 this rank's partitions of them; and the bases, which only
      forward and backward read. Nothing with ``offload_param``, whose partitions are on the host for good.
    - ``lp_grads``: gradients of the accumulation window so far.
    - ``contiguous_grad_buffer``: the pool of buckets; it is freed, and made anew by the next reduction.

    What ``offload_optimizer`` keeps on the host stays there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._home = optimizer.zero.param_states[0].weight.device
        self._away: set[str] = set()
        self._copying = False
        self._movers: dict[str, Callable[[Place], None]] = {
            "optim_states": self._move_moments,
            "hp_params": self._move_masters,
            "lp_params": self._move_weights,
            "lp_grads": self._move_gradients,
        }

    def offload(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None,
        device: Any,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        """Move what is included and not away yet.

        Args:
            include: names of states, None for all. device: the host, DeepSpeed's ``OffloadDeviceEnum.cpu``.
            pin_memory: page-lock the host memory. non_blocking: return while copies are under way.

        Raises:
            ValueError: a state that DeepSpeed does not name, or another device than the host.
        """
        if getattr(device, "value", device) != OffloadDeviceEnum.cpu.value:
            raise ValueError(
                f"offload_states(device={device!r}): legal is OffloadDeviceEnum.cpu. For states on an SSD set "
                'zero_optimization.offload_optimizer.device to "nvme".'
            )
        chosen = _names(include)
        if "lp_params" in chosen:
            self._optimizer.empty_partition_cache()
        accelerator = get_accelerator()

        def to_host(tensor: Tensor) -> Tensor:
            if pin_memory:
                host = accelerator.pin_empty_like(tensor, device="cpu")
            else:
                host = torch.empty_like(tensor, device="cpu")
            return host.copy_(tensor, non_blocking=non_blocking)

        self._away |= self._move(chosen - self._away, _Mover(to_host))
        self._optimizer.forget_moved()
        if "contiguous_grad_buffer" in chosen:
            self._optimizer.reducer.free_pool()
        self._copying |= non_blocking
        accelerator.empty_cache()

    def reload(self, non_blocking: bool) -> None:
        """Move everything that is away back to the device."""

        def to_device(tensor: Tensor) -> Tensor:
            back = torch.empty_like(tensor, device=self._home)
            return back.copy_(tensor, non_blocking=non_blocking)

        self.synchronize()
        mover = _Mover(to_device)
        returned = self._move(self._away, mover)
        if non_blocking:
            get_accelerator().synchronize()  # DeepSpeed's pinned memory is free once it is dropped
        del mover
        self._away.clear()
        if "lp_params" in returned:
            self._optimizer.checkpoint_event_epilogue()

    def synchronize(self) -> None:
        """Wait for asynchronous copies, after which the host may read them."""
        if self._copying:
            get_accelerator().synchronize()
            self._copying = False

    def require(self, action: str, needed: Container[str] = TRAINED) -> None:
        """Check that states are on the device; call before reading them there.

        Args:
            action: what reads them, for the message. needed: the states.

        Raises:
            RuntimeError: one of them is away.
        """
        missing = sorted(name for name in self._away if name in needed)
        if missing:
            raise RuntimeError(
                f"{action} needs {' and '.join(missing)}, which engine.offload_states() has moved to host memory. "
                "Call engine.reload_states() first."
            )

    def _move(self, names: set[str], mover: _Mover) -> set[str]:
        """Move the tensors of the names that have any."""
        moved = self._movers.keys() & names
        for name in sorted(moved):
            self._movers[name](mover)
        return moved

    # -- what each name takes -----------------------------------------------------------------------

    def _move_moments(self, place: Place) -> None:
        for param_state in self._optimizer.zero.param_states:
            if param_state.matrix is not None:
                param_state.matrix.move_states(place)
            elif param_state.host is None:
                assert param_state.dense_state is not None
                first, second, step = param_state.dense_state
                first.move(place)
                second.move(place)
                param_state.dense_state = (first, second, place(step))

    def _move_masters(self, place: Place) -> None:
        for param_state in self._optimizer.zero.param_states:
            param_state.weight.move_master(place)

    def _move_weights(self, place: Place) -> None:
        optimizer = self._optimizer
        coordinator = optimizer.parameter_offload
        if coordinator is not None and coordinator.offload_device not in (
            None,
            OffloadDeviceEnum.none,
        ):
            return
        for param_state in optimizer.zero.param_states:
            param_state.weight.move_weights(place)
        trained = {param_state.gradient.param for param_state in optimizer.zero.param_states}
        for param in optimizer.module.parameters():
            if param not in trained:
                move_parameter(param, place)
        matrices = [
            p.matrix for p in optimizer.zero.low_rank if isinstance(p.matrix, ProjectedMatrix)
        ]
        for columns in {id(matrix.columns): matrix.columns for matrix in matrices}.values():
            columns.move(place)
        for groups in optimizer.zero.all_basis_groups:
            groups.shared.move(place)
        for param_state in optimizer.zero.low_rank:
            link = param_state.gradient.linear
            if link is not None and param_state.gradient.count > 1:  # of no group
                link.move(place)

    def _move_gradients(self, place: Place) -> None:
        for param_state in self._optimizer.zero.param_states:
            param_state.gradient.move(place)


def _names(include: Iterable[OffloadStateTypeEnum | str] | None) -> set[str]:
    legal = {state.value for state in OffloadStateTypeEnum}
    names = legal if include is None else {getattr(s, "value", s) for s in include}
    if unknown := sorted(str(name) for name in names - legal):
        raise ValueError(
            f"offload_states(include=...) has {unknown}; legal are {sorted(legal)}, the values of DeepSpeed's "
            "OffloadStateTypeEnum, and None for all of them."
        )
    return set(names)
