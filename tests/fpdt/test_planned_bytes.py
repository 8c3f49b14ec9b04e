"""FPDT's bytes against those that its benchmark counts, and the chunk that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import fpdt

from benchmarks.counting import Uncomputed, counted
from benchmarks.fpdt import layer_workspace
from benchmarks.setting import Batches, Shape, llama
from hmt_deepspeed.config import ActivationsConfig
from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import FAMILIES
from hmt_deepspeed.optim.backward.experts import expert_sites, patch_experts
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.models import shape_of_architecture
from hmt_deepspeed.planner.model.shapes import plain_shape
from hmt_deepspeed.planner.run.fpdt import fpdt_bytes, fpdt_chunk_size, longest_fpdt_sequence
from hmt_deepspeed.zero.activations.chunked import ChunkedActivations

SHAPE = plain_shape(layers=2, hidden=64, heads=4, vocab=100, dropout=0.0)


@pytest.mark.parametrize(("heads", "kv_heads", "chunk"), [(1, 1, 128), (4, 4, 256), (4, 1, 128)])
def test_device_bytes_of_a_layer_are_those_counted(heads: int, kv_heads: int, chunk: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    length = 1024
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    parameters = sum(p.numel() for p in model.model.layers[0].parameters())
    found = fpdt_bytes(shape_of_config(config), length, chunk)
    # the benchmark leaves out gradients as large as the weights, and what is as long as the sequence
    workspace = layer_workspace(model, length, chunk, torch.bfloat16) + 2 * parameters
    assert found.chunks + found.gradients == pytest.approx(workspace, rel=0.05)


def counted_step(
    shape: Shape,
    model: torch.nn.Module,
    chunk: int,
    after: Callable[[], None] = lambda: None,
    **holders: Any,
) -> int:
    """Peak of a step whose gradients leave as they come, as ZeRO takes them."""
    rows = Batches(shape, "cpu").draw()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step() -> None:
        output = model(input_ids=rows, labels=rows)  # which has the routers' logits, if asked for
        output.loss.backward()
        after()

    with fpdt(model, chunk, **holders), Uncomputed():
        return counted(step)


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "chunk", "dtype"),
    [
        pytest.param(128, 64, 128, torch.bfloat16, id="attention is fullest"),
        pytest.param(128, 64, 128, torch.float32, id="attention is fullest, fp32"),
        pytest.param(256, 64, 64, torch.bfloat16, id="the projections' gradients are"),
        pytest.param(256, 64, 64, torch.float32, id="the MLP's gradients are, fp32"),
        pytest.param(128, 4096, 128, torch.bfloat16, id="the head's product is"),
        pytest.param(128, 4096, 256, torch.float32, id="the loss is, fp32"),
    ],
)
def test_device_bytes_of_a_model_are_those_counted(
    hidden: int, vocabulary: int, chunk: int, dtype: torch.dtype
) -> None:
    shape = Shape(hidden, 2, 2, vocabulary=vocabulary, sequence=5 * chunk, micro_batch=1)
    model = llama(shape).to(dtype)
    counted_bytes = counted_step(shape, model, chunk)
    planned = shape_of_config(model.config)
    found = fpdt_bytes(planned, shape.sequence, chunk, itemsize=dtype.itemsize)
    assert found.device == pytest.approx(counted_bytes, rel=0.05)


# kind, hidden, experts, experts of a token, tokens of a chunk, dtype, what else the config says
MIXTURES: dict[str, tuple[str, int, int, int, int, torch.dtype, dict[str, Any]]] = {
    "scaled rows": ("mixtral", 256, 4, 4, 256, torch.bfloat16, {"intermediate_size": 32}),
    "gates, fp32": ("mixtral", 64, 8, 4, 512, torch.float32, {"intermediate_size": 256}),
    "sums": ("mixtral", 64, 16, 2, 64, torch.bfloat16, {"intermediate_size": 256}),
    "routers' logits": (
        *("mixtral", 32, 32, 2, 128, torch.bfloat16),
        {"intermediate_size": 32, "num_hidden_layers": 2, "output_router_logits": True},
    ),
    "a layer without experts": (
        *("qwen3_moe", 64, 8, 4, 256, torch.bfloat16),
        {"moe_intermediate_size": 128, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    ),
    "a shared expert": (
        *("qwen2_moe", 64, 8, 2, 256, torch.bfloat16),
        {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 256,
            "use_sliding_window": True,  # without one FPDT does not take its masks
            "sliding_window": 10**6,
        },
    ),
}


def mixture(
    kind: str,
    hidden: int,
    experts: int,
    top_k: int,
    chunk: int,
    dtype: torch.dtype,
    special: dict[str, Any],
) -> tuple[Shape, Any]:
    """What it is fed, and a model with little attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = Shape(hidden, 1, 2, vocabulary=64, sequence=5 * chunk, micro_batch=1)
    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": shape.sequence,
        "use_cache": False,
    }
    config = AutoConfig.for_model(kind, **{**sizes, **special})
    return shape, AutoModelForCausalLM.from_config(config).to(dtype)


