"""Codecs: the forms in which an activation is saved between forward and backward.

A codec encodes a tensor into a :class:`SavedTensor`, which decodes it as often as asked, since a backward may run
twice. A saved tensor frees its memory when it is garbage; no call does.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hmt_deepspeed.config.codecs import BLOCK_SIZE, CODECS
from hmt_deepspeed.config.components import Choice
from hmt_deepspeed.kernels.fp8_activation import decode_fp8, encode_fp8
from hmt_deepspeed.kernels.int8_activation import decode_int8, encode_int8
from hmt_deepspeed.memory.tiered import Store

__all__ = [
    "Codec",
    "Fp8",
    "Int8",
    "Keep",
    "SavedBlocks",
    "SavedTensor",
    "SwapHost",
    "SwapHostFp8",
    "SwapHostInt8",
    "SwapSsd",
    "build_codec",
    "dense_strides",
]


class SavedTensor(Protocol):
    """One tensor between forward and backward; frees what it occupies when it is garbage."""

    @property
    def nbytes(self) -> int:
        """Device bytes it occupies."""

    def prefetch(self) -> None:
        """Starts bringing it back to the device, where that takes time."""

    def decode(self) -> Tensor:
        """The tensor: same shape and dtype; same strides where the original had no gaps or repetitions,
        else dense in the same order of dimensions (``torch.preserve_format``). Any number of times."""


class Codec(Protocol):
    """A form."""

    @property
    def choice(self) -> Choice:
        """Its name in a policy."""

    @property
    def lossy(self) -> bool:
        """Whether the decoded tensor differs from the original."""

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> SavedTensor:
        """Hold a tensor.

        Args:
            tensor: of any strides; may be freed at once.
            token_dims: dimensions along which tokens follow each other, the others are channels.
            key: 64-bit seed of stochastic rounding.
            name: for messages.

        Raises:
            ValueError: not a floating-point tensor, or of a dtype or shape that the form has no place for.
        """


# -- keep -----------------------------------------------------------------------------------------


class _Raw:
    """The tensor itself. What is written to it in place is noticed, as autograd does for its own."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor, self._version, self._name = tensor.detach(), tensor._version, name

    @property
    def nbytes(self) -> int:
        return self._tensor.untyped_storage().nbytes()  # of a view: what it keeps alive

    def prefetch(self) -> None:
        return None

    def decode(self) -> Tensor:
        _check_version(self._tensor, self._version, self._name)
        return self._tensor


class Keep:
    """The tensor as it is, on the device, without a copy.

    Decoding raises RuntimeError when the tensor was written to in place since it was encoded; what
    decoding returns is the tensor itself.
    """

    choice: ClassVar[Choice] = "keep"
    lossy: ClassVar[bool] = False

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> _Raw:
        _check_float(tensor, self.choice, name)
        return _Raw(tensor, name)


@lru_cache(maxsize=1024)
def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those of what decodes to a tensor of this geometry: as they were, without gaps or repetitions."""
    tensor = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(tensor).stride()


# -- 8 bits ---------------------------------------------------------------------------------------


class SavedBlocks:
    """A tensor in 8 bits, in blocks of tokens within a channel.

    Attributes:
        codes: tokens x channels, int8 or float8_e4m3fn; dimensions of the original in their order.
        scales: blocks x channels, bf16.
        block_size: tokens of a channel that share a scale.
    """

    def __init__(
        self, tensor: Tensor, token_dims: tuple[int, ...], codec: _Blocks, key: int
    ) -> None:
        self.block_size, self._codec = codec.block_size, codec
        self._shape, self._strides = tensor.shape, dense_strides(tensor.shape, tensor.stride())
        self._dtype, self._device = tensor.dtype, tensor.device
        self._order = token_dims + tuple(d for d in range(tensor.dim()) if d not in token_dims)
        self._num_token_dims = len(token_dims)
        self.codes, self.scales = codec.encode_matrix(self._matrix(tensor.detach()), key)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def prefetch(self) -> None:
        return None

    def decode(self) -> Tensor:
        return self.decode_from(self.codes, self.scales)

    def decode_from(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The tensor of codes and scales that may have been away meanwhile."""
        out = torch.empty_strided(
            self._shape, self._strides, dtype=self._dtype, device=self._device
        )
        matrix = self._matrix(out)
        self._codec.decode_matrix(codes, scales, matrix)
        if matrix.data_ptr() != out.data_ptr():  # tokens and channels are interleaved
            permuted = out.permute(self._order)
            permuted.copy_(matrix.view(permuted.shape))
        return out

    def _matrix(self, tensor: Tensor) -> Tensor:
        """Tokens x channels: a view where strides allow, else a copy."""
        permuted = tensor.permute(self._order)
        tokens = math.prod(permuted.shape[: self._num_token_dims])
        return permuted.reshape(tokens, math.prod(permuted.shape[self._num_token_dims :]))


