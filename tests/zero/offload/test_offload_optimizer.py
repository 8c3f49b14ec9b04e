"""Masters and moments in host memory, updated by DeepSpeed's CPU Adam: ``offload_optimizer: cpu``."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import Ranks
from offloading import ADAMW, offloaded, small_chunks, stock_offload
from torch import Tensor
from training import (
    LOW_RANK,
    assert_same,
    ds_config,
    furthest,
    loss_of,
    make_engine,
    micro_batches,
    model_weights,
    result,
    tiny_llama,
    train,
    train_step,
    weights,
)

from hmt_deepspeed.report.metrics import format_bytes

STEPS = 6


def parity_run(stage: int, gas: int, stock: bool) -> dict[str, Any]:
    """Ten steps with the same JSON, ours or stock."""
    config = stock_offload(stage, gas=gas) if stock else ds_config(stage, ADAMW, gas=gas)
    engine = make_engine(offloaded(config))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(train_step(engine, step))
        norms.append(float(engine.get_global_grad_norm()))
    kernel = type(getattr(engine.optimizer, "optimizer", None)).__name__
    return {"losses": losses, "norms": norms, "weights": model_weights(engine), "kernel": kernel}


PARITY = [(1, 1, 1), (3, 2, 2), pytest.param(2, 2, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("stage", "world", "gas"), PARITY)
def test_the_numbers_are_zero_offloads(ranks: Ranks, stage: int, world: int, gas: int) -> None:
    ours = ranks.run(parity_run, world, stage, gas, stock=False)[0]
    stock = ranks.run(parity_run, world, stage, gas, stock=True)[0]
    assert stock["kernel"] == "DeepSpeedCPUAdam"
    assert sum(norm > 0.5 for norm in ours["norms"]) >= STEPS // 4  # clipping is active
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-3)
    assert furthest(ours["weights"], stock["weights"]) < 2e-3


# -- the same numbers as without offload ------------------------------------------------------------------


def compared(
    stage: int, options: dict[str, Any], changes: dict[str, Any], offload: bool
) -> dict[str, Any]:
    small_chunks()
    config = ds_config(stage, options, **changes)
    model = tiny_llama()
    # Of one element the second of two ranks holds nothing, and takes part in its gather all the same.
    model.model.norm.scalar = torch.nn.Parameter(torch.ones(1))
    engine = make_engine(offloaded(config) if offload else config, model)
    found = result(engine, train(engine, 5))
    assert all(
        engine.optimizer.zero.basis_groups.schedule.num_refreshes
    )  # five steps are enough for each matrix
    worker = engine.optimizer.zero.host
    found["kinds"] = {
        (type(e.weight).__name__, e.matrix is None, e.weight.master is None)
        for e in engine.optimizer.zero.param_states
    }
    pools = [] if worker is None else [worker.engine.pool, worker._outbound]
    found["pools"] = [(pool.nbytes, pool.peak_bytes) for pool in pools]
    return found


MODES = {
    "dense": (1, 1, ADAMW, {}),
    "dense beside low-rank": (2, 2, LOW_RANK, {}),
    "rows that ranks share": (3, 2, LOW_RANK, {}),
    "updates that travel": (2, 2, {**LOW_RANK, "projection": "left"}, {}),
    "whole updates": (3, 2, {"method": "apollo", "update_interval": 3, "scale": 1.0}, {}),
    "muon": (3, 2, {**LOW_RANK, "method": "muon", "scale": 0.3}, {}),
    "core": (2, 1, {**LOW_RANK, "projection": "two_sided"}, {}),
}


SLOW = ["core", "whole updates"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODES]
)
def test_offload_does_not_change_the_numbers(ranks: Ranks, name: str) -> None:
    stage, world, *arguments = MODES[name]
    on_host = ranks.run(compared, world, stage, *arguments, True)[0]
    on_device = ranks.run(compared, world, stage, *arguments, False)[0]
    assert {kind for kind, *_ in on_host["kinds"]} == {"HostWeight"}
    assert {kind for kind, *_ in on_device["kinds"]} == {"Weight"}
    assert_same(on_host, on_device)
    # Two chunks of 512 elements make a page, which one chunk takes: all others had to wait for it.
    assert on_host["pools"] == [(4096, 4096)] * 2


@pytest.mark.parametrize(
    "parameters", [pytest.param("on the device", marks=pytest.mark.slow), "on the host"]
)
def test_16_bit_weights(ranks: Ranks, parameters: str) -> None:
    """bf16, with masters and without; without, Adam's last bits decide single roundings."""
    changes: dict[str, Any] = {"bf16": {"enabled": True}}
    if parameters == "on the host":
        changes["zero_optimization"] = {"offload_param": {"device": "cpu"}}
    for masters in ("fp32", "none"):
        options = {**LOW_RANK, "master_weights": masters}
        on_host = ranks.run(compared, 2, 3, options, changes, True)[0]
        on_device = ranks.run(compared, 2, 3, options, changes, False)[0]
        assert on_host["losses"] == pytest.approx(on_device["losses"], rel=2e-3)
        assert furthest(on_host["weights"], on_device["weights"]) < 2e-2
        if masters == "none":  # nothing of the matrices is on the host
            assert on_host["kinds"] == {("Weight", False, True), ("HostWeight", True, True)}
        else:
            assert {kind for kind, *_ in on_host["kinds"]} == {"HostWeight"}


