"""Projection of gradients, ``A = G B``, accumulated in fp32 from 16-bit or fp32 operands.

The gradient is widened tile by tile: no fp32 copy of it exists. Products of two 16-bit numbers of
one dtype are exact in fp32, so those tiles go to the tensor cores as they are. Of many matrices alike all are one
launch on CUDA, which finds them by a table of addresses, and gives the squared norms of their rows, too.

Shapes: ``gradient`` rows x n, ``projection`` n x w, result rows x w.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt_deepspeed.kernels.chunks import row_chunks
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

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton have no CUDA device to run it on
    triton = None

__all__ = [
    "project",
    "project_reference",
    "project_together",
    "project_together_reference",
    "project_together_triton",
    "project_triton",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# By whether the factors are multiplied in fp32, without matrix units, and whether a thread's accesses are wide;
# then by the oldest architecture. Larger tiles spill registers on some architecture.
_WIDE = {"BLOCK_ROWS": 64, "BLOCK_N": 64, "BLOCK_W": 128, "num_warps": 4, "num_stages": 3}
_FP32 = {"BLOCK_ROWS": 32, "BLOCK_N": 16, "BLOCK_W": 64, "num_warps": 4, "num_stages": 2}
_TILES = {
    (False, True): {75: _WIDE},
    (False, False): {75: _WIDE | {"BLOCK_N": 32}},
    (True, True): {75: _FP32},
    (True, False): {75: _FP32},
}
_LARGEST_STRIDE = 1 << 24  # 64 rows of a tile are then less than 2^31 elements apart


def launch_options(
    gradient: torch.dtype, projection: torch.dtype, capability: int, aligned: bool
) -> dict[str, int]:
    """What the kernel is compiled with for operands of two dtypes on an architecture.

    aligned: 16 divides addresses in bytes, and all that rows are apart in elements.
    """
    widen = gradient != projection or multiplies_in_fp32(gradient, capability)
    return {"WIDEN": widen, **tile_for(_TILES[widen, aligned], capability)}


def project_reference(gradient: Tensor, projection: Tensor) -> Tensor:
    """Torch twin of the kernel; see :func:`project`."""
    columns = projection.float()
    if gradient.dtype == torch.float32:
        return gradient @ columns
    out = torch.empty(
        gradient.shape[0], projection.shape[1], dtype=torch.float32, device=gradient.device
    )
    for chunk in row_chunks(*gradient.shape):
        torch.mm(gradient[chunk].float(), columns, out=out[chunk])
    return out


def project_together_reference(
    gradients: Sequence[Tensor], projections: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; see :func:`project_together`."""
    each = matrices_in(gradients)
    pairs = zip(each, matrices_in(projections), strict=True)
    images = torch.stack([project_reference(one, columns) for one, columns in pairs])
    rows = [torch.linalg.vector_norm(one, dim=1, dtype=torch.float32) for one in each]
    return images, torch.stack(rows).square_()


