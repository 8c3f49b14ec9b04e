"""Builds the rule of a matrix from its settings."""

from __future__ import annotations

from importlib import import_module

import torch

from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.matrix import MatrixSettings
from hmt_deepspeed.rules import Rule

__all__ = ["build_matrix"]


def build_matrix(
    name: str,
    shape: tuple[int, int],
    rows: tuple[int, int],
    settings: MatrixSettings,
    dtype: torch.dtype,
    device: torch.device,
    count: int = 1,
    own_bases: bool = False,
    held: tuple[int, int] | None = None,
) -> MatrixRule:
    """The rule of one matrix or of ``count`` experts; arguments as of :class:`MatrixRule`, but ``shape`` is the weight's.

    ``rows`` are those of ``settings.oriented(*shape)``.
    """
    kind = _class_of(settings.rule)
    oriented, transposed = settings.oriented(*shape), settings.transposes(*shape)
    return kind(name, oriented, rows, settings, dtype, device, transposed, count, own_bases, held)


def _class_of(rule: Rule) -> type[MatrixRule]:
    module, _, name = rule.carried_out_by.partition(":")
    found: type[MatrixRule] = getattr(import_module(module), name)
    return found
