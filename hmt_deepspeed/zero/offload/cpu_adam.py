"""DeepSpeed's CPU Adam kernel as a pure function of its arguments."""

from __future__ import annotations

import weakref
from math import sqrt
from time import perf_counter
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import Tensor

__all__ = ["ALIGNMENT", "CpuAdam"]

# Elements. The kernel takes this many in one vectorised round (AVX-512, 8 registers) and what is left one
# by one, rounded otherwise: pieces that are multiples of it give the bits of the whole.
ALIGNMENT = 128


class CpuAdam:
    """AdamW steps on host memory, vectorised and over ``OMP_NUM_THREADS`` threads.

    The kernel holds Python's interpreter lock while it runs: whoever calls it beside other work hands it
    pieces of a few milliseconds.

    Attributes:
        seconds: spent in the kernel since construction.

    Raises:
        RuntimeError: the kernel, which is compiled at first use, cannot be built here.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        try:
            self._kernel: Any = CPUAdamBuilder().load()
        except Exception as error:
            raise RuntimeError(
                "zero_optimization.offload_optimizer needs DeepSpeed's cpu_adam, which cannot be built here: "
                f"{error}. Install a C++ compiler and ninja, or remove offload_optimizer."
            ) from error
        self._number = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self._kernel.create_adam(self._number, 0.0, 0.9, 0.999, 1e-8, 0.0, True, False)
        weakref.finalize(self, self._kernel.destroy_adam, self._number)

    def step_(
        self,
        param: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """One AdamW step in place (Loshchilov and Hutter, algorithm 2).

        Args:
            param, gradient, exp_avg, exp_avg_sq: flat, contiguous fp32 on the host, of one size; all but
                ``gradient`` are updated.
            step: number of this step, from 1.
            lr, betas, eps, weight_decay: AdamW's.
        """
        # The kernel's own bias correction depends on the calls before it (a running product of beta), so a
        # resumed run would differ. Without it the kernel takes p -= a m / (sqrt(v) + e) + a w p, and
        #   lr/c1 m / (sqrt(v)/c2 + eps) = (lr c2/c1) m / (sqrt(v) + eps c2),  c1 = 1 - b1^t, c2^2 = 1 - b2^t.
        first = 1 - _single(betas[0]) ** step
        second = sqrt(1 - _single(betas[1]) ** step)
        begin = perf_counter()
        self._kernel.adam_update(
            self._number,
            step,
            lr * second / first,
            *betas,
            eps * second,
            weight_decay * first / second,
            False,
            param,
            gradient,
            exp_avg,
            exp_avg_sq,
        )
        self.seconds += perf_counter() - begin


def _single(beta: float) -> float:
    """``beta`` as the kernel sees it: what 0.999 loses in fp32 is 1e-5 of ``1 - beta``."""
    return torch.tensor(beta, dtype=torch.float32).item()
