"""Muon of a whole matrix (Jordan et al., 2024), ``"rank": "full"``: no basis, no normalised rows.

Of G, m x n with n the smaller side::

    M <- mu M + (1 - mu) G,  N = mu M + (1 - mu) G        Nesterov's
    W <- (1 - lr wd) W - lr scale sqrt(m) N (N^T N)^(-1/2)

``torch.optim.Muon`` takes the same steps with ``"match_rms_adamw"`` as its ``adjust_lr_fn`` where ``scale`` is 0.2, but for
the polar factor: its five quintics leave the singular values between 0.7 and 1.2, the four here between 0.8 and 1.2. The
Gram matrix, n x n, is all that holders of rows sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.muon import Momentum, MuonMatrix, MuonStack
from hmt_deepspeed.optim.rules.stack import Stack

__all__ = ["FullMuonMatrix", "FullMuonStack"]


class FullMuonStack(MuonStack):
    """Steps of matrices alike under :class:`FullMuonMatrix`."""

    def finish(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor
    ) -> list[Change]:
        """Orthogonalise, given ``N^T N`` over all rows, and apply ``scale``."""
        for update, root in zip(updates, self.roots(parts, sums), strict=True):
            update.copy_(update @ root)
        return super().finish(parts, updates, sums)

    def _limited(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing is limited."""
        scale = self.shared("scale")
        return torch.ones_like(scale), torch.stack((scale, scale), dim=1)


class FullMuonMatrix(MuonMatrix):
    """States of one matrix under Muon at full rank."""

    STACK = FullMuonStack
    KEPT = Momentum
    SHARES = False  # there is no basis to share
