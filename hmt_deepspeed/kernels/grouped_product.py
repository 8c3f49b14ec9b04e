"""What a backward leaves of the gradients of E experts' weights: ``D_e^T F_e`` for the tokens of each expert.

The tokens are sorted by expert; ``offsets`` say where each expert's end, on the device, so that nobody waits for them.
On CUDA all experts are one launch, with products and sums in fp32. A CPU rounds each product once, at the end, to the
dtype of its operands.

Shapes: ``delta`` S x m, ``features`` S x w, ``offsets`` E, result E x m x w fp32. Rows from the last offset on are
nobody's and are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import (
    capability_of,
    multiplies_in_fp32,
    on_its_device,
    tile_for,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["add_grouped_product", "add_grouped_product_reference", "add_grouped_product_triton"]

# By whether tiles are fp32, without matrix units, and whether a thread's accesses are wide; then by the oldest
# architecture.
_NARROW = {"BLOCK_T": 32, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
_FP32 = {"BLOCK_T": 16, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
_TILES = {
    (False, True): {75: _NARROW, 90: _NARROW | {"BLOCK_T": 64}, 120: _NARROW},
    (False, False): {75: _NARROW},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}


def launch_options(dtype: torch.dtype, capability: int, aligned: bool) -> dict[str, int]:
    """What the kernel is compiled with for operands of a dtype on an architecture.

    aligned: 16 divides addresses in bytes, and all that rows are apart in elements.
    """
    widen = multiplies_in_fp32(dtype, capability)
    return {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}


def add_grouped_product_reference(
    out: Tensor, delta: Tensor, features: Tensor, offsets: Tensor, add: bool
) -> None:
    """Torch twin of the kernel: into ``out``, to what is there if ``add``; see :func:`add_grouped_product`."""
    if not add:
        out.zero_()
    begin = 0
    for own, end in zip(out, offsets.tolist(), strict=True):
        if end > begin:
            own += delta[begin:end].t() @ features[begin:end]
        begin = end


if triton is not None:
    from hmt_deepspeed.kernels.token_blocks import patterns, widened_jit

    @triton.jit
    def _grouped_product_kernel(  # type: ignore[no-untyped-def]
        delta_ptr, features_ptr, offsets_ptr, out_ptr, m, width, delta_row, features_row,
        ADD: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        # Programs that share columns of D run side by side, so those are read from L2.
        tiles = tl.cdiv(width, BLOCK_N)
        programs = tl.cdiv(m, BLOCK_M) * tiles
        expert = (tl.program_id(0) // programs).to(tl.int64)
        program = tl.program_id(0) % programs
        first_row = (program // tiles).to(tl.int64) * BLOCK_M
        first_column = (program % tiles).to(tl.int64) * BLOCK_N
        row, column, token = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        in_row, in_column = row < m - first_row, column < width - first_column
        begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int32)
        end = tl.load(offsets_ptr + expert).to(tl.int32)
        delta_ptr += begin.to(tl.int64) * delta_row + first_row
        features_ptr += begin.to(tl.int64) * features_row + first_column
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(begin, end, BLOCK_T):
            there = (token < end - first)[:, None]
            source = delta_ptr + ((token * delta_row)[:, None] + row[None, :])
            delta = tl.load(source, mask=there & in_row[None, :], other=0)
            source = features_ptr + ((token * features_row)[:, None] + column[None, :])
            features = tl.load(source, mask=there & in_column[None, :], other=0)
            if WIDEN:
                delta, features = widened_jit(delta), widened_jit(features)
            total = tl.dot(tl.trans(delta), features, total, input_precision="ieee")
            delta_ptr += BLOCK_T * delta_row
            features_ptr += BLOCK_T * features_row
        target = out_ptr + (expert * m + first_row) * width + first_column
        target += row[:, None] * width + column[None, :]
        mask = in_row[:, None] & in_column[None, :]
        if ADD:
            total += tl.load(target, mask=mask, other=0)
        tl.store(target, total, mask=mask)

    @on_its_device
    def add_grouped_product_triton(
        out: Tensor, delta: Tensor, features: Tensor, offsets: Tensor, add: bool
    ) -> None:
        """Triton launcher; see :func:`add_grouped_product`."""
        experts, m, width = out.shape
        if out.numel() == 0:
            return
        delta, features = (t if t.stride(1) == 1 else t.contiguous() for t in (delta, features))
        addresses = [tensor.data_ptr() for tensor in (delta, features, out)]
        sizes = (m, width, delta.stride(0), features.stride(0), *addresses)
        aligned = not any(size % 16 for size in sizes)
        tile = launch_options(delta.dtype, capability_of(delta.device), aligned)
        grid = (experts * triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(width, tile["BLOCK_N"]),)
        operands = (patterns(t) if tile["WIDEN"] else t for t in (delta, features))
        _grouped_product_kernel[grid](
            *operands, offsets, out, m, width, delta.stride(0), features.stride(0), ADD=add, **tile
        )


def add_grouped_product(
    total: Tensor | None,
    delta: Tensor,
    features: Tensor,
    offsets: Tensor,
    room: Tensor | None = None,
) -> Tensor:
    """``total[e] + D_e^T F_e`` of each expert, in the memory of ``total``; zeros of an expert without tokens.

    Args:
        total: E x m x w fp32, contiguous, of earlier backwards, or None.
        delta: S x m. features: S x w, of the same dtype: fp32, bf16 or fp16.
        offsets: E int32, ascending, on the same device: the row after the last of each expert.
        room: E x m x w fp32, contiguous, where the first product is to be; None for new memory.
    """
    add = total is not None
    if total is None:
        shape = len(offsets), delta.shape[1], features.shape[1]
        dtype = torch.promote_types(delta.dtype, torch.float32)
        total = delta.new_empty(shape, dtype=dtype) if room is None else room
    if delta.is_cuda and triton is not None:
        add_grouped_product_triton(total, delta, features, offsets, add)
    else:
        add_grouped_product_reference(total, delta, features, offsets, add)
    return total
