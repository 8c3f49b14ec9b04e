"""The files of a checkpoint: plain, whole or passed over, consolidated into fp32 weights."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from training import (
    LOW_RANK,
    ds_config,
    furthest,
    make_engine,
    model_weights,
    stock_config,
    tiny_llama,
    train,
    weights,
)

from hmt_deepspeed.zero.saving import checkpoint
from hmt_deepspeed.zero.saving import durable as files


def config_of(stage: int, variant: str = "fp32", **changes: Any) -> dict[str, Any]:
    kinds = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}[variant]
    return ds_config(stage, LOW_RANK, **kinds, **changes)


# -- cases --------------------------------------------------------------------------------------------


def saves_two_tags(folder: str, stage: int) -> dict[str, Any]:
    engine = make_engine(config_of(stage), tiny_llama(layers=1))
    train(engine, 2)
    engine.save_checkpoint(folder, tag="first")
    first = weights(engine)
    train(engine, 2, first=2)
    engine.save_checkpoint(folder, tag="second")
    return {"first": first, "second": weights(engine)}


def loads(folders: list[str], stage: int, tag: str | None = None) -> list[Any]:
    """What loading each folder gives: (path, weights, what it printed) or the error's text."""
    found: list[Any] = []
    for folder in folders:
        engine = make_engine(config_of(stage), tiny_llama(layers=1, seed=7))
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                path, _ = engine.load_checkpoint(folder, tag=tag)
            found.append((path, weights(engine), said.getvalue()))
        except ValueError as error:
            found.append(str(error))
        engine.destroy()
    return found


def killed_while_saving(folder: str, moment: str, tag: str) -> None:
    """Saves "first", then dies by SIGKILL at a moment of saving ``tag``."""
    engine = make_engine(config_of(2), tiny_llama(layers=1))
    train(engine, 2)
    engine.save_checkpoint(folder, tag="first")
    train(engine, 1, first=2)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "inside a file":

        def torn(_: Any, file: Any) -> None:
            file.write(b"half of it")
            file.flush()
            die()

        files.torch.save = torn
    elif moment == "between files":
        original, count = files.AtomicCheckpointEngine.save, []

        def save(*args: Any, **keyword: Any) -> None:
            if count:
                die()
            count.append(1)
            original(*args, **keyword)

        files.AtomicCheckpointEngine.save = save  # type: ignore[method-assign]
    elif moment == "before the manifest":
        checkpoint.replace_text = die
    elif moment == "before the rename":
        checkpoint.os.rename = die
    elif moment == "between the renames":
        rename, renamed = os.rename, []

        def once(*args: Any) -> None:
            if renamed:
                die()
            renamed.append(1)
            rename(*args)

        checkpoint.os.rename = once
    elif moment == "before latest":
        write = checkpoint.replace_text

        def all_but_latest(path: str, text: str) -> None:
            if path.endswith("latest"):
                die()
            write(path, text)

        checkpoint.replace_text = all_but_latest
    engine.save_checkpoint(folder, tag=tag)


def saves_over_a_tag(folder: str) -> list[Any]:
    engine = make_engine(config_of(3), tiny_llama(layers=1))
    train(engine, 1)
    engine.save_checkpoint(folder, tag="same")
    train(engine, 1, first=1)
    engine.save_checkpoint(folder, tag="same")
    engine.save_checkpoint(folder, tag="aside", save_latest=False)
    return [weights(engine), sorted(os.listdir(folder))]


