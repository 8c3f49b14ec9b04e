"""FPDT's bytes against those that its benchmark counts, and the chunk that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import fpdt

from benchmarks.counting import Uncomputed, counted
from benchmarks.fpdt import layer_workspace
from benchmarks.setting import Batches, Shape, llama
from hmt_deepspeed.config import ActivationsConfig
from hmt_deepspeed.planner.model.families import shape_of_config
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


def counted_step(shape: Shape, model: torch.nn.Module, chunk: int, **holders: Any) -> int:
    """Peak of a step whose gradients leave as they come, as ZeRO takes them."""
    rows = Batches(shape, "cpu").draw()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with fpdt(model, chunk, **holders), Uncomputed():
        return counted(lambda: model(input_ids=rows, labels=rows).loss.backward())


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


@pytest.mark.parametrize("choice", ["keep", "int8", "swap_host"])
def test_what_activations_hold_beside_chunks_is_counted(choice: str) -> None:
    shape = Shape(128, 2, 2, vocabulary=64, sequence=384, micro_batch=1)
    model = llama(shape).to(torch.bfloat16)
    components = ("embedding", "residual", "attention_output", "lm_head")
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
