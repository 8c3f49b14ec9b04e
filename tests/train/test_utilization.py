"""What the training loop says of a device's peak: MFU, HFU, and neither where the peak cannot be the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hmt_deepspeed.report.metrics import model_flops_per_token
from hmt_deepspeed.train import loop as training
from hmt_deepspeed.train.loop import TrainingLoop
from hmt_deepspeed.train.models import flops_per_token

SEQ_LENGTH, TOKENS, SECONDS = 64, 512, 2.0


def llama(tied: bool) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                num_attention_heads=4, head_dim=16, tie_word_embeddings=tied,
            )
        )  # fmt: skip


def loop_of(computed: float | None, monkeypatch: pytest.MonkeyPatch) -> TrainingLoop:
    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(training, "rank", lambda: 0)
    loop = object.__new__(TrainingLoop)
    loop.data = SimpleNamespace(train=SimpleNamespace(seq_length=SEQ_LENGTH))
    loop.tokens_per_step, loop._peak_is_wrong = TOKENS, False
    loop.engine = SimpleNamespace(
        module=llama(tied=False),
        train_micro_batch_size_per_gpu=lambda: 4,
        hmt_metrics=SimpleNamespace(computed_flops=lambda *sizes: computed),
    )
    return loop


def test_a_table_that_tokens_are_looked_up_in_counts_only_as_the_head() -> None:
    untied, tied = llama(False), llama(True)
    expected = model_flops_per_token(
        sum(p.numel() for p in untied.parameters()) - 100 * 32, 3, 4 * 16, SEQ_LENGTH
    )
    assert flops_per_token(untied, SEQ_LENGTH) == flops_per_token(tied, SEQ_LENGTH) == expected


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))
    idle = 3 * (5 - 2) * 3 * 32 * 64  # in three layers, gate, up and down of three experts
    met = sum(p.numel() for p in model.parameters()) - 100 * 32 - idle
    expected = model_flops_per_token(met, 3, 4 * 16, SEQ_LENGTH)
    assert flops_per_token(model, SEQ_LENGTH) == expected


def test_less_computed_than_ordinary_training_shows_in_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordinary = flops_per_token(llama(False), SEQ_LENGTH) * TOKENS / 2  # of one of two devices
    loop = loop_of(0.7 * ordinary, monkeypatch)
    peak = ordinary / SECONDS * 0.9
    found = loop.utilization(SECONDS, peak)
    assert found == {"mfu": pytest.approx(1 / 0.9), "hfu": pytest.approx(0.7 / 0.9)}


def test_no_device_is_said_to_do_more_than_its_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_of(3e12, monkeypatch)
    for _ in range(2):
        assert loop.utilization(SECONDS, 1e12) == {}
    assert capsys.readouterr().out == (
        "--peak_tflops is 1, but a device computed 1.5 TFLOP/s: no MFU and HFU are shown. Give its peak at "
        "the training dtype.\n"
    )


def test_without_a_count_of_what_is_computed_there_is_no_hfu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = loop_of(None, monkeypatch)
    assert set(loop.utilization(SECONDS, 1e15)) == {"mfu"}
    assert loop.utilization(SECONDS, 1e6) == {}