if triton is not None:
    from hmt_deepspeed.kernels.low_rank_factors import TRITON_DTYPES, pointer_jit

    @triton.jit
    def _project_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr, projection_ptr, out_ptr, squares_ptr, members, rows, n, width,
        gradient_row, gradient_column, projection_row, projection_column,
        GRADIENT: tl.constexpr, PROJECTION: tl.constexpr, ALIGNED: tl.constexpr,
        WIDEN: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    ):  # fmt: skip
        """With ``squares_ptr`` both operands are found in the table ``gradient_ptr``; without it they are given."""
        # Programs that share rows run side by side, so the gradient's tiles are read from L2.
        tiles = tl.cdiv(width, BLOCK_W)
        programs = tl.cdiv(rows, BLOCK_ROWS) * tiles
        member = (tl.program_id(0) // programs).to(tl.int64)
        program = tl.program_id(0) % programs
        first_row = (program // tiles).to(tl.int64) * BLOCK_ROWS
        first_column = (program % tiles).to(tl.int64) * BLOCK_W
        row, column, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
        in_row, in_column = row < rows - first_row, column < width - first_column
        if squares_ptr is not None:
            left_ptr = pointer_jit(gradient_ptr, member, GRADIENT, ALIGNED)
            right_ptr = pointer_jit(gradient_ptr, members + member, PROJECTION, ALIGNED)
        else:
            left_ptr, right_ptr = gradient_ptr, projection_ptr
        left_ptr += first_row * gradient_row
        right_ptr += first_column * projection_column
        total = tl.zeros((BLOCK_ROWS, BLOCK_W), dtype=tl.float32)
        squares = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        for begin in range(0, n, BLOCK_N):
            left = tl.load(
                left_ptr + ((row * gradient_row)[:, None] + (k * gradient_column)[None, :]),
                mask=in_row[:, None] & (k < n - begin)[None, :],
                other=0.0,
            )
            right = tl.load(
                right_ptr + ((k * projection_row)[:, None] + (column * projection_column)[None, :]),
                mask=(k < n - begin)[:, None] & in_column[None, :],
                other=0.0,
            )
            left_ptr += BLOCK_N * gradient_column
            right_ptr += BLOCK_N * projection_row
            if squares_ptr is not None:
                wide = left.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
            if WIDEN:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee")
        mask = in_row[:, None] & in_column[None, :]
        target = out_ptr + member * rows * width + first_row * width + first_column
        tl.store(target + (row[:, None] * width + column[None, :]), total, mask=mask)
        if squares_ptr is not None:
            # of all tiles of a row the same
            tl.store(squares_ptr + member * rows + first_row + row, squares, mask=in_row)

    @on_its_device
    def _launch(
        gradients: Sequence[Tensor],
        projections: Sequence[Tensor],
        out: Tensor,
        squares: Tensor | None,
    ) -> None:
        (rows, n), width = gradients[0].shape[-2:], projections[0].shape[-1]
        members = count_of(gradients)
        addresses = tuple(addresses_of((*gradients, *projections)))
        strides = *gradients[0].stride()[-2:], *projections[0].stride()[-2:]
        sizes = [width, *addresses, *(stride for stride in strides if stride != 1)]
        aligned = not any(size % 16 for size in sizes)
        capability = capability_of(out.device)
        dtypes = gradients[0].dtype, projections[0].dtype
        tile = launch_options(*dtypes, capability, aligned)
        tiles = triton.cdiv(rows, tile["BLOCK_ROWS"]) * triton.cdiv(width, tile["BLOCK_W"])
        table = squares is not None
        _project_kernel[(members * tiles,)](
            device_table(addresses, out.device) if table else gradients[0],
            None if table else projections[0],
            out,
            squares,
            members,
            rows,
            n,
            width,
            *strides,
            GRADIENT=TRITON_DTYPES[dtypes[0]],
            PROJECTION=TRITON_DTYPES[dtypes[1]],
            ALIGNED=table and not any(address % 16 for address in addresses),
            **tile,
        )

    def project_triton(gradient: Tensor, projection: Tensor) -> Tensor:
        """Triton launcher; see :func:`project`."""
        rows, width = gradient.shape[0], projection.shape[1]
        out = torch.empty(rows, width, dtype=torch.float32, device=gradient.device)
        if out.numel():
            _launch([gradient], [projection], out, None)
        return out

    def project_together_triton(
        gradients: Sequence[Tensor], projections: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Triton launcher; see :func:`project_together`."""
        first, width = gradients[0], projections[0].shape[-1]
        shape = (count_of(gradients), first.shape[-2])
        images = torch.empty(*shape, width, dtype=torch.float32, device=first.device)
        squares = torch.empty(shape, dtype=torch.float32, device=first.device)
        if images.numel():
            _launch(gradients, projections, images, squares)
        return images, squares


def project(gradient: Tensor, projection: Tensor) -> Tensor:
    """``gradient projection`` with fp32 products and sums.

    Args:
        gradient: rows x n, fp32, bf16 or fp16, any strides.
        projection: n x w, fp32, bf16 or fp16, any strides.

    Returns:
        rows x w, fp32, contiguous.

    Raises:
        ValueError: for other dtypes or shapes.
    """
    _check(gradient, projection)
    if gradient.is_cuda and triton is not None:
        return project_triton(gradient, projection)
    return project_reference(gradient, projection)


def project_together(
    gradients: Sequence[Tensor], projections: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """:func:`project` of B gradients of one shape, dtype and strides, each on columns of its own, at least one, that
    are also alike. Some or all may be in tensors of several, E x rows x n and E x n x w.

    Returns:
        B x rows x w, and the squared norms of the gradients' rows, B x rows; fp32.

    Raises:
        ValueError: for other dtypes, shapes or strides.
    """
    for name, tensors in (("gradients", gradients), ("projections", projections)):
        kinds = {(t.shape[-2:], t.dtype, t.stride()[-2:]) for t in tensors}
        count, found = count_of(gradients), count_of(tensors)
        if len(kinds) != 1 or found != count:
            raise ValueError(
                f"{name} must be {count} of one shape, dtype and strides, got {found} of {kinds}"
            )
    _check(
        *(
            tensors[0][0] if tensors[0].dim() == 3 else tensors[0]
            for tensors in (gradients, projections)
        )
    )
    if not projections[0].shape[-1]:
        raise ValueError("projects on at least one column, got none")
    if gradients[0].is_cuda and triton is not None:
        return project_together_triton(gradients, projections)
    return project_together_reference(gradients, projections)


def _check(gradient: Tensor, projection: Tensor) -> None:
    if gradient.dtype not in _FLOATS or projection.dtype not in _FLOATS:
        raise ValueError(
            f"gradient and projection must be fp32, bf16 or fp16, got {gradient.dtype} and {projection.dtype}"
        )
    if gradient.dim() != 2 or projection.dim() != 2 or gradient.shape[1] != projection.shape[0]:
        raise ValueError(
            f"projects rows x n by n x w, got {tuple(gradient.shape)} and {tuple(projection.shape)}"
        )
    if max(*gradient.stride(), *projection.stride()) > _LARGEST_STRIDE:
        raise ValueError(
            f"rows and columns are at most 2^24 elements apart, got strides {gradient.stride()} and "
            f"{projection.stride()}"
        )
