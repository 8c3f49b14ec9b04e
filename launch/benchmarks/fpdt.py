"""FPDT: device bytes of a layer and of a model, and time against full recompute and ALST."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alst import TiledLlama
from benchmarks.counting import Uncomputed, counted
from benchmarks.reduction_peak import reduction_peak
from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, Setting, Shape, llama
from benchmarks.timing import Sample, column, interleave, median_of, now, paired_spread
from hmt_deepspeed.activations.codecs import SwapHost
from hmt_deepspeed.fpdt.inputs import AttentionHolder, Holder
from hmt_deepspeed.fpdt.install import install
from hmt_deepspeed.fpdt.installation import Installation
from hmt_deepspeed.fpdt.visibility import Visibility
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.transfer import TransferEngine

NARROW = Shape(64, 1, 1, vocabulary=64, micro_batch=1)
WIDE = Shape(256, 2, 4, vocabulary=8192, micro_batch=1)
CHUNKS = (2, 4, 8, 16, 32)
HOLDING = "fpdt, attention's outputs on the host"
UNCOMPUTED = (
    "products and attention make their outputs and do not compute them, which changes no storage"
)


@contextmanager
def _chunked(
    model: nn.Module,
    chunk_size: int,
    holders: Mapping[nn.Module, Holder] | None = None,
    attention: Mapping[nn.Module, AttentionHolder] | None = None,
) -> Iterator[Installation]:
    installation = install(model, chunk_size, holders=holders, attention_holders=attention)
    try:
        yield installation
    finally:
        installation.remove()


def layer_workspace(model: Any, length: int, chunk_size: int, dtype: torch.dtype) -> int:
    """Device bytes of a layer's forward and backward beyond its output and its input's gradient, which
    are as long as the sequence whoever computes them, and beyond the gradients of its weights."""
    layer = model.model.layers[0]
    x = torch.randn(1, length, model.config.hidden_size, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    rotary = model.model.rotary_emb(x, torch.arange(length)[None])

    def run() -> None:
        seen = Visibility.causal(length)
        layer(x, attention_mask=seen, position_embeddings=rotary).backward(grad)
        x.grad = None
        model.zero_grad()

    with _chunked(model, chunk_size):
        peak = counted(run)
    return peak - 2 * x.nbytes - sum(p.nbytes for p in layer.parameters())


def layer_memory(setting: Setting) -> CaseResult:
    lengths = (256, 512) if setting.toy else (16384, 32768, 65536, 131072)
    chunks = (2, 4, 16) if setting.toy else CHUNKS  # 32 take four times as long as 16
    model: Any = llama(NARROW).to(setting.torch_dtype)
    shortest = lengths[0]
    fixed = shortest // 8
    workspace = partial(layer_workspace, model, dtype=setting.torch_dtype)
    with Uncomputed():
        by_chunks = {n: workspace(shortest, shortest // n) for n in chunks}
        by_length = {length: workspace(length, fixed) for length in lengths}
    computed = workspace(shortest, fixed)
    result = CaseResult(
        {"model": asdict(NARROW), "lengths": lengths, "chunk_size": fixed},
        samples={"bytes_by_chunks": by_chunks, "bytes_by_length": by_length, "computed": computed},
    )
    most = chunks[-1]
    # In two chunks nothing is fetched ahead, so there is less to fall from.
    result.measurements += [
        Measurement(
            f"one layer, {shortest} tokens: device bytes in {fewer} chunks / in {most} chunks, over "
            f"{most // fewer}",
            by_chunks[fewer] / by_chunks[most] / (most // fewer),
            "share",
            ">=",
            0.8,
            note="beyond the layer's output, its input's gradient and its weights' gradients; 1 is 1/chunks; "
            + UNCOMPUTED,
        )
        for fewer in chunks[:2]
    ]
    result.measurements += [
        Measurement(
            f"one layer, chunks of {fixed}: device bytes at {lengths[-1]} tokens / at {lengths[0]}",
            by_length[lengths[-1]] / by_length[lengths[0]],
            "share",
            "<=",
            1.05,
            note="a fixed number of chunks is on the device",
        ),
        _check("one layer", shortest, by_length[shortest], computed, "computed"),
    ]
    return result


def _check(what: str, tokens: int, counted_so: int, counted_really: int, how: str) -> Measurement:
    """That the shortcut by which a case counts changes nothing."""
    label = f"{what}, {tokens} tokens: device bytes as counted here / {how}"
    return Measurement(label, counted_so / counted_really, "share", "=", 1.0)


# -- a model ----------------------------------------------------------------------------------------


def _step(model: Any, rows: Tensor) -> None:
    model(input_ids=rows, labels=rows).loss.backward()
    model.zero_grad()


@contextmanager
def _swap(device: str) -> Iterator[SwapHost]:
    engine = TransferEngine(device, 2**24)
    store = GrowingHostStore(engine, 2**34, "this case's limit", slab_bytes=2**24)
    try:
        yield SwapHost(store)
    finally:
        store.close()
        engine.close()


@contextmanager
def _swapping(model: Any) -> Iterator[dict[nn.Module, Holder]]:
    """Holders that swap the layers' inputs and the head's to host memory."""
    with _swap("cpu") as codec:
        yield dict.fromkeys([*model.model.layers, model.lm_head], lambda: codec.encode)


@contextmanager
def _swapping_attention(model: Any, device: str) -> Iterator[dict[nn.Module, AttentionHolder]]:
    """Holders that swap attention's outputs, as ``"attention_output": "swap_host"`` does."""
    from hmt_deepspeed.zero.activations.chunked import SavedAttention

    with _swap(device) as codec:

        def hold(out: Tensor, log_sum_exp: Tensor) -> SavedAttention:
            return SavedAttention(codec.encode(out), codec.encode(log_sum_exp))

        yield dict.fromkeys(model.model.layers, lambda: hold)


