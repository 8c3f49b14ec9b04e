"""The forms that an activation may be held in between forward and backward: one row each, without torch.

A row is all that the config, the planner, the start tables and the documentation know of a form; the class that
encodes and decodes is named in it and loaded by :func:`hmt_deepspeed.activations.codecs.build_codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = [
    "BLOCK_SIZE",
    "CODECS",
    "CodecSpec",
    "Place",
    "block_bytes",
    "codec_of",
    "held_bytes",
    "is_lossy",
    "place_of",
    "register_codec",
]

Place = Literal["device", "host", "ssd"]
PLACES: tuple[Place, ...] = get_args(Place)

BLOCK_SIZE = 256  # tokens of a channel that share a scale (int8, fp8)
_SCALE_BYTES = 2  # a block's scale is bf16
_CLASSES = "hmt_deepspeed.activations.codecs"
# Choices of a policy that are no forms, and its word for the planner.
_TAKEN = ("recompute", "project", "plan")


@dataclass(frozen=True)
class CodecSpec:
    """One form.

    Attributes:
        name: in ``hmt.activations.policy``.
        held, costs: the form and what it costs, in words, for the documentation.
        implementation: a class as of :class:`hmt_deepspeed.activations.codecs.Codec`, or where it is, as
            ``"module:name"``. It is called with the store of its place where that is not the device.
        nbytes: of (tokens, channels, bytes of an element as computed): bytes that a tensor of tokens x channels
            takes in this form.
        lossy: whether the decoded tensor differs from the original.
        place: where it waits: on the device, in pinned host memory, or in files beyond that. Moving is the stores'.
        passes: how often encoding goes through the tensor and its form in the device's memory, and decoding too;
            0 where neither computes.
    """

    name: str
    held: str
    costs: str
    implementation: str | Callable[..., Any]
    nbytes: Callable[[int, int, int], int]
    lossy: bool = False
    place: Place = "device"
    passes: float = 0.0

    @property
    def is_moved(self) -> bool:
        """Whether it leaves the device."""
        return self.place != "device"


def raw_bytes(tokens: int, channels: int, itemsize: int) -> int:
    """Of the tensor itself."""
    return tokens * channels * itemsize


def block_bytes(tokens: int, channels: int, itemsize: int, block_size: int = BLOCK_SIZE) -> int:
    """Of 8-bit codes, with a bf16 scale for each ``block_size`` tokens of a channel."""
    return tokens * channels + -(-tokens // block_size) * channels * _SCALE_BYTES


CODECS: dict[str, CodecSpec] = {
    row.name: row
    for row in (
        CodecSpec(
            "keep",
            held="on the device as it is",
            costs="memory",
            implementation=f"{_CLASSES}:Keep",
            nbytes=raw_bytes,
        ),
        CodecSpec(
            "int8",
            held="1 byte an element, blocks of 256 tokens within a channel, stochastic rounding",
            costs="an unbiased error of about 1 %, encoding",
            implementation=f"{_CLASSES}:Int8",
            nbytes=block_bytes,
            lossy=True,
            passes=1,
        ),
        CodecSpec(
            "fp8",
            held="the same in e4m3, for values of wide range",
            costs="an error of about 3 %",
            implementation=f"{_CLASSES}:Fp8",
            nbytes=block_bytes,
            lossy=True,
            passes=1,
        ),
        CodecSpec(
            "swap_host",
            held="pinned host memory, fetched one layer ahead",
            costs="PCIe; loses nothing",
            implementation=f"{_CLASSES}:SwapHost",
            nbytes=raw_bytes,
            place="host",
        ),
        CodecSpec(
            "swap_ssd",
            held="host memory up to `host_memory`, then checksummed files below `nvme_path`, in pieces",
            costs="PCIe, the SSD; loses nothing",
            implementation=f"{_CLASSES}:SwapSsd",
            nbytes=raw_bytes,
            place="ssd",
        ),
        CodecSpec(
            "swap_host_int8",
            held="as `int8`, in pinned host memory",
            costs="half of `swap_host`'s PCIe and host memory; `int8`'s error",
            implementation=f"{_CLASSES}:SwapHostInt8",
            nbytes=block_bytes,
            lossy=True,
            place="host",
            passes=1,
        ),
        CodecSpec(
            "swap_host_fp8",
            held="as `fp8`, in pinned host memory",
            costs="the same; `fp8`'s error",
            implementation=f"{_CLASSES}:SwapHostFp8",
            nbytes=block_bytes,
            lossy=True,
            place="host",
            passes=1,
        ),
    )
}


def register_codec(row: CodecSpec) -> None:
    """Add a form: from then on it is legal wherever a tensor is held, for a run and for the planner.

    Raises:
        ValueError: a name that is taken or no word, a place that does not exist, passes below 0.
    """
    if not row.name.isidentifier() or row.name in (*CODECS, *_TAKEN):
        raise ValueError(
            f"a codec's name is {row.name!r}; legal: a word other than {', '.join((*CODECS, *_TAKEN))}. Choose "
            "another."
        )
    if row.place not in PLACES:
        raise ValueError(
            f"{row.name}: place is {row.place!r}; legal: {PLACES}. Choose one of them."
        )
    if row.passes < 0:
        raise ValueError(
            f"{row.name}: passes is {row.passes!r}; legal: a number >= 0. Say how often it goes through a tensor."
        )
    CODECS[row.name] = row


def codec_of(choice: str) -> CodecSpec | None:
    """The form that a choice holds its tensor in; None where it holds none (``recompute``).

    ``project`` keeps the product ``X [Q | P]`` as it is.
    """
    return CODECS["keep"] if choice == "project" else CODECS.get(choice)


def is_lossy(choice: str) -> bool:
    """Whether a choice gives its tensor back with an error."""
    row = codec_of(choice)
    return row is not None and row.lossy


def place_of(choice: str) -> Place | None:
    """Where a choice holds its tensor; None where it holds none."""
    row = codec_of(choice)
    return None if row is None else row.place


def held_bytes(choice: str, tokens: int, channels: int, itemsize: int) -> int:
    """Device bytes that one tensor of tokens x channels occupies until backward.

    Args:
        channels: of ``project``, the columns of ``X [Q | P]``.
        itemsize: bytes of one element as computed (2 for bf16).
    """
    row = codec_of(choice)
    return 0 if row is None or row.is_moved else row.nbytes(tokens, channels, itemsize)
