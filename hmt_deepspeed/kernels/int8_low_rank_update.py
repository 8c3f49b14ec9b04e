"""Update of a stack of INT8 weights: decode, ``W_b <- (1 - lr wd) W_b - lr (U_b P_b^T + diag(s_b) G_b)``, encode.

The formula is :mod:`hmt_deepspeed.kernels.low_rank_update`'s, the codes are
:mod:`hmt_deepspeed.kernels.int8_weight`'s. A Triton program owns whole blocks, so that the new scale
is known before anything is stored; no fp32 copy of a weight exists.

Training moves a weight by less than half a code in most steps. Nearest rounding returns it to its old
code; stochastic rounding moves it by one code with the right probability. The expectation of the
weight is then fp32's, and its variance after T steps, with s the scale of the block and d_t, e_t the
movements of the element and of its block's largest in step t::

    variance <= s^2 / 4 + s sum_t (|d_t| + |e_t|)

because a step that moves a value by p codes adds p(1-p) s^2 and a changed scale moves all values.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from hmt_deepspeed.kernels.launching import (
    addresses_of,
    capability_of,
    count_of,
    device_table,
    matrices_in,
    multiplies_in_fp32,
    on_its_device,
    tile_for,
)
from hmt_deepspeed.kernels.low_rank_factors import Factors, ScaledRows
from hmt_deepspeed.kernels.low_rank_update import add_product_, check_keys

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "int8_low_rank_updates_",
    "int8_low_rank_updates_reference_",
    "int8_low_rank_updates_triton_",
]

# By whether the factors are multiplied in fp32, without matrix units, and whether a thread's accesses are wide;
# then by the oldest architecture. Larger tiles spill registers on some architecture.
_NARROW = {"BLOCK_ROWS": 32, "BLOCK_W": 32, "num_warps": 8, "num_stages": 3}
_FP32 = {"BLOCK_ROWS": 16, "BLOCK_W": 16, "num_warps": 8, "num_stages": 2}
_TILES = {
    (False, True): {75: _NARROW | {"BLOCK_ROWS": 64}},
    (False, False): {75: _NARROW},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}


def launch_options(
    dtype: torch.dtype, capability: int, aligned: bool, beside: bool = False
) -> dict[str, int]:
    """As :func:`hmt_deepspeed.kernels.low_rank_update.launch_options`."""
    widen = multiplies_in_fp32(dtype, capability)
    tile = {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}
    return tile | ({"BLOCK_ROWS": 16} if beside else {})


def int8_low_rank_updates_reference_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    factors: Factors,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    keys: Tensor | None,
    offset: int = 0,
    beside: ScaledRows | None = None,
) -> None:
    """Torch twin of the kernel; see :func:`int8_low_rank_updates_`. Reads its numbers on the host."""
    rows, n = codes[0].shape[-2:]
    codes, scales = matrices_in(codes), matrices_in(scales)
    lr, decay = float(lr), 1 - float(lr) * float(weight_decay)
    halves = None if keys is None else keys.tolist()
    for b, scale in enumerate(factors.column_scale.tolist()):
        if scale[0] == 0:
            continue
        (left, right), key = factors.scaled(b, scale), None if halves is None else tuple(halves[b])
        for chunk in row_chunks(rows, n):
            value = decode_weight_reference(codes[b][chunk], scales[b][chunk], torch.float32)
            add_product_(value, left[chunk], right.t(), lr, decay)
            if beside is not None:
                beside.add_to_(value, b, chunk, factors.transposed, -lr)
            encoded = encode_rows(value, key, offset + chunk.start * n)
            codes[b][chunk], scales[b][chunk] = encoded


if triton is not None:
    from hmt_deepspeed.kernels.int8_weight import load_decoded_jit, store_encoded_jit, tile_jit
    from hmt_deepspeed.kernels.low_rank_factors import (
        TRITON_DTYPES,
        low_rank_product_jit,
        number_jit,
        pointer_jit,
        scaled_rows_jit,
    )

    # Not specialised: another shard must not compile another kernel.
    @triton.jit(do_not_specialize=["offset"])
    def _update_kernel(  # type: ignore[no-untyped-def]
        table_ptr, update_ptr, scale_ptr, keys_ptr, lr, weight_decay, members, rows, n, width, rank,
        update_member, update_row, projection_row, offset, beside_ptr, beside_row, beside_column,
        LOAD_LR: tl.constexpr, LOAD_DECAY: tl.constexpr,
        PROJECTION: tl.constexpr, BESIDE: tl.constexpr, ALIGNED: tl.constexpr,
        TRANSPOSED: tl.constexpr, PRODUCT: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        programs = tl.cdiv(rows, BLOCK_ROWS) * tl.cdiv(n, BLOCK)
        member = (tl.program_id(0) // programs).to(tl.int64)
        scale, rest = tl.load(scale_ptr + 2 * member), tl.load(scale_ptr + 2 * member + 1)
        if scale == 0:
            return
        first, block, held = tile_jit(tl.program_id(0) % programs, rows, n, BLOCK_ROWS, BLOCK)
        product = low_rank_product_jit(
            update_ptr + member * update_member,
            pointer_jit(table_ptr, 2 * members + member, PROJECTION, ALIGNED),
            first, block.to(tl.int64) * BLOCK, rows, n, width, rank, update_row, projection_row,
            scale, rest, TRANSPOSED, PRODUCT, WIDEN, BLOCK_ROWS, BLOCK, BLOCK_W,
        )  # fmt: skip
        if BESIDE is not None:
            product += scaled_rows_jit(
                pointer_jit(table_ptr, 3 * members + member, BESIDE, ALIGNED),
                beside_ptr + member * (n if TRANSPOSED else rows),
                first, block.to(tl.int64) * BLOCK, rows, n, beside_row, beside_column,
                TRANSPOSED, BLOCK_ROWS, BLOCK,
            )  # fmt: skip
        codes_ptr = pointer_jit(table_ptr, member, tl.int8, ALIGNED)
        scales_ptr = pointer_jit(table_ptr, members + member, tl.float32, ALIGNED)
        weight = load_decoded_jit(codes_ptr, scales_ptr, first, block, held, n, BLOCK_ROWS, BLOCK)
        lr = number_jit(lr, LOAD_LR)
        decay = 1 - lr * number_jit(weight_decay, LOAD_DECAY)
        low, high = 0, 0
        if keys_ptr is not None:
            low, high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
        store_encoded_jit(
            decay * weight - lr * product, codes_ptr, scales_ptr, first, block, held, n, offset,
            low, high, keys_ptr is not None, BLOCK_ROWS, BLOCK,
        )  # fmt: skip

    @on_its_device
    def int8_low_rank_updates_triton_(
        codes: Sequence[Tensor],
        scales: Sequence[Tensor],
        factors: Factors,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        keys: Tensor | None,
        offset: int = 0,
        beside: ScaledRows | None = None,
    ) -> None:
        """Triton launcher; see :func:`int8_low_rank_updates_`."""
        (rows, n), device, members = codes[0].shape[-2:], codes[0].device, count_of(codes)
        if not codes[0].numel():
            return
        addresses = addresses_of([*codes, *scales]) + factors.projection_addresses()
        beside_row, beside_column, kind = 0, 0, None
        if beside is not None:
            addresses += addresses_of(beside.matrices)
            beside_row, beside_column = beside.strides(factors.transposed)
            kind = beside.matrices[0].dtype
        aligned = not any(address % 16 for address in addresses)
        rows_aligned = aligned and not n % 16 and factors.rows_aligned
        capability, reads_rows = capability_of(device), beside is not None
        tile = launch_options(factors.product_dtype, capability, rows_aligned, reads_rows)
        grid = (members * tile_grid(rows, n, tile["BLOCK_ROWS"])[0],)
        _update_kernel[grid](
            device_table(tuple(addresses), device),
            factors.update,
            factors.column_scale,
            keys,
            lr,
            weight_decay,
            members,
            rows,
            n,
            factors.width,
            factors.rank,
            *factors.update.stride()[:2],
            factors.given[0].stride(-2),
            (offset + (1 << 31)) % (1 << 32) - (1 << 31),  # noise knows its low half only
            None if beside is None else beside.scale,
            beside_row,
            beside_column,
            LOAD_LR=isinstance(lr, Tensor),
            LOAD_DECAY=isinstance(weight_decay, Tensor),
            PROJECTION=TRITON_DTYPES[factors.given[0].dtype],
            BESIDE=None if kind is None else TRITON_DTYPES[kind],
            ALIGNED=aligned,
            TRANSPOSED=factors.transposed,
            PRODUCT=TRITON_DTYPES[factors.product_dtype],
            BLOCK=BLOCK,
            **tile,
        )
        torch.autograd.graph.increment_version((*codes, *scales))


def int8_low_rank_updates_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    update: Tensor,
    projections: Sequence[Tensor] | Tensor,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    *,
    rank: int,
    column_scale: Tensor,
    keys: Tensor | None,
    offset: int = 0,
    transposed: bool = False,
    beside: ScaledRows | None = None,
) -> None:
    """``W_b <- (1 - lr wd) W_b - lr ((U_b S_b) P_b^T + diag(s_b) G_b)`` on B encoded weights, in place.

    Decoded, updated and encoded in fp32, a few rows (torch) or one tile (Triton) at a time.

    Args:
        codes, scales: of each weight, from :func:`encode_weight`, or of E in one tensor, E x rows x n and E x rows x
            ceil(n / 256); both are overwritten.
        keys: B x 2, int32, contiguous: halves of the key of each matrix' rounding, new ones for every step; None
            rounds to the nearest code.
        update, projections, lr, weight_decay, rank, column_scale, offset, transposed, beside: of
            :func:`hmt_deepspeed.kernels.low_rank_update.low_rank_updates_`.

    Raises:
        ValueError: for other dtypes, shapes or an encoded weight that is not contiguous.
    """
    factors = Factors(update, projections, rank, column_scale, transposed)
    count = count_of(codes)
    factors.check(codes[0].shape[-2:] if codes else torch.Size(), count)
    if len(scales) != len(codes) or any(code.shape[-2:] != codes[0].shape[-2:] for code in codes):
        raise ValueError(
            f"takes codes of one shape and as many scales, got {[tuple(code.shape) for code in codes]} and "
            f"{len(scales)} scales"
        )
    for pair in zip(codes, scales, strict=True):
        check_encoded(*pair)
    if keys is not None:
        check_keys(keys, count)
    if beside is not None:
        beside.check(update.shape[1], codes[0].shape[-2 if transposed else -1], count)
    numbers = lr, weight_decay, keys, offset, beside
    if codes[0].is_cuda and triton is not None:
        int8_low_rank_updates_triton_(codes, scales, factors, *numbers)
    else:
        int8_low_rank_updates_reference_(codes, scales, factors, *numbers)