class _Blocks:
    """Codecs of 8 bits; they differ in how a tokens x channels matrix is encoded and decoded.

    Args:
        block_size: tokens of a channel that share a scale.

    Raises:
        ValueError: a block without tokens.
    """

    lossy: ClassVar[bool] = True
    choice: ClassVar[Choice]

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        if block_size < 1:
            raise ValueError(f"block_size of {self.choice} is at least 1 token, got {block_size}")
        self.block_size = block_size

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> SavedBlocks:
        _check_float(tensor, self.choice, name)
        dims = _normalized(token_dims, tensor, name)
        return SavedBlocks(tensor, dims, self, key)

    def encode_matrix(self, value: Tensor, key: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def decode_matrix(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        raise NotImplementedError


class Int8(_Blocks):
    """INT8, see :mod:`hmt_deepspeed.kernels.int8_activation`. fp32, bf16 and fp16."""

    choice: ClassVar[Choice] = "int8"

    def encode_matrix(self, value: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return encode_int8(value, self.block_size, key)

    def decode_matrix(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        decode_int8(codes, scales, self.block_size, out)


class Fp8(_Blocks):
    """FP8 e4m3, see :mod:`hmt_deepspeed.kernels.fp8_activation`. fp32, bf16 and fp16."""

    choice: ClassVar[Choice] = "fp8"

    def encode_matrix(self, value: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return encode_fp8(value, self.block_size, key)

    def decode_matrix(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        decode_fp8(codes, scales, self.block_size, out)


def _normalized(token_dims: int | tuple[int, ...], tensor: Tensor, name: str) -> tuple[int, ...]:
    """As indices from 0, each once."""
    given = (token_dims,) if isinstance(token_dims, int) else token_dims
    dims = tuple(dim + tensor.dim() if dim < 0 else dim for dim in given)
    if len(set(dims)) != len(dims) or not all(0 <= dim < tensor.dim() for dim in dims):
        raise ValueError(
            f"token_dims of {name!r} are {token_dims}; legal: different dimensions of its shape "
            f"{tuple(tensor.shape)}"
        )
    return dims


# -- swap -----------------------------------------------------------------------------------------


class _Swapped:
    """A tensor in a store, under a name of its own."""

    nbytes = 0

    def __init__(self, tensor: Tensor, swap: _Swap, entry: str) -> None:
        self._swap, self._entry = swap, entry
        # It shares the tensor's version count but not its memory: the copy leaves the device at a time
        # of its own, so what is written in place after encoding may or may not be in it.
        self._watch = tensor.detach()
        self._watch.data = tensor.new_empty(0)
        self._version = tensor._version

    def prefetch(self) -> None:
        self._swap.store.prefetch(self._entry)

    def decode(self) -> Tensor:
        self._swap.sweep()
        _check_version(self._watch, self._version, self._entry)
        return self._swap.store.get(self._entry)


class _Swap:
    """Codecs that move a tensor off the device. Encoding starts its way out, decoding waits for it.

    A store's entry is dropped at the first use of the codec after its holder became garbage, or by
    :meth:`sweep`: garbage may be collected in any thread at any allocation, also inside the store while
    it holds its locks.

    Args:
        store: where to. Errors of it name the tensor.
    """

    choice: ClassVar[Choice]
    lossy: ClassVar[bool] = False
    _count = itertools.count()  # of all codecs: two may use one store

    def __init__(self, store: Store) -> None:
        self.store = store
        self._garbage: SimpleQueue[str] = SimpleQueue()  # its put may interrupt any code
        self._sweeping = threading.Lock()

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> _Swapped:
        _check_float(tensor, self.choice, name)
        return self.move(tensor, name)

    def move(self, tensor: Tensor, name: str) -> _Swapped:
        """Hold a tensor of any dtype."""
        self.sweep()
        entry = f"{name} #{next(_Swap._count)}"
        held = _Swapped(tensor, self, entry)
        self.store.put(entry, tensor)
        weakref.finalize(held, self._garbage.put, entry).atexit = False
        return held

    def sweep(self) -> None:
        """Drops the entries whose holders are garbage."""
        with self._sweeping:  # who returns finds the room made
            while True:
                try:
                    entry = self._garbage.get_nowait()
                except Empty:
                    return
                with suppress(KeyError):  # the store was closed meanwhile
                    self.store.drop(entry)


class SwapHost(_Swap):
    """In pinned host memory, for a :class:`hmt_deepspeed.memory.host.HostStore`."""

    choice: ClassVar[Choice] = "swap_host"


class SwapSsd(_Swap):
    """In host memory while there is room, else in a file, for a tiered store."""

    choice: ClassVar[Choice] = "swap_ssd"


# -- swap in 8 bits -------------------------------------------------------------------------------


class _SwappedBlocks:
    """Codes and scales in a store, of which nothing is left on the device."""

    nbytes = 0

    def __init__(self, blocks: SavedBlocks, swap: SwapHost, name: str) -> None:
        self._blocks = blocks
        self._parts = (swap.move(blocks.codes, name), swap.move(blocks.scales, f"{name}, scales"))
        del blocks.codes, blocks.scales

    def prefetch(self) -> None:
        for part in self._parts:
            part.prefetch()

    def decode(self) -> Tensor:
        codes, scales = (part.decode() for part in self._parts)
        return self._blocks.decode_from(codes, scales)


class _SwapBlocks:
    """Codecs that encode on the device and move what that takes, half of 16 bits, to pinned host memory.

    Args:
        store: where to. options: of the codec.
    """

    choice: ClassVar[Choice]
    lossy: ClassVar[bool] = True
    _codec: ClassVar[type[_Blocks]]

    def __init__(self, store: Store, **options: Any) -> None:
        self._blocks, self._swap = self._codec(**options), SwapHost(store)

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> _SwappedBlocks:
        return _SwappedBlocks(self._blocks.encode(tensor, token_dims, key, name), self._swap, name)


class SwapHostInt8(_SwapBlocks):
    """INT8, see :class:`Int8`."""

    choice: ClassVar[Choice] = "swap_host_int8"
    _codec: ClassVar[type[_Blocks]] = Int8


class SwapHostFp8(_SwapBlocks):
    """FP8 e4m3, see :class:`Fp8`."""

    choice: ClassVar[Choice] = "swap_host_fp8"
    _codec: ClassVar[type[_Blocks]] = Fp8


# -- all ------------------------------------------------------------------------------------------


def build_codec(choice: Choice, store: Store | None = None, **options: Any) -> Codec:
    """The codec of a row of :data:`~hmt_deepspeed.config.codecs.CODECS`.

    Args:
        store: where a codec moves tensors to whose place is not the device.
        options: of its class; ``block_size`` of those of 8 bits.

    Raises:
        ValueError: a choice that holds nothing, a codec without its store, or a class that is not what its row says.
    """
    row = CODECS.get(choice)
    if row is None:
        raise ValueError(
            f"{choice!r} holds no tensor, so there is no codec for it; legal: {', '.join(CODECS)}"
        )
    if row.is_moved and store is None:
        raise ValueError(f"{choice} needs a store to move tensors to: give one")
    make: Any = row.implementation
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(import_module(module), name)
    codec: Codec = make(store, **options) if row.is_moved else make(**options)
    if (codec.choice, codec.lossy) != (row.name, row.lossy):
        raise ValueError(
            f"the codec {choice!r} is registered with lossy={row.lossy}, its class says choice={codec.choice!r} and "
            f"lossy={codec.lossy}: legal is the same in both. Correct one of them."
        )
    return codec


def _check_float(tensor: Tensor, choice: Choice, name: str) -> None:
    if not tensor.is_floating_point():
        raise ValueError(
            f"{name!r} is {tensor.dtype}; {choice} holds floating-point tensors: leave others alone"
        )


def _check_version(tensor: Tensor, version: int, name: str) -> None:
    if tensor._version != version:
        inexact = [row.name for row in CODECS.values() if row.lossy]
        raise RuntimeError(
            f"{name!r} was changed by an in-place operation after it was saved for backward "
            f"(version {tensor._version}, saved at {version}): use the operation that makes a new "
            f"tensor, or hold this component as {', '.join(inexact)} or recompute"
        )
