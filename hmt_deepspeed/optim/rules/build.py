"""Which class carries out a matrix's settings."""

from __future__ import annotations

import torch

from hmt_deepspeed.optim.rules.apollo import ApolloMatrix
from hmt_deepspeed.optim.rules.factored import FactoredMatrix
from hmt_deepspeed.optim.rules.low_rank import LowRankMatrix
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.two_sided import TwoSidedMatrix
from hmt_deepspeed.optim.settings.matrix import MatrixSettings

__all__ = ["build_matrix"]


def build_matrix(
    name: str,
    shape: tuple[int, int],
    rows: tuple[int, int],
    settings: MatrixSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> MatrixRule:
    """The rule of one matrix; arguments as of :class:`MatrixRule`, but ``shape`` is the weight's.

    ``rows`` are those of ``settings.oriented(*shape)``.
    """
    kind: type[MatrixRule] = LowRankMatrix
    if settings.is_apollo:
        kind = ApolloMatrix
    elif settings.projection == "two_sided":
        kind = TwoSidedMatrix
    elif settings.is_factored:
        kind = FactoredMatrix
    oriented, transposed = settings.oriented(*shape), settings.transposes(*shape)
    return kind(name, oriented, rows, settings, dtype, device, transposed)
