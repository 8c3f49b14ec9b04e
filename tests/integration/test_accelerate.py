"""Accelerate's DeepSpeed plugin in code, and ``accelerate launch`` of a script that nobody changed."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Ranks
from hf_runs import auto_config, forget, plain_weights, rows, save_tiny_model, whole_weights
from training import furthest

import hmt_deepspeed

ROOT = Path(__file__).resolve().parents[2]


def accelerator(config: dict[str, Any], precision: str = "no") -> Any:
    """As on GPUs: on a CPU Accelerate counts the ranks only when it is told that it is one."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import PartialState

    forget()
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(
        hf_ds_config=copy.deepcopy(config), gradient_clipping=0.7, gradient_accumulation_steps=2
    )
    return Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)


def prepared(folder: Path, config: dict[str, Any], precision: str, client: bool = False) -> Any:
    """Accelerator and what it prepares: model, optimizer, scheduler, training and evaluation data."""
    from accelerate.utils import DummyOptim, DummyScheduler
    from transformers import AutoModelForCausalLM

    run = accelerator(config, precision)
    model = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    if client:
        optimizer: Any = hmt_deepspeed.HMT(model, lr=3e-3, weight_decay=0.05, rank=4)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    else:
        optimizer = DummyOptim(model.parameters(), lr=3e-3, weight_decay=0.05)
        steps = 12 * run.num_processes  # which it divides by
        scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=2)
    data = [loader(rows(64, high=30)), loader(rows(5, 1000, low=30))]
    return run, *run.prepare(model, optimizer, scheduler, *data)


def loader(rows: list[dict[str, list[int]]]) -> Any:
    def collate(picked: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {key: torch.tensor([row[key] for row in picked]) for key in picked[0]}

    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


def train(things: Any, until: int, save: Path | None = None, evaluate: bool = False) -> list[Any]:
    """Accelerate's own loop, to an optimizer step; loss, norm and learning rate of every step."""
    run, model, optimizer, scheduler, data, _ = things
    found: list[Any] = []
    if model.global_steps:
        data = run.skip_first_batches(data, 2 * model.global_steps)
    for batch in data:
        with run.accumulate(model):
            loss = model(**batch).loss
            run.backward(loss)
            norm = run.clip_grad_norm_(model.parameters(), 0.7) if run.sync_gradients else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = run.gather(loss.detach()).mean().item()
        if run.sync_gradients:
            found.append((mean, norm, optimizer.param_groups[0]["lr"]))
        if run.sync_gradients and model.global_steps == 3:
            if save is not None:
                run.save_state(str(save))
            if evaluate:
                found[-1] += (evaluated(things),)
        if model.global_steps == until:
            break
    return found


def evaluated(things: Any) -> int:
    """Rows that an evaluation in the middle has seen, over all ranks."""
    run, model, *_, held_out = things
    model.eval()
    seen = 0
    with torch.no_grad():
        for batch in held_out:
            losses = model(**batch).loss.repeat(len(batch["input_ids"]))
            seen += len(run.gather_for_metrics(losses))
    model.train()
    return seen


def runs(folder: Path, stage: int, precision: str, client: bool) -> dict[str, Any]:
    """A run with everything in the middle, one that resumes it, one without."""
    hmt_deepspeed.register()
    config = auto_config(stage)
    params = {"lr": "auto", "weight_decay": "auto", "betas": [0.85, 0.95]}
    config["optimizer"] = {"type": "HMT", "params": params}
    if client:
        config = {k: v for k, v in config.items() if k not in ("optimizer", "scheduler", "hmt")}
    whole = prepared(folder, config, precision, client)
    run, model = whole[:2]
    found = {
        "steps": train(whole, 6, folder / "state", evaluate=True),
        "types": (type(model).__name__, type(model.optimizer).__name__),
        "dtype": model.optimizer.settings.model_dtype,
        "clip": model.optimizer.settings.clip,
        "batches": (model.train_batch_size(), model.gradient_accumulation_steps()),
        "matrices": len(model.optimizer.zero.low_rank),
        "ranks": {e.matrix.rank for e in model.optimizer.zero.low_rank},
        "group": {k: v for k, v in model.optimizer.param_groups[0].items() if k != "params"},
        "weights": whole_weights(model.module),
    }
    state = run.get_state_dict(model)
    run.unwrap_model(model).save_pretrained(
        folder / "saved",
        is_main_process=run.is_main_process,
        save_function=run.save,
        state_dict=state,
    )
    run.wait_for_everyone()
    model.destroy()
    resumed = prepared(folder, config, precision, client)
    resumed[0].load_state(str(folder / "state"))
    found["resumed"] = train(resumed, 6)
    resumed[1].destroy()
    found["bare"] = train(prepared(folder, config, precision, client), 6)
    return found


CASES = {
    "zero2-client": (2, 1, "no", True),
    "zero3-json": (3, 2, "bf16", False),
    "zero2-json": (2, 1, "no", False),
    "zero3-client": (3, 2, "bf16", True),
}
PARAMS = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] if place > 1 else [])
    for place, (name, case) in enumerate(CASES.items())
]


@pytest.fixture(scope="module", params=PARAMS)
def run(request: Any, ranks: Ranks, tmp_path_factory: Any) -> dict[str, Any]:
    stage, world, precision, client = request.param
    folder = tmp_path_factory.mktemp("accelerate")
    save_tiny_model(folder / "start")
    ranks.preload("transformers.trainer")
    found = ranks.run(runs, world, folder, stage, precision, client)[0]
    return found | {"folder": folder, "world": world, "precision": precision, "client": client}


