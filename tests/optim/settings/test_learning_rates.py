"""Learning rates beside low rank: what the default multiplies, what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from low_rank_adamw import low_rank_adamw
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.rules import rule_of

RULE = rule_of("lowrank_adamw")
SCALE, BESIDE_RATIO = RULE.scale, RULE.beside_ratio

LR, DECAY = 1e-3, 0.1


class Model(nn.Module):
    """An embedding, a linear and its bias, a norm, a head and an adapter, by the names that models have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(24, 16)
        self.fc = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 24, bias=False)
        self.lora_A = nn.Linear(16, 16, bias=False)


def moved(**fields: Any) -> dict[str, float]:
    """Root mean square of what the first step takes of each weight beside the decay, as a multiple of the rate."""
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = low_rank_adamw(model, lr=LR, weight_decay=DECAY, eps=1e-12, **fields)
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [LR]  # what a script logs
    return {
        name: float((before[name] * (1 - LR * DECAY) - p.detach()).square().mean().sqrt()) / LR
        for name, p in model.named_parameters()
    }


def test_at_adamws_rate_matrices_and_what_is_beside_have_their_factors() -> None:
    sizes = moved(rank=4, residual="none")
    # one step of Adam in 4 of 16 columns, each of the basis' columns of size one
    assert sizes["fc.weight"] == pytest.approx(SCALE * (4 / 16) ** 0.5, rel=1e-3)
    for name in ("embed_tokens.weight", "lm_head.weight", "fc.bias", "norm.weight", "norm.bias"):
        assert sizes[name] == pytest.approx(BESIDE_RATIO, rel=1e-3), name
    assert sizes["lora_A.weight"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "fields", [{"scale": 0.25}, {"method": "adamw"}, {"method": "apollo", "rank": 4}]
)
def test_with_a_scale_or_another_method_everything_has_one_rate(fields: dict[str, Any]) -> None:
    sizes = moved(**fields)
    for name in ("embed_tokens.weight", "lm_head.weight", "fc.bias", "norm.weight"):
        assert sizes[name] == pytest.approx(1.0, rel=1e-3), name


def test_beside_muon_embeddings_alone_have_a_higher_rate() -> None:
    sizes = moved(method="muon", rank=4, residual="none")
    muon = rule_of("muon")
    assert muon.embedding_ratio > muon.beside_ratio > 1
    assert sizes["embed_tokens.weight"] == pytest.approx(muon.embedding_ratio, rel=1e-3)
    for name in ("lm_head.weight", "fc.bias", "norm.weight"):
        assert sizes[name] == pytest.approx(muon.beside_ratio, rel=1e-3), name
    with_a_scale = moved(method="muon", rank=4, residual="none", scale=1.5)
    assert with_a_scale["embed_tokens.weight"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("rank", [4, 8, 12, 16])
def test_a_wider_basis_has_a_smaller_factor_down_to_that_of_all_columns(rank: int) -> None:
    columns = 16
    for method, error in (("lowrank_adamw", 1e-3), ("muon", 0.2)):
        # the singular values of Muon's directions are between 0.8 and 1.2
        rule = rule_of(method)
        expected = min(rule.scale, rule.full_scale * columns / rank) * (rank / columns) ** 0.5
        sizes = moved(method=method, rank=rank, residual="none")
        assert sizes["fc.weight"] == pytest.approx(expected, rel=error), method


def test_muon_of_a_whole_matrix_has_a_factor_of_its_own() -> None:
    muon = rule_of("muon")
    assert muon.full_scale < muon.scale
    sizes = moved(method="muon", rank="full")
    alike = moved(method="muon", rank="full", scale=muon.full_scale)
    assert sizes["fc.weight"] == pytest.approx(alike["fc.weight"], rel=1e-5)
    assert sizes["embed_tokens.weight"] == pytest.approx(muon.embedding_ratio, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_the_head_has_the_heads_rate(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    weight = model.model.embed_tokens.weight
    before = weight.detach().clone()
    optimizer = HMT(model, lr=LR, weight_decay=0.0, eps=1e-12)
    rows = torch.arange(32).view(2, 16)
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    muon = rule_of("muon")
    expected = muon.beside_ratio if tied else muon.embedding_ratio
    moved_by = (weight.detach() - before).abs().max() / LR
    assert float(moved_by) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_known_by_its_module_whatever_its_name(tied: bool) -> None:
    """GPT-2's are `wte` and `wpe`."""
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    optimizer = HMT(GPT2LMHeadModel(config), lr=LR)
    scales = {slot.assigned.name: slot.assigned.lr_scale for slot in optimizer._slots.values()}
    muon = rule_of("muon")
    assert scales["transformer.wpe.weight"] == muon.embedding_ratio
    tokens = muon.beside_ratio if tied else muon.embedding_ratio
    assert scales["transformer.wte.weight"] == tokens


def test_a_module_rule_has_the_plain_rate() -> None:
    rules = {"lm_head": {"method": "adamw"}, "embed": {"rank": 4, "scale": 1.0}}
    sizes = moved(module_rules=rules)
    assert sizes["lm_head.weight"] == pytest.approx(1.0, rel=1e-3)
    assert sizes["embed_tokens.weight"] < 2.0
    assert sizes["norm.weight"] == pytest.approx(BESIDE_RATIO, rel=1e-3)


def test_a_rate_of_its_own_is_on_matrices_and_vectors_and_changes_nothing_else() -> None:
    fields: dict[str, Any] = {"rank": 4, "residual": "none"}
    plain = moved(**fields)
    rules = {
        "fc": {"lr_scale": 3.0},  # the bias too, in place of its five
        "embed": {"lr_scale": 20.0},
        r"norm\.weight": {"lr_scale": 0.5},
        "lm_head": {"rank": 4, "scale": 1.0, "lr_scale": 2.0},
    }
    sizes = moved(module_rules=rules, **fields)
    expected = {
        **plain,
        "fc.weight": 3.0 * plain["fc.weight"],
        "fc.bias": 3.0,
        "embed_tokens.weight": 20.0,
        "norm.weight": 0.5,
        "lm_head.weight": 2.0 * 0.5,  # one step of Adam in 4 of 16 columns
    }
    assert sizes == pytest.approx(expected, rel=1e-3)
    everything = moved(method="adamw", module_rules={".": {"lr_scale": 3.0}})
    assert everything == pytest.approx(dict.fromkeys(everything, 3.0), rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [{"target_modules": "all"}, {"module_rules": {"embed|lm_head": {"method": "lowrank_adamw"}}}],
)
def test_embeddings_and_heads_in_low_rank_are_matrices_like_others(fields: dict[str, Any]) -> None:
    sizes = moved(rank=4, residual="none", **fields)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert sizes[name] == pytest.approx(SCALE * 0.5, rel=1e-3)


def test_at_full_rank_it_is_adamws_own_step() -> None:
    assert moved(rank=16, residual="none")["fc.weight"] == pytest.approx(1.0, rel=0.02)


def test_where_nothing_is_in_low_rank_everything_has_the_plain_rate() -> None:
    """A head that is trained beside adapters, of a base that is frozen."""
    sizes = moved(module_rules={"fc": {"method": "adamw"}})
    assert sizes == pytest.approx(dict.fromkeys(sizes, 1.0), rel=1e-3)
