"""ZeRO-R's partitioned activation checkpoints (P_a): each rank saves its part of what all ranks hold alike.

Source: ZeRO, section 6.1 (Rajbhandari et al., 2020): with tensor parallelism every rank of a model-parallel
group holds the same input of each layer, N times in all; split over the ranks it is held once, for one
all-gather before the layer is computed again. P_a+cpu is ``Partitioned`` around the codec that swaps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hmt_deepspeed.activations.codecs import Codec, SavedTensor, dense_strides
from hmt_deepspeed.kernels.chunks import row_chunks

__all__ = ["Partitioned", "Replicas", "TorchReplicas", "fingerprint"]


class Replicas(Protocol):
    """The ranks that compute the same activations, and the one collective that they need."""

    world: int
    rank: int

    def all_gather(self, packed: Tensor, part: Tensor) -> object:
        """Every rank's ``part`` into ``packed`` (world times as long), in the caller's stream order."""


class TorchReplicas:
    """Replicas of a ``torch.distributed`` group; ``None`` is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_gather(self, packed: Tensor, part: Tensor) -> None:
        dist.all_gather_into_tensor(packed.view(-1), part.view(-1), group=self.group)


class Partitioned:
    """Codec: rank r of N holds ``ceil(T / N)`` of a tensor's T tokens, encoded by ``inner``.

    Split along tokens, so that an inner INT8 or FP8 keeps its blocks along tokens within a channel. Where N
    does not divide T the last part is filled up with zeros; a tensor of fewer tokens than ranks is held whole.

    What the ranks encode must be equal, or backward would compute with a mixture of theirs. Every tensor
    encoded before the first decode, that is one forward, is therefore compared over the ranks by its
    :func:`fingerprint`: a few reductions on the device, 96 bytes of communication and one wait of the host
    each. ``encode`` and ``decode`` are collective: all ranks call them in the same order.

    Args:
        inner: what becomes of this rank's part.
        replicas: the group; the ranks of a tensor-parallel group have replicated layer inputs, those of a
            data-parallel or Ulysses group do not.
    """

    def __init__(self, inner: Codec, replicas: Replicas) -> None:
        self.inner, self.replicas = inner, replicas
        self.choice, self.lossy = inner.choice, inner.lossy
        self.verified = False

    @torch.no_grad()
    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> SavedTensor:
        """Holds this rank's part.

        Raises:
            ValueError: on every rank alike, when the ranks' tensors differ in any bit, shape or dtype.
        """
        geometry = _Geometry.of(tensor, token_dims)
        rows = geometry.rows(tensor.detach())
        if not self.verified:
            self._verify(rows, tensor, name)
        tokens, world, rank = rows.shape[0], self.replicas.world, self.replicas.rank
        if tokens < world or tensor.numel() == 0:
            return self.inner.encode(tensor, token_dims, key, name)
        size = -(-tokens // world)
        mine = rows[rank * size : (rank + 1) * size]
        part = rows.new_empty(size, rows.shape[1])
        part[: mine.shape[0]] = mine  # a copy: a view would keep the whole tensor alive
        part[mine.shape[0] :] = 0
        held = self.inner.encode(part, 0, _key_of_rank(key, rank), name)
        return _SavedPart(self, held, geometry)

    def _verify(self, rows: Tensor, tensor: Tensor, name: str) -> None:
        own = fingerprint(rows, tensor.shape)
        packed = own.new_empty(self.replicas.world * own.numel())
        self.replicas.all_gather(packed, own)
        prints = packed.view(self.replicas.world, -1).tolist()
        different = [rank for rank, other in enumerate(prints) if other != prints[0]]
        if different:
            raise ValueError(
                f"activation_checkpointing.partition_activations is true, but {name!r}, an input of a checkpoint, "
                f"{tuple(tensor.shape)} in {tensor.dtype} on this rank, is not the same on all "
                f"{self.replicas.world} ranks of the model-parallel group: ranks {different} hold something "
                "else than rank 0. Legal are inputs that are equal in every bit. Turn "
                "partition_activations off where the ranks split the batch or the sequence, or give the "
                "ranks of a group the same data and the same dropout outside the split layers."
            )


class _SavedPart:
    """One rank's part of a tensor."""

    def __init__(self, codec: Partitioned, held: SavedTensor, geometry: _Geometry) -> None:
        self._codec, self._held, self._geometry = codec, held, geometry

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def prefetch(self) -> None:
        self._held.prefetch()

    @torch.no_grad()
    def decode(self) -> Tensor:
        self._codec.verified = True  # backward has begun: one forward has been compared
        replicas = self._codec.replicas
        part = self._held.decode().contiguous()
        packed = part.new_empty(replicas.world * part.shape[0], part.shape[1])
        # as bytes: no backend needs to know the dtype
        replicas.all_gather(packed.view(torch.uint8), part.view(torch.uint8))
        return self._geometry.restore(packed)


@dataclass(frozen=True)
class _Geometry:
    """Reads a tensor as tokens x channels, and restores its shape and strides.

    Attributes:
        order: its dimensions, those of the tokens first.
        strides: of the tensor that comes back: as they were, without gaps.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    num_token_dims: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, token_dims: int | tuple[int, ...]) -> _Geometry:
        given = (token_dims,) if isinstance(token_dims, int) else token_dims
        first = tuple(dim % tensor.dim() for dim in given) if tensor.dim() else ()
        order = first + tuple(dim for dim in range(tensor.dim()) if dim not in first)
        strides = dense_strides(tensor.shape, tensor.stride())
        return cls(tuple(tensor.shape), order, len(first), strides)

    def rows(self, tensor: Tensor) -> Tensor:
        """Tokens x channels."""
        permuted = tensor.permute(self.order)
        tokens = math.prod(permuted.shape[: self.num_token_dims])
        channels = math.prod(permuted.shape[self.num_token_dims :])
        return permuted.reshape(tokens, channels)

    def restore(self, rows: Tensor) -> Tensor:
        """The tensor of which these are the tokens, perhaps with more behind them."""
        permuted_shape = [self.shape[dim] for dim in self.order]
        tokens = math.prod(permuted_shape[: self.num_token_dims])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        tensor = rows[:tokens].view(permuted_shape).permute(inverse)
        if tensor.stride() == self.strides:
            return tensor
        restored = rows.new_empty_strided(self.shape, self.strides)
        return restored.copy_(tensor)


def _key_of_rank(key: int, rank: int) -> int:
    """Element i of two ranks' parts are different elements, whose rounding must not be the same."""
    return key ^ (rank * 0xD1B54A32D192ED03 & (1 << 64) - 1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_DIMS = 8


def fingerprint(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """12 int64 on the tensor's device, equal for equal tensors: dtype, shape, and two sums over all bits.

    Each element's bits are summed as an integer, modulo 2^64, weighted by pseudo-random weights of its
    column in one sum and of its row in the other: exchanged rows or columns show. No temporary is as large
    as the tensor.

    Args:
        rows: tokens x channels.
        shape: of the tensor they are of; its first 8 dimensions count.
    """
    bits = rows.view(_BITS[rows.element_size()])
    of_rows, of_columns = (
        torch.zeros(size, dtype=torch.int64, device=bits.device) for size in bits.shape
    )
    for chunk in row_chunks(*bits.shape):  # torch widens to int64 before it sums
        of_rows[chunk] = bits[chunk].sum(1, dtype=torch.int64)
        of_columns += bits[chunk].sum(0, dtype=torch.int64)
    sums = [(s * _weights(len(s), bits.device)).sum() for s in (of_columns, of_rows)]
    sizes = [*shape, *[-1] * _MAX_DIMS][:_MAX_DIMS]
    kind = [zlib.crc32(str(rows.dtype).encode()), len(shape), *sizes]
    return torch.stack([*torch.tensor(kind, device=bits.device), *sums])


def _weights(count: int, device: torch.device) -> Tensor:
    """``count`` odd int64, by two rounds of multiply and xor-shift; products wrap around."""
    mixed: Any = torch.arange(1, count + 1, device=device) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x1B03738712FAD5C9
    return (mixed ^ (mixed >> 32)) | 1