def refused_loads(folder: str, stock_folder: str, empty: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def attempt(name: str, engine: Any, path: str, **keyword: Any) -> None:
        try:
            found[name] = engine.load_checkpoint(path, **keyword)[0]
        except ValueError as error:
            found[name] = str(error)

    stock = make_engine(stock_config(2), tiny_llama(layers=1))
    train(stock, 1)
    stock.save_checkpoint(stock_folder)
    attempt("other model", make_engine(config_of(2), tiny_llama(layers=2)), folder)
    other_rules = ds_config(2, {"module_rules": {"mlp": {"method": "adamw"}}})
    attempt("other rules", make_engine(other_rules, tiny_llama(layers=1)), folder)
    engine = make_engine(config_of(2), tiny_llama(layers=1, seed=7))
    attempt("no such tag", engine, folder, tag="third")
    attempt("empty", engine, empty)
    attempt("custom", engine, folder, custom_load_fn=print)
    attempt("stock", engine, stock_folder)
    attempt("stock module", engine, stock_folder, load_module_only=True)
    found["difference"] = furthest(model_weights(engine), model_weights(stock))
    return found


def odd_model() -> Any:
    """Tied embeddings, a frozen matrix, odd sizes."""
    model = tiny_llama(layers=1, tie_word_embeddings=True)
    model.model.layers[0].mlp.up_proj.weight.requires_grad = False
    model.model.layers[0].input_layernorm.weight.requires_grad = False
    return model


def consolidates(stage: int, folder: str) -> dict[str, Any]:
    """Own masters, DeepSpeed's consolidation of the checkpoint, and the 16-bit file."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    config = config_of(stage, "bf16", zero_optimization=zero)
    model = odd_model()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    other = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed}, {"params": other, "weight_decay": 0.0}]
    engine = make_engine(config, model, model_parameters=groups)
    train(engine, 3)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    torch.distributed.barrier()
    half = torch.load(os.path.join(folder, "pytorch_model.bin"), weights_only=True)
    trained = {e.name for e in engine.optimizer.zero.param_states}
    own = {**model_weights(engine), **weights(engine)}
    return {
        "own": own,
        "trained": trained,
        "consolidated": dict(get_fp32_state_dict_from_zero_checkpoint(folder)),
        "half": half,
        "model": model_weights(engine),
    }


def resumes_frozen_and_tied(stage: int, folder: str) -> dict[str, Any]:
    """The frozen weights are those of the checkpoint, not of the new model."""
    model = odd_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)
    engine = make_engine(config_of(stage, "bf16"), model)
    engine.load_checkpoint(folder, load_module_only=True)
    return model_weights(engine)


def without_frozen(stage: int, folder: str) -> dict[str, Any]:
    engine = make_engine(config_of(stage), odd_model())
    train(engine, 1)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved, found = model_weights(engine), {"saved": model_weights(engine)}
    model = odd_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)
    fresh = make_engine(config_of(stage), model)
    try:
        fresh.load_checkpoint(folder)
    except ValueError as error:
        found["strict"] = str(error)
    fresh.load_checkpoint(folder, load_module_strict=False)
    loaded = model_weights(fresh)
    frozen = {n for n, p in engine.module.named_parameters() if not p.requires_grad}
    offset = {n: float((loaded[n] - w).abs().max()) for n, w in saved.items()}
    found["kept"] = {n: offset[n] for n in frozen}
    found["restored"] = {n: offset[n] for n in offset.keys() - frozen}
    return found


def dropped_script(folder: str) -> None:
    """``python zero_to_fp32.py . out`` in a checkpoint's folder, where DeepSpeed is imported already."""
    os.chdir(folder)
    sys.argv = ["zero_to_fp32.py", ".", "out"]
    runpy.run_path(sys.argv[0], run_name="__main__")


# -- tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_every_file_is_plain(ranks: Ranks, tmp_path: Path, stage: int, world: int) -> None:
    ranks.run(saves_two_tags, world, str(tmp_path), stage)
    found = sorted((tmp_path / "second").glob("*.pt"))
    assert len(found) >= 2
    for path in found:
        torch.load(path, weights_only=True)


def _damage(folder: Path, kind: str) -> str:
    """Spoil the newest tag of a checkpoint; the file to be named."""
    tag = folder / "second"
    optimizer, model = sorted(tag.glob("*optim_states.pt"))[-1], next(tag.glob("*model_states.pt"))
    if kind == "torn":
        optimizer.write_bytes(optimizer.read_bytes()[:-100])
        return optimizer.name
    if kind == "altered":
        content = bytearray(model.read_bytes())
        content[len(content) // 2] ^= 1
        model.write_bytes(content)
        return model.name
    if kind == "missing":
        optimizer.unlink()
        return optimizer.name
    manifest = tag / "manifest.json"
    if kind == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    return manifest.name


KINDS = ["torn", "altered", "missing", "no manifest", "torn manifest"]


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2)])
def test_damage_is_named_and_the_previous_tag_used(
    ranks: Ranks, tmp_path: Path, stage: int, world: int
) -> None:
    ranks.run(saves_two_tags, world, str(tmp_path / "whole"), stage)
    copies, named = [], []
    for kind in KINDS if world == 1 else KINDS[:1]:
        copies.append(str(shutil.copytree(tmp_path / "whole", tmp_path / kind)))
        named.append(_damage(tmp_path / kind, kind))
    whole = ranks.run(loads, world, [str(tmp_path / "whole")], stage)[0][0]
    assert whole[0].endswith("second")
    first = ranks.run(loads, world, [str(tmp_path / "whole")], stage, tag="first")[0][0]
    for name, (path, found, said) in zip(
        named, ranks.run(loads, world, copies, stage)[0], strict=True
    ):
        assert path.endswith("first")
        assert furthest(found, first[1]) == 0
        assert "'second' is damaged" in said
        assert name in said
    for name, error in zip(
        named, ranks.run(loads, world, copies, stage, tag="second")[0], strict=True
    ):
        assert isinstance(error, str)
        assert name in error


