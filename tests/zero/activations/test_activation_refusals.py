"""What `hmt.activations` cannot honour is refused where the engine is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from activation_runs import checkpointing_flags, with_activations
from harness import Ranks
from torch import nn
from training import (
    HIDDEN,
    VOCAB,
    make_engine,
    stock_config,
    tiny_llama,
)

import hmt_deepspeed
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.zero.engine.support import check_activations


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class OddLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _with_odd_head() -> nn.Module:
    model: Any = tiny_llama()
    model.lm_head = OddLinear(HIDDEN, VOCAB)
    return model


REFUSALS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "overrides": (
        {"overrides": {"no_such": {"residual": "int8"}}},
        tiny_llama,
        "'no_such' matches",
    ),
    "components": ({"components": {"no_such": "residual"}}, tiny_llama, "'no_such' matches"),
    "no layers": ({}, NoLayers, "no decoder layers in NoLayers"),
    "a head that cannot be encoded": (
        {"policy": {"lm_head": "int8"}},
        lambda: _with_odd_head(),
        "lm_head (OddLinear) has a forward of its own",
    ),
    "no projected inputs": (
        {"overrides": {"layers": {"projected_inputs": "project"}}},
        tiny_llama,
        "overrides['layers'].projected_inputs is 'project', but nothing is projected",
    ),
    "a limit of host memory that nothing takes": (
        {"host_memory": 2**30},
        tiny_llama,
        "host_memory is 1073741824, but nothing is swapped: remove it",
    ),
    "misspelt": ({"polcy": {}}, tiny_llama, 'did you mean "hmt.activations.policy"'),
}


def refused(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        section, build, _ = REFUSALS[name]
        model = build()
        before = checkpointing_flags(model)
        with pytest.raises(ValueError) as caught:
            make_engine(with_activations(stock_config(0), section), model)
        found[name] = str(caught.value)
        assert checkpointing_flags(model) == before
    for options in ({}, {"optimizer": {}, "activations": {}}):
        with pytest.raises(ValueError, match='leave only "activations" in it'):
            make_engine({**stock_config(0), "hmt": options})
    deepcompile = with_activations(stock_config(0, compile={"deepcompile": True}), {})
    with pytest.raises(ValueError, match=r"compile.deepcompile is True.*hmt.activations"):
        make_engine(deepcompile)
    summed = stock_config(0, data_types={"grad_accum_dtype": "bf16"})
    with pytest.raises(ValueError, match=r"grad_accum_dtype is 'bf16', legal at stage 0 .* 'fp32'"):
        make_engine(with_activations(summed, {}))
    for key, value in (("gradient_predivide_factor", 2.0), ("prescale_gradients", True)):
        with pytest.raises(
            ValueError, match=f"{key} is {value}, legal at stage 3 with DeepSpeed's own"
        ):
            make_engine(with_activations(stock_config(3, **{key: value}), {}))
    return found


def test_what_cannot_be_honoured_is_refused(ranks: Ranks) -> None:
    found = ranks.run(refused, 1, list(REFUSALS))[0]
    for name, (_, _, words) in REFUSALS.items():
        assert words in found[name]
        assert "hmt.activations" in found[name] or name.startswith("a head")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"policy": "plan"}, {}),
        ({"policy": {"residual": "swap_host"}}, {}),
        ({"overrides": {"layers": {"residual": "swap_host"}}}, {}),
        ({}, {"cpu_checkpointing": True}),
    ],
)
def test_a_limit_of_host_memory_that_something_takes(
    section: dict[str, Any], keys: dict[str, Any]
) -> None:
    hmt = HMTConfig.from_block({"activations": {**section, "host_memory": 2**30}})
    check_activations({"activation_checkpointing": keys}, hmt, None)


@contextmanager
def hmt_deepspeed_registered() -> Iterator[None]:
    hmt_deepspeed.register()
    try:
        yield
    finally:
        hmt_deepspeed.unregister()


def test_other_engines_refuse_a_block_of_activations() -> None:
    import deepspeed

    with hmt_deepspeed_registered(), pytest.raises(ValueError, match="does not work with Pipeline"):
        deepspeed.PipelineEngine(config={"hmt": {"activations": {}}, "optimizer": {"type": "Adam"}})
