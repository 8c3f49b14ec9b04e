"""Triton kernels beside eager PyTorch on a GPU: time, launches, bandwidth and error.

Every call finds a cold L2. The eager contenders are the kernel's torch twin and, where that goes by row chunks
to save memory, the same operations on whole matrices. On a CPU (``--toy``) the public functions pick the twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import kernels_8bit
from benchmarks.kernel_problem import (
    KEY,
    WEIGHT_DECAY,
    Problem,
    Tensors,
    contenders,
    difference,
)
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import DTYPES, LEARNING_RATE, Setting
from benchmarks.timing import Samples, column, interleave, median_of, now, paired_spread, timed_cold
from hmt_deepspeed.kernels import (
    factored_moment_update,
    int8_state,
    low_rank_projection,
    low_rank_update,
    moment_update,
)
from hmt_deepspeed.kernels.low_rank_factors import Factors, as_factors
from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round

SUITE = "kernels"
NEEDS_GPU = True
USES_ENGINE: set[str] = set()
SHAPES = ((4096, 11008, 128), (8192, 8192, 256))  # rows, n, rank
TOY_SHAPES = ((48, 80, 8),)
ROUNDS, TOY_ROUNDS, WARMUP = 50, 3, 3
FLUSH_BYTES = 2**30  # beyond any L2, and a fill long enough for a fused call to be queued behind it
COPY_SHARE_TARGET = 0.70
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
COPY = "copy_"
BYTES_NOTE = (
    "bytes: of an update the weight read and written, both factors read, a 16-bit copy written; of a codec value, "
    "codes and scales"
)
LAUNCHES_NOTE = (
    "kernels, copies and fills in torch.profiler's trace (on a CPU operators); target: fewer than the "
    "eager contender with fewest"
)
ERROR_NOTE = "against float64, as a share of the largest entry; the eager ones' are in the JSON"


# -- the ops ----------------------------------------------------------------------------------------


def _updates(rows: int, n: int, rank: int, setting: Setting) -> Iterator[Problem]:
    """Of bf16 weights, of fp32 weights, and of fp32 masters; U is fp32, as Adam returns it."""
    update = torch.randn(rows, rank, device=setting.device)
    projection = torch.randn(n, rank, device=setting.device).to(setting.torch_dtype) / n**0.5
    plain = [(dtype, d, False) for dtype in ("bf16", "fp32") for d in (0.0, WEIGHT_DECAY)]
    for dtype, decay, copies in [*plain, ("fp32", WEIGHT_DECAY, True)]:
        weight = (0.02 * torch.randn(rows, n, device=setting.device)).to(DTYPES[dtype])
        copy = torch.empty_like(weight, dtype=torch.bfloat16) if copies else None
        values = {"lr": LEARNING_RATE, "weight_decay": decay, "copy": copy}
        values["scale"] = torch.ones(1, 2, device=setting.device)
        values["keys"] = low_rank_update.new_keys(KEY, setting.device)
        moved = [weight, weight, update, projection] + ([] if copy is None else [copy])
        kind = "bf16 weight, stochastic rounding" if dtype == "bf16" else "fp32 weight"
        yield Problem(
            f"{rows}x{n}, r = {rank}, {kind}{', bf16 copy' if copies else ''}, decay {decay}",
            (weight, update, projection),
            contenders(_fused_update_, _twin_update_, _whole_update_, **values),
            partial(_update_error, decay),
            sum(tensor.nbytes for tensor in moved),
        )


def _fused_update_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    copy: Tensor | None,
    scale: Tensor,
    keys: Tensor,
) -> None:
    low_rank_update.low_rank_updates_(
        [weight],
        update[None],
        [projection],
        lr,
        weight_decay,
        rank=update.shape[1],
        column_scale=scale,
        keys=keys,
        copies=None if copy is None else [copy],
    )


def _twin_update_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    copy: Tensor | None,
    scale: Tensor,
    keys: Tensor,
) -> None:
    factors = Factors(update[None], [projection], update.shape[1], scale)
    copies = None if copy is None else [copy]
    low_rank_update.low_rank_updates_reference_(
        [weight], factors, lr, weight_decay, keys, copies=copies
    )


def _whole_update_(
    weight: Tensor,
    update: Tensor,
    projection: Tensor,
    lr: float,
    weight_decay: float,
    copy: Tensor | None,
    **_: Tensor,
) -> None:
    """The twin without its chunks and scales, as fast as eager gets: on a GPU a kernel of its own rounds."""
    left, right = as_factors(update, projection)
    value = weight.float()  # of an fp32 weight its own memory
    low_rank_update.add_product_(value, left, right.t(), lr, 1 - lr * weight_decay)
    if weight.dtype == torch.bfloat16:
        stochastic_round(value, weight, KEY)
    if copy is not None:
        copy.copy_(value)


def _update_error(decay: float, _: None, after: Tensors, before: Tensors) -> float:
    weight, update, projection = (tensor.double() for tensor in before)
    exact = (1 - LEARNING_RATE * decay) * weight - LEARNING_RATE * (update @ projection.t())
    return difference(after[0], exact)


def _projections(rows: int, n: int, rank: int, setting: Setting) -> Iterator[Problem]:
    gradient = torch.randn(rows, n, device=setting.device).to(setting.torch_dtype)
    projection = torch.randn(n, rank, device=setting.device).to(setting.torch_dtype)
    eager = [low_rank_projection.project_reference, lambda g, p: g.float() @ p.float()]
    if setting.dtype == "bf16":  # not the same op: rounded before it is widened
        eager.append(lambda g, p: (g @ p).float())
    yield Problem(
        f"{rows}x{n}, r = {rank}, {setting.dtype} gradient",
        (gradient, projection),
        contenders(low_rank_projection.project, *eager),
        lambda result, _, before: difference(result, before[0].double() @ before[1].double()),
    )


def _stack(rows: int, rank: int, setting: Setting) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Gradient ``[A | S]`` with a probe for four directions, a first moment, and Adam's constants: a stack of one."""
    device = setting.device
    gradient = torch.randn(1, rows, rank + rank // 4, device=device)
    names = ("first_evidence", "factor", "residual_scale")
    scales = {name: torch.full((1,), 0.9, device=device) for name in names}
    return gradient, torch.randn(1, rows, rank, device=device), {**ADAM, **scales}


def _moment_updates(rows: int, _: int, rank: int, setting: Setting) -> Iterator[Problem]:
    gradient, mean, adam = _stack(rows, rank, setting)
    square, evidence = mean.square() + 0.1, torch.full((1, rank), 0.5, device=setting.device)
    fused, twin = moment_update.moment_update_, moment_update.moment_update_reference_
    inputs = (gradient, mean, square, evidence)
    yield Problem(f"{rows}x{rank}", inputs, contenders(fused, twin, **adam), _moment_error)


def _moment_error(_: Tensor, after: Tensors, before: Tensors) -> float:
    gradient, mean, square, evidence = (tensor.double() for tensor in before)
    scaled = 0.9 * gradient
    inside = scaled[..., : mean.shape[2]]
    square = ADAM["beta2"] * square + (1 - ADAM["beta2"]) * inside.square()
    return _update_errors(after, scaled, mean, (square / evidence[:, None]).sqrt(), square)


def _update_errors(
    after: Tensors, gradient: Tensor, mean: Tensor, root: Tensor, second: Tensor
) -> float:
    """The largest of update, first and second moment, given the scaled gradient and the second's root."""
    inside, outside = gradient.split((mean.shape[2], gradient.shape[2] - mean.shape[2]), dim=2)
    mean = mean + (1 - ADAM["beta1"]) * (inside - mean)
    direction = mean / 0.9 / (root + ADAM["eps"])
    norms = [part.norm(dim=2, keepdim=True) for part in (direction, inside, outside)]
    residual = 0.9 * norms[0] / torch.maximum(norms[1], norms[2]) * outside
    exact = (torch.cat((direction, residual), dim=2), mean, second)
    return max(map(difference, after[:3], exact))


def _factored_updates(rows: int, _: int, rank: int, setting: Setting) -> Iterator[Problem]:
    gradient, mean, adam = _stack(rows, rank, setting)
    row_means, roots = (torch.rand(1, size, device=setting.device) + 0.1 for size in (rows, rank))
    fused = factored_moment_update.factored_moment_update_
    twin = factored_moment_update.factored_moment_update_reference_
    inputs = (gradient, mean, row_means, roots)
    yield Problem(f"{rows}x{rank}", inputs, contenders(fused, twin, **adam), _factored_error)


def _factored_error(_: Tensor, after: Tensors, before: Tensors) -> float:
    gradient, mean, rows, roots = (tensor.double() for tensor in before)
    scaled = 0.9 * gradient
    squares = scaled[..., : mean.shape[2]].square().mean(dim=2)
    rows = ADAM["beta2"] * rows + (1 - ADAM["beta2"]) * squares
    return _update_errors(after, scaled, mean, rows.sqrt()[..., None] * roots[:, None], rows)


def _int8_states(rows: int, _: int, rank: int, setting: Setting) -> Iterator[Problem]:
    encode, encode_twin = int8_state.encode_states, int8_state.encode_states_reference
    decode, decode_twin = int8_state.decode_states, int8_state.decode_states_reference
    for signed, name in ((True, "first"), (False, "second")):
        value = torch.randn(1, rows * rank, device=setting.device).pow(1 if signed else 2)
        encoded = tuple(part[None] for part in int8_state.encode_state(value, signed, KEY))
        yield Problem(
            f"encode {rows}x{rank}, {name} moment",
            (value, *encoded),
            contenders(partial(_encoded, encode), partial(_encoded, encode_twin), signed=signed),
            partial(_encode_error, signed),
        )
        yield Problem(
            f"decode {rows}x{rank}, {name} moment",
            encoded,
            contenders(decode, decode_twin, signed=signed, shape=value.shape),
            partial(_decode_error, signed),
        )


def _encoded(
    encode: Callable[..., None], value: Tensor, codes: Tensor, scales: Tensor, *, signed: bool
) -> Tensors:
    encode(value, signed, KEY, codes, scales)
    return codes, scales


def _decoded(signed: bool, codes: Tensor, scales: Tensor) -> Tensor:
    scale = scales.double().view(-1).repeat_interleave(int8_state.BLOCK)[: codes.numel()]
    return int8_state.levels(signed, codes.device).double()[codes.int().view(-1)] * scale


def _encode_error(signed: bool, encoded: Tensors, _: Tensors, before: Tensors) -> float:
    return difference(_decoded(signed, *encoded), before[0].double().flatten())


def _decode_error(signed: bool, value: Tensor, _: Tensors, before: Tensors) -> float:
    return difference(value.flatten(), _decoded(signed, *before))


# -- what is measured of each -----------------------------------------------------------------------


def _num_launches(call: Callable[[], object], device: str) -> int:
    """Kernels, copies and fills that one call puts on a GPU; on a CPU the operators that it calls."""
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as trace:
        call()
        now()
    if device == "cuda":
        return sum(event.device_type == DeviceType.CUDA for event in trace.events())
    return sum(event.cpu_parent is None for event in trace.events())


def _ratio(slow: Samples, fast: Samples, scale: float = 1.0) -> dict[str, Any]:
    low, high = paired_spread(column(slow), column(fast))
    value = scale * median_of(slow) / median_of(fast)
    return {"value": value, "spread": (scale * low, scale * high)}


def _measure(problem: Problem, setting: Setting, flush: Tensor | None, result: CaseResult) -> None:
    label, source, errors = problem.label, problem.inputs[0], {}
    for name, run in problem.contenders.items():
        own = tuple(tensor.clone() for tensor in problem.inputs)
        errors[name] = problem.error(run(*own), own, problem.inputs)
    calls = {name: partial(run, *problem.inputs) for name, run in problem.contenders.items()}
    if problem.num_bytes is not None:
        calls[COPY] = partial(torch.empty_like(source).copy_, source)
    turns = {name: partial(timed_cold, call, flush) for name, call in calls.items()}
    samples = interleave(turns, setting.rounds_or(TOY_ROUNDS if setting.toy else ROUNDS), WARMUP)
    launches = {n: _num_launches(call, setting.device) for n, call in calls.items() if n != COPY}
    result.samples[label] = {**samples, "launches": launches, "errors": errors}

    lines, (fused, *eager) = result.measurements, problem.contenders
    if problem.num_bytes is not None:
        ratio = _ratio(samples[COPY], samples[fused], problem.num_bytes / (2 * source.nbytes))
        text = f"{label}: bandwidth, fused / copy_ of the first input"
        goal: dict[str, Any] = {"relation": ">=", "target": COPY_SHARE_TARGET}
        lines.append(Measurement(text, unit="share", note=BYTES_NOTE, **goal, **ratio))
    for name in eager:
        ratio = _ratio(samples[name], samples[fused])
        lines.append(Measurement(f"{label}: time, {name} / fused", unit="x", **ratio))
    if all(launches.values()):  # else the profiler was not let at the device
        found, fewest = float(launches[fused]), min(launches[name] for name in eager)
        goal = {"relation": "<=", "target": fewest - 1, "note": LAUNCHES_NOTE}
        lines.append(Measurement(f"{label}: launches of one call", found, "launches", **goal))
    lines.append(Measurement(f"{label}: largest error", errors[fused], "error", note=ERROR_NOTE))


def _case(
    problems: Callable[[int, int, int, Setting], Iterator[Problem]], setting: Setting
) -> Iterator[CaseResult]:
    """What there is so far, after each problem."""
    torch.manual_seed(0)
    shapes = TOY_SHAPES if setting.toy else SHAPES
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda") if setting.device == "cuda" else None
    result = CaseResult({"rows, n, rank": shapes, "flush_bytes": FLUSH_BYTES})
    for shape in shapes:
        for problem in problems(*shape, setting):
            _measure(problem, setting, flush, result)
            yield result


CASES: dict[str, Callable[[Setting], Iterator[CaseResult]]] = {
    "low_rank_update": partial(_case, _updates),
    "low_rank_projection": partial(_case, _projections),
    "moment_update": partial(_case, _moment_updates),
    "factored_moment_update": partial(_case, _factored_updates),
    "int8_state": partial(_case, _int8_states),
    "int8_update": partial(_case, kernels_8bit.weight_updates),
    "activation_codecs": partial(_case, kernels_8bit.activation_codecs),
    "dequant_matmul": partial(_case, kernels_8bit.products),
}
