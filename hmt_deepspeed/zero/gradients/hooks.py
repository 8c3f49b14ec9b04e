"""Gradient hooks: DeepSpeed counts a backward's hooks around the reducer's work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.utils.torch import register_grad_hook
from torch import Tensor, nn
from torch.autograd.graph import _get_grad_fn_or_grad_acc

from hmt_deepspeed.kernels.backward import asked_of, is_transformed
from hmt_deepspeed.zero.gradients.gradient import Gradient
from hmt_deepspeed.zero.gradients.reducer import GradientReducer

__all__ = ["goes_on_to_any", "register_gradient_hooks"]


def register_gradient_hooks(
    optimizer: ZeROOptimizer,
    reducer: GradientReducer,
    leaves: Sequence[nn.Module],
    partitioned: bool,
) -> list[Any]:
    """Hand every gradient to the reducer as backward leaves it.

    The hooks, which the model holds, hold the reducer and not the optimizer: it must not outlive its engine.

    Args:
        optimizer: keeps DeepSpeed's count; its ``partition_gradients`` and ``_coalesce_grad_reduction`` say when
            to reduce.
        leaves: of ZeRO-3 whose gradients leave with the leaf.
        partitioned: parameters are at stage 3.

    Returns:
        Handles, to remove the hooks by.
    """
    params = [gradient.param for gradient in reducer.gradients]
    this = weakref.ref(optimizer)

    def fired(arrived: Gradient | nn.Module) -> Callable[..., None]:
        """Make the hook of a gradient or of a leaf.

        It also fires, with ``param.grad`` None, when a projected backward returned no gradient.
        """

        def hook(*_: object) -> None:
            optimizer = this()
            if optimizer is None:  # dropped, and about to be taken apart
                return
            # Order as in DeepSpeed's own hooks: the question must be asked before re-entering.
            refresh = optimizer.should_refresh_expected_hook_count()
            optimizer.reenter_backward_if_needed()
            reducer.last = optimizer.is_gradient_accumulation_boundary()
            reduce_now = optimizer.partition_gradients or reducer.last
            reduce_now = reduce_now and not optimizer._coalesce_grad_reduction
            if isinstance(arrived, Gradient):
                # False between the slices of DeepSpeed's TiledMLP and its kin, which are one use of the weight
                is_ready = getattr(arrived.param, "ds_grad_is_ready", True)
                reducer.arrive(arrived, reduce_now and is_ready)
            else:
                reducer.arrive_leaf(arrived, reduce_now)
            expected = optimizer._max_expected_hooks_seen
            if refresh:
                expected = count_used_parameters_in_backward(params) + len(leaves)
            optimizer.update_hook_state_and_maybe_run_epilogue(expected)

        return hook

    hooks = []
    for gradient in reducer.gradients:
        param: Any = gradient.param
        if partitioned:
            param.all_gather()  # the gradient accumulator must see the whole parameter
        hooks.append(register_grad_hook(param, fired(gradient)))
        if partitioned:
            param.partition()
    for leaf in leaves:
        hooks.append(leaf.register_full_backward_hook(_at_inputs(fired(leaf))))
    return hooks


def goes_on_to_any(params: Iterable[nn.Parameter]) -> bool:
    """Whether the backward that runs now accumulates gradients of some of these parameters; that of a transform of
    ``torch.func`` accumulates none."""
    return not is_transformed() and any(
        asked_of(_get_grad_fn_or_grad_acc(param)) == "goes_on" for param in params
    )


def _at_inputs(hook: Callable[[], None]) -> Callable[[nn.Module, Any, Any], None]:
    """A full backward hook that calls ``hook`` once gradients have reached the module's inputs.

    Without an input that wants a gradient torch calls it before the module's backward.
    """

    def at_inputs(_: nn.Module, grad_inputs: Sequence[Tensor | None], __: Any) -> None:
        if any(grad is not None for grad in grad_inputs):
            hook()

    return at_inputs
