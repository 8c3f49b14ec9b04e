"""Dense AdamW of a parameter or a shard of it, a chunk at a time: of a large embedding's 16-bit gradient, weight
and states no fp32 copy is ever whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import device_table
from hmt_deepspeed.kernels.noise import Stream, step_keys
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round, stochastic_rounds
from hmt_deepspeed.optim.rules.formulas import adamw_
from hmt_deepspeed.optim.rules.state import StateTensor

__all__ = [
    "DenseState",
    "SmallParameter",
    "dense_adamw_",
    "dense_adamw_together_",
    "new_dense_state",
]

DenseState = tuple[StateTensor, StateTensor, Tensor]  # exp_avg, exp_avg_sq, 0-dim fp32 steps taken

# fp32 elements of each of four tensors alive at once, on a CPU and elsewhere: 16 and 128 MiB. Whole blocks of an
# INT8 state.
CHUNK_ELEMENTS = {True: 1 << 22, False: 1 << 25}
# Elements of a rounded parameter whose fp32 values are alive beside those of others: biases and norms.
MOST_ROUNDED = 1 << 20


def new_dense_state(shape: tuple[int, ...], dtype: str, device: torch.device) -> DenseState:
    """Zero moments, of a shard those of its elements; see :func:`~hmt_deepspeed.rules.dense_states_dtype`."""
    first, second = (StateTensor(shape, dtype, signed, device) for signed in (True, False))
    return first, second, torch.zeros((), device=device)


class SmallParameter(NamedTuple):
    """A parameter, or a shard of one, that steps together with others.

    Attributes:
        weight: flat, contiguous, fp32, or bf16 that is rounded stochastically. gradient: flat, of any float dtype;
            None is zero. state: fp32.
        copy: of 16 bits, contiguous, of as many elements: is given the new values. Or None.
        base: key of the parameter, see :func:`hmt_deepspeed.kernels.noise.base_key`. offset: of the first element in
            the whole parameter.
    """

    weight: Tensor
    gradient: Tensor | None
    state: DenseState
    copy: Tensor | None
    base: int = 0
    offset: int = 0

    @property
    def rounds(self) -> bool:
        return self.weight.dtype == torch.bfloat16

    @property
    def fits(self) -> bool:
        """Whether it may step with others: states of fp32, and small enough for fp32 copies whole."""
        most = CHUNK_ELEMENTS[self.weight.device.type == "cpu"]
        small = self.weight.numel() <= (min(most, MOST_ROUNDED) if self.rounds else most)
        stored = {state.dtype for state in self.state[:2]}
        return small and stored == {"fp32"} and (self.rounds or self.weight.dtype == torch.float32)


def dense_adamw_together_(
    params: Sequence[SmallParameter],
    *,
    number: Tensor | int,
    factor: Tensor | None = None,
    taken: Tensor | None = None,
    **hyper: Any,
) -> None:
    """:func:`dense_adamw_` of several parameters that fit, in a few launches for all.

    Args:
        number: of the step, which keys the rounding; 0-dim int64 on the device, or a number.
        factor, taken: as there. hyper: lr, betas, eps, weight_decay.
    """
    rounded = list(_rounded_alike([param for param in params if param.rounds]))
    values = {
        id(p): value for alike, stack in rounded for p, value in zip(alike, stack, strict=True)
    }
    weights = [values.get(id(param), param.weight) for param in params]
    if rounded:
        widened = [p for p in params if p.rounds]
        torch._foreach_copy_([values[id(p)] for p in widened], [p.weight for p in widened])
    gradients = [torch.empty_like(weight) for weight in weights]
    given = [torch.zeros_like(p.weight) if p.gradient is None else p.gradient for p in params]
    torch._foreach_copy_(gradients, given)
    if factor is not None:
        torch._foreach_mul_(gradients, factor)
    firsts, seconds, steps = zip(*(param.state for param in params), strict=True)
    adamw_(
        weights,
        gradients,
        [first.data.view(-1) for first in firsts],
        [second.data.view(-1) for second in seconds],
        list(steps),
        **hyper,
        skipped=None if taken is None else (~taken).float(),
    )
    copied = [
        (p.copy, weight) for p, weight in zip(params, weights, strict=True) if p.copy is not None
    ]
    for alike, stack in rounded:
        bases = device_table(tuple(param.base for param in alike), stack.device)
        out = torch.empty_like(stack, dtype=torch.bfloat16)
        keys = step_keys(bases, number, Stream.WEIGHT_ROUNDING)
        stochastic_rounds(stack, out, keys, offset=alike[0].offset)
        copied += [(param.weight, new) for param, new in zip(alike, out, strict=True)]
    if copied:
        torch._foreach_copy_([target for target, _ in copied], [new for _, new in copied])


def _rounded_alike(
    params: Sequence[SmallParameter],
) -> Iterator[tuple[list[SmallParameter], Tensor]]:
    """Those of one size and offset, and memory for their fp32 values, B x numel."""
    kinds: dict[tuple[int, int], list[SmallParameter]] = {}
    for param in params:
        kinds.setdefault((param.weight.numel(), param.offset), []).append(param)
    for (numel, _), alike in kinds.items():
        shape = (len(alike), numel)
        yield alike, torch.empty(shape, dtype=torch.float32, device=alike[0].weight.device)


def dense_adamw_(
    weight: Tensor,
    gradient: Tensor | None,
    state: DenseState,
    base: int,
    number: Tensor | int,
    *,
    factor: Tensor | None = None,
    taken: Tensor | None = None,
    offset: int = 0,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place.

    Args:
        weight: flat, contiguous; fp32, or bf16 that is rounded stochastically.
        gradient: flat, of any float dtype, and scaled in place where it is fp32; None is zero.
        state: of as many elements.
        base: key of the parameter, see :func:`hmt_deepspeed.kernels.noise.base_key`. number: of the step, 0-dim int64 on the
            device or a number; both key the rounding.
        factor: what the gradient is multiplied by, 0-dim; None for nothing.
        taken: 0-dim bool; where it is false nothing changes, whatever the gradient holds. None for true.
        offset: of the first element in the whole parameter, so that shards of one round alike.
    """
    first, second, step = state
    keys = _rounding_keys(weight, state, base, number)
    active = None if taken is None else taken.float().view(1)
    skipped = None if active is None else 1.0 - active[0]
    chunk = CHUNK_ELEMENTS[weight.device.type == "cpu"]
    begins = range(0, weight.numel(), chunk)
    before = step.clone() if len(begins) > 1 else step
    if not begins:
        step += 1.0 if active is None else active[0]
    for begin in begins:
        part = weight[begin : begin + chunk]
        end = begin + part.numel()
        if gradient is None:
            grad = torch.zeros_like(part, dtype=torch.float32)
        else:
            grad = gradient[begin:end].float()
            grad = grad if factor is None else grad.mul_(factor)
        moments = first.read_part(begin, end), second.read_part(begin, end)
        values = part.float()
        if begin:
            step.copy_(before)  # every chunk takes the same step
        adamw_(
            [values],
            [grad.contiguous()],
            [moments[0]],
            [moments[1]],
            [step],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            skipped=skipped,
        )
        first.write_part(begin, moments[0], keys.get(Stream.FIRST_STATE), active)
        second.write_part(begin, moments[1], keys.get(Stream.SECOND_STATE), active)
        if part.dtype == torch.bfloat16:
            stochastic_round(values, part, keys[Stream.WEIGHT_ROUNDING], offset + begin)


def _rounding_keys(
    weight: Tensor, state: DenseState, base: int, number: Tensor | int
) -> dict[Stream, Tensor]:
    """Of what rounds, 1 x 2 int32 each."""
    rounding = {
        Stream.FIRST_STATE: state[0].dtype != "fp32",
        Stream.SECOND_STATE: state[1].dtype != "fp32",
        Stream.WEIGHT_ROUNDING: weight.dtype == torch.bfloat16,
    }
    bases = device_table((base,), weight.device)
    return {
        stream: step_keys(bases, number, stream) for stream, rounds in rounding.items() if rounds
    }
