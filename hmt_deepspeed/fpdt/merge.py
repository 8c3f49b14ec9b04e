"""The online softmax: attention over some keys merged with attention over others."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_"]


def merge_(out: Tensor, log_sum_exp: Tensor, more_out: Tensor, more_log_sum_exp: Tensor) -> None:
    """Adds attention over further keys to a running result, in place.

    With ``L = log(e^a + e^b)``: ``O = e^(a - L) O_a + e^(b - L) O_b``. Both exponents are at most 0, so no
    gap between ``a`` and ``b`` overflows. A query that has seen no key has ``a = -inf`` and ``O_a = 0``.

    Args:
        out: fp32, [B, H, T, D]. log_sum_exp: fp32, [B, H, T].
        more_out: any dtype, [B, H, T, D]. more_log_sum_exp: fp32, [B, H, T].
    """
    total = torch.logaddexp(log_sum_exp, more_log_sum_exp)
    finite = total.clamp(min=torch.finfo(torch.float32).min)  # -inf - -inf is not a number
    out.mul_((log_sum_exp - finite).exp_().unsqueeze(-1))
    out.addcmul_(more_out.to(out.dtype), (more_log_sum_exp - finite).exp_().unsqueeze(-1))
    log_sum_exp.copy_(total)
