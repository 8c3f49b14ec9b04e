"""Presets and folders become models, whole or partitioned; what cannot be is refused."""

import os
import socket

import pytest
import torch

from hmt_deepspeed.train.models import (
    PRESETS,
    build_model,
    config_dtype,
    model_signature,
    num_parameters,
    resolve_bf16,
)
from hmt_deepspeed.train.tokenizer import byte_tokenizer, train_bpe

BATCH = {"train_micro_batch_size_per_gpu": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def process_group():
    import deepspeed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in (*names, "MASTER_ADDR", "MASTER_PORT")}
    os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    linear = torch.nn.functional.linear
    deepspeed.init_distributed("gloo")
    yield
    torch.nn.functional.linear = linear  # DeepSpeed leaves its own of stage 3 to the whole process
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, torch.float16),
    ],
)
def test_tiny_has_the_configs_dtype(tokenizer, section, dtype):
    assert config_dtype(section) == dtype
    model = build_model("tiny", tokenizer, 256, 0, {**BATCH, **section})
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config._attn_implementation == "sdpa"
    assert model.config.vocab_size == 320  # 258 tokens, up to a multiple of 64
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_bf16_auto_follows_the_machine():
    config = {"bf16": {"enabled": "auto", "immediate_grad_update": True}}
    for fast in (True, False):
        resolved = resolve_bf16(config, fast)
        assert resolved["bf16"] == {"enabled": fast, "immediate_grad_update": True}
    assert config["bf16"]["enabled"] == "auto"
    assert resolve_bf16({"fp16": {}}, True) == {"fp16": {}}


def test_seed_decides_the_weights(tokenizer):
    first, same, other = (build_model("tiny", tokenizer, 8, seed, BATCH) for seed in (0, 0, 1))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True)
    )
    weight, changed = first.lm_head.weight, other.lm_head.weight
    assert not torch.equal(weight, changed)
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert torch.equal(first.model.norm.weight, torch.ones(256))
    assert model_signature(first) == model_signature(other)


def test_presets_have_their_sizes():
    published = {
        "125m": 124e6,
        "350m": 354e6,
        "1b": 1.1e9,
        "3b": 3.43e9,
        "7b": 6.74e9,
        "13b": 13.0e9,
        "70b": 69.0e9,
    }
    for name, expected in published.items():
        shape = PRESETS[name]
        head = shape.hidden // shape.heads
        attention = 2 * shape.hidden**2 + 2 * shape.hidden * head * shape.kv_heads
        layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
        vocabulary = 2 * 32000 * shape.hidden
        if name in ("125m", "350m"):  # counted with tied embeddings and GPT-3's vocabulary
            vocabulary = 50257 * shape.hidden
        total = shape.layers * layer + vocabulary + shape.hidden
        assert total == pytest.approx(expected, rel=0.02), name


def test_zero3_presets_are_partitioned_with_the_same_weights(tokenizer, process_group):
    import deepspeed

    config = {**BATCH, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    whole = build_model("tiny", tokenizer, 8, 7, {**BATCH, "bf16": {"enabled": True}})
    split = build_model("tiny", tokenizer, 8, 7, config)
    assert all(parameter.numel() == 0 for parameter in split.parameters())
    assert (
        num_parameters(split) == num_parameters(whole) == sum(p.numel() for p in whole.parameters())
    )
    assert model_signature(split) == model_signature(whole)
    for mine, other in zip(split.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([mine]):
            assert torch.equal(mine, other)
    rotary = split.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32
    assert torch.equal(rotary, whole.model.rotary_emb.inv_freq)


def test_local_folder_loads_whole_and_partitioned(tokenizer, process_group, tmp_path):
    import deepspeed

    saved = build_model("tiny", tokenizer, 8, 3, BATCH)
    saved.save_pretrained(tmp_path)
    loaded = build_model(str(tmp_path), tokenizer, 8, 0, {**BATCH, "bf16": {"enabled": True}})
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight.bfloat16())
    split = build_model(
        str(tmp_path), tokenizer, 8, 0, {**BATCH, "zero_optimization": {"stage": 3}}
    )
    assert all(parameter.numel() == 0 for parameter in split.parameters())
    with deepspeed.zero.GatheredParameters([split.lm_head.weight]):
        assert torch.equal(split.lm_head.weight, saved.lm_head.weight)
    # The next model of this process is not partitioned by accident.
    assert build_model("tiny", tokenizer, 8, 0, BATCH).lm_head.weight.numel() > 0


def test_weights_that_find_no_host_memory_say_how_much_they_take(tokenizer, monkeypatch):
    def nothing_left(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 4096 bytes")

    whole = build_model("tiny", tokenizer, 8, 7, BATCH)
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    monkeypatch.setattr("hmt_deepspeed.train.models._random_model", nothing_left)
    config = {**BATCH, "zero_optimization": zero, "bf16": {"enabled": True}}
    with pytest.raises(
        MemoryError, match=f"takes {2 * num_parameters(whole)} bytes of host memory"
    ):
        build_model("tiny", tokenizer, 8, 7, config)
    with pytest.raises(RuntimeError, match="can't allocate memory"):  # of a device
        build_model("tiny", tokenizer, 8, 7, BATCH)


def test_what_cannot_be_built_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"--model '/no/such/model' does not exist"):
        build_model("/no/such/model", tokenizer, 8, 0, BATCH)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        build_model(str(tmp_path), tokenizer, 8, 0, BATCH)
    # A preset takes rows of any length; a trained model those it was made for.
    assert build_model("tiny", tokenizer, 4096, 0, BATCH).config.max_position_embeddings == 4096
    build_model("tiny", tokenizer, 8, 0, BATCH).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--seq_length is 4096.*at most 2048"):
        build_model(str(tmp_path), tokenizer, 4096, 0, BATCH)
    larger = train_bpe(["".join(f"word{index} " for index in range(3000))], 600)
    with pytest.raises(ValueError, match=r"320 token embeddings, the tokeniser \d+"):
        build_model(str(tmp_path), larger, 8, 0, BATCH)


def test_unreachable_hub_id_says_so(tokenizer, monkeypatch):
    import transformers

    def offline(name, **_):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ValueError, match=r"--model 'owner/name' is neither.*couldn't connect"):
        build_model("owner/name", tokenizer, 8, 0, BATCH)


def test_tensor_parallelism_is_refused_before_a_model_is_loaded(tokenizer):
    parallel = {**BATCH, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ValueError, match=r"tensor_parallel.autotp_size is 2; legal: 0 or 1"):
        build_model("/no/such/model", tokenizer, 8, 0, parallel)