def _model_bytes(shape: Shape, chunk_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Peaks of a step in chunks: with layers' inputs on the device, and with them swapped."""
    model, rows = llama(shape).to(dtype), Batches(shape, "cpu").draw()
    step = partial(_step, model, rows)
    with _chunked(model, chunk_size):
        found = {"kept": counted(step)}
    with _swapping(model) as holders, _chunked(model, chunk_size, holders):
        found["swapped"] = counted(step)
    return found


def _plain_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Of the model as it is, sdpa without checkpointing."""
    model, rows = llama(shape).to(dtype), Batches(shape, "cpu").draw()
    return counted(partial(_step, model, rows))


def _line(points: Mapping[int, int], tokens: int) -> float:
    """Bytes at ``tokens`` on the line through the first two points."""
    (x0, y0), (x1, y1) = list(points.items())[:2]
    return y0 + (y1 - y0) / (x1 - x0) * (tokens - x0)


def model_memory(setting: Setting) -> CaseResult:
    lengths = (256, 512) if setting.toy else (65536, 131072)
    base = replace(TOY if setting.toy else WIDE, micro_batch=1)
    short, shape = (replace(base, sequence=length) for length in lengths)
    counted_at = (64, 128, 256) if setting.toy else (1024, 2048, 4096)
    small, dtype = replace(base, sequence=counted_at[1]), setting.torch_dtype
    chunk_size = shape.sequence // 16
    points = {n: _plain_bytes(replace(base, sequence=n), dtype) for n in counted_at}
    plain = _line(points, shape.sequence)
    with Uncomputed():
        found = {s.sequence: _model_bytes(s, chunk_size, dtype) for s in (short, shape)}
        uncomputed = _model_bytes(small, small.sequence // 16, dtype)
    computed = _model_bytes(small, small.sequence // 16, dtype)
    result = CaseResult(
        {"model": asdict(shape), "chunk_size": chunk_size},
        samples={"plain_bytes": points, "fpdt_bytes": found},
    )
    ours, at_half = found[shape.sequence], found[short.sequence]
    label = f"{shape.label}, {shape.sequence} tokens"
    head_size = shape.hidden // shape.heads
    per_token = (ours["swapped"] - at_half["swapped"]) / (shape.sequence - short.sequence)
    result.measurements += [
        Measurement(f"{label}: device bytes of a step, plain model", plain, "bytes"),
        Measurement(
            f"{label}: device bytes of a step, FPDT, chunks of {chunk_size}", ours["kept"], "bytes"
        ),
        Measurement(
            f"{label}: device bytes of a step, FPDT, inputs swapped", ours["swapped"], "bytes"
        ),
        Measurement(
            f"{label}: device bytes of a step, plain / FPDT",
            plain / ours["kept"],
            "x",
            ">=",
            8.0,
            note="weights aside; sdpa without checkpointing, whose bytes at fewer tokens are on a line; "
            + UNCOMPUTED,
        ),
        Measurement(f"{label}: the same, inputs swapped", plain / ours["swapped"], "x", ">=", 8.0),
        Measurement(
            f"{label}: device bytes that a further token takes, inputs swapped, over a [1, hidden] tensor",
            per_token / (shape.hidden * dtype.itemsize),
            "x",
            note="as long as the sequence are the gradient that enters a layer and the one that leaves it, cos "
            f"and sin ({2 * head_size} elements a token), and token numbers",
        ),
        _check("the model", small.sequence, uncomputed["kept"], computed["kept"], "computed"),
        Measurement(
            f"the plain model, {counted_at[2]} tokens: device bytes on that line / counted",
            _line(points, counted_at[2]) / points[counted_at[2]],
            "share",
            note=f"the line through {counted_at[0]} and {counted_at[1]} tokens",
        ),
    ]
    return result


# -- time -------------------------------------------------------------------------------------------


def _timed(run: Callable[[], object], installation: Installation | None = None) -> Sample:
    """Seconds, seconds of processor time, and seconds that the host waits for chunks."""
    engine = None if installation is None else installation.memory.engine
    waited = 0.0 if engine is None else engine.counters.seconds_waited
    begin, busy = now(), time.process_time()
    run()
    sample = {"seconds": now() - begin, "processor": time.process_time() - busy, "waited": 0.0}
    if installation is not None and installation.memory.engine is not None:
        sample["waited"] = installation.memory.engine.counters.seconds_waited - waited
    return sample


def _ratios(
    label: str, ours: list[Sample], theirs: list[Sample], target: float | None = None
) -> list[Measurement]:
    return [
        Measurement(
            label,
            median_of(ours) / median_of(theirs),
            "x",
            "" if target is None else "<=",
            target,
            spread=paired_spread(column(ours), column(theirs)),
        ),
        Measurement(
            f"{label}, processor time",
            median_of(ours, "processor") / median_of(theirs, "processor"),
            "x",
            spread=paired_spread(column(ours, "processor"), column(theirs, "processor")),
            note="of all threads: what other programs on the machine take is not in it",
        ),
    ]


def step_time(setting: Setting) -> CaseResult:
    """Against sdpa with every layer recomputed; run on a machine that does nothing else."""
    shape = replace(TOY if setting.toy else WIDE, sequence=256 if setting.toy else 16384)
    shape = replace(shape, micro_batch=1)
    plain, chunked = (llama(shape).to(setting.device, setting.torch_dtype) for _ in range(2))
    plain.gradient_checkpointing_enable()  # type: ignore[operator]
    plain.train()
    rows = Batches(shape, setting.device).draw()
    with _chunked(chunked, shape.sequence // 8) as installation:
        contenders = {
            "sdpa, recompute": lambda: _timed(lambda: _step(plain, rows)),
            "fpdt": lambda: _timed(lambda: _step(chunked, rows), installation),
        }
        samples = interleave(contenders, setting.rounds_or(5), warmup=1)
    ours, theirs = samples["fpdt"], samples["sdpa, recompute"]
    result = CaseResult(
        {"model": asdict(shape), "chunk_size": shape.sequence // 8}, samples=dict(samples)
    )
    label = f"{shape.label}, {shape.sequence} tokens"
    result.measurements += [
        *_ratios(f"{label}: step time, FPDT / sdpa with full recompute", ours, theirs, 1.15),
        Measurement(
            f"{label}: share of the step that the host waits for chunks",
            median_of(ours, "waited") / median_of(ours),
            "share",
            note="on a CPU every copy is waited for; on CUDA what the device's stream waits is not seen here",
        ),
    ]
    return result


def alst(setting: Setting) -> CaseResult:
    """DeepSpeed's pieces for long sequences on the same model in the same run."""
    shape = replace(TOY if setting.toy else WIDE, sequence=256 if setting.toy else 16384)
    shape, dtype = replace(shape, micro_batch=1), setting.torch_dtype
    theirs, ours, holding = (llama(shape).to(setting.device, dtype) for _ in range(3))
    chunk_size, pieces = shape.sequence // 16, 64  # a piece is a quarter of a chunk
    tiled, rows = TiledLlama(theirs, pieces), Batches(shape, setting.device).draw()

    def tiled_step() -> None:
        tiled.loss(rows).backward()
        theirs.zero_grad()

    with (
        _chunked(ours, chunk_size) as installation,
        _swapping_attention(holding, setting.device) as holders,
        _chunked(holding, chunk_size, attention=holders) as holding_installation,
    ):
        own_step, holding_step = partial(_step, ours, rows), partial(_step, holding, rows)
        with torch.no_grad():
            losses = tuple(float(m(input_ids=rows, labels=rows).loss) for m in (theirs, ours))
        nbytes = {
            "alst": counted(tiled_step),
            "fpdt": counted(own_step),
            HOLDING: counted(holding_step),
        }
        contenders = {
            "alst": lambda: _timed(tiled_step),
            "fpdt": lambda: _timed(own_step, installation),
            HOLDING: lambda: _timed(holding_step, holding_installation),
        }
        samples = interleave(contenders, setting.rounds_or(5), warmup=1)
    result = CaseResult(
        {"model": asdict(shape), "chunk_size": chunk_size, "tiles": pieces},
        samples={**samples, "bytes": nbytes, "losses": losses},
    )
    label = f"{shape.label}, {shape.sequence} tokens"
    result.measurements += [
        Measurement(
            f"{label}: device bytes of a step, ALST / FPDT",
            nbytes["alst"] / nbytes["fpdt"],
            "x",
            ">=",
            1.0,
            note="weights aside, layers' inputs on the device; ALST: sdpa (Ulysses at one rank), checkpointed "
            f"layers, TiledMLP and TiledFusedLogitsLoss in {pieces} tiles; FPDT in 16 chunks of four pieces",
        ),
        Measurement(
            f"{label}: device bytes of a step, ALST / FPDT, attention's outputs on the host",
            nbytes["alst"] / nbytes[HOLDING],
            "x",
            ">=",
            1.0,
        ),
        *_ratios(f"{label}: step time, FPDT / ALST", samples["fpdt"], samples["alst"]),
        *_ratios(
            f"{label}: step time, FPDT with attention's outputs on the host / ALST",
            samples[HOLDING],
            samples["alst"],
            1.0,
        ),
    ]
    return result


SUITE = "fpdt"
CASES: dict[str, Callable[[Setting], CaseResult]] = {
    "layer_memory": layer_memory,
    "model_memory": model_memory,
    "step_time": step_time,
    "alst": alst,
    "reduction_peak": reduction_peak,
}
USES_ENGINE: set[str] = set()
