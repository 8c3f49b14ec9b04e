"""Low-rank updates: the formula, the noise, the kernel against float64 and against its twin."""

import pytest
import torch
from interpreted import assert_as_accurate, run_interpreted

from hmt_deepspeed.kernels import chunks, low_rank_update
from hmt_deepspeed.kernels.launching import count_of, device_table
from hmt_deepspeed.kernels.low_rank_factors import Factors, ScaledRows, low_rank_product
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.noise import key_halves
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

SHAPES = [(1, 1, 1), (3, 257, 1), (65, 130, 33), (64, 64, 32), (5, 70, 100), (130, 3, 7)]
OFFSETS = (0, 12_345, (1 << 31) - 40, (1 << 33) + 3, (1 << 40) - 7)


def inputs(rows, n, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, n), (rows, width), (n, width))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exact_inputs(rows, n, width):
    """Integers and powers of two: fp32 holds every sum, whatever the order of its terms."""
    weight, update, projection = ((4 * t).round() for t in inputs(rows, n, width))
    return weight.bfloat16(), update, projection


def formula(weight, update, projection, lr, decay):
    weight, update, projection = (t.double() for t in (weight, update, projection))
    return (1 - lr * decay) * weight - lr * (update @ projection.t())


def magnitude(update, projection, lr):
    """What the terms of each element of the update add up to, signs apart."""
    return lr * (update.double().abs() @ projection.double().abs().t())


def stack(weight, update, projection, key=None, copy=None, rank=None, scale=(1.0, 1.0)):
    """Arguments of a stack of one matrix."""
    return {
        "weights": [weight],
        "update": update[None],
        "projections": [projection],
        "rank": update.shape[-1] if rank is None else rank,
        "column_scale": torch.tensor([scale], device=weight.device),
        "keys": None
        if key is None
        else torch.tensor([key_halves(key)], dtype=torch.int32).to(weight.device),
        "copies": None if copy is None else [copy],
    }


def update_(weight, update, projection, lr, weight_decay, key=None, offset=0, copy=None):
    arguments = stack(weight, update, projection, key, copy)
    low_rank_updates_(**arguments, lr=lr, weight_decay=weight_decay, offset=offset)


def padded(tensor):
    """The same values in rows that are further apart."""
    rows, columns = tensor.shape
    buffer = torch.full((rows, columns + 3), float("nan"), dtype=tensor.dtype, device=tensor.device)
    buffer[:, 1 : columns + 1] = tensor
    return buffer[:, 1 : columns + 1]


@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_formula(rows, n, width, dtype):
    weight, update, projection = inputs(rows, n, width)
    projection = projection.to(dtype)
    expected = formula(weight, update, projection, 0.3, 0.1)
    update_(weight, padded(update), padded(projection), 0.3, 0.1)
    # Each of the width + 1 terms is below 16 and rounded a few times.
    assert (weight - expected).abs().max() < 16 * (width + 3) * 2.0**-23


@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
@pytest.mark.parametrize("swapped", [False, True])
def test_beside_a_bf16_factor_the_other_is_rounded(rows, n, width, swapped):
    weight, update, projection = inputs(rows, n, width)
    if swapped:
        update = update.bfloat16()
    else:
        projection = projection.bfloat16()
    exact = formula(weight, update, projection, 0.3, 0.1)
    terms = magnitude(update, projection, 0.3)
    rounded = formula(weight, update.bfloat16(), projection.bfloat16(), 0.3, 0.1)
    update_(weight, update, projection, 0.3, 0.1)
    summed = 16 * (width + 3) * 2.0**-23
    # bf16 rounds by at most 2^-8 of a value: the factor, then the twin's product.
    assert ((weight - exact).abs() < 2.01 * 2.0**-8 * terms + summed).all()
    assert ((weight - rounded).abs() < 1.01 * 2.0**-8 * terms + summed).all()
    product = low_rank_product(update, projection)
    assert product.dtype == torch.bfloat16


