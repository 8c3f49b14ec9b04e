"""Forms of an activation that are registered from outside of the package: legal in the JSON, run, counted, planned."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from harness import Ranks
from torch import Tensor
from training import (
    HIDDEN,
    INTERMEDIATE,
    LENGTH,
    ds_config,
    make_engine,
    result,
    train,
)

from hmt_deepspeed.activations.codecs import SavedTensor, SwapHost, build_codec
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.codecs import CODECS, CodecSpec, register_codec

STEPS = 3


class SavedHalf:
    """A tensor in bf16, wherever a codec puts that."""

    def __init__(self, tensor: Tensor, half: Any) -> None:
        self._dtype, self._half = tensor.dtype, half

    @property
    def nbytes(self) -> int:
        return self._half.nbytes

    def prefetch(self) -> None:
        if not isinstance(self._half, Tensor):
            self._half.prefetch()

    def decode(self) -> Tensor:
        half = self._half if isinstance(self._half, Tensor) else self._half.decode()
        return half.to(self._dtype)


class Half:
    choice: ClassVar[str] = "half"
    lossy: ClassVar[bool] = True

    def encode(
        self, tensor: Tensor, token_dims: Any = 0, key: int = 0, name: str = "activation"
    ) -> SavedTensor:
        return SavedHalf(tensor, tensor.detach().bfloat16())


class HalfHost:
    choice: ClassVar[str] = "half_host"
    lossy: ClassVar[bool] = True

    def __init__(self, store: Any) -> None:
        self._swap = SwapHost(store)

    def encode(
        self, tensor: Tensor, token_dims: Any = 0, key: int = 0, name: str = "activation"
    ) -> SavedTensor:
        half = tensor.detach().bfloat16()
        return SavedHalf(tensor, self._swap.encode(half, token_dims, key, name))


def half_bytes(tokens: int, channels: int, itemsize: int) -> int:
    return tokens * channels * 2


HALF = CodecSpec(
    "half",
    held="bf16",
    costs="half of fp32's bytes",
    implementation=Half,
    nbytes=half_bytes,
    lossy=True,
    passes=1,
)
HALF_HOST = dataclasses.replace(HALF, name="half_host", implementation=HalfHost, place="host")


@pytest.fixture
def registered() -> Any:
    register_codec(HALF)
    register_codec(HALF_HOST)
    yield
    for row in (HALF, HALF_HOST):
        del CODECS[row.name]


# -- in a run -----------------------------------------------------------------------------------------


def runs(sections: dict[str, Any]) -> dict[str, Any]:
    """A few steps with each section of activations."""
    register_codec(HALF)
    register_codec(HALF_HOST)
    found = {}
    for name, section in sections.items():
        config = ds_config(2)
        if section is not None:
            config["hmt"]["activations"] = section
        engine = make_engine(config)
        found[name] = result(engine, train(engine, STEPS))
        found[name]["metrics"] = engine.hmt_metrics.read()
        found[name]["table"] = engine.hmt_activations.describe() if section else ""
        engine.destroy()
    return found


def test_registered_codecs_hold_what_a_policy_gives_them(ranks: Ranks) -> None:
    kept = {"attention_output": "keep", "mlp_intermediate": "keep", "residual": "keep"}
    found = ranks.run(
        runs,
        1,
        {
            "plain": None,
            "half": {"policy": {**kept, "mlp_intermediate": "half"}},
            "host": {"policy": {**kept, "layer_input": "half_host"}, "host_memory": 2**20},
        },
    )[0]
    tokens = 12 * LENGTH
    losses = {name: torch.tensor(run["losses"]) for name, run in found.items()}
    for name in ("half", "host"):
        assert not torch.equal(losses[name], losses["plain"])  # it rounds, a little
        torch.testing.assert_close(losses[name], losses["plain"], rtol=1e-3, atol=0)
    held = found["half"]["metrics"]["activation_bytes_per_component"]
    assert held["mlp_intermediate"] == 2 * half_bytes(tokens, 2 * INTERMEDIATE, 4)  # of two layers
    assert found["host"]["metrics"]["activation_bytes_per_component"].get("layer_input", 0) == 0
    moved = found["host"]["metrics"]["activation_bytes_to_host"]
    assert moved == 2 * half_bytes(tokens, HIDDEN, 4)
    assert "half" in found["half"]["table"]
    assert "swap: up to" in found["host"]["table"]


# -- what asks the table --------------------------------------------------------------------------------


def test_the_block_takes_registered_codecs(registered: None) -> None:
    block = {
        "activations": {"policy": {"residual": "half"}, "overrides": {"x": {"lm_head": "half"}}},
    }
    assert HMTConfig.from_block(block).activations.policy.residual == "half"
    planned = {"activations": {"policy": "plan"}, "planner": {"lossy": {"residual": "half"}}}
    assert HMTConfig.from_block(planned).planner.lossy == {"residual": "half"}
    host = {"activations": {"policy": {"residual": "half_host"}, "host_memory": 2**21}}
    assert HMTConfig.from_block(host).activations.host_memory == 2**21
    with pytest.raises(ValueError, match='"swap_host_fp8", "half" or "half_host"'):
        HMTConfig.from_block({"activations": {"policy": {"lm_head": "hlf"}}})


def test_without_the_row_it_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"got 'half'\. Legal: "):
        HMTConfig.from_block({"activations": {"policy": {"residual": "half"}}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "keep"}, "a word other than"),
        ({"name": "plan"}, "a word other than"),
        ({"name": "two words"}, "a word other than"),
        ({"place": "tape"}, "place is 'tape'"),
        ({"passes": -1}, "passes is -1"),
    ],
)
def test_rows_that_are_refused(change: dict[str, Any], words: str) -> None:
    before = dict(CODECS)
    with pytest.raises(ValueError, match=words):
        register_codec(dataclasses.replace(HALF, **change))
    assert before == CODECS


def test_a_class_that_is_not_what_its_row_says_is_refused() -> None:
    CODECS["half"] = dataclasses.replace(HALF, lossy=False)
    try:
        with pytest.raises(ValueError, match="registered with lossy=False"):
            build_codec("half")
    finally:
        del CODECS["half"]


def test_every_row_s_class_says_what_the_row_says() -> None:
    for row in CODECS.values():
        codec = build_codec(row.name, *([object()] if row.is_moved else []))
        assert (codec.choice, codec.lossy) == (row.name, row.lossy)
