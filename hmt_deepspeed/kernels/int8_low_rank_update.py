"""Low-rank update of an INT8 weight: decode, ``W <- (1 - lr wd) W - lr (U P^T)``, encode.

The formula is :mod:`hmt_deepspeed.kernels.low_rank_update`'s, the codes are
:mod:`hmt_deepspeed.kernels.int8_weight`'s. A Triton program owns whole blocks, so that the new scale
is known before anything is stored; no fp32 copy of the weight exists.

Training moves a weight by less than half a code in most steps. Nearest rounding returns it to its old
code; stochastic rounding moves it by one code with the right probability. The expectation of the
weight is then fp32's, and its variance after T steps, with s the scale of the block and d_t, e_t the
movements of the element and of its block's largest in step t::

    variance <= s^2 / 4 + s sum_t (|d_t| + |e_t|)

because a step that moves a value by p codes adds p(1-p) s^2 and a changed scale moves all values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
from hmt_deepspeed.kernels.int8_weight import (
    BLOCK,
    check_encoded,
    decode_weight_reference,
    encode_rows,
    tile_grid,
)
from hmt_deepspeed.kernels.launching import on_its_device
from hmt_deepspeed.kernels.low_rank_update import add_product_, as_factors, check_low_rank
from hmt_deepspeed.kernels.noise import key_halves

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "int8_low_rank_update_",
    "int8_low_rank_update_reference_",
    "int8_low_rank_update_triton_",
]

# By whether the factors are multiplied in fp32, without tensor cores.
_TILES = {
    False: {"BLOCK_ROWS": 64, "BLOCK_W": 32, "num_warps": 8},
    True: {"BLOCK_ROWS": 16, "BLOCK_W": 16, "num_warps": 4},
}


def int8_low_rank_update_reference_(
    codes: Tensor,
    scales: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None,
    offset: int = 0,
) -> None:
    """Torch twin of the kernel; see :func:`int8_low_rank_update_`."""
    rows, n = codes.shape
    left, right = as_factors(update, projection)
    for chunk in row_chunks(rows, n):
        value = decode_weight_reference(codes[chunk], scales[chunk], torch.float32)
        add_product_(value, left[chunk], right.t(), lr, 1 - lr * weight_decay)
        codes[chunk], scales[chunk] = encode_rows(value, key, offset + chunk.start * n)


if triton is not None:
    from hmt_deepspeed.kernels.int8_weight import load_decoded_jit, store_encoded_jit, tile_jit
    from hmt_deepspeed.kernels.low_rank_update import low_rank_product_jit, widens

    # Not specialised: a new key every step must not compile a new kernel.
    @triton.jit(do_not_specialize=["offset", "key_low", "key_high"])
    def _update_kernel(  # type: ignore[no-untyped-def]
        codes_ptr, scales_ptr, update_ptr, projection_ptr, rows, n, width,
        update_row, update_column, projection_row, projection_column,
        lr, decay, offset, key_low, key_high,
        STOCHASTIC: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        row, block, column = tile_jit(n, BLOCK_ROWS, BLOCK)
        product = low_rank_product_jit(
            update_ptr, projection_ptr, row, column, rows, n, width,
            update_row, update_column, projection_row, projection_column, WIDEN,
            BLOCK_ROWS, BLOCK, BLOCK_W,
        )  # fmt: skip
        weight = load_decoded_jit(codes_ptr, scales_ptr, row, block, column, rows, n, BLOCK)
        store_encoded_jit(
            decay * weight - lr * product,
            codes_ptr, scales_ptr, row, block, column, rows, n, offset, key_low, key_high,
            STOCHASTIC, BLOCK,
        )  # fmt: skip

    @on_its_device
    def int8_low_rank_update_triton_(
        codes: Tensor,
        scales: Tensor,
        update: Tensor,
        projection: Tensor,
        lr: float,
        weight_decay: float,
        key: int | None,
        offset: int = 0,
    ) -> None:
        """Triton launcher; see :func:`int8_low_rank_update_`."""
        (rows, n), (low, high) = codes.shape, key_halves(key or 0)
        update, projection = as_factors(update, projection)
        tile = _TILES[widens(update)]
        if codes.numel() > 0:
            _update_kernel[tile_grid(rows, n, tile["BLOCK_ROWS"])](
                codes, scales, update, projection, rows, n, update.shape[1],
                *update.stride(), *projection.stride(),
                lr, 1 - lr * weight_decay, offset, low, high,
                STOCHASTIC=key is not None, WIDEN=widens(update),
                BLOCK=BLOCK, **tile,
            )  # fmt: skip


def int8_low_rank_update_(
    codes: Tensor,
    scales: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    key: int | None,
    offset: int = 0,
) -> None:
    """``W <- (1 - lr wd) W - lr (update projection^T)`` on an encoded weight, in place.

    Decoded, updated and encoded in fp32, a few rows (torch) or one tile (Triton) at a time; the
    formula is :mod:`hmt_deepspeed.kernels.low_rank_update`'s.

    Args:
        codes, scales: of :func:`encode_weight`; both are overwritten.
        update: rows x w. projection: n x w. Dtypes as in that module.
        lr, weight_decay: step length; decay per unit of step length.
        key, offset: of :func:`encode_weight`; a new key for every step.

    Raises:
        ValueError: for other dtypes, shapes or an encoded weight that is not contiguous.
    """
    check_encoded(codes, scales)
    check_low_rank(codes.shape, update, projection)
    if codes.is_cuda and triton is not None:
        int8_low_rank_update_triton_(
            codes, scales, update, projection, lr, weight_decay, key, offset
        )
    else:
        int8_low_rank_update_reference_(
            codes, scales, update, projection, lr, weight_decay, key, offset
        )
