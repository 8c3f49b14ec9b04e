"""Dense AdamW of a parameter or a shard of it, a chunk at a time: of a large embedding's 16-bit gradient, weight
and states no fp32 copy is ever whole."""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round
from hmt_deepspeed.optim.bases.basis import keyed_seed
from hmt_deepspeed.optim.rules.formulas import adamw_
from hmt_deepspeed.optim.rules.state import StateTensor
from hmt_deepspeed.rules import MIN_INT8_ELEMENTS

__all__ = ["DenseState", "dense_adamw_", "new_dense_state", "state_keys"]

DenseState = tuple[StateTensor, StateTensor, Tensor]  # exp_avg, exp_avg_sq, 0-dim fp32 steps taken

# fp32 elements of each of four tensors alive at once: 16 MiB. Whole blocks of an INT8 state.
CHUNK_ELEMENTS = 1 << 22


def new_dense_state(
    shape: tuple[int, ...], dtype: str, whole_numel: int, device: torch.device
) -> DenseState:
    """Zero moments; in fp32 those of a parameter that is small as a whole, whatever its shards."""
    kind = dtype if whole_numel >= MIN_INT8_ELEMENTS else "fp32"
    first, second = (StateTensor(shape, kind, signed, device) for signed in (True, False))
    return first, second, torch.zeros((), device=device)


def state_keys(seed: int, name: str, step: int) -> tuple[int, int]:
    """Seeds of the rounding of a parameter's two moments at a step."""
    first, second = (keyed_seed(seed, name, "state", which, step) for which in (0, 1))
    return first, second


def dense_adamw_(
    weight: Tensor,
    gradient: Tensor | None,
    state: DenseState,
    *,
    factor: Tensor | None,
    key: int,
    state_keys: tuple[int, int],
    offset: int = 0,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place.

    Args:
        weight: flat, contiguous; fp32, or bf16 that is rounded stochastically.
        gradient: flat, of any float dtype, and scaled in place where it is fp32; None is zero.
        state: of as many elements.
        factor: what the gradient is multiplied by, 0-dim; None for nothing.
        key: seed of the weight's rounding. state_keys: see :func:`state_keys`.
        offset: of the first element in the whole parameter, so that shards of one round alike.
    """
    first, second, step = state
    before = step.clone()
    for begin in range(0, weight.numel(), CHUNK_ELEMENTS):
        part = weight[begin : begin + CHUNK_ELEMENTS]
        end = begin + part.numel()
        if gradient is None:
            grad = torch.zeros_like(part, dtype=torch.float32)
        else:
            grad = gradient[begin:end].float()
            grad = grad if factor is None else grad.mul_(factor)
        moments = first.read_part(begin, end), second.read_part(begin, end)
        values = part.float()
        adamw_(
            values,
            grad.contiguous(),
            *moments,
            step.copy_(before),  # every chunk takes the same step
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        first.write_part(begin, moments[0], state_keys[0])
        second.write_part(begin, moments[1], state_keys[1])
        if part.dtype == torch.bfloat16:
            stochastic_round(values, part, key, offset + begin)
    step.copy_(before + 1)
