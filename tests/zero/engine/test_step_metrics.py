"""What an engine says of its steps, to whoever asks and to DeepSpeed's monitors."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from training import ds_config, make_engine, stock_config, train, train_step

from hmt_deepspeed.memory.numbers import ArrivingNumbers

STEPS = 11  # of which the first and the tenth tell of every matrix
NAMES = {
    "lr",
    "grad_norm",
    "skipped_steps",
    "device_bytes",
    "average_device_bytes",
    "peak_device_bytes",
    "host_bytes",
    "peak_host_bytes",
    "forward_seconds",
    "backward_seconds",
    "reduce_seconds",
    "optimizer_seconds",
    "bytes_to_host",
    "bytes_from_host",
    "transfer_wait_seconds",
    "optimizer_host_bytes",
    "communication_bytes_per_step",
    "mean_rank",
    "mean_captured_energy",
}


def monitored(folder: str, stock: bool, behind: int = 0) -> dict[str, Any]:
    """A script of somebody's own: no training loop of ours, DeepSpeed's monitors on.

    Args:
        behind: reports that a device's numbers come late.
    """
    reports: list[Any] = []
    arrived = ArrivingNumbers.have_arrived

    def late(arriving: Any) -> bool:
        if all(arriving is not known for known in reports):
            reports.append(arriving)
        place = next(i for i, known in enumerate(reports) if known is arriving)
        return engine.global_steps > place + behind and arrived(arriving)

    ArrivingNumbers.have_arrived = late  # type: ignore[method-assign]
    monitors: dict[str, Any] = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}
    }
    if find_spec("tensorboard") is not None:
        monitors["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": "board"}
    host = {"offload_optimizer": {"device": "cpu"}}
    config = (
        stock_config(2, **monitors)
        if stock
        else ds_config(2, gas=2, zero_optimization=host, **monitors)
    )
    engine = make_engine(config)
    hooks = len(engine.module._forward_hooks)
    before = engine.hmt_metrics.read()
    train(engine, STEPS - 1)
    engine.eval()
    held_out = [train_forward(engine) for _ in range(3)]
    engine.train()
    train_step(engine, STEPS - 1)
    found = {
        "before": before,
        "after": engine.hmt_metrics.read(),
        "brief": engine.hmt_metrics.read(every_matrix=False),
        "held_out": held_out,
    }
    module = engine.module
    found["told"] = len(events(Path(folder), "HMT/lr")) if not stock else None
    engine.destroy()
    return found | {"hooks_left": len(module._forward_hooks) - hooks}


def train_forward(engine: Any) -> float:
    """A forward of evaluation; what the phases say of forward before the next step."""
    from training import loss_of, micro_batches

    loss_of(engine, micro_batches(engine, 0)[0])
    return float(engine.hmt_metrics.phases.seconds()["forward"])


@pytest.fixture(scope="module")
def ours(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("ours")
    return ranks.run(monitored, 1, str(folder), False)[0], folder


def events(folder: Path, name: str) -> list[tuple[int, float]]:
    """(samples, value) that the CSV monitor wrote under a name."""
    with open(folder / "run" / f"{name.replace('/', '_')}.csv", newline="") as file:
        return [(int(samples), float(value)) for samples, value in list(csv.reader(file))[1:]]


def test_every_number_is_there_after_a_step(ours: tuple[dict[str, Any], Path]) -> None:
    after = ours[0]["after"]
    assert after.keys() >= NAMES
    for name in ("forward_seconds", "backward_seconds", "optimizer_seconds", "bytes_to_host"):
        assert after[name] > 0, name
    assert after["host_bytes"] > after["optimizer_host_bytes"] > 0, "the process's, not the states'"
    assert 0 < after["average_device_bytes"] <= after["peak_device_bytes"]
    assert "forward_seconds" not in ours[0]["before"]


def test_bytes_are_of_one_step(ours: tuple[dict[str, Any], Path]) -> None:
    # fp32 gradients of what AdamW updates, twice (two micro-batches), and the low-rank matrices' updates
    numbers = [value for _, value in events(ours[1], "HMT/bytes_to_host")]
    dense = 2 * 61 * 40 + 5 * 40
    low_rank = 2 * (2 * 40 * 40 + 2 * 20 * 40 + 3 * 77 * 40)
    assert set(numbers) == {4 * (2 * dense + low_rank)}


def test_evaluation_is_no_forward_of_a_step(ours: tuple[dict[str, Any], Path]) -> None:
    assert len(set(ours[0]["held_out"])) == 1


def test_the_monitors_get_every_number_every_step(ours: tuple[dict[str, Any], Path]) -> None:
    found, folder = ours
    samples = [12 * step for step in range(1, STEPS + 1)]
    for name in NAMES:
        assert [at for at, _ in events(folder, f"HMT/{name}")] == samples, name
    matrix = "HMT/rank_per_matrix/model.layers.0.mlp.up_proj.weight"
    assert [at for at, _ in events(folder, matrix)] == [12, 120]
    assert events(folder, matrix)[-1][1] in (4, 8, 16)
    assert "rank_per_matrix" in found["after"]
    assert "rank_per_matrix" not in found["brief"]
    if find_spec("tensorboard") is not None:
        assert any(path.is_file() for path in (folder / "board").rglob("events*"))


def test_a_device_that_is_behind_is_told_of_later_under_its_own_samples(
    ours: tuple[dict[str, Any], Path], ranks: Ranks, tmp_path: Path
) -> None:
    """And what has not come when the engine is destroyed is told then."""
    found = ranks.run(monitored, 1, str(tmp_path), False, behind=2)[0]
    assert (ours[0]["told"], found["told"]) == (STEPS, STEPS - 2)
    names = ("lr", "grad_norm", "mean_captured_energy", "mean_rank", "communication_bytes_per_step")
    for name in [*names, "captured_energy_per_matrix/model.layers.0.mlp.up_proj.weight"]:
        assert events(tmp_path, f"HMT/{name}") == events(ours[1], f"HMT/{name}")
    assert found["after"]["grad_norm"] == ours[0]["after"]["grad_norm"]


def test_the_module_is_left_as_it_was(ours: tuple[dict[str, Any], Path]) -> None:
    assert ours[0]["hooks_left"] < 0


def test_a_stock_engine_is_measured_and_tells_the_monitors_what_stock_tells(
    ranks: Ranks, tmp_path: Path
) -> None:
    after = ranks.run(monitored, 1, str(tmp_path), True)[0]["after"]
    assert after["forward_seconds"] > 0
    assert not list((tmp_path / "run").glob("HMT*"))


def test_a_skipped_step_is_said(ranks: Ranks) -> None:
    codes, _, logs = ranks.attempt(skipping, 1)
    assert codes == [0], logs
    assert "a gradient is not finite: this step is skipped; loss scale 16, now 8" in logs[0]
    assert logs[0].count("this step is skipped\n") == 2  # fp32 has no scale


def skipping() -> None:
    """In fp16 and, clipped or not, in fp32; the second step also looks for new bases."""
    from deepspeed.accelerator import get_accelerator
    from training import furthest, loss_of, micro_batches, model_weights

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    unclipped = {"gradient_clipping": 0.0}
    for stage, changes, scale in [(2, {"fp16": fp16}, 8.0), (3, {}, None), (1, unclipped, None)]:
        engine = make_engine(ds_config(stage, **changes))
        for factor, steps in ((1.0, True), (float("inf"), False), (1.0, True)):
            before = model_weights(engine)
            engine.backward(loss_of(engine, micro_batches(engine, 0)[0]) * factor)
            engine.step()
            assert (furthest(model_weights(engine), before) > 0) == steps
        found = engine.hmt_metrics.read(every_matrix=False)
        assert (found["skipped_steps"], found.get("loss_scale")) == (1, scale)