@pytest.mark.parametrize("name", MIXTURES)
def test_device_bytes_of_a_mixture_are_those_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Family(layer="Qwen2MoeDecoderLayer", fp32_routing=False)
    monkeypatch.setitem(FAMILIES, "qwen2_moe", row)  # a row of one's own
    *_, chunk, dtype, _ = MIXTURES[name]
    shape, model = mixture(*MIXTURES[name])
    counted_bytes = counted_step(shape, model, chunk)
    planned = shape_of_architecture(model.config)
    found = fpdt_bytes(planned, shape.sequence, chunk, itemsize=dtype.itemsize)
    assert found.device == pytest.approx(counted_bytes, rel=0.02)


def test_projected_experts_compute_their_gates_again() -> None:
    sizes = {"intermediate_size": 512}
    shape, model = mixture("mixtral", 32, 4, 4, 512, torch.bfloat16, sizes)
    sites, links = expert_sites(model), list[ProjectedLinear]()
    for name, site in sites.items():
        links.append(ProjectedLinear(name, transposed=site.role == "down"))
        links[-1].projection = torch.randn(shape.hidden, 8, dtype=torch.bfloat16)
    patch_experts(zip(sites.values(), links, strict=True))
    gradients = 0  # which are ZeRO's

    def take() -> None:
        nonlocal gradients
        gradients = sum(gradient.nbytes for link in links if (gradient := link.take()) is not None)

    counted_bytes = counted_step(shape, model, 512, after=take)
    found = fpdt_bytes(shape_of_architecture(model.config), shape.sequence, 512)
    assert found.device == pytest.approx(counted_bytes - gradients, rel=0.02)


@pytest.mark.parametrize("choice", ["keep", "int8", "swap_host"])
def test_what_activations_hold_beside_chunks_is_counted(choice: str) -> None:
    shape = Shape(128, 2, 2, vocabulary=64, sequence=384, micro_batch=1)
    model = llama(shape).to(torch.bfloat16)
    components = ("layer_input", "attention_output", "lm_head")
    config = ActivationsConfig.model_validate({"policy": dict.fromkeys(components, choice)})
    activations = ChunkedActivations(
        model, config, device=torch.device("cpu"), aio=None, current_step=lambda: 0
    )
    held = {"holders": activations.holders, "attention_holders": activations.attention_holders}
    counted_bytes = counted_step(shape, model, 128, **held)
    activations.close()
    found = fpdt_bytes(shape_of_config(model.config), 384, 128, held=activations.held)
    assert found.device == pytest.approx(counted_bytes, rel=0.05)


def test_a_chunk_is_the_largest_power_of_two_that_fits() -> None:
    def needed(chunk: int) -> int:
        return fpdt_bytes(SHAPE, 2**14, chunk).device

    for chunk in (256, 1024, 2**13):
        assert fpdt_chunk_size(SHAPE, 2**14, needed(chunk)) == chunk
        assert fpdt_chunk_size(SHAPE, 2**14, needed(2 * chunk) - 1) == chunk
    assert fpdt_chunk_size(SHAPE, 1000, 2**60) == 1024  # one chunk holds the sequence
    with pytest.raises(ValueError, match=r"chunk_size is \"auto\".* do not fit.*Shorten"):
        fpdt_chunk_size(SHAPE, 2**14, needed(256) - 1)


def test_ranks_that_share_a_sequence_have_their_part() -> None:
    alone = fpdt_bytes(SHAPE, 2**14, 1024)
    shared = fpdt_bytes(SHAPE, 2**14, 1024, sequence_parallel=4)
    assert (4 * shared.chunks, 4 * shared.stream) == (alone.chunks, alone.stream)
    assert 4 * shared.host == alone.host
    assert shared.gradients == alone.gradients


def test_the_longest_sequence_ends_at_whichever_memory_is_full_first() -> None:
    at = fpdt_bytes(SHAPE, 2**16, 256)
    plenty = 2**60
    for device, host in ((at.device, plenty), (plenty, at.host), (at.device, at.host)):
        assert longest_fpdt_sequence(SHAPE, device, host) == 2**16
    assert longest_fpdt_sequence(SHAPE, at.device - 1, plenty) == 2**16 - 256
    assert longest_fpdt_sequence(SHAPE, 1, plenty) == 0
