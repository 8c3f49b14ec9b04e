"""``hmt.snapshot``: taken beside training, whole or not there, and the run goes on from one bit for bit."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from snapshot_runs import STEPS, snapshot_engine, tags, train_in_step
from training import LOW_RANK, ds_config, make_engine, tiny_llama, train, wait_for, weights

from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.zero.saving import raw_tensors
from hmt_deepspeed.zero.saving.raw_tensors import ByteFile, decode, encode
from hmt_deepspeed.zero.saving.verify import damage

# -- going on --------------------------------------------------------------------------------------------

CACHED = {"basis_cache": {"history": 1}}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "no masters": {"bf16": {"enabled": True}, "options": {"master_weights": "none"}},
    "cached": {
        "bf16": {"enabled": True},
        "options": {"update_interval": 2},
        "block": CACHED,
    },
}


def straight(stage: int, folder: str, variant: str) -> dict[str, Any]:
    engine = snapshot_engine(stage, folder, **VARIANTS[variant])
    losses = train_in_step(engine, STEPS)
    found = {
        "losses": losses,
        "weights": weights(engine),
        "metrics": engine.hmt_snapshots.metrics(),
    }
    engine.destroy()
    return found


def resumed(stage: int, folder: str, variant: str, tag: str) -> dict[str, Any]:
    engine = snapshot_engine(stage, None, seed=7, **VARIANTS[variant])
    path, client = engine.load_checkpoint(folder, tag=tag)
    step = int(tag.removeprefix("step"))
    assert path == os.path.join(folder, tag)
    assert (client["position"], engine.global_steps) == (12 * step, step)
    losses = train(engine, STEPS - step, first=step)
    found = {"losses": losses, "weights": weights(engine)}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "stage", "variant", "which"),
    [(1, 2, "fp32", 2), (1, 3, "no masters", 1), (2, 0, "bf16", 1), (2, 3, "cached", 1)],
)
def test_a_run_taken_up_from_a_snapshot_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, variant: str, which: int
) -> None:
    folder = str(tmp_path)
    whole = ranks.run(straight, world, stage, folder, variant)[0]
    assert whole["metrics"]["snapshots"] == 3
    assert tags(folder)[-2:] == ["step00000004", "step00000006"]
    for tag in tags(folder)[-which:]:
        rest = ranks.run(resumed, world, stage, folder, variant, tag)[0]
        assert rest["losses"] == whole["losses"][int(tag.removeprefix("step")) :]
        assert all(torch.equal(w, whole["weights"][n]) for n, w in rest["weights"].items())


def loaded(stage: int, folder: str) -> dict[str, Any]:
    engine = snapshot_engine(stage, None, seed=7)
    engine.load_checkpoint(folder)
    return {"step": engine.global_steps, "losses": train(engine, 3, first=6)}


def test_a_snapshot_loads_at_another_stage_and_world_size(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = ranks.run(straight, 2, 3, folder, "fp32")[0]
    other = ranks.run(loaded, 1, 1, folder)[0]
    assert other["step"] == 6
    # Sums over ranks in another order: see training.py.
    assert other["losses"][:1] == pytest.approx(whole["losses"][6:], rel=1e-5)


# -- the device's memory ------------------------------------------------------------------------------------

TEMPORARY = {
    "no masters": {"options": {"master_weights": "none"}, "bf16": {"enabled": True}},
    "bf16 states": {"options": {"state_dtype": "bf16"}, "bf16": {"enabled": True}},
    "INT8 weights": {"options": {"weight_dtype": "int8"}, "bf16": {"enabled": True}},
    "frozen": {},
}


def held_beside_the_run(folder: str, stage: int, variant: str, most: int) -> dict[str, int]:
    """Bytes of tensors that only copies to the host keep on the device while a snapshot is taken, at most."""
    from hmt_deepspeed.memory.streams import Direction
    from hmt_deepspeed.zero.saving import staging

    staging.MOST_TEMPORARY = most
    stage_one, peak, largest = staging.Staging.stage, 0, 0

    def watched(self: Any, value: Any, *name: Any) -> Any:
        nonlocal peak, largest
        staged = stage_one(self, value, *name)
        held = {}
        for copy in self._transfers.streams.pending[Direction.TO_HOST]:
            for storage in (tensor.untyped_storage() for tensor in copy.kept):
                if storage.data_ptr() not in self._living:
                    held[storage.data_ptr()] = storage.nbytes()
        peak, largest = max(peak, sum(held.values())), max([largest, *held.values()])
        return staged

    staging.Staging.stage = watched  # type: ignore[method-assign]
    changes = dict(TEMPORARY[variant])
    options = {**LOW_RANK, **changes.pop("options", {})}  # type: ignore[dict-item]
    config = ds_config(stage, options, **changes)
    config["hmt"]["snapshot"] = {"path": folder, "interval": 1}
    model = tiny_llama()
    if variant == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad = "mlp" not in name
    engine = make_engine(config, model)
    train_in_step(engine, 1)
    engine.destroy()
    return {"peak": peak, "largest": largest}


@pytest.mark.parametrize("variant", TEMPORARY)
def test_what_a_snapshot_makes_on_the_device_is_bounded(
    ranks: Ranks, tmp_path: Path, variant: str
) -> None:
    """Copies leave more slowly than they are made: decoded states, but not weights, which live on."""
    found, bound = (
        ranks.run(held_beside_the_run, 1, f"{tmp_path}/{most}", 2, variant, most)[0]
        for most in (2**30, 10_000)
    )
    assert bound["peak"] <= 10_000 + bound["largest"]
    if variant in ("no masters", "frozen"):
        assert found["peak"] < 25_000  # bases and counts
    else:
        assert found["peak"] > 40_000


# -- differences and what is kept --------------------------------------------------------------------------


def slow_learner(folder: str) -> dict[str, Any]:
    """A learning rate at which most leading bits stay: bf16 weights that are their own masters."""
    config = ds_config(2, {**LOW_RANK, "master_weights": "none"}, bf16={"enabled": True})
    config["optimizer"]["params"] |= {"lr": 1e-5, "weight_decay": 0.0}
    config["hmt"]["snapshot"] = {"path": folder, "interval": 1}
    engine = make_engine(config, tiny_llama(layers=1))
    train_in_step(engine, 5)
    found = {
        name: json.loads(Path(folder, name, "manifest.json").read_text()) for name in tags(folder)
    }
    engine.destroy()
    return found


def test_weights_are_stored_as_differences_to_a_snapshot_that_is_kept(
    ranks: Ranks, tmp_path: Path
) -> None:
    manifests = ranks.run(slow_learner, 1, str(tmp_path))[0]
    first, *kept = sorted(manifests)
    assert (first, kept) == ("step00000001", ["step00000004", "step00000005"])
    binary = "zero_pp_rank_0_mp_rank_00_tensors.bin"
    for name in kept:
        files = manifests[name]["files"]
        assert f"../{first}/{binary}" in files
        weight_bytes = 2 * (2 * 61 * 40 + 2 * 40 * 40 + 2 * 20 * 40 + 3 * 77 * 40 + 3 * 40)
        assert (
            files[binary]["bytes"] < manifests[first]["files"][binary]["bytes"] - weight_bytes / 4
        )
        assert damage(str(tmp_path / name)) is None
    torn = tmp_path / first / binary
    torn.write_bytes(torn.read_bytes()[:-1])
    assert "bytes instead of" in str(damage(str(tmp_path / kept[0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_is_without_loss(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_tensors, "_CHUNK", 2**17)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(100_001, generator=generator).to(dtype)  # more than one chunk
    new = (base.float() * (1 + 1e-4 * torch.randn(base.shape, generator=generator))).to(dtype)
    new[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    before, after = base.view(torch.uint8), new.view(torch.uint8)
    file = ByteFile(str(tmp_path / "file"))
    file.append(b"something before")
    planes = encode(after, before, dtype.itemsize, file)
    file.close()
    data = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)
    assert torch.equal(decode(data, planes, before, dtype.itemsize), after)
    assert file.size < 0.8 * after.numel()


# -- beside training ---------------------------------------------------------------------------------------


def train_beside_a_slow_disk(folder: str) -> dict[str, Any]:
    """The disk does not take a byte before the run has gone on by four steps; the copies are slow too."""
    engine = snapshot_engine(2, folder)
    read, slow = GrowingHostStore.host_bytes, iter([0.5])

    def read_late(
        *args: Any,
    ) -> Any:  # longer than a step takes: an update that did not wait would be seen
        time.sleep(next(slow, 0))
        return read(*args)

    GrowingHostStore.host_bytes = read_late  # type: ignore[method-assign]
    opened, plain = threading.Event(), ByteFile.append
    ByteFile.append = lambda *args: (opened.wait(), plain(*args))[1]  # type: ignore[method-assign]
    losses = train(engine, 6)
    wait_for(lambda: bool(tags(folder)))
    during = engine.hmt_snapshots.metrics(), tags(folder)
    opened.set()
    engine.hmt_snapshots.finish()
    after = tags(folder)
    engine.destroy()
    return {"losses": losses, "during": during, "after": after}


def test_no_step_waits_for_the_disk(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(train_beside_a_slow_disk, 1, str(tmp_path))[0]
    metrics, folders = found["during"]
    assert (metrics["snapshots"], metrics["snapshots_skipped"]) == (1, 2)
    assert folders == ["step00000002.saving"]
    assert found["after"] == ["step00000002"]
    rest = ranks.run(resumed_after_two, 1, str(tmp_path))[0]
    assert rest == found["losses"][2:]  # the state of step 2, though the weights have moved on


def resumed_after_two(folder: str) -> list[float]:
    engine = snapshot_engine(2, None, seed=7)
    engine.load_checkpoint(folder)
    return train(engine, 4, first=2)


def failing(folder: str, call: str, code: int) -> str:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code), folder)

    engine = snapshot_engine(2, folder)
    train_in_step(engine, 2)
    setattr(os, call, fail)
    with pytest.raises(RuntimeError, match=r"hmt\.snapshot\.path") as error:
        train_in_step(engine, 3, first=2)
    return str(error.value)


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("makedirs", errno.EACCES)])
def test_what_the_disk_refuses_is_raised_in_training(
    ranks: Ranks, tmp_path: Path, call: str, code: int
) -> None:
    message = ranks.run(failing, 1, str(tmp_path), call, code)[0]
    assert os.strerror(code) in message
    assert str(tmp_path) in message
    assert damage(str(tmp_path / "step00000002")) is None


def refused(folder: str) -> str:
    with pytest.raises(ValueError, match=r"hmt\.snapshot\.path") as error:
        snapshot_engine(2, f"{folder}/file/snapshots")
    return str(error.value)


def test_what_cannot_work_is_refused_at_start_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    messages = ranks.run(refused, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "Not a directory" in messages[0]


# -- killed ------------------------------------------------------------------------------------------------

CALLS = ("write", "fsync", "replace", "rename", "remove", "rmdir", "unlink")


def killed(folder: str, at: int | None) -> int:
    """Dies before the ``at``-th change of the disk; without it the number of changes."""
    engine = snapshot_engine(2, folder)
    seen = 0

    def counted(plain: Any) -> Any:
        def call(*args: Any, **keyword: Any) -> Any:
            nonlocal seen
            if threading.current_thread() is not threading.main_thread():
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **keyword)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    train_in_step(engine, STEPS)
    return seen


def go_on(folder: str) -> tuple[int, list[float]]:
    """As a user would: the same config, whatever there is to load."""
    engine = snapshot_engine(2, folder, seed=0)
    engine.load_checkpoint(folder)
    step = engine.global_steps
    losses = train_in_step(engine, STEPS - step, first=step)
    engine.destroy()
    return step, losses


def test_killed_at_any_instant_the_newest_whole_snapshot_loads(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks.run(straight, 1, 2, str(tmp_path / "whole"), "fp32")[0]["losses"]
    changes = ranks.run(killed, 1, str(tmp_path / "count"), None)[0]
    instants = [changes * part // 8 for part in (2, 5, 7)]
    steps = set()
    for at in instants:
        folder = str(tmp_path / f"killed{at}")
        codes, _, _ = ranks.attempt(killed, 1, folder, at)
        assert codes == [-signal.SIGKILL]
        step, losses = ranks.run(go_on, 1, folder)[0]
        assert losses == whole[step:]
        assert tags(folder)[-1] == "step00000006"
        steps.add(step)
    assert len(steps) >= 2


# -- the SSD is left alone ---------------------------------------------------------------------------------


def files_written(folder: str | None) -> list[str]:
    """Paths opened for writing, renamed or removed by ordinary steps, threads included."""
    engine = snapshot_engine(2, folder, block=CACHED)
    train(engine, 1)
    found: list[str] = []
    counting = True

    def hook(event: str, args: Any) -> None:
        if not counting:
            return
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & writes:
            found.append(os.fsdecode(args[0]))
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            found.append(str(args[0]))

    sys.addaudithook(hook)
    train(engine, 5, first=1)
    if folder is not None:
        engine.hmt_snapshots.finish()
    counting = False
    return found


def test_training_touches_no_file_but_those_of_its_snapshots(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(files_written, 1, None)[0] == []
    written = ranks.run(files_written, 1, str(tmp_path))[0]
    assert written
    assert all(path.startswith(str(tmp_path)) for path in written)
