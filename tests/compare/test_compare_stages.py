"""What is trained in which order, at which rates, from what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import plan

from comparison.cells import Cell, Setting, Store
from comparison.corpus import documentation, finetuning_texts
from comparison.stages import best_point, make_queue
from comparison.training import Run, train_cell
from comparison.variants import VARIANTS


def test_the_baseline_comes_first_and_every_variant_before_any_again(
    setting: Setting, folder: Path, store: Store
) -> None:
    chosen = ("galore", "adamw", "fira")
    queue = make_queue(plan(setting, folder, "sweep", variants=chosen), store)
    names = [own.variant for own in queue.cells]
    rates = len(VARIANTS["adamw"].learning_rates)
    assert names[:rates] == ["adamw"] * rates
    assert names[rates : rates + 4] == ["galore", "fira", "galore", "fira"]
    assert len({own.key for own in queue.cells}) == len(queue.cells)


def test_final_takes_the_best_rate_of_the_sweep(
    setting: Setting, data: Any, folder: Path, store: Store, results: Any
) -> None:
    rate = VARIANTS["galore"].learning_rates[0]
    assert best_point(store, "galore", setting, data.digest).lr == rate
    queue = make_queue(plan(setting, folder, "final", variants=("galore",)), store)
    assert [own.lr for own in queue.cells] == [rate]
    with pytest.raises(ValueError, match=r"compare\.py sweep --variants hmt_left_d4"):
        make_queue(plan(setting, folder, "final", variants=("hmt_left_d4",)), store)


LOW = "hmt_lowrank_adamw"  # whose factor is 5


def test_rates_of_embeddings_and_decays_are_swept_and_what_is_given_anyway_is_no_cell_of_its_own(
    setting: Setting, folder: Path, store: Store
) -> None:
    plain = plan(setting, folder, "sweep", variants=("adamw", LOW), learning_rates=(1e-3,))
    keys = {own.variant: own.key for own in make_queue(plain, store).cells}
    grid = replace(plain, embedding_lr_scales=(1.0, 5.0), decays=(1e-4, 0.0))
    cells = make_queue(grid, store).cells
    found = [(own.variant, own.embedding_lr_scale, own.decay) for own in cells]
    assert found[:4] == [("adamw", scale, decay) for scale in (None, 5.0) for decay in (None, 0.0)]
    assert found[4:] == [(LOW, scale, decay) for scale in (1.0, None) for decay in (None, 0.0)]
    assert len({own.key for own in cells}) == 8
    assert set(keys.values()) < {own.key for own in cells}
    assert cells[3].key.startswith("sweep-adamw-lr0.001-embeddings5-decay0-seed0-")
    assert cells[3].hyper.weight_decay == 0.0
    finals = replace(grid, stage="final", variants=("galore",), learning_rates=None, decays=None)
    points = [(own.lr, own.embedding_lr_scale) for own in make_queue(finals, store).cells]
    assert points == [(1e-2, None), (1e-2, 5.0)]  # the best rate of its sweep


def test_finetuning_starts_from_a_base_model_of_other_text(
    setting: Setting, folder: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path, tmp_path / "runs")
    queue = make_queue(
        plan(setting, folder, "finetune", variants=("adamw", "lora", "qlora")), store
    )
    base, own = queue.cells[0], queue.cells[1]
    assert base.stage == "base"
    assert {c.start for c in queue.cells[1:]} == {base.key}
    assert own.text != base.text
    assert train_cell(base, queue.texts[base.key], store) is not None
    assert store.is_finished(base)
    base_loss = torch.load(store.weights(base.key), weights_only=True)
    started = Run(own, queue.texts[own.key], store).contender.model.state_dict()
    assert all(torch.equal(started[name], base_loss[name]) for name in base_loss)
    lora = next(c for c in queue.cells if c.variant == "lora")
    check_adapters(lora, queue.texts[lora.key], tmp_path)


def check_adapters(own: Cell, text: Any, folder: Path) -> None:
    """Only adapters are trained and checkpointed; an interrupted run ends as a whole one does."""
    whole, parts = (Store(folder / part, folder / "runs") for part in ("whole", "parts"))
    model = Run(own, text, whole).contender.model
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    first = train_cell(own, text, whole)
    assert train_cell(own, text, parts, lambda step: step == 3) is None
    second = train_cell(own, text, parts)
    assert first is not None
    assert second is not None
    assert first["val_loss"] == second["val_loss"]
    assert first["checkpoint_bytes"] < 2 * first["parameters"]


def test_the_halves_are_disjoint_and_share_a_vocabulary(setting: Setting, folder: Path) -> None:
    base, tuning = finetuning_texts(setting, str(folder / "cache"))
    assert base.digest != tuning.digest
    assert base.num_documents == tuning.num_documents == 20
    assert base.tokenizer.get_vocab() == tuning.tokenizer.get_vocab()


def test_documentation_is_the_strings_alone() -> None:
    source = '"""Top."""\n\ndef f():\n    """Inner."""\n    return 1\n'
    assert documentation(source) == "Top.\n\nInner."
    assert documentation("def broken(") == ""
