"""Low-rank update of a stack of weights in one pass: ``W_b <- (1 - lr wd) W_b - lr U_b P_b^T``.

Decoupled weight decay as in AdamW (Loshchilov and Hutter, algorithm 2) on an update that has only rank w; the
factors and their dtypes are those of :mod:`hmt_deepspeed.kernels.low_rank_factors`. The product is summed in
fp32 tile by tile and never stored, so a weight is read once and written once, and a 16-bit copy of a master
in the same pass. A bf16 weight is rounded stochastically, see :mod:`hmt_deepspeed.kernels.stochastic_rounding`.

Where rows of whole gradients are a part of the update, ``U_b P_b^T + diag(s_b) G_b`` is subtracted: they are read where
they are.

On CUDA all matrices are one launch, which finds them by a table of addresses.

Shapes: B weights rows x n, ``update`` B x rows x w, B projections n x w.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks, scratch_like
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
from hmt_deepspeed.kernels.noise import key_halves
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "add_product_",
    "check_keys",
    "low_rank_updates_",
    "low_rank_updates_reference_",
    "low_rank_updates_triton_",
    "new_keys",
]

# By whether the factors are multiplied in fp32, without matrix units, and whether a thread's accesses are wide;
# then by the oldest architecture. Larger tiles spill registers on some architecture.
_NARROW = {"BLOCK_ROWS": 64, "BLOCK_N": 128, "BLOCK_W": 32, "num_warps": 8, "num_stages": 3}
_WIDE = _NARROW | {"BLOCK_ROWS": 128}
# The fastest of 17 on an H100: of bf16 weights 1.5 times as fast as the one before, of masters 1.2 times.
_HOPPER = {"BLOCK_ROWS": 64, "BLOCK_N": 128, "BLOCK_W": 64, "num_warps": 4, "num_stages": 2}
_FP32 = {"BLOCK_ROWS": 128, "BLOCK_N": 64, "BLOCK_W": 16, "num_warps": 8, "num_stages": 2}
_TILES = {
    (False, True): {75: _WIDE, 90: _HOPPER, 120: _WIDE},
    (False, False): {75: _NARROW},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}


def launch_options(
    dtype: torch.dtype, capability: int, aligned: bool, beside: bool = False
) -> dict[str, int]:
    """What the kernel is compiled with for factors of a dtype on an architecture.

    aligned: 16 divides addresses in bytes, rows in elements. beside: rows of whole matrices are a part of the update.
    """
    widen = multiplies_in_fp32(dtype, capability)
    tile = {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}
    if beside:  # Hopper's own tile, and wider ones, would spill
        tile |= (_FP32 if widen else _NARROW) | {"BLOCK_ROWS": 64}
        tile |= {} if aligned else {"BLOCK_N": 64}
    return tile


def add_product_(value: Tensor, update: Tensor, columns: Tensor, lr: float, decay: float) -> None:
    """``value <- decay value - lr update columns`` for fp32 rows and factors of one dtype."""
    if update.dtype == torch.float32:
        value.addmm_(update, columns, beta=decay, alpha=-lr)
    else:
        product = torch.mm(update, columns, out=scratch_like(value, update.dtype))
        value.mul_(decay).add_(scratch_like(value, torch.float32).copy_(product), alpha=-lr)


def low_rank_updates_reference_(
    weights: Sequence[Tensor],
    factors: Factors,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    keys: Tensor | None,
    offset: int = 0,
    copies: Sequence[Tensor] | None = None,
    beside: ScaledRows | None = None,
) -> None:
    """Torch twin of the kernel; see :func:`low_rank_updates_`. Reads its numbers on the host."""
    lr, decay = float(lr), 1 - float(lr) * float(weight_decay)
    halves = [] if keys is None else keys.tolist()
    each, copied = matrices_in(weights), matrices_in(copies or ())
    for b, scale in enumerate(factors.column_scale.tolist()):
        if scale[0] == 0:
            continue
        weight, (left, right) = each[b], factors.scaled(b, scale)
        for chunk in row_chunks(*weight.shape):
            value = weight[chunk].float()  # of an fp32 weight its own memory
            add_product_(value, left[chunk], right.t(), lr, decay)
            if beside is not None:
                beside.add_to_(value, b, chunk, factors.transposed, -lr)
            if weight.dtype == torch.bfloat16:
                first = offset + chunk.start * weight.shape[1]
                stochastic_round_reference(value, weight[chunk], tuple(halves[b]), first)
            if copied:
                copied[b][chunk].copy_(value)


if triton is not None:
    from hmt_deepspeed.kernels.low_rank_factors import (
        TRITON_DTYPES,
        low_rank_product_jit,
        number_jit,
        pointer_jit,
        scaled_rows_jit,
    )
    from hmt_deepspeed.kernels.noise import noise_bits_jit
    from hmt_deepspeed.kernels.stochastic_rounding import round_bits_jit, round_nearest_bits_jit

    # Not specialised: another shard must not compile another kernel.
    @triton.jit(do_not_specialize=["offset"])
    def _low_rank_update_kernel(  # type: ignore[no-untyped-def]
        table_ptr, update_ptr, scale_ptr, keys_ptr, lr, weight_decay, members, rows, n, width, rank,
        update_member, update_row, projection_row, offset, beside_ptr, beside_row, beside_column,
        LOAD_LR: tl.constexpr, LOAD_DECAY: tl.constexpr,
        WEIGHT: tl.constexpr, COPY: tl.constexpr, PROJECTION: tl.constexpr, BESIDE: tl.constexpr,
        ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, PRODUCT: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        # Programs that share rows run side by side, so those of the left factor are read from L2.
        tiles = tl.cdiv(n, BLOCK_N)
        programs = tl.cdiv(rows, BLOCK_ROWS) * tiles
        member = (tl.program_id(0) // programs).to(tl.int64)
        program = tl.program_id(0) % programs
        scale, rest = tl.load(scale_ptr + 2 * member), tl.load(scale_ptr + 2 * member + 1)
        if scale == 0:
            return
        first_row = (program // tiles).to(tl.int64) * BLOCK_ROWS
        first_column = (program % tiles).to(tl.int64) * BLOCK_N
        product = low_rank_product_jit(
            update_ptr + member * update_member,
            pointer_jit(table_ptr, 2 * members + member, PROJECTION, ALIGNED),
            first_row, first_column, rows, n, width, rank, update_row, projection_row, scale, rest,
            TRANSPOSED, PRODUCT, WIDEN, BLOCK_ROWS, BLOCK_N, BLOCK_W,
        )  # fmt: skip
        lr = number_jit(lr, LOAD_LR)
        decay = 1 - lr * number_jit(weight_decay, LOAD_DECAY)

        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_N)
        mask = (row < rows - first_row)[:, None] & (column < n - first_column)[None, :]
        position = row[:, None] * n + column[None, :]
        first = first_row * n + first_column
        target = pointer_jit(table_ptr, member, WEIGHT, ALIGNED) + first + position
        weight = tl.load(target, mask=mask, other=0)
        if tl.int16 == WEIGHT:  # patterns of bf16, the upper halves of fp32's
            weight = (weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
                tl.float32, bitcast=True
            )
        value = decay * weight - lr * product
        if BESIDE is not None:
            value -= lr * scaled_rows_jit(
                pointer_jit(table_ptr, 3 * members + member, BESIDE, ALIGNED),
                beside_ptr + member * (n if TRANSPOSED else rows),
                first_row, first_column, rows, n, beside_row, beside_column,
                TRANSPOSED, BLOCK_ROWS, BLOCK_N,
            )  # fmt: skip
        if tl.int16 == WEIGHT:
            index = position.to(tl.uint32) + (first + offset).to(tl.uint32)
            low, high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
            rounded = round_bits_jit(
                value.to(tl.uint32, bitcast=True), noise_bits_jit(index, low, high)
            )
            tl.store(target, rounded.to(tl.int16), mask=mask)
        else:
            tl.store(target, value, mask=mask)
        if COPY is not None:
            copy = pointer_jit(table_ptr, members + member, COPY, ALIGNED) + first + position
            if tl.int16 == COPY:
                nearest = round_nearest_bits_jit(value.to(tl.uint32, bitcast=True))
                tl.store(copy, nearest.to(tl.int16), mask=mask)
            else:
                tl.store(copy, value.to(tl.float16), mask=mask)

    @on_its_device
    def low_rank_updates_triton_(
        weights: Sequence[Tensor],
        factors: Factors,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        keys: Tensor | None,
        offset: int = 0,
        copies: Sequence[Tensor] | None = None,
        beside: ScaledRows | None = None,
    ) -> None:
        """Triton launcher; see :func:`low_rank_updates_`."""
        (rows, n), first, members = weights[0].shape[-2:], weights[0], count_of(weights)
        if not first.numel():
            return
        targets = weights if copies is None else copies
        addresses = addresses_of((*weights, *targets)) + factors.projection_addresses()
        beside_row, beside_column, kind = 0, 0, None
        if beside is not None:
            addresses += addresses_of(beside.matrices)
            beside_row, beside_column = beside.strides(factors.transposed)
            kind = beside.matrices[0].dtype
        aligned = not any(address % 16 for address in addresses)
        rows_aligned = aligned and not n % 16 and factors.rows_aligned
        capability, reads_rows = capability_of(first.device), beside is not None
        tile = launch_options(factors.product_dtype, capability, rows_aligned, reads_rows)
        copy = None if copies is None else copies[0].dtype
        grid = (members * triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(n, tile["BLOCK_N"]),)
        _low_rank_update_kernel[grid](
            device_table(tuple(addresses), first.device),
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
            WEIGHT=tl.int16 if first.dtype == torch.bfloat16 else tl.float32,
            COPY={None: None, torch.bfloat16: tl.int16}.get(copy, tl.float16),
            PROJECTION=TRITON_DTYPES[factors.given[0].dtype],
            BESIDE=None if kind is None else TRITON_DTYPES[kind],
            ALIGNED=aligned,
            TRANSPOSED=factors.transposed,
            PRODUCT=TRITON_DTYPES[factors.product_dtype],
            **tile,
        )
        written = (*weights, *(copies or ()))
        torch.autograd.graph.increment_version(written)  # a graph that saved them must not run on


def low_rank_updates_(
    weights: Sequence[Tensor],
    update: Tensor,
    projections: Sequence[Tensor] | Tensor,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    *,
    rank: int,
    column_scale: Tensor,
    keys: Tensor | None,
    offset: int = 0,
    copies: Sequence[Tensor] | None = None,
    transposed: bool = False,
    beside: ScaledRows | None = None,
) -> None:
    """``W_b <- (1 - lr wd) W_b - lr (U_b S_b) P_b^T`` for each b, summed in fp32.

    S_b scales columns of U_b: the first ``rank`` by ``column_scale[b, 0]``, the rest by ``column_scale[b, 1]``.
    Where ``column_scale[b, 0]`` is zero, matrix b takes no step at all, whatever its update holds.

    Args:
        weights: B matrices rows x n of one dtype, contiguous, each with memory of its own: fp32, or bf16
            (rounded stochastically). Updated in place. As of projections, copies and rows beside, some or all may be
            in tensors of several, E x rows x n.
        update: B x rows x w. projections: B matrices n x w of one dtype and strides, of which some may be the
            same. Both fp32, bf16 or fp16, w contiguous.
        lr, weight_decay: step length; decay per unit of step length. Numbers, or 0-dim fp32 on the device.
        rank: columns of the first factor of S. column_scale: B x 2, fp32, contiguous.
        keys: B x 2, int32, contiguous: halves of the key of each matrix' rounding; a bf16 weight needs them, an
            fp32 weight is not rounded.
        offset: index of ``weights[b][0, 0]`` within the whole weight; element (i, j) draws the noise of
            index ``offset + i n + j``, so that the rounding does not depend on which rows are here.
        copies: B matrices of the weights' shape, bf16 or fp16, contiguous: are given the updated values of
            fp32 weights, rounded to nearest.
        transposed: the update is B x n x w, projections are rows x w, and ``P_b (U_b S_b)^T`` is subtracted.
        beside: ``lr diag(s_b) G_b`` is subtracted, too; with ``transposed`` its transpose. w may then be 0.

    Raises:
        ValueError: for other dtypes, shapes, strides or bf16 weights without keys.
    """
    factors = Factors(update, projections, rank, column_scale, transposed)
    count = count_of(weights)
    factors.check(weights[0].shape[-2:] if weights else torch.Size(), count)
    dtype = weights[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights must be fp32 or bf16, got {dtype}")
    _check_matrices("weights", weights, weights[0].shape[-2:], dtype)
    if dtype == torch.bfloat16:
        check_keys(keys, count)
    if copies is not None:
        _check_copies(weights, copies)
    if beside is not None:
        beside.check(update.shape[1], weights[0].shape[-2 if transposed else -1], count)
    if weights[0].is_cuda and triton is not None:
        low_rank_updates_triton_(weights, factors, lr, weight_decay, keys, offset, copies, beside)
    else:
        low_rank_updates_reference_(
            weights, factors, lr, weight_decay, keys, offset, copies, beside
        )


def new_keys(key: int | None, device: torch.device) -> Tensor | None:
    """The table of one key, written by the device: no copy from pageable memory waits for it."""
    if key is None:
        return None
    keys = torch.empty(1, 2, dtype=torch.int32, device=device)
    for place, half in enumerate(key_halves(key)):
        keys[:, place].fill_(half)
    return keys


def check_keys(keys: Tensor | None, count: int) -> None:
    """Raises ValueError unless these are keys of ``count`` weights that are rounded stochastically."""
    if keys is None:
        raise ValueError("a bf16 weight is rounded stochastically: keys must be int32, got None")
    if keys.shape != (count, 2) or keys.dtype != torch.int32 or not keys.is_contiguous():
        raise ValueError(
            f"keys must be {count} x 2, int32 and contiguous, got {tuple(keys.shape)}, {keys.dtype}"
        )


def _check_matrices(
    name: str, matrices: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype
) -> None:
    for matrix in matrices:
        if matrix.shape[-2:] != shape or matrix.dtype != dtype or not matrix.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, {tuple(shape)} and {dtype}, got {tuple(matrix.shape)} and "
                f"{matrix.dtype} with strides {matrix.stride()}"
            )


def _check_copies(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    dtype = copies[0].dtype if copies else None
    if weights[0].dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"copies fp32 weights to bf16 or fp16, got {weights[0].dtype} and {dtype}")
    count, found = count_of(weights), count_of(copies)
    if found != count:
        raise ValueError(f"{count} weights take as many copies, got {found}")
    _check_matrices("copies", copies, weights[0].shape[-2:], dtype)
