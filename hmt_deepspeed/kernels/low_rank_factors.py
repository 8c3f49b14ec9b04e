"""The factors of B low-rank updates ``U_b P_b^T``, and their product tile by tile.

Two numbers of each matrix scale the columns of ``U_b``, the first ``rank`` and the rest: the optimizer's
factor and the residual's. They are multiplied into the smaller of what there is to scale, in fp32, and the
scaled ``U_b`` is rounded to the dtype of the product.

The product is what a step's time goes into, and matrix units multiply 16-bit numbers several times as fast.
So beside a bf16 factor the other is rounded to bf16, which changes each element of the update by at most
``2^-8 sum_i |u_i p_i|``. Beside an fp16 factor it is rounded to fp16 by the kernels (``2^-11``, and what
exceeds 65504 becomes infinite); the torch twins multiply fp16 in fp32. fp32 factors are multiplied in fp32,
never in TF32. Sums are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hmt_deepspeed.kernels.launching import addresses_of, count_of, matrices_in

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = ["Factors", "ScaledRows", "as_factors", "low_rank_product"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_COLUMNS = 1 << 24  # 128 rows of a tile are then less than 2^31 elements apart


@dataclass(frozen=True)
class ScaledRows:
    """``diag(s_b) G_b`` of B matrices, which stay as they are and where they are.

    matrices: of one shape, dtype and strides, some or all of them E in one tensor: fp32, bf16 or fp16. scale: B x rows,
    fp32, contiguous.
    """

    matrices: Sequence[Tensor]
    scale: Tensor

    def times(self, factor: Tensor) -> ScaledRows:
        """The same times a factor of each matrix, (B,) fp32."""
        return ScaledRows(self.matrices, self.scale * factor.unsqueeze(1))

    def part(self, members: slice) -> ScaledRows:
        """Of some of the matrices."""
        return ScaledRows(matrices_in(self.matrices)[members], self.scale[members])

    def whole(self, member: int) -> Tensor:
        """Of one matrix, fp32; zeros where the scale is zero, whatever the matrix holds."""
        scale = self.scale[member].unsqueeze(1)
        return torch.where(scale != 0, matrices_in(self.matrices)[member] * scale, 0.0)

    def strides(self, transposed: bool) -> tuple[int, int]:
        """Of rows and columns of the matrices, or of their transposes."""
        first, second = self.matrices[0].stride()[-2:]
        return (second, first) if transposed else (first, second)

    def add_to_(
        self, value: Tensor, member: int, chunk: slice, transposed: bool, factor: float
    ) -> None:
        """Add some rows of a matrix, or of its transpose, times a number, to fp32 values of theirs."""
        matrix, scale = matrices_in(self.matrices)[member], self.scale[member]
        if transposed:
            value.addcmul_(matrix.t()[chunk].float(), scale.unsqueeze(0), value=factor)
        else:
            value.addcmul_(matrix[chunk].float(), scale[chunk].unsqueeze(1), value=factor)

    def check(self, rows: int, n: int, count: int) -> None:
        """Raises ValueError unless these are rows x n beside updates of ``count`` weights."""
        kinds = {(m.dtype, m.shape[-2:], m.stride()[-2:]) for m in self.matrices}
        first = self.matrices[0] if self.matrices else None
        if (
            first is None
            or len(kinds) != 1
            or first.shape[-2:] != (rows, n)
            or first.dtype not in _DTYPES
        ):
            raise ValueError(
                f"matrices beside must be {rows} x {n} of one dtype and strides, fp32, bf16 or fp16, got {kinds}"
            )
        found, strides = count_of(self.matrices), first.stride()[-2:]
        if found != count or max(strides) > _MOST_COLUMNS:
            raise ValueError(
                f"{count} weights take as many matrices, whose elements are at most 2^24 apart, got "
                f"{found} with strides {strides}"
            )
        scale = self.scale
        if (
            scale.shape != (count, rows)
            or scale.dtype != torch.float32
            or not scale.is_contiguous()
        ):
            raise ValueError(
                f"scale of rows must be {count} x {rows}, fp32 and contiguous, got {tuple(scale.shape)}, {scale.dtype}"
            )


@dataclass(frozen=True)
class Factors:
    """``U_b P_b^T`` of weights rows x n, or with ``transposed`` ``P_b U_b^T``.

    update: B x rows x w (transposed: B x n x w). projections: B matrices n x w (transposed: rows x w), of
    which some may be the same, and some or all may be in one tensor. Both fp32, bf16 or fp16, with w contiguous.
    column_scale: B x 2, fp32, contiguous: factors of the first ``rank`` columns of an update and of the rest.
    """

    update: Tensor
    projections: Sequence[Tensor] | Tensor
    rank: int
    column_scale: Tensor
    transposed: bool = False

    @property
    def width(self) -> int:
        return self.update.shape[2]

    @property
    def product_dtype(self) -> torch.dtype:
        """What the kernels multiply in."""
        dtypes = (self.update.dtype, self.given[0].dtype)
        return next((d for d in (torch.bfloat16, torch.float16) if d in dtypes), torch.float32)

    @property
    def rows_aligned(self) -> bool:
        """Whether 16 divides what the rows of the factors are apart."""
        strides = (*self.update.stride()[:2], self.given[0].stride(-2))
        return not any(stride % 16 for stride in strides)

    @property
    def given(self) -> Sequence[Tensor]:
        """The projections, each a matrix or a tensor of several."""
        return [self.projections] if isinstance(self.projections, Tensor) else self.projections

    @cached_property
    def each(self) -> list[Tensor]:
        """The projections one by one."""
        return matrices_in(self.given)

    def projection_addresses(self) -> list[int]:
        return addresses_of(self.given)

    def scaled(self, member: int, scale: Sequence[float]) -> tuple[Tensor, Tensor]:
        """What the torch twin multiplies: left rows x w and right n x w of one matrix, in one dtype."""
        update = self.update[member]
        if tuple(scale) != (1.0, 1.0):
            columns = torch.full((self.width,), scale[1], device=update.device)
            columns[: self.rank] = scale[0]
            update = update * columns
        update, projection = as_factors(update, self.each[member])
        return (projection, update) if self.transposed else (update, projection)

    def check(self, shape: torch.Size, count: int) -> None:
        """Raises ValueError unless these are updates of ``count`` weights of this shape."""
        if len(shape) != 2 or self.update.dim() != 3 or not count:
            raise ValueError(
                f"weights must be at least one matrix and update B x rows x w, got {count} of shape "
                f"{tuple(shape)} and {tuple(self.update.shape)}"
            )
        rows, n = reversed(shape) if self.transposed else shape
        found = count_of(self.given)
        if tuple(self.update.shape[:2]) != (count, rows) or found != count:
            raise ValueError(
                f"{count} weights {shape[0]} x {shape[1]} take an update {count} x {rows} x w and as many "
                f"projections, got {tuple(self.update.shape)} and {found}"
            )
        if shape[1] > _MOST_COLUMNS:
            raise ValueError(f"a weight has at most 2^24 columns, got {shape[1]}")
        self._check_projections(n)
        if not 0 <= self.rank <= self.width:
            raise ValueError(
                f"rank is {self.rank}; legal is 0..{self.width}, the columns of update"
            )
        scale = self.column_scale
        if scale.shape != (count, 2) or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"column_scale must be {count} x 2, fp32 and contiguous, got {tuple(scale.shape)}, "
                f"{scale.dtype}"
            )

    def _check_projections(self, n: int) -> None:
        first, shape = self.given[0], (n, self.width)
        for projection in self.given:
            if projection.shape[-2:] != shape or projection.dtype != first.dtype:
                raise ValueError(
                    f"every projection must be {n} x {self.width} and {first.dtype}, got "
                    f"{tuple(projection.shape)} and {projection.dtype}"
                )
            if projection.stride()[-2:] != first.stride()[-2:]:
                raise ValueError("all projections must have the same strides")
        for name, factor in (("update", self.update), ("projections", first)):
            if factor.dtype not in _DTYPES:
                raise ValueError(f"{name} must be fp32, bf16 or fp16, got {factor.dtype}")
            if factor.stride(-1) != 1 and self.width > 1:
                raise ValueError(f"columns of {name} must be contiguous, got {factor.stride()}")


def as_factors(update: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype that torch multiplies them in: bf16 if one of them is bf16, else fp32."""
    bf16 = torch.bfloat16 in (update.dtype, projection.dtype)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return update.to(dtype), projection.to(dtype)


