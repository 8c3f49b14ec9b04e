"""Parameters, FLOPs and saved tensors of every family against small real models: equal, not close."""

from __future__ import annotations

import pytest
import torch
from real_models import FAMILIES, MICRO_BATCH, SEQ_LENGTH, config, flops, model, saved_bytes

from hmt_deepspeed.families.table import FAMILIES as KNOWN
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.flops import attention_flops
from hmt_deepspeed.planner.model.shapes import (
    layer_linears,
    num_parameters,
    parameters,
    plain_shape,
)
from hmt_deepspeed.planner.model.workload import build_workload, recompute_flops

ITEMSIZE = {torch.float32: 4, torch.bfloat16: 2}
SIZES = {"micro_batch": MICRO_BATCH, "seq_length": SEQ_LENGTH}


def workload(name, attention="eager", dtype=torch.float32):
    kind = {"eager": "eager", "sdpa": "fused"}[attention]
    shape = shape_of_config(config(name))
    return build_workload(shape, **SIZES, itemsize=ITEMSIZE[dtype], attention=kind)


def test_every_known_family_is_tested():
    assert {config(name).model_type for name in FAMILIES} == {
        name for name, row in KNOWN.items() if row.sizes is not None
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_by_name_and_shape(name):
    found = {}
    for parameter in parameters(shape_of_config(config(name))):
        for number in range(parameter.count):
            found[parameter.name.replace("*", str(number))] = parameter.shape
    real = {name: tuple(p.shape) for name, p in model(name, "eager").named_parameters()}
    assert found == real


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_that_torch_counts(name):
    # eager: torch's counter has no formula for the CPU's fused attention
    expected = workload(name)
    assert flops(model(name, "eager")) == (expected.forward_flops, expected.backward_flops)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_recompute_runs_again_what_the_sites_say(name):
    expected = workload(name)
    again = sum(
        layer.count
        * recompute_flops(
            layer, {s.name: "recompute" if "recompute" in s.legal else "keep" for s in layer.sites}
        )
        for layer in expected.layers
    )
    if expected.shape.parallel:
        # torch's checkpoint runs the output projection too, on its way to the MLP; the backend, which follows
        # what backward reads, does not
        (out,) = (linear for linear in layer_linears(expected.shape) if linear.role == "out")
        again += expected.shape.layers * 2 * expected.tokens * out.inputs * out.outputs
    network = model(name, "eager")
    network.activation_checkpointing_enable({"use_reentrant": False})
    try:
        _, backward = flops(network)
    finally:
        network.activation_checkpointing_disable()
    assert backward - expected.backward_flops == again > 0


# transformers has no fused attention with Gemma 2's capped scores
CASES = [
    (n, a, torch.float32)
    for n in FAMILIES
    for a in ("eager", "sdpa")
    if (n, a) != ("gemma2", "sdpa")
]
# in bf16 RMSNorm makes fp32 copies; the CPU's LayerNorm differs from CUDA's there, see below
CASES += [(n, "sdpa", torch.bfloat16) for n in ("llama", "qwen3", "gemma", "gemma3", "phi3")]
CASES += [("llama", "eager", torch.bfloat16), ("gemma2", "eager", torch.bfloat16)]


@pytest.mark.parametrize(("name", "attention", "dtype"), CASES)
def test_saved_bytes_are_those_of_the_storages(name, attention, dtype):
    expected = workload(name, attention, dtype)
    real = saved_bytes(model(name, attention, dtype))
    assert real == {
        "layer": expected.layers[-1].saved_bytes,
        "head": expected.head.saved_bytes,
        "all": expected.saved_bytes,
    }


def test_bf16_layer_norm_statistics_are_planned_as_on_cuda():
    # CUDA keeps mean and deviation in fp32; the CPU kernel in the input's bf16: 2 x 2 bytes of a token less
    expected, tokens = workload("gpt2", "sdpa", torch.bfloat16), MICRO_BATCH * SEQ_LENGTH
    real = saved_bytes(model("gpt2", "sdpa", torch.bfloat16))
    assert expected.layers[-1].saved_bytes - real["layer"] == 2 * 4 * tokens  # two norms
    assert expected.head.saved_bytes - real["head"] == 4 * tokens


def test_dropout_masks_are_planned_as_on_cuda():
    # CUDA's masks are bool, one after each branch; the CPU multiplies by a mask of the input's dtype
    shape = shape_of_config(config("opt", dropout=0.1))
    planned = build_workload(shape, **SIZES, itemsize=4).layers[-1].saved_bytes
    without = workload("opt", "sdpa").layers[-1].saved_bytes
    assert planned - without == 2 * MICRO_BATCH * SEQ_LENGTH * shape.hidden


def test_sliding_windows_make_layers_of_their_own():
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    made = config("qwen2").__class__(
        **{**config("qwen2").to_dict(), **changes, "layer_types": kinds, "num_hidden_layers": 4}
    )
    work = build_workload(shape_of_config(made), **SIZES)
    assert [layer.layers for layer in work.layers] == [(0, 2), (1, 3)]
    full, sliding = work.layers
    assert sliding.forward_flops < full.forward_flops
    assert sliding.saved_bytes == full.saved_bytes


@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_fused_attention_counts_the_pairs_that_the_mask_leaves(window):
    shape, length = shape_of_config(config("llama")), 12
    pairs = sum(0 <= i - j < (window or length) for i in range(length) for j in range(length))
    forward, backward = attention_flops(shape, 3, length, "fused", window)
    assert forward == 2 * 2 * 3 * shape.heads * shape.head_dim * pairs
    assert backward == 5 * forward // 2  # five products, the scores once more


def test_parameters_of_plain_shapes():
    gpt = plain_shape(layers=96, hidden=12288, heads=96, vocab=50257, positions=2048)
    # the playbook's formula, with positions: v h + L (12 h^2 + 13 h) + 2 h
    assert (
        num_parameters(gpt)
        == (50257 + 2048) * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288
    )
    llama_7b = plain_shape(
        layers=32, hidden=4096, heads=32, vocab=32000, intermediate=11008, gated=True, tied=False
    )
    assert num_parameters(llama_7b) == 6_738_415_616  # of meta-llama/Llama-2-7b


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: shape_of_config(object()), "family is 'object'"),
        (lambda: shape_of_config(config("llama", hidden_act="tanh")), "hidden_act is 'tanh'"),
        (lambda: plain_shape(layers=2, hidden=64, heads=7, vocab=9), "heads is 7"),
        (lambda: plain_shape(layers=0, hidden=64, heads=4, vocab=9), "layers is 0"),
        (lambda: plain_shape(layers=2, hidden=64, heads=4, kv_heads=3, vocab=9), "kv_heads is 3"),
        (
            lambda: build_workload(shape_of_config(config("gpt2")), micro_batch=1, seq_length=65),
            "at most 64",
        ),
        (
            lambda: build_workload(shape_of_config(config("opt")), micro_batch=1, seq_length=65),
            "at most 64",
        ),
        (
            lambda: build_workload(shape_of_config(config("llama")), micro_batch=0, seq_length=8),
            "micro_batch",
        ),
        (
            lambda: build_workload(shape_of_config(config("llama")), **SIZES, itemsize=3),
            "itemsize is 3",
        ),
        (
            lambda: build_workload(shape_of_config(config("llama")), **SIZES, attention="flash"),
            "'flash'",
        ),
        (lambda: build_workload(shape_of_config(config("gemma2")), **SIZES), "caps its scores"),
    ],
)
def test_bad_input_names_field_value_and_legal_values(call, text):
    with pytest.raises(ValueError, match=text) as raised:
        call()
    assert "legal" in str(raised.value)
