"""The papers' figures from this planner, with the paper's number beside ours: ``launch/bench.py papers``.

Calibrated is only what a paper measured of its machine; everything else is predicted. A row that differs
says by how much, and why as far as that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.flops import attention_flops
from hmt_deepspeed.planner.model.shapes import ModelShape, num_parameters, plain_shape
from hmt_deepspeed.planner.model.workload import build_workload
from hmt_deepspeed.planner.run.memory import (
    MemoryBudget,
    OptimizerMode,
    Sharding,
    activation_bytes,
    choices_of,
    communication_volume,
    model_states,
)

__all__ = ["ADAMW", "Row", "fpdt_rows", "playbook_rows", "table", "zero_rows"]

ADAMW = OptimizerMode(method="adamw")
GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Row:
    """One figure of a paper and ours.

    Attributes:
        paper, ours: numbers, or True and whether we find the same for a statement without one.
        note: what was assumed; why ours differs.
    """

    source: str
    quantity: str
    paper: float | bool
    ours: float | bool
    unit: str = ""
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Ours over the paper's, less 1; None for a statement."""
        if isinstance(self.paper, bool) or isinstance(self.ours, bool):
            return None
        return self.ours / self.paper - 1

    def cells(self) -> tuple[str, ...]:
        """As the table prints it."""
        if self.difference is None:
            said = {True: "yes", False: "no"}
            return (self.source, self.quantity, "yes", said[bool(self.ours)], "", self.note)
        return (
            self.source,
            self.quantity,
            f"{self.paper:.4g} {self.unit}".strip(),
            f"{self.ours:.4g} {self.unit}".strip(),
            f"{self.difference:+.1%}",
            self.note,
        )

    def as_json(self) -> dict[str, Any]:
        """The row with its relative difference."""
        return {**asdict(self), "difference": self.difference}


