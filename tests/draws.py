"""What tests draw by labels instead of by a parameter's name and a step."""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.noise import base_key, step_keys
from hmt_deepspeed.optim.bases.basis import random_basis


def key_of(*labels: object) -> Tensor:
    """A key, 1 x 2."""
    return step_keys(torch.tensor([base_key(0, *labels)]), 0, 0)


def basis_of(n: int, rank: int, *labels: object) -> Tensor:
    """A random basis, n x rank."""
    return random_basis(n, rank, key_of(*labels))[0]