MOMENTS = ["inside a file", "between files", "before the manifest", "before the rename"]


@pytest.mark.parametrize(
    ("moment", "tag", "expected"),
    [(moment, "second", "first") for moment in MOMENTS]
    + [("before latest", "second", "first")]
    + [("before the rename", "first", "first"), ("between the renames", "first", "first.old")],
)
def test_kill_while_saving_leaves_the_previous_tag(
    ranks: Ranks, tmp_path: Path, moment: str, tag: str, expected: str
) -> None:
    codes, _, _ = ranks.attempt(killed_while_saving, 1, str(tmp_path), moment, tag)
    assert codes == [-signal.SIGKILL]
    assert (tmp_path / "latest").read_text() == "first"
    path, _, said = ranks.run(loads, 1, [str(tmp_path)], 2)[0][0]
    assert os.path.basename(path) == expected
    assert "damaged" not in said
    # the leftovers do not stand in the way of the next save
    final, names = ranks.run(saves_over_a_tag, 1, str(tmp_path))[0]
    assert {"same", "aside", "latest"} <= set(names)
    path, found, _ = ranks.run(loads, 1, [str(tmp_path)], 3)[0][0]
    assert os.path.basename(path) == "same"
    assert furthest(found, final) == 0


def test_overwriting_a_tag(ranks: Ranks, tmp_path: Path) -> None:
    final, names = ranks.run(saves_over_a_tag, 2, str(tmp_path))[0]
    assert names == ["aside", "latest", "same", "zero_to_fp32.py", "zero_to_torch.py"]
    path, found, _ = ranks.run(loads, 2, [str(tmp_path)], 3)[0][0]
    assert path == str(tmp_path / "same")  # save_latest=False left it there
    assert furthest(found, final) == 0


def test_what_does_not_fit_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ours, stock, empty = (str(tmp_path / name) for name in ("ours", "stock", "empty"))
    os.makedirs(empty)
    ranks.run(saves_two_tags, 1, ours, 2)
    found = ranks.run(refused_loads, 1, ours, stock, empty)[0]
    assert "another model" in found["other model"]
    assert "model.layers.1" in found["other model"]
    assert "the rule of" in found["other rules"]
    assert "mlp" in found["other rules"]
    assert "no checkpoint 'third'" in found["no such tag"]
    assert "first" in found["no such tag"]
    assert found["empty"] is None
    assert "custom_load_fn" in found["custom"]
    assert "load_module_only=True" in found["stock"]
    assert found["stock module"].startswith(stock)
    assert found["difference"] == 0


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 2)])
def test_consolidation_gives_the_masters(
    ranks: Ranks, tmp_path: Path, stage: int, world: int
) -> None:
    found = ranks.run(consolidates, world, stage, str(tmp_path))[0]
    own, consolidated = found["own"], found["consolidated"]
    assert set(own) <= set(consolidated)
    for name, weight in own.items():
        assert torch.equal(consolidated[name], weight.float()), name
    assert torch.equal(consolidated["lm_head.weight"], own["model.embed_tokens.weight"].float())
    assert any(not torch.equal(own[n], found["model"][n].float()) for n in found["trained"])
    for name, weight in found["model"].items():
        assert found["half"][name].dtype == torch.bfloat16
        assert torch.equal(found["half"][name], weight), name
    if (stage, world) in [(2, 2), (3, 2), (0, 1)]:
        loaded = ranks.run(resumes_frozen_and_tied, 1, (stage + 1) % 4, str(tmp_path))[0]
        assert furthest(loaded, found["model"]) == 0
    if (stage, world) == (3, 2):
        ranks.run(dropped_script, 1, str(tmp_path))
        _same_as_script_wrote(tmp_path / "out", own)


def _same_as_script_wrote(folder: Path, own: dict[str, torch.Tensor]) -> None:
    merged: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.bin"):
        merged.update(torch.load(path, weights_only=True))
    for name, weight in own.items():
        assert torch.equal(merged[name], weight.float()), name


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_may_be_left_out(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    found = ranks.run(without_frozen, 2, stage, str(tmp_path))[0]
    assert "load_module_strict=False" in found["strict"]
    assert len(found["kept"]) == 2
    assert list(found["kept"].values()) == pytest.approx([0.5, 0.5])
    assert set(found["restored"].values()) == {0.0}
