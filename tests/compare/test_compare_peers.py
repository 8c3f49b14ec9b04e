"""Peers as their packages publish them, and the rate of embeddings and head apart, of every kind of variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare_runs import cell

from comparison import variants as table
from comparison.cells import Setting, Store
from comparison.contenders import build, own_embedding_lr_scale
from comparison.training import Run, build_model, train_cell
from comparison.variants import VARIANTS, Variant

HIDDEN, WIDTH, LAYERS = 64, 192, 2
SQUARES, WIDE = 4 * LAYERS * HIDDEN**2, 3 * LAYERS * HIDDEN * WIDTH
ELEMENTS = SQUARES + WIDE  # of the matrices
ROWS = LAYERS * (4 * HIDDEN + 2 * WIDTH + HIDDEN)  # of the matrices as they are stored
NEEDS = {"adamw_8bit": "bitsandbytes", "adam_mini": "adam_mini"}

# Of matrices: bytes of moments, and of what else a basis is made of.
BYTES = {
    "muon": (4 * ELEMENTS, 0),
    "soap": (8 * ELEMENTS, 8 * LAYERS * (4 * 2 * HIDDEN**2 + 3 * (HIDDEN**2 + WIDTH**2))),
    # one second moment a row, of queries and keys a head
    "adam_mini": (4 * ELEMENTS + 4 * (ROWS - 2 * LAYERS * HIDDEN + 2 * LAYERS * 4), 0),
    "lion": (4 * ELEMENTS, 0),
    "adamw_8bit": (2 * (ELEMENTS + ELEMENTS // 256 * 4), 0),
}


def skip_without(variant: str) -> None:
    if variant in NEEDS:
        pytest.importorskip(NEEDS[variant])


@pytest.mark.parametrize("variant", BYTES)
def test_a_peer_learns_resumes_and_its_states_are_counted(
    variant: str, setting: Setting, data: Any, tmp_path: Any
) -> None:
    skip_without(variant)
    own = replace(cell(setting, data, variant), tokens=8 * setting.step_tokens)
    store = Store(tmp_path, tmp_path)
    assert train_cell(own, data, store, lambda step: step == 5) is None
    parts = train_cell(own, data, store)
    whole = train_cell(own, data, Store(tmp_path / "whole", tmp_path / "whole"))
    assert whole is not None
    assert parts is not None
    losses = whole["curves"]["train_loss"]
    assert parts["curves"]["train_loss"] == losses
    assert losses[-1] < losses[0] - 0.05
    sizes, (moments, bases) = whole["state_bytes"], BYTES[variant]
    assert (sizes["matrices_moments"], sizes["matrices_bases"]) == (moments, bases)
    assert sizes["moments_share"] == moments / (8 * ELEMENTS)


KINDS = ("adamw", "galore", "fira", "apollo", *BYTES, "hmt", "hmt_muon_full", "hmt_memory")


@pytest.mark.parametrize("variant", KINDS)
def test_the_rate_of_embeddings_is_of_all_but_the_matrices(variant: str, setting: Setting) -> None:
    """A step without a gradient takes the same by decay of all; with one, what is scaled moves so many times as far."""
    skip_without(variant)
    moved = [first_step(variant, setting, scale) for scale in (1.0, 3.0)]
    for name, change in moved[0].items():
        dense = "embed" in name or "lm_head" in name or "norm" in name
        expected = 3 * change if dense else change
        torch.testing.assert_close(moved[1][name], expected, rtol=2e-2, atol=2e-6, msg=name)


def first_step(variant: str, setting: Setting, scale: float) -> dict[str, torch.Tensor]:
    """What the first steps with a gradient take of each weight beside the decay, which is none."""
    model = build_model(setting, 0)
    hyper = replace(setting.hyper(1e-3, 0, decay=0.0), embedding_lr_scale=scale)
    contender = build(variant, model, setting.shape.hidden, hyper)
    contender.set_learning_rate(1e-3)
    tokens = torch.arange(256).view(8, 32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    # SOAP's first step makes its bases alone: of its matrices nothing moves
    contender.model(input_ids=tokens, labels=tokens).loss.backward()
    contender.optimizer.step()
    contender.close()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_schedules_and_decay_reach_embeddings(setting: Setting, data: Any, store: Store) -> None:
    own = replace(cell(setting, data, "adamw", 1e-3), embedding_lr_scale=10.0, decay=3e-4)
    run = Run(own, data, store)
    run.contender.set_learning_rate(5e-4)
    dense, matrices = run.contender.optimizer.param_groups
    assert (dense["lr"], matrices["lr"]) == (pytest.approx(5e-3), 5e-4)
    assert dense["weight_decay"] * 1e-2 == pytest.approx(3e-4)
    assert matrices["weight_decay"] * 1e-3 == pytest.approx(3e-4)


# None: of embeddings another than of the head, or rules of their own
OWN = {"adamw": 1.0, "hmt_lowrank_adamw": 5.0, "hmt": None, "hmt_memory": None}


def test_what_a_variant_has_itself_is_known_and_what_cannot_be_is_refused(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {name: own_embedding_lr_scale(name, 64) for name in OWN}
    assert own == OWN
    assert own_embedding_lr_scale("hmt_d4", 64) == 1.0  # of a scale that is a number
    hyper = replace(setting.hyper(1e-3, 0), embedding_lr_scale=2.0)
    with pytest.raises(ValueError, match="adapters leave embeddings frozen"):
        build("lora", build_model(setting, 0), 64, hyper)
    ruled = Variant("hmt", {"optimizer": {"module_rules": {"q_proj": {"rank": 8}}}}, (1e-3,))
    monkeypatch.setitem(table.VARIANTS, "ruled", ruled)
    with pytest.raises(ValueError, match="Give its rules an lr_scale"):
        build("ruled", build_model(setting, 0), 64, hyper)
    assert VARIANTS["ruled"] is ruled
