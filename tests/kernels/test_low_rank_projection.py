"""Projection: exact products, fp32 sums, the kernel against float64."""

import itertools

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted, strided

from hmt_deepspeed.kernels import chunks, low_rank_projection
from hmt_deepspeed.kernels.low_rank_projection import (
    project,
    project_reference,
    project_together,
    project_together_reference,
)

# In each dimension less than a tile, whole ones, and a rest beside some; sums that are long where a kernel is compiled.
SHAPES = [(1, 1, 1), (3, 67, 1), (65, 130, 33), (32, 64, 64), (33, 70, 70)]
LONG = [(3, 257, 1), (33, 555, 70), (65, 130, 150)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(rows, n, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((rows, n), (n, width))]


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)))
def test_sums_in_fp32(dtypes):
    gradient, projection = (t.to(d) for t, d in zip(inputs(65, 1000, 33), dtypes, strict=True))
    out = project(strided(gradient), strided(projection))
    assert out.dtype == torch.float32
    # Sums of 1000 products of size 1: fp32 is off by 1e-5, sums in bf16 or fp16 by .01 and more.
    assert (out - gradient.double() @ projection.double()).abs().max() < 1e-4


def test_internal_chunks_do_not_matter(monkeypatch):
    gradient, projection = inputs(65, 130, 33)
    whole = project(gradient.bfloat16(), projection)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 300)
    # A product of fewer rows may sum in another order.
    assert (project(gradient.bfloat16(), projection) - whole).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("gradient", "projection"),
    [
        (torch.ones(3, 4).double(), torch.ones(4, 2)),
        (torch.ones(3, 4), torch.ones(4, 2).int()),
        (torch.ones(3, 4), torch.ones(3, 2)),
        (torch.ones(4), torch.ones(4, 2)),
    ],
)
def test_refuses(gradient, projection):
    with pytest.raises(ValueError):
        project(gradient, projection)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)))
def test_together_as_alone(dtypes):
    pairs = [inputs(65, 130, 33, seed) for seed in range(3)]
    gradients, projections = (
        [tensor.to(dtype) for tensor in tensors]
        for tensors, dtype in zip(zip(*pairs, strict=True), dtypes, strict=True)
    )
    images, squares = project_together(gradients, projections)
    tensors = [torch.stack(gradients)], [torch.stack(projections)]
    assert all(map(torch.equal, project_together(*tensors), (images, squares)))
    for place, (gradient, projection) in enumerate(zip(gradients, projections, strict=True)):
        assert torch.equal(images[place], project(gradient, projection))
        torch.testing.assert_close(squares[place], gradient.double().square().sum(1).float())


@pytest.mark.parametrize(
    ("gradients", "projections"),
    [
        ([torch.ones(3, 4)], [torch.ones(4, 2)] * 2),
        ([torch.ones(3, 4), torch.ones(2, 4)], [torch.ones(4, 2)] * 2),
        ([torch.ones(3, 4), torch.ones(4, 3).t()], [torch.ones(4, 2)] * 2),
        ([torch.ones(3, 4), torch.ones(3, 4).half()], [torch.ones(4, 2)] * 2),
        ([torch.ones(3, 4)] * 2, [torch.ones(4, 2), torch.ones(2, 4).t()]),
        ([torch.ones(3, 4)] * 2, [torch.ones(4, 2), torch.ones(4, 2).half()]),
        ([torch.ones(3, 4)] * 2, [torch.ones(4, 0)] * 2),
        ([torch.ones(3, 4).double()] * 2, [torch.ones(4, 2)] * 2),
    ],
)
def test_refuses_together(gradients, projections):
    with pytest.raises(ValueError):
        project_together(gradients, projections)


def check_together(device="cpu"):
    """Rows of the gradients contiguous, padded, or those of a transpose. On a CPU, where the interpreter is slow, each
    shape with three pairs of dtypes, and each pair with one or two shapes: :func:`check_kernel` has them all."""
    for number, (rows, n, width) in enumerate(SHAPES if device == "cpu" else SHAPES + LONG):
        for first, second in itertools.product(range(3), range(3)):
            if device == "cpu" and (first + second + number) % 3:
                continue
            dtypes = DTYPES[first], DTYPES[second]
            pairs = [inputs(rows, n, width, seed) for seed in (n, n + 1, n + 2)]
            gradients = [gradient.to(dtypes[0]) for gradient, _ in pairs]
            projections = [projection.to(dtypes[1]) for _, projection in pairs]
            twins, _ = project_together_reference(gradients, projections)
            place = [
                lambda t: t,
                strided,
                lambda t: t.t().contiguous().t(),
            ][second]
            images, squares = low_rank_projection.project_together_triton(
                [place(gradient.to(device)) for gradient in gradients],
                [projection.to(device) for projection in projections],
            )
            one = projections[0].to(device).expand(3, -1, -1)
            together, _ = low_rank_projection.project_together_triton(
                [torch.stack(gradients).to(device)], [one]
            )
            last, columns = gradients[2], projections[0]
            exact = last.double() @ columns.double()
            terms = last.double().abs() @ columns.double().abs()
            assert_as_accurate(together[2].cpu(), project_reference(last, columns), exact, terms)
            for b, (gradient, projection) in enumerate(zip(gradients, projections, strict=True)):
                exact = gradient.double() @ projection.double()
                terms = gradient.double().abs() @ projection.double().abs()
                assert_as_accurate(images[b].cpu(), twins[b], exact, terms)
                expected = gradient.double().square().sum(1)
                # fp32 sums of n positive terms
                assert ((squares[b].cpu() - expected).abs() <= n * 2.0**-23 * expected).all()


def check_kernel(device="cpu"):
    for rows, n, width in SHAPES if device == "cpu" else SHAPES + LONG:
        for dtypes in itertools.product(DTYPES, DTYPES):
            gradient, projection = (
                t.to(d) for t, d in zip(inputs(rows, n, width, seed=n), dtypes, strict=True)
            )
            exact = gradient.double() @ projection.double()
            terms = gradient.double().abs() @ projection.double().abs()
            twin = project_reference(gradient, projection)
            gradient, projection = gradient.to(device), projection.to(device)
            if n % 2:
                gradient, projection = strided(gradient), strided(projection)
            out = low_rank_projection.project_triton(gradient, projection)
            assert_as_accurate(out.cpu(), twin, exact, terms)
    for rows, n, width in ((0, 4, 3), (4, 0, 3), (4, 3, 0)):
        left, right = torch.ones(rows, n, device=device), torch.ones(n, width, device=device)
        assert torch.equal(low_rank_projection.project_triton(left, right), left @ right)


def test_kernel():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_kernel")


def test_kernel_together():
    pytest.importorskip("triton")
    run_interpreted(__file__, "check_together")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_on_gpu():
    check_kernel("cuda")
    check_together("cuda")
