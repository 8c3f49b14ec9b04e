"""``hmt.snapshot`` beside ``offload_optimizer``: states in host memory are copied by their worker, those on an SSD
linked; and ranks that are killed within a snapshot or a checkpoint."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from killed_runs import (
    assert_one_run,
    kill_after,
    kill_at_call,
    log_loss,
    undisturbed_and_resumed,
)
from offloading import ADAMW, flip_bit, offloaded_to, small_chunks
from snapshot_runs import INTERVAL, STEPS, tags, train_in_step
from training import (
    LOW_RANK,
    ds_config,
    loss_of,
    make_engine,
    mean_over_ranks,
    micro_batches,
    tiny_llama,
    train,
    train_step,
    wait_for,
    weights,
)

from hmt_deepspeed.memory import available
from hmt_deepspeed.memory.growing import GrowingHostStore
from hmt_deepspeed.memory.pool import PinnedPool
from hmt_deepspeed.zero.offload.states import MASTER, RamStates
from hmt_deepspeed.zero.offload.worker import HostWorker
from hmt_deepspeed.zero.saving import snapshot
from hmt_deepspeed.zero.saving.raw_tensors import ByteFile
from hmt_deepspeed.zero.saving.verify import damage

BF16 = {"bf16": {"enabled": True}}


def snapshot_engine(
    folder: str | None,
    home: str,
    stage: int = 2,
    options: dict[str, Any] = ADAMW,
    overlap: str = "none",
    seed: int = 0,
    **changes: Any,
) -> Any:
    small_chunks()
    config = offloaded_to(home, stage, options, {"overlap": overlap}, **changes)
    if folder is not None:
        config["hmt"]["snapshot"] = {"path": folder, "interval": INTERVAL}
    return make_engine(config, tiny_llama(layers=1, seed=seed))


# -- going on --------------------------------------------------------------------------------------------


def straight(folder: str, *arguments: Any, **changes: Any) -> dict[str, Any]:
    engine = snapshot_engine(folder, *arguments, **changes)
    losses = train_in_step(engine, STEPS)
    found = {"losses": losses, "weights": weights(engine)}
    found["metrics"] = engine.hmt_snapshots.metrics()
    found["masters"] = engine.optimizer.metrics()["master_weight_bytes"]
    found["files"] = engine.optimizer.metrics().get("ssd_state_bytes")
    engine.destroy()
    return found


def resumed(folder: str, tag: str, *arguments: Any, **changes: Any) -> dict[str, Any]:
    engine = snapshot_engine(None, *arguments, seed=7, **changes)
    engine.load_checkpoint(folder, tag=tag)
    step = engine.global_steps
    assert step == int(tag.removeprefix("step"))
    found = {"losses": train(engine, STEPS - step, first=step), "weights": weights(engine)}
    engine.destroy()
    return found


# world, home, stage, options, overlap, changes
CASES: list[Any] = [
    pytest.param(1, "cpu", 2, ADAMW, "backward", BF16, marks=pytest.mark.slow),
    (2, "cpu", 3, LOW_RANK, "forward", {}),
    (2, "cpu", 1, {**LOW_RANK, "master_weights": "none"}, "forward", BF16),
    (1, "nvme", 2, LOW_RANK, "none", BF16),
    (2, "nvme", 3, ADAMW, "forward", {}),
    (2, "nvme", 2, ADAMW, "backward", {}),
    pytest.param(
        *(1, "nvme", 3, {**LOW_RANK, "master_weights": "none"}, "forward", BF16),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("world", "home", "stage", "options", "overlap", "changes"), CASES)
def test_a_run_taken_up_from_a_snapshot_goes_on_bit_for_bit(
    ranks: Ranks,
    tmp_path: Path,
    world: int,
    home: str,
    stage: int,
    options: Any,
    overlap: str,
    changes: dict[str, Any],
) -> None:
    folder, ssd = str(tmp_path / "snapshots"), str(tmp_path / "ssd") if home == "nvme" else ""
    arguments = (ssd, stage, options, overlap)
    whole = ranks.run(straight, world, folder, *arguments, **changes)[0]
    assert whole["metrics"]["snapshots"] == 3
    assert tags(folder)[-2:] == ["step00000004", "step00000006"]
    assert (whole["metrics"]["snapshot_bytes_linked"] > 0) == (home == "nvme")
    rest = ranks.run(resumed, world, folder, "step00000004", *arguments, **changes)[0]
    assert rest["losses"] == whole["losses"][4:]
    assert all(torch.equal(w, whole["weights"][n]) for n, w in rest["weights"].items())


def at_home(folder: str) -> dict[str, Any]:
    engine = snapshot_engine(None, "", 1, seed=7)
    path, _ = engine.load_checkpoint(folder)
    return {"path": path, "losses": train(engine, 1, first=engine.global_steps)}


def test_files_are_linked_and_load_anywhere(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing of the states is written again; another home, stage and world size, and a damaged link."""
    folder = str(tmp_path / "snapshots")
    whole = ranks.run(straight, 2, folder, str(tmp_path / "ssd"), 3)[0]
    linked = sorted((tmp_path / "snapshots" / "step00000006" / "ssd_states").iterdir())
    metrics = whole["metrics"]
    assert sum(path.stat().st_size for path in linked) * 3 == 2 * metrics["snapshot_bytes_linked"]
    assert metrics["snapshot_bytes_written"] < 3 * whole["masters"] / 2
    # the run's own, two of each piece as ever, less what only snapshots still hold
    assert whole["files"] <= 2 * metrics["snapshot_bytes_linked"] / 3
    other = ranks.run(at_home, 1, folder)[0]
    # sums over ranks in another order: see training.py
    assert other["losses"] == pytest.approx(whole["losses"][6:], rel=1e-5)
    flip_bit(linked[3])
    assert "checksum" in str(damage(os.path.join(folder, "step00000006")))
    assert ranks.run(at_home, 1, folder)[0]["path"].endswith("step00000004")