def low_rank_product(update: Tensor, projection: Tensor) -> Tensor:
    """``update projection^T`` as the torch twins apply it; in the dtype of the factors."""
    left, right = as_factors(update, projection)
    return left @ right.t()


if triton is not None:
    from hmt_deepspeed.kernels.stochastic_rounding import round_nearest_bits_jit

    TRITON_DTYPES = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }

    @triton.jit
    def number_jit(number, LOAD: tl.constexpr):  # type: ignore[no-untyped-def]
        """An fp32 argument; with ``LOAD`` the one that a pointer argument points to."""
        if LOAD:
            number = tl.load(number)
        return number

    @triton.jit
    def pointer_jit(table_ptr, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Entry of a table of addresses, as a pointer; ``ALIGNED``: to 16 bytes."""
        pointer = tl.load(table_ptr + index).to(tl.pointer_type(TYPE))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        return pointer

    @triton.jit
    def factor_jit(value, PRODUCT: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
        """fp32 ``value`` rounded to what is multiplied; with ``WIDEN`` that number in fp32.

        By bits: the interpreter's own conversion to bf16 truncates.
        """
        if not WIDEN:
            value = value.to(PRODUCT)
        elif tl.bfloat16 == PRODUCT:
            bits = round_nearest_bits_jit(value.to(tl.uint32, bitcast=True)) << 16
            value = bits.to(tl.float32, bitcast=True)
        elif tl.float16 == PRODUCT:
            value = value.to(tl.float16).to(tl.float32)
        return value

    @triton.jit
    def low_rank_product_jit(  # type: ignore[no-untyped-def]
        update_ptr, projection_ptr, first_row, first_column, rows, n, width, rank,
        update_row, projection_row, scale, rest,
        TRANSPOSED: tl.constexpr, PRODUCT: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        """A tile of one matrix' ``U P^T`` (``P U^T``) in fp32, whose first element is (first_row, first_column).

        update_row, projection_row: strides. scale, rest: of the columns of U, see :class:`Factors`.
        WIDEN: products of 16-bit factors are fp32's, which is exact. Rows beyond the last repeat it.
        """
        left_ptr, left_row = update_ptr, update_row
        right_ptr, right_row = projection_ptr, projection_row
        if TRANSPOSED:
            left_ptr, left_row = projection_ptr, projection_row
            right_ptr, right_row = update_ptr, update_row
        row = tl.minimum(tl.arange(0, BLOCK_ROWS), (rows - 1 - first_row).to(tl.int32))
        column = tl.minimum(tl.arange(0, BLOCK_N), (n - 1 - first_column).to(tl.int32))
        left_ptr += first_row * left_row
        right_ptr += first_column * right_row
        product = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
        for begin in range(0, width, BLOCK_W):
            k = begin + tl.arange(0, BLOCK_W)
            left = tl.load(
                left_ptr + (row[:, None] * left_row + k[None, :]),
                mask=k[None, :] < width,
                other=0.0,
            )
            right = tl.load(
                right_ptr + (column[None, :] * right_row + k[:, None]),
                mask=k[:, None] < width,
                other=0.0,
            )
            factor = tl.where(k < rank, scale, rest)
            left, right = left.to(tl.float32), right.to(tl.float32)
            if TRANSPOSED:
                right *= factor[:, None]
            else:
                left *= factor[None, :]
            left, right = factor_jit(left, PRODUCT, WIDEN), factor_jit(right, PRODUCT, WIDEN)
            product = tl.dot(left, right, product, input_precision="ieee")
        return product

    @triton.jit
    def scaled_rows_jit(  # type: ignore[no-untyped-def]
        given_ptr, scale_ptr, first_row, first_column, rows, n, given_row, given_column,
        TRANSPOSED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """A tile of one matrix' ``diag(s) G`` in fp32, placed as that of :func:`low_rank_product_jit`; zeros beyond the last.

        With ``TRANSPOSED`` of ``G diag(s)``, where the scale is of columns. given_row, given_column: strides.
        """
        row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_N)
        row_mask, column_mask = row < rows - first_row, column < n - first_column
        if TRANSPOSED:
            scale = tl.load(scale_ptr + first_column + column, mask=column_mask, other=0.0)[None, :]
        else:
            scale = tl.load(scale_ptr + first_row + row, mask=row_mask, other=0.0)[:, None]
        given_ptr += first_row * given_row + first_column * given_column
        place = (row * given_row)[:, None] + (column * given_column)[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        return scale * tl.load(given_ptr + place, mask=mask, other=0.0).to(tl.float32)