def test_the_engine_is_what_json_and_code_say(run: dict[str, Any]) -> None:
    assert run["types"] == ("HMTEngine", "HMTZeroOptimizer")
    assert run["dtype"] == (torch.bfloat16 if run["precision"] == "bf16" else torch.float32)
    assert run["clip"] == 0.7
    assert run["batches"] == (4 * run["world"], 2)
    assert run["matrices"] == 14
    assert run["group"]["weight_decay"] == 0.05
    assert tuple(run["group"]["betas"]) == ((0.9, 0.999) if run["client"] else (0.85, 0.95))
    assert run["ranks"] <= ({4} if run["client"] else {4, 8})


def test_resuming_repeats_the_run(run: dict[str, Any]) -> None:
    steps = [step[:3] for step in run["steps"]]
    assert run["resumed"] == steps[3:]
    rates = [rate for *_, rate in steps]
    if run["client"]:  # whose scheduler Accelerate steps once per rank
        expected = [3e-3 * 0.9 ** (run["world"] * step) for step in range(1, 7)]
        assert rates == pytest.approx(expected)
    else:
        assert max(rates) == pytest.approx(3e-3)
        assert rates[-1] < max(rates)


def test_evaluating_and_saving_change_nothing(run: dict[str, Any]) -> None:
    steps = run["steps"]
    assert [len(step) for step in steps] == [3, 3, 4, 3, 3, 3]
    assert steps[2][3] == 5  # rows evaluated
    assert [step[:3] for step in steps] == run["bare"]
    assert all(norm > 0.7 for _, norm, _ in run["bare"])  # of the gradient, before clipping


def test_a_saved_model_is_an_ordinary_one(run: dict[str, Any]) -> None:
    saved, start = (plain_weights(run["folder"] / name) for name in ("saved", "start"))
    assert all(torch.equal(run["weights"][name], weight) for name, weight in saved.items())
    assert furthest(saved, start) > 1e-3  # 16-bit rounding of the start alone is below 2e-4


def test_accelerate_fills_in_all_but_the_block_until_unregistered() -> None:
    from accelerate import DeepSpeedPlugin

    stock = DeepSpeedPlugin.deepspeed_config_process
    config = {"zero_optimization": {"stage": 2}, "hmt": {"optimizer": {"rank": "auto"}}}
    try:
        hmt_deepspeed.register()
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        plugin.deepspeed_config_process(must_match=False)
        assert plugin.deepspeed_config["hmt"] == {"optimizer": {"rank": "auto"}}
        with pytest.raises(ValueError, match="`theirs` not found"):
            DeepSpeedPlugin(hf_ds_config={**config, "theirs": "auto"}).deepspeed_config_process()
    finally:
        hmt_deepspeed.unregister()
    assert DeepSpeedPlugin.deepspeed_config_process is stock


def replaced() -> str:
    hmt_deepspeed.register()
    config = auto_config(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    config = {key: config[key] for key in ("zero_optimization",)}
    run = accelerator(config | {"train_micro_batch_size_per_gpu": 2})
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="zero_force_ds_cpu_optimizer") as refusal:
        run.prepare(model, hmt_deepspeed.HMT(model, lr=1e-3, rank=2))
    config["zero_force_ds_cpu_optimizer"] = False
    run = accelerator(config | {"train_micro_batch_size_per_gpu": 2})
    engine, _ = run.prepare(model, hmt_deepspeed.HMT(model, lr=1e-3, rank=2))
    return f"{refusal.value} {engine.optimizer.zero.host is not None}"


def test_an_object_that_accelerate_replaces_is_refused(ranks: Ranks) -> None:
    ranks.preload("transformers.trainer")
    found = ranks.run(replaced, 1)[0]
    assert "replaced by DeepSpeedCPUAdam" in found
    assert found.endswith("True")


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    start, saved, lr = sys.argv[1:]
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(start)
    partitioned = all(hasattr(p, "ds_id") for p in model.parameters())
    tokens = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(tokens.repeat(8, 1), batch_size=2)
    optimizer = DummyOptim(model.parameters(), lr=float(lr), weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=1)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            losses.append(model(input_ids=batch, labels=batch).loss)
            accelerator.backward(losses[-1])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(saved, state_dict=state)
    learned = losses[-1].item() < losses[0].item()
    words = [type(model.optimizer).__name__, model.global_steps, partitioned, learned]
    # one write: nothing of the launcher's log may fall between two words
    print(" ".join(map(str, ["RESULT", *words, model.bfloat16_enabled()])), flush=True)
    accelerator.end_training()
"""


def launch(*arguments: str) -> None:
    """The command ``accelerate launch``, by its entry point."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    os.chdir(ROOT)
    port = str(10000 + os.getpid() % 20000)
    launch_command(launch_command_parser().parse_args(["--main_process_port", port, *arguments]))


def test_accelerate_launch_runs_an_unchanged_script(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    save_tiny_model(tmp_path / "start")
    options = ["--config_file", "ds_configs/accelerate.yaml", "-m", "hmt_deepspeed"]
    script = [str(tmp_path / name) for name in ("train.py", "start", "saved")]
    (code,), _, (output,) = ranks.attempt(launch, 1, *options, *script, "0.01")
    assert code == 0, output[-3000:]
    assert "RESULT HMTZeroOptimizer 8 True True True" in output
    saved, start = (plain_weights(tmp_path / name) for name in ("saved", "start"))
    assert furthest(saved, start) > 1e-3