# -- beside training ---------------------------------------------------------------------------------------


def beside_training(folder: str, home: str) -> dict[str, Any]:
    """No update of the step that a snapshot is of begins before the step has returned, and the disk takes no byte
    before the run has gone on by four steps."""
    engine = snapshot_engine(folder, home, overlap="forward")
    adam, append = engine.optimizer.zero.host.adam, ByteFile.append
    may_update, opened, waited_in_vain = threading.Event(), threading.Event(), list[bool]()
    update = adam.step_

    def held_up(*args: Any, **keyword: Any) -> Any:
        if not may_update.wait(120):
            waited_in_vain.append(True)
            may_update.set()
        return update(*args, **keyword)

    adam.step_ = held_up
    ByteFile.append = lambda *args: (opened.wait(), append(*args))[1]  # type: ignore[method-assign]
    may_update.set()
    losses = train(engine, 1)
    (tokens,) = micro_batches(engine, 1)
    loss = loss_of(engine, tokens)
    engine.backward(loss)
    engine.optimizer.overlap.finish()  # of the first step
    may_update.clear()
    engine.step()
    taken = engine.hmt_snapshots.metrics()["snapshots"]
    pending = all(e.weight.pending for e in engine.optimizer.zero.param_states)
    may_update.set()
    losses += [mean_over_ranks(loss.item()), *train(engine, 4, first=2)]
    wait_for(lambda: bool(tags(folder)))
    found = {"losses": losses, "during": tags(folder), "taken": taken, "pending": pending}
    found["in vain"], found["metrics"] = any(waited_in_vain), engine.hmt_snapshots.metrics()
    opened.set()
    engine.hmt_snapshots.finish()
    found["after"] = tags(folder)
    engine.destroy()
    return found


def rest_of(folder: str, home: str) -> list[float]:
    engine = snapshot_engine(None, home, overlap="forward", seed=7)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    return train(engine, 4, first=2)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_no_step_waits(ranks: Ranks, tmp_path: Path, home: str) -> None:
    folder, ssd = str(tmp_path / "snapshots"), str(tmp_path / "ssd") if home == "nvme" else ""
    found = ranks.run(beside_training, 1, folder, ssd)[0]
    assert found["taken"] == 1
    assert found["pending"]  # taking it has waited for none of them
    assert not found["in vain"]
    assert found["during"] == ["step00000002.saving"]
    assert found["metrics"]["snapshots_skipped"] == 2
    assert found["after"] == ["step00000002"]
    # the state of step 2, though the run has gone on
    assert ranks.run(rest_of, 1, folder, ssd)[0] == found["losses"][2:]


