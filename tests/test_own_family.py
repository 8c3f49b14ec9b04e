"""A model family that is registered from outside of the package, by one row: attribution, FPDT and planner know it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import PAPER_KEPT, assert_equal, gradients, installed
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hmt_deepspeed.attribution import attribute
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.sizes import llama_sizes
from hmt_deepspeed.families.table import FAMILIES, register_family
from hmt_deepspeed.fpdt.install import install
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.shapes import parameters
from hmt_deepspeed.planner.run.fpdt import runs_in_chunks

ROW = Family(
    base="body",
    layers="blocks",
    embedding="words",
    final_norm="last",
    head="tongue",
    attention="mixer",
    qkv=("ask", "match", "tell"),
    output="back",
    up=("grow.open", "grow.wide"),
    down="grow.narrow",
    mlp=("grow",),
    norms=("calm", "calm_again"),
    layer="ToyBlock",
    package=__name__.partition(".")[0],
    sizes=llama_sizes,
)


class ToyConfig(LlamaConfig):
    model_type = "toy_of_a_test"


class Mixer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.is_causal = config, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        width = config.num_key_value_heads * self.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.ask = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.match = nn.Linear(config.hidden_size, width, bias=False)
        self.tell = nn.Linear(config.hidden_size, width, bias=False)
        self.back = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, mask: Any, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.ask, self.match, self.tell)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sdpa_attention_forward
        )
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)
        return self.back(out.reshape(x.shape))


class Grow(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.open, self.wide = (nn.Linear(*sizes, bias=False) for _ in range(2))
        self.narrow = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(nn.functional.silu(self.open(x)) * self.wide(x))


class ToyBlock(GradientCheckpointingLayer):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mixer, self.grow = Mixer(config), Grow(config)
        self.calm = LlamaRMSNorm(config.hidden_size)
        self.calm_again = LlamaRMSNorm(config.hidden_size)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None
    ) -> Tensor:
        x = hidden_states
        x = x + self.mixer(self.calm(x), attention_mask, position_embeddings)
        return x + self.grow(self.calm_again(x))


class ToyBase(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "body"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True


class ToyBody(ToyBase):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(ToyBlock(config) for _ in range(config.num_hidden_layers))
        self.last = LlamaRMSNorm(config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config=config)
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False, **kwargs: Any) -> BaseModelOutput:
        x = self.words(input_ids)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        # no padding mask, no cache
        mask = create_causal_mask(self.config, x, None, None, position_ids=positions)
        rotary = self.rotary(x, position_ids=positions)
        for block in self.blocks:
            x = block(x, attention_mask=mask, position_embeddings=rotary)
        return BaseModelOutput(last_hidden_state=self.last(x))


class ToyForCausalLM(ToyBase, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.body = ToyBody(config)
        self.tongue = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.body.words

    def get_output_embeddings(self) -> nn.Module:
        return self.tongue

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        logits = self.tongue(self.body(input_ids, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def toy() -> Any:
    config = ToyConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return ToyForCausalLM(config).train()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_family("toy_of_a_test", ROW)
    yield
    del FAMILIES["toy_of_a_test"]


def test_its_modules_have_components() -> None:
    found = attribute(toy())
    assert [layer.name for layer in found.layers] == ["body.blocks.0", "body.blocks.1"]
    assert (found.head, found.final_norm, found.unattributed) == ("tongue", "body.last", ())
    for layer in found.layers:
        assert layer.components == {
            "mixer": "attention_output",
            "mixer.ask": "attention_qkv",
            "mixer.match": "attention_qkv",
            "mixer.tell": "attention_qkv",
            "mixer.back": "residual",
            "grow.open": "mlp_intermediate",
            "grow.wide": "mlp_intermediate",
            "calm": "layernorm",
            "calm_again": "layernorm",
        }
        assert layer.exits == {"grow.narrow"}


def test_a_policy_runs_on_it() -> None:
    model = toy()
    expected = gradients(model)
    with installed(model, PAPER_KEPT) as backend:
        assert_equal(gradients(model), expected)
        assert set(backend.report().rerun) == {"attention_qkv"}


def test_it_runs_in_chunks() -> None:
    model = toy()
    expected = gradients(model)
    installation = install(model, chunk_size=4)
    try:
        found = gradients(model)
    finally:
        installation.remove()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert_equal(gradients(model), expected)


def test_the_planner_knows_its_sizes() -> None:
    model = toy()
    shape = shape_of_config(model.config)
    found = {
        parameter.name.replace("*", str(number)): parameter.shape
        for parameter in parameters(shape)
        for number in range(parameter.count)
    }
    assert found == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert runs_in_chunks(shape)
    assert shape.names.layer == "body.blocks.*"


def test_without_the_row_it_is_refused() -> None:
    del FAMILIES["toy_of_a_test"]
    try:
        with pytest.raises(ValueError, match="are of no known family"):
            attribute(toy())
        with pytest.raises(ValueError, match="this model is 'toy_of_a_test'"):
            install(toy())
        with pytest.raises(ValueError, match="family is 'toy_of_a_test'"):
            shape_of_config(toy().config)
    finally:
        FAMILIES["toy_of_a_test"] = ROW


def test_a_family_that_has_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="'llama' has a row"):
        register_family("llama", ROW)


def test_a_row_s_own_words_come_before_those_of_all() -> None:
    """Two families may call different things by one name."""
    register_family("toy_the_other_way", replace(ROW, up=("grow.narrow",), down="grow.open"))
    try:
        assert attribute(toy()).layers[0].exits == {"grow.narrow"}
    finally:
        del FAMILIES["toy_the_other_way"]
