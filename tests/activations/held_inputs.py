"""A checkpoint whose input is held by a codec, without the backend: what the holders' tests need of it."""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def make_layers(count, width, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()).to(dtype) for _ in range(count)]


def checkpointed(function, x, codec, held=None):
    """``function(x)``, plainly without a codec; ``held`` collects what holds the inputs."""
    if codec is None:
        return function(x)

    def pack(tensor):
        found = codec.encode(tensor, tuple(range(tensor.dim() - 1)), name="x")
        if held is not None:
            held.append(found)
        return found

    with saved_tensors_hooks(pack, lambda found: found.decode()):
        return checkpoint(function, x, use_reentrant=False)
