"""What all cases share: device and dtype, a Llama of a given size, engines, one training step."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Sample, Samples, median_of, now
from hmt_deepspeed.rules import DEFAULT
from hmt_deepspeed.train.models import bf16_is_fast

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INTERVAL = 200  # the optimizer's default, for which refresh costs are stated
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """device: "cuda" or "cpu". dtype: a key of DTYPES. rounds: overrides a case's own. toy: tiny sizes. own: options
    of the suite alone, those that were given."""

    device: str
    dtype: str
    dtype_reason: str
    rounds: int | None = None
    toy: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def rounds_or(self, default: int) -> int:
        return self.rounds or default

    def record(self) -> dict[str, Any]:
        return asdict(self)


def choose_setting(
    dtype: str | None, rounds: int | None, toy: bool, own: Mapping[str, Any]
) -> Setting:
    """bf16 where the machine computes in it, unless `dtype` says otherwise."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = bf16_is_fast(device)
    if dtype is not None:
        return Setting(device, dtype, "given by --dtype", rounds, toy, own)
    if fast:
        return Setting(device, "bf16", "the device computes in bf16", rounds, toy, own)
    reason = "this processor has no bf16 arithmetic: torch would emulate it"
    return Setting(device, "fp32", reason, rounds, toy, own)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_ranks(rank: int, world: int, port: int, backend: str | None = None) -> None:
    """Start DeepSpeed's communication for this process, whatever launched it."""
    import deepspeed

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    deepspeed.init_distributed(dist_backend=backend)


# -- models and data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A Llama with the MLP 8/3 as wide as the model, rounded to 64, and what it is fed."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 8192
    sequence: int = 512
    micro_batch: int = 4

    @property
    def intermediate(self) -> int:
        return max(64, round(self.hidden * 8 / 3 / 64) * 64)

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    @property
    def label(self) -> str:
        return f"hidden {self.hidden}, {self.layers} layers"


SMALL = Shape(512, 8, 8)
LARGE = Shape(1024, 6, 16)
TOY = Shape(64, 2, 4, vocabulary=64, sequence=32, micro_batch=2)


def llama(shape: Shape) -> nn.Module:
    """Random weights, the same for every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.sequence,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class Batches:
    """The same endless sequence of random token rows for every contender (and another per rank)."""

    def __init__(self, shape: Shape, device: str, rank: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(1 + rank)
        self._shape, self._device = shape, device

    def draw(self) -> Tensor:
        size = (self._shape.micro_batch, self._shape.sequence)
        rows = torch.randint(0, self._shape.vocabulary, size, generator=self._generator)
        return rows.to(self._device)


# -- engines ----------------------------------------------------------------------------------------


def engine_config(shape: Shape, dtype: str, **zero: Any) -> dict[str, Any]:
    """The JSON of both contenders up to the optimizer's name: stage 2, DeepSpeed's defaults."""
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2, **zero},
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 10**9,
    }


def hmt_engine(shape: Shape, dtype: str, options: Mapping[str, Any], **zero: Any) -> Any:
    """The engine of low-rank AdamW, unless ``options`` name another method."""
    import hmt_deepspeed

    model = llama(shape)
    config = engine_config(shape, dtype, **zero)
    config["optimizer"]["type"] = "HMT"
    config["hmt"] = {"optimizer": {"method": "lowrank_adamw", **options}}
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def stock_engine(shape: Shape, dtype: str) -> Any:
    """DeepSpeed's engine with the AdamW that it chooses by itself."""
    import deepspeed

    model = llama(shape)
    config = engine_config(shape, dtype)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def alternating_options(shape: Shape, rank: int | None) -> dict[str, Any]:
    """HMT at a fixed rank, or at the default block's (None), refreshing one matrix in every second step.

    Step 0 finds all bases at once, so that what follows is the steady state. With an interval of
    twice the number of matrices, ordinary steps and steps that refresh one matrix then alternate,
    which is what an interval of 200 does to a model of these sizes, only more often.
    """
    matrices = 7 * shape.layers
    elements = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    if rank is None:
        chosen: dict[str, Any] = {"method": DEFAULT}
    else:
        chosen = {"method": "lowrank_adamw", "rank": min(rank, shape.hidden // 2)}
    return {
        **chosen,
        "update_interval": 2 * matrices,
        "max_full_gradient_bytes": 4 * elements,
    }


# Step 0 finds every basis and learns which linears share an input; step 1 is the first ordinary one.
STEADY_AFTER = 2
# Refreshing each of a layer's seven matrices once takes this many alternating steps.
LAYER_ROUNDS = 14


class EngineStep:
    """One whole training step of an engine; times its phases and counts refreshing matrices."""

    def __init__(self, engine: Any, batches: Batches) -> None:
        self.engine, self.batches = engine, batches

    def __call__(self) -> Sample:
        rows = self.batches.draw()
        refreshing = num_refreshing(self.engine)
        begin = now()
        loss = self.engine(input_ids=rows, labels=rows).loss
        after_forward = now()
        self.engine.backward(loss)
        after_backward = now()
        self.engine.step()
        end = now()
        return {
            "seconds": end - begin,
            "forward": after_forward - begin,
            "backward": after_backward - after_forward,
            "step": end - after_backward,
            "refreshing": refreshing,
        }


def num_refreshing(engine: Any) -> int:
    """Matrices whose basis the coming step renews; 0 for a stock engine."""
    zero = getattr(engine.optimizer, "zero", None)
    return sum(param.gradient.refreshing for param in zero.low_rank) if zero else 0


# -- steps over one refresh interval ----------------------------------------------------------------


def ordinary(samples: Sequence[Sample]) -> Samples:
    return [sample for sample in samples if not sample["refreshing"]]


def refreshes(samples: Sequence[Sample]) -> Samples:
    return [sample for sample in samples if sample["refreshing"]]


def refresh_extra(samples: Sequence[Sample], key: str = "seconds") -> float:
    """Mean extra time of refreshing one matrix, over an ordinary step."""
    usual = median_of(ordinary(samples), key)
    return mean((s[key] - usual) / s["refreshing"] for s in refreshes(samples))


def amortised_refresh(samples: Sequence[Sample], matrices: int, key: str = "seconds") -> float:
    """What refreshing every matrix once per INTERVAL adds to the mean step."""
    return refresh_extra(samples, key) * matrices / INTERVAL