def copied_late(folder: str) -> list[float]:
    """The next updates begin, during backward, before a copy of what the device holds has been made."""
    engine = snapshot_engine(folder, "", overlap="backward")
    read, slow = GrowingHostStore.host_bytes, iter([0.3])

    def read_late(*args: Any) -> Any:
        time.sleep(next(slow, 0))
        return read(*args)

    GrowingHostStore.host_bytes = read_late  # type: ignore[method-assign]
    losses = train(engine, 3)
    engine.hmt_snapshots.finish()
    losses += train(engine, 3, first=3)
    engine.destroy()
    return losses


def test_updates_during_backward_come_after_a_snapshot(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks.run(copied_late, 1, str(tmp_path))[0]
    assert ranks.run(resumed, 1, str(tmp_path), "step00000002", "")[0]["losses"][:4] == losses[2:]


def left_alone(folder: str, home: str) -> list[Any]:
    """A script that ends after a step, without ``engine.destroy``; then one that calls it."""
    engine = snapshot_engine(folder, home, overlap="forward")
    train(engine, 2)
    at_exit = threading.Thread(target=engine.hmt_snapshots._thread.submit(int).result)
    at_exit.start()
    at_exit.join(120)
    found = [at_exit.is_alive(), tags(folder)]
    engine.destroy()
    return [*found, tags(folder)]


def test_a_process_that_ends_does_not_hang(ranks: Ranks, tmp_path: Path) -> None:
    """Its last step on the SSD never counts, so no thread may wait for that; ``destroy`` makes it count."""
    folder = str(tmp_path / "snapshots")
    found = ranks.run(left_alone, 1, folder, str(tmp_path / "ssd"))[0]
    assert found == [False, [], ["step00000002"]]


def refused_for(folder: str, home: str, limit: int) -> tuple[int, str]:
    """With so many bytes of host memory for snapshots: how many they take, or what is said."""
    snapshot.host_memory_share = lambda: limit
    try:
        engine = snapshot_engine(folder, home)
    except ValueError as error:
        return 0, str(error)
    taken = engine.hmt_snapshots.host_bytes
    train_in_step(engine, 3)
    assert engine.hmt_snapshots.metrics()["snapshot_host_bytes"] == taken  # it was counted before
    states = engine.optimizer.metrics()["optimizer_state_bytes"]
    masters = engine.optimizer.metrics()["master_weight_bytes"]
    line = engine.hmt_snapshots.describe()
    engine.destroy()
    return taken, f"{line}; {states + masters} in all"


def copied_and_refused(folder: str, home: str) -> list[Any]:
    found = [refused_for(f"{folder}/a", home, 2**30)]
    taken = found[0][0]
    return [
        *found,
        refused_for(f"{folder}/b", home, taken),
        refused_for(f"{folder}/c", home, taken - 1),
    ]


def test_copies_that_host_memory_has_no_room_for_are_refused_at_start(
    ranks: Ranks, tmp_path: Path
) -> None:
    (taken, line), same, (_, message) = ranks.run(copied_and_refused, 1, str(tmp_path), "")[0]
    nbytes = int(line.split("; ")[-1].split()[0])
    # moments and masters, without their counts; a page for each of those and of the numbers beside
    assert nbytes <= taken < nbytes + 100 * 4096
    assert "of host memory per rank" in line
    assert same == (taken, line.replace("/a;", "/b;"))
    assert f"copies {taken} bytes" in message
    assert f"may take {taken - 1}" in message
    assert "nvme" in message


def shared_out(folder: str | None) -> int:
    """What "auto" leaves to activations that swap, of a machine with 64 MiB."""
    pools, make = [], PinnedPool.__init__

    def counted(pool: PinnedPool, nbytes: int, *arguments: Any) -> None:
        make(pool, nbytes, *arguments)
        pools.append(pool.nbytes)

    PinnedPool.__init__ = counted  # type: ignore[method-assign]
    available.free_host_memory = lambda: 2**26 - sum(pools)
    config = ds_config(2, LOW_RANK)
    config["hmt"]["activations"] = {"policy": {"residual": "swap_host"}}
    if folder is not None:
        config["hmt"]["snapshot"] = {"path": folder, "interval": INTERVAL}
    engine = make_engine(config, tiny_llama(layers=1))
    return int(engine.hmt_activations.memory.limit)


def test_activations_share_what_snapshots_leave(ranks: Ranks, tmp_path: Path) -> None:
    alone, beside = (ranks.run(shared_out, 1, folder)[0] for folder in (None, str(tmp_path)))
    weight_bytes = 4 * (2 * 61 * 40 + 2 * 40 * 40 + 2 * 20 * 40 + 3 * 77 * 40)
    assert alone == 2**25
    assert beside < alone - weight_bytes / 2  # half of what is free


def written_behind_a_copy() -> tuple[float, float]:
    """What a job that was submitted before the write finds, and what is there after it."""
    worker, found = HostWorker(torch.device("cpu"), pinned=True), torch.zeros(4)
    states = RamStates(worker, "a weight", 4, [MASTER], undo=False)
    states.write({MASTER: torch.ones(4)})
    worker.submit("a weight", lambda _: (time.sleep(0.1), found.copy_(states.read(MASTER))))
    states.write({MASTER: torch.full((4,), 2.0)})
    worker.close()
    return float(found[0]), float(states.read(MASTER)[0])


def test_states_are_replaced_after_a_copy_of_them(ranks: Ranks) -> None:
    assert ranks.run(written_behind_a_copy, 1)[0] == (1.0, 2.0)


# -- killed -------------------------------------------------------------------------------------------------


def until_killed(
    folder: str, home: str, overlap: str, steps: int, instant: Any = None, victims: Any = ()
) -> None:
    """From the newest checkpoint or snapshot to the end, with a snapshot after every second step and a checkpoint
    after every third one, unless ``victims`` are killed at ``instant``."""
    engine = snapshot_engine(f"{folder}/snapshots", home, 3, overlap=overlap)
    checkpoints = f"{folder}/checkpoints"
    engine.load_checkpoint(engine.hmt_snapshots.newest(checkpoints))
    if torch.distributed.get_rank() in victims:
        arm(instant)
    for step in range(engine.global_steps, steps):
        log_loss(folder, step, train_step(engine, step))
        if (step + 1) % 3 == 0:
            if isinstance(instant, tuple) and "snapshot" in instant:
                engine.hmt_snapshots.finish()  # else the checkpoint might be whole before it
            engine.save_checkpoint(checkpoints)
    engine.destroy()


def arm(instant: Any) -> None:
    """Dies at the n-th call of something in the thread that writes snapshots, or in the one that saves
    checkpoints; or so many seconds from now."""
    if isinstance(instant, float):
        kill_after(instant)
        return
    name, inside, number = instant

    def counts() -> bool:
        in_snapshot = threading.current_thread().name.startswith("hmt-snapshot")
        return in_snapshot == (inside == "snapshot")

    kill_at_call(os, name, number, counts)


INSTANTS = [
    (("link", "snapshot", 30), (1,)),  # before there is any
    (("link", "checkpoint", 30), (0,)),  # a snapshot is there, no checkpoint
    (("rename", "snapshot", 1), (0,)),
    (("replace", "snapshot", 2), (0, 1)),
]


def test_ranks_killed_within_a_snapshot_or_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    runs = undisturbed_and_resumed(ranks, until_killed, 2, tmp_path, ("forward", 6), INSTANTS)
    assert_one_run(runs, 6)
    # what the killed runs left on the SSD the next one has taken away
    assert not list((tmp_path / "ssd").glob("hmt-swap-*"))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_ranks_killed_at_random_instants(ranks: Ranks, tmp_path: Path, overlap: str) -> None:
    """One of them or both, sooner than so many steps could end."""
    draw = random.Random(overlap)
    instants = [(draw.uniform(0.0, 0.3), draw.choice([(0,), (1,), (0, 1)])) for _ in range(25)]
    runs = undisturbed_and_resumed(ranks, until_killed, 2, tmp_path, (overlap, 60), instants)
    assert_one_run(runs, 60)
    assert not list((tmp_path / "ssd").glob("hmt-swap-*"))
