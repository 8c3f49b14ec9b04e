"""Classifies a module by its class and its own weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

__all__ = [
    "CONVOLUTIONS",
    "SCANS",
    "TRANSPOSED",
    "attentions",
    "has_no_weights",
    "is_matrix",
    "is_plain",
    "norm_channels",
]

SCANS = re.compile(
    r"Mamba|SSM|Rwkv|xLSTM|mLSTM|sLSTM|GatedDelta|Recurrent|Hyena|KDA|LightningAttention"
)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_plain(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children, as far as this can be seen: it has no weights itself."""
    has_own = any(p is not None and p.dim() > 1 for p in module._parameters.values())
    return not has_own and next(module.children(), None) is not None and not _is_attention(module)


def has_no_weights(module: nn.Module) -> bool:
    return not any(p is not None for p in module._parameters.values())


def norm_channels(module: nn.Module) -> int:
    """Channels of a norm, 0 of anything else."""
    own = [p for p in module._parameters.values() if p is not None]
    named = "norm" in type(module).__name__.lower()
    return int(own[0].numel()) if named and own and all(p.dim() == 1 for p in own) else 0


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    whole = re.search(
        r"(Layer|Block|Stack|Encoder|Decoder|Model)$", name
    )  # JambaAttentionDecoderLayer
    attends = "Attention" in name and whole is None and not SCANS.search(name)
    return attends and any(map(is_matrix, module.modules()))


def is_matrix(module: nn.Module) -> bool:
    own = module._parameters.values()
    return not isinstance(module, nn.Embedding) and any(p is not None and p.dim() == 2 for p in own)


def attentions(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Innermost modules of attention with their output projection: the outer of two that are nested and have both."""
    held: list[str] = []
    for name, inner in module.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{outer}.") or outer == "" for outer in held):
            continue
        if _is_attention(inner):
            held.append(name)
            yield name, inner
