"""Fira (2410.01623), a minimal reference written from the paper's formulas.

Shapes: G m x n; the smaller side is projected, as GaLore does. Written for n <= m (``right``):

    R = G P                     P: n x r, the first right singular vectors, renewed every `gap` steps
    U = Adam(R)
    phi_i = ||U_i|| / ||R_i||   per row
    S = phi o (G - R P^T)       limited: ||S_t|| <= limit ||S_{t-1}||
    W <- (1 - lr wd) W - lr scale (U P^T + S)

For n > m the same is done to the transposes. Moments are kept unrotated when P is renewed, as in GaLore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_TINY = 1e-8


class Fira(Optimizer):
    """Groups with a "rank" get Fira's update, the others AdamW's.

    Args:
        params: groups; those with "rank" also hold "update_proj_gap", "scale" and
            "norm_growth_limit".
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._update(param, group)
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(update, alpha=group["lr"])
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        gradient = param.grad
        assert gradient is not None
        if "rank" not in group:
            return _adam(gradient, state, group)
        wide = gradient.shape[1] > gradient.shape[0]
        gradient = gradient.t() if wide else gradient
        if (state["step"] - 1) % group["update_proj_gap"] == 0:
            state["basis"] = leading_right_vectors(gradient, group["rank"])
        basis = state["basis"]
        projected = gradient @ basis
        direction = _adam(projected, state, group)
        phi = direction.norm(dim=1) / (projected.norm(dim=1) + _TINY)
        residual = (gradient - projected @ basis.t()) * phi.unsqueeze(1)
        residual = limited(residual, state, group["norm_growth_limit"])
        update = group["scale"] * (direction @ basis.t() + residual)
        return update.t() if wide else update


def leading_right_vectors(gradient: Tensor, rank: int) -> Tensor:
    """The first `rank` right singular vectors of an m x n gradient, n x rank."""
    _, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    return right[:rank].t().to(gradient.dtype).contiguous()


def limited(residual: Tensor, state: dict[str, Any], limit: float) -> Tensor:
    """The residual, its norm at most `limit` times that of the step before (kept in `state`)."""
    norm = residual.norm()
    last = state.get("residual_norm")
    if last is not None and norm > limit * last:
        residual = residual * (limit * last / (norm + _TINY))
        norm = limit * last
    state["residual_norm"] = norm
    return residual


def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's direction with bias correction, eps outside the root."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    return mean / (1 - beta1 ** state["step"]) / denominator
