"""``offload_states(include=…)``: what moves, what stays, and training that does not notice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from harness import Ranks
from modes import INT8, LOW_RANK, wide_llama
from offloading import offloaded
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from training import ds_config, loss_of, make_engine, micro_batches, tiny_llama, train, weights

from hmt_deepspeed.optim.rules.state import StateTensor

ALL = [state.value for state in OffloadStateTypeEnum]
BF16 = {"bf16": {"enabled": True}}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": (LOW_RANK, {}),
    "bf16": ({**LOW_RANK, "share_basis": True}, BF16),
    "two-sided, no masters": (
        {**LOW_RANK, "projection": "two_sided", "master_weights": "none"},
        BF16,
    ),
    "factored": ({**LOW_RANK, "projection": "left", "second_moment": "factored"}, BF16),
    "int8 states": (INT8, BF16),
}


def tensors_of(engine: Any, name: str) -> list[Tensor]:
    """What a name of DeepSpeed's takes, found without the code that moves it; each storage once."""
    optimizer = engine.optimizer
    found: list[Tensor] = []
    for entry in optimizer.zero.param_states:
        if name == "optim_states":
            moments = (
                entry.dense_state[:2] if entry.matrix is None else entry.matrix.states().values()
            )
            found += [t for state in moments if type(state) is StateTensor for t in state.tensors()]
        elif name == "hp_params" and entry.weight.master_bytes():
            found.append(entry.weight.master)
        elif name == "lp_grads":
            gradient = entry.gradient
            found += [t for t in (gradient.reduced, gradient.full, gradient.local) if t is not None]
        elif name == "lp_params" and entry.matrix is not None:
            columns = getattr(entry.matrix, "columns", None)
            place = None if columns is None else columns.local
            place = place if place is not None or columns is None else columns.whole
            site = entry.gradient.linear
            found += [
                t
                for t in (place, site and site.projection, site and site.group.columns)
                if isinstance(t, Tensor)
            ]
    if name == "lp_params":
        found += [getattr(p, "ds_tensor", p).data for p in engine.module.parameters()]
    storages = {t.untyped_storage().data_ptr(): t for t in found if t.numel()}
    return [t.untyped_storage() for t in storages.values()]


def poison(storages: list[Any]) -> None:
    for storage in storages:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN, of whatever dtype


def moves(mode: str, stage: int, rounds: list[list[str]]) -> dict[str, Any]:
    """Losses with moves in the middle of each window; what was left behind is overwritten at once."""
    options, changes = MODES[mode]
    found: dict[str, Any] = {"kept": [], "moved": 0}
    for move in (False, True):
        model = wide_llama() if options is INT8 else tiny_llama(layers=1)
        engine = make_engine(ds_config(stage, options, gas=2, **changes), model)
        losses = train(engine, 1)
        for step, include in enumerate(rounds):
            first, second = micro_batches(engine, 1 + step)
            engine.backward(loss_of(engine, first))
            engine.step()
            if move:
                pinned = step % 2 == 0
                engine.empty_partition_cache()
                before = {name: tensors_of(engine, name) for name in ALL[:4]}
                engine.offload_states(include=include, pin_memory=pinned, non_blocking=pinned)
                engine.offload_states(include=include)  # nothing is left to do
                on_host = {name: tensors_of(engine, name) for name in ALL[:4]}
                for name in ALL[:4]:
                    stays = {s.data_ptr() for s in before[name]} & {
                        s.data_ptr() for s in on_host[name]
                    }
                    if (name in include and stays) or (
                        name not in include and len(stays) != len(before[name])
                    ):
                        found["kept"].append((name, include))
                    if name in include:
                        found["moved"] += len(before[name])
                        poison(before[name])
                engine.reload_states(non_blocking=pinned)
                engine.reload_states()
                for name in include:
                    poison(on_host.get(name, []))
            engine.backward(loss_of(engine, second))
            engine.step()
        losses += train(engine, 2, first=1 + len(rounds))
        found[move] = (losses, weights(engine))
        engine.destroy()
    return found


def freed(mode: str, stage: int) -> list[bool]:
    """Of each storage of moments and bases, whether nobody holds what it was after it has moved."""
    options, changes = MODES[mode]
    engine = make_engine(ds_config(stage, options, **changes), tiny_llama(layers=1))
    train(engine, 2)
    bases = [entry.matrix.columns.whole for entry in engine.optimizer.zero.low_rank]
    before = [StorageWeakRef(b.untyped_storage()) for b in bases if b is not None]
    before += [StorageWeakRef(storage) for storage in tensors_of(engine, "optim_states")]
    del bases
    engine.offload_states(include=["optim_states", "lp_params"])
    found = [storage.expired() for storage in before]
    engine.reload_states()
    train(engine, 1, first=2)
    engine.destroy()
    return found


@pytest.mark.parametrize(("mode", "stage"), [("bf16", 0), ("fp32", 2)])
def test_what_has_moved_is_held_by_nobody(ranks: Ranks, mode: str, stage: int) -> None:
    (found,) = ranks.run(freed, 1, mode, stage)
    assert found
    assert all(found)


