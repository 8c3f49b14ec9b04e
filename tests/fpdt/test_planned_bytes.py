"""FPDT's bytes against those that its benchmark counts, and the chunk that follows from them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fpdt import layer_workspace
from hmt_deepspeed.planner.families import shape_of_config
from hmt_deepspeed.planner.fpdt import fpdt_bytes, fpdt_chunk_size, longest_fpdt_sequence
from hmt_deepspeed.planner.shapes import plain_shape

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
    counted = layer_workspace(model, length, chunk, torch.bfloat16) + 2 * parameters
    assert found.chunks + found.gradients == pytest.approx(counted, rel=0.05)


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
