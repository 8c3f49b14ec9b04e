"""Low-rank updates in float64, and stacks of all that the update takes."""

import torch

from hmt_deepspeed.kernels.low_rank_factors import ScaledRows
from hmt_deepspeed.kernels.low_rank_update import low_rank_updates_
from hmt_deepspeed.kernels.noise import key_halves

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
    """Of every second mode: either side, without copies and with, in fp32 and bf16."""
    for number in (0, 3, 5, 6):
        mode = FP32_MODES[number]
        given = with_rows(members(*mode), torch.bfloat16, number)
        given["projections"] = [projection.contiguous() for projection in given["projections"]]
        alone, together = cloned(given, device), in_tensors(cloned(given, device))
        for arguments in (alone, together):
            update(**arguments, lr=0.125, weight_decay=0.5, offset=11)
        for name in ("weights", "copies"):
            if given[name] is not None:
                first, rest = together[name]
                assert all(map(torch.equal, (first, *rest), alone[name])), (mode, name)


def narrowed(given, width):
    """The first columns of the factors."""
    given["projections"] = [projection[:, :width] for projection in given["projections"]]
    return given | {"update": given["update"][..., :width], "rank": min(given["rank"], width)}