SUBSETS = [["optim_states", "hp_params"], ["optim_states"], ["hp_params", "contiguous_grad_buffer"]]


@pytest.mark.parametrize(
    ("mode", "stage", "rounds"),
    [
        ("bf16", 3, [*SUBSETS[:2], ["lp_params", "lp_grads"], ALL]),
        ("fp32", 1, [["lp_params"], ALL]),
        ("two-sided, no masters", 2, [SUBSETS[2], ALL]),
        ("factored", 0, [ALL]),
        ("int8 states", 2, [ALL]),
    ],
)
def test_training_does_not_notice(
    ranks: Ranks, mode: str, stage: int, rounds: list[list[str]]
) -> None:
    for found in ranks.run(moves, 2, mode, stage, rounds):
        assert not found["kept"]
        assert found["moved"] > 0
        (plain, before), (moved, after) = found[False], found[True]
        assert plain == moved
        for name, weight in before.items():
            assert torch.equal(weight, after[name]), name


def raised(act: Any) -> str:
    try:
        act()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def edges(folder: str) -> dict[str, Any]:
    """What is refused while states are away, what works, and what stays where it is."""
    found: dict[str, Any] = {}
    engine = make_engine(ds_config(2, LOW_RANK, **BF16), tiny_llama(layers=1))
    tokens = micro_batches(engine, 0)[0]
    train(engine, 1)
    found["unknown"] = raised(lambda: engine.offload_states(include=["momments"]))
    nvme = OffloadDeviceEnum.nvme
    found["nvme"] = raised(lambda: engine.optimizer.offload_states(device=nvme))
    fences: list[str] = []
    accelerator = get_accelerator()
    accelerator.synchronize = lambda *_: fences.append("waits")
    engine.offload_states(include=["optim_states", "hp_params"], non_blocking=True)
    fences.append("offloaded")
    param = engine.optimizer.zero.param_states[0].gradient.param
    safe_get_local = engine.optimizer.state_access.get_local_fp32_param(param)
    fences.append("read")
    del accelerator.synchronize
    found["fences"] = fences
    found["devices"] = get_state_devices(engine, OffloadStateTypeEnum.hp_params)
    found["master"] = safe_get_local is not None
    loss = loss_of(engine, tokens)  # forward and backward need none of them
    engine.backward(loss)
    found["step"] = raised(engine.step)
    engine.save_checkpoint(folder, "away")
    found["load"] = raised(lambda: engine.load_checkpoint(folder, "away"))
    engine.reload_states()
    engine.step()
    engine.offload_states()
    found["forward"] = raised(lambda: loss_of(engine, tokens))
    found["save"] = raised(lambda: engine.save_checkpoint(folder, "other"))
    engine.reload_states()
    engine.backward(loss_of(engine, tokens))
    engine.offload_states(include=["lp_grads"])
    found["backward"] = raised(lambda: engine.backward(loss_of(engine, tokens)))
    engine.optimizer.zero_grad()  # dropped: reloading brings nothing back
    engine.reload_states()
    found["gradients"] = len(tensors_of(engine, "lp_grads"))
    found["pool"] = []
    for include in ([], ["contiguous_grad_buffer"]):
        engine.backward(loss_of(engine, tokens))
        engine.offload_states(include=include)
        found["pool"].append(len(engine.optimizer.reducer._pool))
        engine.reload_states()
        engine.step()
    engine.destroy()
    hosted = make_engine(offloaded(ds_config(2, LOW_RANK, **BF16)), tiny_llama(layers=1))
    train(hosted, 1)
    before = {e.name: e.weight.master for e in hosted.optimizer.zero.param_states}
    moments = tensors_of(hosted, "optim_states")
    hosted.offload_states(include=["optim_states", "hp_params"])
    found["hosted"] = all(
        e.weight.master is before[e.name] for e in hosted.optimizer.zero.param_states
    )
    left = {s.data_ptr() for s in tensors_of(hosted, "optim_states")}
    found["low-rank moments moved"] = sum(s.data_ptr() not in left for s in moments)
    hosted.reload_states()
    train(hosted, 1)
    return found


def test_edges(ranks: Ranks, tmp_path: Any) -> None:
    for found in ranks.run(edges, 2, str(tmp_path)):
        assert "legal are ['contiguous_grad_buffer', 'hp_params'" in found["unknown"]
        assert "['momments']" in found["unknown"]
        assert "legal is OffloadDeviceEnum.cpu" in found["nvme"]
        assert found["fences"] == ["offloaded", "waits", "read"]
        assert found["devices"] == {torch.device("cpu")}
        for action, missing in {
            "step": "hp_params and optim_states",
            "load": "hp_params and optim_states",
            "forward": "lp_params",
            "save": "lp_params",
            "backward": "lp_grads",
        }.items():
            assert re.search(
                rf"RuntimeError: .* needs {missing}, .*reload_states\(\)", found[action]
            )
        assert found["gradients"] == 0
        assert found["pool"][0] > 0
        assert found["pool"][1] == 0
        assert found["hosted"]
        assert found["low-rank moments moved"] > 0