def overflowing(stock: bool) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    if stock:
        config = stock_offload(2, fp16=fp16)
    else:
        config = ds_config(2, ADAMW, fp16=fp16)
    engine = make_engine(offloaded(config))
    losses, before = train(engine, 3), model_weights(engine)
    states = [] if stock else copied_states(engine)
    loss = loss_of(engine, micro_batches(engine, 3)[0])
    engine.backward(loss * (1e8 if torch.distributed.get_rank() == 1 else 1.0))
    engine.step()
    same = furthest(before, model_weights(engine)) == 0
    if not stock:
        same &= all(map(torch.equal, states, copied_states(engine)))
    losses += train(engine, 5, first=4)
    return {"losses": losses, "same": same, "scale": engine.optimizer.cur_scale}


def copied_states(engine: Any) -> list[Tensor]:
    states = [t for state in engine.optimizer.state.values() for t in state.values()]
    return [t.clone() for t in [*states, *weights(engine).values()]]


def test_an_overflow_on_one_rank_skips_the_step(ranks: Ranks) -> None:
    for ours, stock in zip(
        ranks.run(overflowing, 2, False), ranks.run(overflowing, 2, True), strict=True
    ):
        assert ours["same"]
        assert stock["same"]
        assert ours["scale"] == stock["scale"] == 128
        assert ours["losses"] == pytest.approx(stock["losses"], rel=2e-3)  # fp16 has three digits


# -- what is where -----------------------------------------------------------------------------------------


def device_bytes(options: dict[str, Any], offload: bool) -> dict[str, int]:
    """Bytes of all live tensors outside the worker's pools: on a CPU the host is the device."""
    small_chunks()  # the worker's scratch, which is no state, is a chunk
    config = ds_config(2, options)
    engine = make_engine(offloaded(config) if offload else config, tiny_llama(layers=1))
    train(engine, 3)
    loss = loss_of(engine, micro_batches(engine, 3)[0])
    engine.backward(loss)
    worker = engine.optimizer.zero.host
    if worker is not None:
        worker.drain()  # gradients on their way
    pools = [] if worker is None else [pool._memory for pool in worker.engine._pools]
    host = {memory.untyped_storage().data_ptr() for memory in pools}
    gc.collect()
    storages = {}
    for tensor in [t for t in gc.get_objects() if isinstance(t, Tensor)]:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in host:
            storages[pointer] = tensor.untyped_storage().nbytes()
    found = {"device": sum(storages.values())}
    entries = engine.optimizer.zero.param_states
    found["dense"] = sum(e.weight.num_elements for e in entries if e.matrix is None)
    found["matrices"] = sum(e.weight.num_elements for e in entries if e.matrix is not None)
    found["host"] = engine.optimizer.metrics()["optimizer_host_bytes"]
    found["table"] = engine.optimizer.describe()
    return found


def test_states_leave_the_device(ranks: Ranks) -> None:
    """fp32: without offload the weights are their own masters, so the masters on the host are new bytes;
    the moments (8 bytes an element) and the reduced gradients (4) leave the device."""
    for options in (ADAMW, LOW_RANK):
        before = ranks.run(device_bytes, 1, options, False)[0]
        after = ranks.run(device_bytes, 1, options, True)[0]
        dense, matrices = after["dense"], after["matrices"]
        assert (matrices == 0) == (options is ADAMW)
        assert after["host"] == 16 * dense + 4 * matrices
        # the worker keeps a scalar count, norms by chunk and the like
        assert before["device"] - after["device"] == pytest.approx(12 * dense, abs=4096)
        assert "whole, on host" in after["table"]
        assert ("whole, masters on host" in after["table"]) == (matrices > 0)
        said = f"{format_bytes(after['host'])} of states and gradients in host memory"
        assert said in after["table"]
        assert max(map(len, after["table"].splitlines())) <= 80