def test_a_bf16_product_leaves_small_weights_their_digits():
    # 300 elements of very different sizes: the weight is summed in fp32, whatever the product is in.
    weight = torch.logspace(-6, 6, 300).view(3, 100)
    before = weight.double()
    update, projection = torch.ones(3, 1), torch.ones(100, 1).bfloat16()
    update_(weight, update, projection, 1e-3, 0.0)
    assert torch.allclose(weight.double(), before - 1e-3, rtol=2.0**-23, atol=2.0**-33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_copy_is_the_rounded_weight(dtype, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    weight, update, projection = inputs(65, 130, 33)
    twin, copy = weight.clone(), torch.empty_like(weight, dtype=dtype)
    update_(weight, update, projection, 0.3, 0.1, copy=copy)
    update_(twin, update, projection, 0.3, 0.1)
    assert torch.equal(weight, twin)
    assert torch.equal(copy, weight.to(dtype))


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("offset", OFFSETS)
def test_noise_is_that_of_the_element(chunk, offset, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk)
    weight, update, projection = exact_inputs(65, 130, 33)
    value = formula(weight, update, projection, 0.125, 0.5).float()
    expected = torch.empty_like(weight)
    stochastic_round(value, expected, 77, offset)
    halves = weight.clone()
    update_(weight, update, projection, 0.125, 0.5, 77, offset)
    assert torch.equal(weight, expected)
    for rows in (slice(0, 20), slice(20, 65)):
        start = offset + rows.start * 130
        update_(halves[rows], update[rows], projection, 0.125, 0.5, 77, start)
    assert torch.equal(halves, expected)


def members(dtype, transposed, projection_dtype, copies, shared):
    """A stack of four matrices of odd sizes with all that a step takes; the second takes none."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    rows, n, width = 67, 133, 37
    update = normal(4, n if transposed else rows, width)
    projections = [normal(rows if transposed else n, width).to(projection_dtype) for _ in range(4)]
    if shared:
        projections[2] = projections[0]
    update[1, 3, 5] = float("nan")
    return {
        "weights": [normal(rows, n).to(dtype) for _ in range(4)],
        "update": update.to(projection_dtype) if projection_dtype == torch.float16 else update,
        "projections": torch.stack(projections) if not shared else projections,
        "rank": 21,
        "column_scale": torch.tensor([[0.5, 2.0], [0.0, 1.0], [1.0, 1.0], [1.25, 0.0]]),
        "keys": torch.randint(-(2**31), 2**31, (4, 2), generator=generator).int(),
        "copies": None
        if copies is None
        else [torch.full((rows, n), 7.0).to(copies) for _ in range(4)],
        "transposed": transposed,
    }


MODES = [
    (weight, transposed, projection, copies, shared)
    for transposed, shared in ((False, False), (True, True))
    for projection in (torch.float32, torch.bfloat16, torch.float16)
    for weight, copies in (
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    )
]


def scaled_formula(given, b, lr, decay):
    """One matrix of the stack in float64, and the magnitude of its terms."""
    scale = torch.full((given["update"].shape[2],), given["column_scale"][b, 1].item()).double()
    scale[: given["rank"]] = given["column_scale"][b, 0].item()
    update, projection = given["update"][b].double() * scale, given["projections"][b].double()
    if given["transposed"]:
        update, projection = projection, update
    exact = formula(given["weights"][b], update, projection, lr, decay)
    return exact, magnitude(update, projection, lr) + given["weights"][b].double().abs()


def cloned(given, device="cpu"):
    def place(value):
        if isinstance(value, ScaledRows):
            matrices = [matrix.to(device) for matrix in value.matrices]
            return ScaledRows(matrices, value.scale.to(device))
        if isinstance(value, list):
            placed = {id(tensor): tensor.to(device, copy=True) for tensor in value}
            return [placed[id(tensor)] for tensor in value]
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    return {name: place(value) for name, value in given.items()}


def check_stack(mode, given, after, lr, decay):
    weight, _, projection, copies, _ = mode
    # fp32 sums of 38 terms; beside a 16-bit factor the other is rounded, and bf16's product on a CPU.
    unit = {torch.float32: 0.0, torch.bfloat16: 2.01 * 2.0**-8, torch.float16: 2.0**-11}[projection]
    unit += 40 * 2.0**-24 + (
        2.0**-7 if weight == torch.bfloat16 else 0
    )  # bf16: to either neighbour
    for b in (0, 2, 3):
        exact, terms = scaled_formula(given, b, lr, decay)
        assert ((after["weights"][b].double() - exact).abs() <= unit * terms).all(), (mode, b)
        if copies is not None:
            assert torch.equal(after["copies"][b], after["weights"][b].to(copies)), (mode, b)
    for name in ("weights", "copies") if copies is not None else ("weights",):
        assert torch.equal(after[name][1], given[name][1]), (
            mode,
            name,
        )  # neither decay nor rounding


@pytest.mark.parametrize("mode", MODES)
def test_stack(mode):
    given = members(*mode)
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5, offset=11)
    check_stack(mode, given, after, 0.125, 0.5)
    assert torch.equal(after["update"].nan_to_num(), given["update"].nan_to_num())
    again = cloned(given)
    numbers = {"lr": torch.tensor(0.125), "weight_decay": torch.tensor(0.5)}
    low_rank_updates_(**again, **numbers, offset=11)
    assert all(map(torch.equal, again["weights"], after["weights"]))


def test_a_matrix_of_a_stack_moves_as_it_does_alone():
    given = members(torch.bfloat16, False, torch.bfloat16, None, False)
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5)
    for b in (0, 2, 3):
        alone = cloned(given)
        arguments = {
            name: alone[name][b : b + 1]
            for name in alone
            if name in ("weights", "update", "projections", "column_scale", "keys")
        }
        low_rank_updates_(**arguments, rank=given["rank"], lr=0.125, weight_decay=0.5)
        assert torch.equal(alone["weights"][b], after["weights"][b])


def with_rows(given, matrix_dtype, number):
    """The same with rows of whole matrices beside: contiguous, or those of a transpose."""
    generator = torch.Generator().manual_seed(5)
    rows, n = given["weights"][0].shape
    if given["transposed"]:
        rows, n = n, rows
    matrices = [torch.randn(rows, n, generator=generator).to(matrix_dtype) for _ in range(4)]
    if number % 2:
        matrices = [matrix.t().contiguous().t() for matrix in matrices]
    matrices[1][2, 1] = float("inf")
    return given | {"beside": ScaledRows(matrices, torch.randn(4, rows, generator=generator))}


def check_rows(given, after, lr, decay):
    """Where the products are of fp32."""
    beside = given["beside"]
    for b in (0, 2, 3):
        exact, terms = scaled_formula(given, b, lr, decay)
        rows = lr * beside.matrices[b].double() * beside.scale[b].double().unsqueeze(1)
        rows = rows.t() if given["transposed"] else rows
        # fp32 sums of 39 terms, and bf16 to either neighbour
        unit = 42 * 2.0**-24 + (2.0**-7 if given["weights"][b].dtype == torch.bfloat16 else 0)
        error = (after["weights"][b].double() - (exact - rows)).abs()
        assert (error <= unit * (terms + rows.abs())).all()
        if given["copies"] is not None:
            assert torch.equal(after["copies"][b], after["weights"][b].to(given["copies"][b].dtype))
    assert torch.equal(after["weights"][1], given["weights"][1])


FP32_MODES = [mode for mode in MODES if mode[2] == torch.float32]


@pytest.mark.parametrize("width", [37, 0])
@pytest.mark.parametrize("matrix_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", FP32_MODES)
def test_rows_beside(mode, matrix_dtype, width, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1000)
    given = with_rows(narrowed(members(*mode), width), matrix_dtype, len(mode))
    after = cloned(given)
    low_rank_updates_(**after, lr=0.125, weight_decay=0.5, offset=11)
    check_rows(given, after, 0.125, 0.5)


def in_tensors(given):
    """The same with the first matrix by itself and the other three in one tensor."""

    def place(value):
        if not isinstance(value, list):
            return value
        rest = torch.stack(value[1:])
        if value[0].stride(0) == 1:  # rows of a transpose
            rest = rest.mT.contiguous().mT
        return [value[0].as_strided(value[0].shape, rest.stride()[1:]), rest]

    found = {name: place(value) for name, value in given.items()}
    if given.get("beside") is not None:
        beside = given["beside"]
        found["beside"] = ScaledRows(place(list(beside.matrices)), beside.scale)
    return found


def check_in_tensors(update, device="cpu"):
    for number, mode in enumerate(FP32_MODES):
        given = with_rows(members(*mode), torch.bfloat16, number)
        given["projections"] = [projection.contiguous() for projection in given["projections"]]
        alone, together = cloned(given, device), in_tensors(cloned(given, device))
        for arguments in (alone, together):
            update(**arguments, lr=0.125, weight_decay=0.5, offset=11)
        for name in ("weights", "copies"):
            if given[name] is not None:
                first, rest = together[name]
                assert all(map(torch.equal, (first, *rest), alone[name])), (mode, name)


def test_matrices_in_one_tensor():
    check_in_tensors(low_rank_updates_)


def check_kernel_in_tensors(device="cpu"):
    check_in_tensors(kernel, device)


def narrowed(given, width):
    """The first columns of the factors."""
    given["projections"] = [projection[:, :width] for projection in given["projections"]]
    return given | {"update": given["update"][..., :width], "rank": min(given["rank"], width)}


@pytest.mark.parametrize(
    ("matrices", "scale"),
    [
        ([torch.ones(4, 6)], torch.ones(2, 4)),
        ([torch.ones(4, 6)] * 2, torch.ones(2, 6)),
        ([torch.ones(4, 6)] * 2, torch.ones(2, 4).double()),
        ([torch.ones(4, 6)] * 2, torch.ones(4, 2).t()),
        ([torch.ones(6, 4)] * 2, torch.ones(2, 4)),
        ([torch.ones(4, 6).double()] * 2, torch.ones(2, 4)),
        ([torch.ones(4, 6), torch.ones(4, 6).half()], torch.ones(2, 4)),
        ([torch.ones(4, 6), torch.ones(6, 4).t()], torch.ones(2, 4)),
        ([], torch.ones(2, 4)),
    ],
)
def test_refuses_rows_beside(matrices, scale):
    arguments = {
        "weights": [torch.ones(4, 6), torch.ones(4, 6)],
        "update": torch.ones(2, 4, 2),
        "projections": [torch.ones(6, 2)] * 2,
        "rank": 1,
        "column_scale": torch.ones(2, 2),
        "keys": None,
        "lr": 0.1,
        "weight_decay": 0,
    }
    low_rank_updates_(**arguments, beside=ScaledRows([torch.ones(4, 6)] * 2, torch.ones(2, 4)))
    with pytest.raises(ValueError):
        low_rank_updates_(**arguments, beside=ScaledRows(matrices, scale))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": []},
        {"weights": [torch.ones(4, 6).half()] * 2},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2},  # no keys
        {"weights": [torch.ones(4, 6), torch.ones(4, 6).bfloat16()]},
        {"weights": [torch.ones(4, 6), torch.ones(6, 4).t()]},
        {"weights": [torch.ones(4, 6)] * 3},
        {"weights": [torch.ones(24)] * 2},
        {"update": torch.ones(2, 3, 2)},
        {"update": torch.ones(1, 4, 2)},
        {"update": torch.ones(4, 2)},
        {"update": torch.ones(2, 4, 2).double()},
        {"update": torch.ones(2, 2, 4).mT},
        {"projections": [torch.ones(6, 3)] * 2},
        {"projections": [torch.ones(6, 2)]},
        {"projections": [torch.ones(6, 2), torch.ones(6, 2).half()]},
        {"projections": [torch.ones(6, 2), torch.ones(6, 4)[:, :2]]},
        {"projections": torch.ones(2, 5, 2)},
        {"projections": torch.ones(2, 6, 2).int()},
        {"projections": torch.ones(2, 2, 6).mT},
        {"copies": [torch.ones(4, 6)] * 2},
        {"copies": [torch.ones(4, 6).half()]},
        {"copies": [torch.ones(6, 4).half()] * 2},
        {"copies": [torch.ones(6, 4).half().t()] * 2},
        {"rank": 3},
        {"column_scale": torch.ones(2)},
        {"column_scale": torch.ones(2, 2).double()},
        {"column_scale": torch.ones(2, 2).t()},
        {"transposed": True},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2, "keys": torch.ones(2, 2)},
        {"weights": [torch.ones(4, 6).bfloat16()] * 2, "keys": torch.ones(1, 2).int()},
    ],
)
def test_refuses(change):
    arguments = {
        "weights": [torch.ones(4, 6), torch.ones(4, 6)],
        "update": torch.ones(2, 4, 2),
        "projections": [torch.ones(6, 2)] * 2,
        "rank": 1,
        "column_scale": torch.ones(2, 2),
        "keys": None,
    }
    low_rank_updates_(**arguments, lr=0.1, weight_decay=0)
    with pytest.raises(ValueError):
        low_rank_updates_(**(arguments | change), lr=0.1, weight_decay=0)


def kernel(
    weights,
    update,
    projections,
    lr,
    weight_decay,
    *,
    rank,
    column_scale,
    keys,
    transposed=False,
    **rest,
):
    factors = Factors(update, projections, rank, column_scale, transposed)
    factors.check(weights[0].shape[-2:], count_of(weights))
    low_rank_update.low_rank_updates_triton_(weights, factors, lr, weight_decay, keys, **rest)


def check_kernel(device="cpu"):
    for rows, n, width in SHAPES:
        weight, update, projection = inputs(rows, n, width, seed=rows)
        for columns in (projection, padded(projection)):
            expected = formula(weight, update, columns, 0.3, 0.1)
            first, second = weight.clone(), weight.to(device, copy=True)
            update_(first, update, columns, 0.3, 0.1)
            given = stack(second, padded(update.to(device)), columns.to(device))
            kernel(**given, lr=0.3, weight_decay=0.1)
            terms = formula(-weight.abs(), update.abs(), columns.abs(), 0.3, 0.1).abs()
            assert_as_accurate(second.cpu(), first, expected, terms)

        for dtype in (torch.bfloat16, torch.float16):
            left, right = update.to(dtype), projection.to(dtype)
            expected = formula(weight, left, right, 0.3, 0.1)
            terms = formula(-weight.abs(), left.abs(), right.abs(), 0.3, 0.1).abs()
            first, second = weight.clone(), weight.to(device, copy=True)
            copy = torch.empty_like(second, dtype=dtype)
            update_(first, left.float(), right.float(), 0.3, 0.1)
            kernel(
                **stack(second, update.to(device), right.to(device), copy=copy),
                lr=0.3,
                weight_decay=0.1,
            )
            # Products of 16-bit numbers are exact in fp32: as accurate as fp32 factors of these values.
            assert_as_accurate(second.cpu(), first, expected, terms)
            assert torch.equal(copy, second.to(dtype))

        weight, update, projection = exact_inputs(rows, n, width)
        for offset, key in zip(OFFSETS, (0, 1, (1 << 63) - 5, 0xFFFFFFFF, 1 << 62), strict=True):
            first, second = weight.clone(), weight.to(device, copy=True)
            update_(first, update, projection, 0.125, 0.5, key, offset)
            given = stack(second, update.to(device), projection.to(device), key)
            kernel(**given, lr=0.125, weight_decay=0.5, offset=offset)
            assert torch.equal(first, second.cpu()), (rows, n, width, key, offset)


def check_kernel_modes(device="cpu"):
    for mode in MODES:
        given = members(*mode)
        after = cloned(given, device)
        lr, decay = torch.tensor(0.125, device=device), torch.tensor(0.5, device=device)
        kernel(**after, lr=lr, weight_decay=0.5, offset=11)
        check_stack(mode, given, cloned(after), 0.125, 0.5)
    again = cloned(given, device)
    kernel(**again, lr=0.125, weight_decay=decay, offset=11)
    assert all(map(torch.equal, again["weights"], after["weights"]))


def check_kernel_rows(device="cpu"):
    for number, mode in enumerate(FP32_MODES):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for width in (37, 0):
                given = with_rows(narrowed(members(*mode), width), dtype, number)
                after = cloned(given, device)
                kernel(**after, lr=0.125, weight_decay=0.5, offset=11)
                check_rows(given, cloned(after), 0.125, 0.5)


def check_kernel_launches(device="cpu"):
    """One for all matrices, of a table that is made once."""
    launched, real = [], low_rank_update._low_rank_update_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return real[grid]

    low_rank_update._low_rank_update_kernel = Counted()
    after = cloned(members(torch.float32, False, torch.bfloat16, torch.bfloat16, True), device)
    device_table.cache_clear()
    for _ in range(3):
        kernel(**after, lr=0.125, weight_decay=0.5)
    assert len(launched) == 3
    assert device_table.cache_info()[:2] == (2, 1)  # found again, made
    low_rank_update._low_rank_update_kernel = real


def check_kernel_edges(device="cpu"):
    def given(weight, copy=None):
        update, projection = weight.float()[:, :0], weight.float().t()[:, :0]
        return stack(weight, update, projection, key=1, copy=copy)

    weight = torch.full((2, 3), float("nan"), device=device)
    copy = torch.zeros(2, 3, device=device).bfloat16()
    assert copy._version == weight._version == 0
    kernel(**given(weight, copy), lr=0.1, weight_decay=0.0)
    assert copy.isnan().all()
    # A graph that saved what is overwritten fails in its backward, as it does with torch's operations.
    assert copy._version == weight._version == 1
    weight = weight.bfloat16()
    kernel(**given(weight), lr=0.1, weight_decay=0.0)
    assert weight.isnan().all()
    kernel(
        **stack(weight[:0], weight.float()[:0], torch.ones(3, 3, device=device), 1),
        lr=0.1,
        weight_decay=0.0,
    )


@pytest.mark.parametrize(
    "check",
    [
        "check_kernel",
        "check_kernel_modes",
        "check_kernel_rows",
        "check_kernel_launches",
        "check_kernel_edges",
        "check_kernel_in_tensors",
    ],
)
def test_kernel(check):
    pytest.importorskip("triton")
    run_interpreted(__file__, check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "check",
    [
        check_kernel,
        check_kernel_modes,
        check_kernel_rows,
        check_kernel_launches,
        check_kernel_edges,
        check_kernel_in_tensors,
    ],
)
def test_kernel_on_gpu(check):
    check("cuda")