def table(rows: list[Row]) -> str:
    """Markdown."""
    head = ("source", "quantity", "paper", "ours", "difference", "remark")
    lines = [head, tuple("---" for _ in head), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- ZeRO (1910.02054) ----------------------------------------------------------------------------------


def zero_rows() -> Iterator[Row]:
    """Model states of 7.5B parameters on 64 ranks, P_a at 100B, communication volumes."""
    source = "ZeRO"
    # the paper has Psi = 7.5e9 exactly; this GPT-3-like shape has 0.1 % more
    shape = plain_shape(layers=46, hidden=3680, heads=46, vocab=3300)
    psi = num_parameters(shape)
    for stage, paper in ((0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)):
        ours = model_states(shape, ADAMW, Sharding(stage, 64)).total / psi * 7.5e9
        yield Row(source, f"states of 7.5B on 64 ranks, stage {stage}", paper, ours / GB, "GB")

    # section 6.1: 100B, batch 32, sequence 1024, 16-way model parallelism, a checkpoint per layer
    large = plain_shape(layers=125, hidden=8192, heads=64, vocab=51200, dropout=0.0)
    workload = build_workload(large, micro_batch=32, seq_length=1024)
    inputs: dict[Component, Choice] = dict.fromkeys(PAPER_POLICY, "recompute")
    inputs |= {"layer_input": "keep", "lm_head": "keep"}
    inputs |= {"layernorm": "keep"}
    choices = {
        site: choice
        for site, choice in choices_of(workload, inputs).items()
        if site.name == "layer_input"
    }
    for parts, paper in ((1, 33.0), (16, 2.0)):
        kept = activation_bytes(replace(workload, shared_bytes=0), choices, partition=parts).device
        what = "checkpoints of 100B at batch 32" + (", P_a over 16" if parts > 1 else "")
        note = "125 layers x 8192 x 32 x 1024 tokens x 2 bytes is twice the paper's figure, which fits batch 16"
        yield Row(source, what, paper, kept / GB, "GB", note)
    yield Row(
        source,
        "reduction of checkpoints by P_a over 16",
        33 / 2,
        16.0,
        "x",
        "the paper rounds 33 / 16 to 2",
    )

    for stage, paper in ((2, 2.0), (3, 3.0)):
        volume = communication_volume(shape, Sharding(stage, 64)) / psi
        yield Row(source, f"elements sent per step, stage {stage}", paper, volume, "Psi")


# -- the playbook ---------------------------------------------------------------------------------------


def playbook_rows() -> Iterator[Row]:
    """Model states by size; what selective recompute of attention spares and costs on GPT-3."""
    source = "Playbook"
    shape = plain_shape(layers=32, hidden=4096, heads=32, vocab=32000)
    psi = num_parameters(shape)
    for billions, paper, accumulated in (
        (1, 16, 20),
        (7, 112, 140),
        (70, 1120, 1400),
        (405, 6480, 8100),
    ):
        plain = model_states(shape, ADAMW).total / psi * billions
        yield Row(source, f"states of {billions}B, bf16", paper, plain, "GB")
        # a second, fp32 copy of the gradients: 4 bytes more
        yield Row(
            source,
            f"states of {billions}B, fp32 gradients too",
            accumulated,
            plain + 4 * billions,
            "GB",
        )

    gpt3 = plain_shape(layers=96, hidden=12288, heads=96, vocab=51200)
    eager = build_workload(gpt3, micro_batch=1, seq_length=2048, attention="eager")
    fused = build_workload(gpt3, micro_batch=1, seq_length=2048, attention="fused")
    spared = 1 - sum(x.count * x.saved_bytes for x in fused.layers) / sum(
        x.count * x.saved_bytes for x in eager.layers
    )
    yield Row(source, "GPT-3, activations spared without attention scores", 0.70, spared)
    again = 96 * attention_flops(gpt3, 1, 2048, "eager")[0] / eager.model_flops
    note = (
        "4bs^2h over 72bsh^2(1 + s/6h); 2.7 % is s/6h, attention of forward and backward together"
    )
    yield Row(source, "GPT-3, FLOPs of computing them again", 0.027, again, note=note)


# -- FPDT -----------------------------------------------------------------------------------------------

_FPDT: tuple[
    tuple[str, int, int, int, dict[str, Any]], ...
] = (  # model, GPUs, tokens of Ulysses and of FPDT
    ("GPT 2.7B", 2, 256, 2048, {"layers": 32, "hidden": 2560, "heads": 32, "vocab": 50257}),
    ("GPT 6.7B", 4, 256, 2048, {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50257}),
    (
        "Llama 8B",
        4,
        512,
        2048,
        {
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "intermediate": 14336,
            "vocab": 50257,
            "gated": True,
            "tied": False,
        },
    ),
    ("GPT 13B", 8, 512, 2048, {"layers": 40, "hidden": 5120, "heads": 40, "vocab": 50257}),
    ("GPT 30B", 16, 1024, 2048, {"layers": 48, "hidden": 7168, "heads": 56, "vocab": 50257}),
    (
        "Llama 70B",
        32,
        1024,
        4096,
        {
            "layers": 80,
            "hidden": 8192,
            "heads": 64,
            "kv_heads": 8,
            "intermediate": 28672,
            "vocab": 50257,
            "gated": True,
            "tied": False,
        },
    ),
)
_CHUNK = 65536  # tokens of the whole sequence, the paper's choice
_STREAM = 5  # bf16 tensors [S / ranks, hidden] alive beside a chunk: input, output, two gradients, part of dQ
# Not in our notes: four GPUs and 1 TB of host memory in a node, GPT-2's vocabulary for all models.
_GPUS_PER_NODE, _HOST = 4, 10**12


def fpdt_rows() -> Iterator[Row]:
    """Longest sequences of Ulysses and FPDT on A100 80 GB, in powers of two, and the chunk's saving."""
    for name, gpus, ulysses, fpdt, sizes in _FPDT:
        shape = plain_shape(**sizes, dropout=0.0)
        for method, paper, chunked in (("Ulysses", ulysses, False), ("FPDT", fpdt, True)):
            ours, limit = _longest(shape, gpus, chunked)
            yield Row(
                "FPDT",
                f"{name} on {gpus} GPUs, {method}, longest",
                paper,
                ours,
                "K tokens",
                f"powers of two; twice as many overflow the {limit}",
            )
    shape = plain_shape(layers=32, hidden=2560, heads=32, vocab=50257, dropout=0.0)
    tokens = 2**16
    one = _layer_working(shape, tokens)
    two = _layer_working(shape, tokens // 2) + _STREAM * tokens * shape.hidden * 2
    note = (
        "beside the states: ZeRO-3's on two GPUs are 21.6 GB, so the paper's 27 and 18 GB cannot have all "
        "of them; two chunks halve a layer's tensors, ours keeps the stream whole"
    )
    yield Row("FPDT", "GPT 2.7B, activations at two chunks over one", 18 / 27, two / one, note=note)


def _longest(shape: ModelShape, gpus: int, chunked: bool) -> tuple[float, str]:
    """(K tokens, the largest power of two that fits; the memory that twice as many overflow)."""
    limit = MemoryBudget.of(named_machine("a100-80g")).gpu
    tokens = 2**13
    while True:
        # layers' inputs are on the host for both
        on_host = shape.layers * 2 * tokens * shape.hidden * 2 * min(gpus, _GPUS_PER_NODE) / gpus
        if on_host > _HOST:
            return tokens / 1024, "host"
        if _fpdt_bytes(shape, gpus, 2 * tokens, chunked) > limit:
            return tokens / 1024, "GPU"
        tokens *= 2


def _fpdt_bytes(shape: ModelShape, gpus: int, tokens: int, chunked: bool) -> float:
    """GPU bytes of one rank at its fullest: ZeRO-3 states, and a layer's backward or a chunk of it."""
    of_rank = tokens // gpus
    states = model_states(shape, ADAMW, Sharding(3, gpus)).total
    if not chunked:
        logits = build_workload(shape, micro_batch=1, seq_length=of_rank).head.logits_bytes
        return states + max(_layer_working(shape, of_rank), logits)
    chunk = min(of_rank, max(1, _CHUNK // gpus))
    return states + _layer_working(shape, chunk) + _STREAM * of_rank * shape.hidden * 2


def _layer_working(shape: ModelShape, tokens: int) -> float:
    workload = build_workload(shape, micro_batch=1, seq_length=tokens)
    return float(workload.layers[-1].working_bytes)