# -- checkpoints and tools -----------------------------------------------------------------------------------


def saved(folder: str, stage: int) -> dict[str, Any]:
    small_chunks()
    engine = make_engine(offloaded(ds_config(stage, LOW_RANK)))
    train(engine, 4)
    engine.save_checkpoint(folder)
    return {"losses": train(engine, 2, first=4), "weights": weights(engine)}


def resumed(folder: str, stage: int, offload: bool) -> dict[str, Any]:
    small_chunks()
    config = ds_config(stage, LOW_RANK)
    engine = make_engine(offloaded(config) if offload else config, tiny_llama(seed=1))
    engine.load_checkpoint(folder)
    return {"losses": train(engine, 2, first=4), "weights": weights(engine)}


def test_checkpoints(ranks: Ranks, tmp_path: Any) -> None:
    """Bit for bit on the same layout; at another world size, stage, and without offload up to summation."""
    whole = ranks.run(saved, 2, str(tmp_path), 3)[0]
    same = ranks.run(resumed, 2, str(tmp_path), 3, True)[0]
    assert same["losses"] == whole["losses"]
    assert furthest(same["weights"], whole["weights"]) == 0
    for world, stage, offload in ((1, 2, True), (2, 3, False)):
        other = ranks.run(resumed, world, str(tmp_path), stage, offload)[0]
        assert other["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert furthest(other["weights"], whole["weights"]) < 2e-3


def tools(stage: int, offload: bool) -> dict[str, Any]:
    from deepspeed import utils

    small_chunks()
    config = ds_config(stage, LOW_RANK)
    engine = make_engine(offloaded(config) if offload else config)
    train(engine, 2)
    engine.backward(loss_of(engine, micro_batches(engine, 2)[0]))
    param = dict(engine.module.named_parameters())["model.embed_tokens.weight"]
    gradient = utils.safe_get_full_grad(param)
    utils.safe_set_full_grad(param, gradient * 2)
    doubled = utils.safe_get_full_grad(param) / 2
    engine.optimizer.offload_states()
    engine.optimizer.reload_states()
    engine.step()
    found = {"gradient": gradient, "doubled": doubled}
    found["master"] = utils.safe_get_full_fp32_param(param)
    found["moment"] = utils.safe_get_full_optimizer_state(param, "exp_avg")
    utils.safe_set_full_fp32_param(param, found["master"] + 1)
    found["set"] = utils.safe_get_full_fp32_param(param) - 1
    found["weight"] = model_weights(engine)["model.embed_tokens.weight"] - 1
    utils.safe_set_full_optimizer_state(param, found["moment"] * 2, "exp_avg")
    found["set moment"] = utils.safe_get_full_optimizer_state(param, "exp_avg") / 2
    return found


def test_tools_read_and_write_what_is_on_the_host(ranks: Ranks) -> None:
    for stage, world in ((2, 1), (3, 2)):
        on_host = ranks.run(tools, world, stage, True)[0]
        on_device = ranks.run(tools, world, stage, False)[0]
        assert on_host["gradient"].abs().max() > 0
        for name, value in on_device.items():
            assert torch.allclose(on_host[name], value, atol=2e-4), name
        assert torch.equal(on_host["gradient"], on_host["doubled"])


# -- failures ------------------------------------------------------------------------------------------------


def failing_worker() -> list[str]:
    small_chunks()
    engine = make_engine(offloaded(ds_config(2, ADAMW), pin_memory=False))
    assert "not page-locked (pin_memory is false)" in engine.optimizer.describe()
    train(engine, 1)
    adam = engine.optimizer.zero.host.adam
    step, calls = adam.step_, []

    def fail(*arguments: Any, **keyword: Any) -> None:
        calls.append(1)
        if len(calls) == 20:
            raise OSError("the kernel broke")
        step(*arguments, **keyword)

    adam.step_ = fail
    said = []
    for attempt in range(3):
        try:
            train_step(engine, 1 + attempt)
            said.append("went on")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_failed_job_is_raised_in_the_training_thread(ranks: Ranks) -> None:
    said = ranks.run(failing_worker, 1)[0]
    for message in said:  # every time: the states are no longer one step's
        assert "the optimizer's work on model." in message
        assert "the kernel broke" in message
        assert "last checkpoint" in message
