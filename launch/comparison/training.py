"""One cell: train a variant, measure it, resume it where it was interrupted."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.results import load_average, machine
from benchmarks.timing import now, percentile
from comparison.activations import SavedActivations
from comparison.cells import Cell, Setting, Store
from comparison.contenders import Contender, build
from comparison.corpus import held_out_rows
from comparison.measures import (
    Memory,
    Pcie,
    arithmetic,
    captured_energy,
    elements,
    ranks,
    state_bytes,
    without_activation_error,
)
from hmt_deepspeed.optim.backward.int8_linear import encoded_weight
from hmt_deepspeed.train.data import TrainingData
from hmt_deepspeed.train.packing import GlobalOrder

POINTS = 50  # of the training loss
EVALUATIONS = 8  # on the way, on every fourth held-out row; the end is evaluated on all of them


def build_model(setting: Setting, seed: int) -> nn.Module:
    """The Llama or Mixtral of a setting, fp32; its weights depend on the seed alone."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape, kind, mixture = setting.shape, LlamaConfig, {}
    if shape.experts:
        kind = MixtralConfig
        mixture = {
            "num_local_experts": shape.experts,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        }
    config = kind(
        vocab_size=setting.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=setting.seq_length,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        **mixture,
    )
    torch.manual_seed(seed)
    model = (MixtralForCausalLM if shape.experts else LlamaForCausalLM)(config)
    return model.to(setting.device)


def learning_rate(setting: Setting, peak: float, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr` of the peak at the last step."""
    warmup = max(1, round(setting.warmup * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    turn = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (setting.final_lr + (1 - setting.final_lr) * (1 + math.cos(math.pi * turn)) / 2)


class Run:
    """The state of one cell between two steps; all of it is in a checkpoint."""

    def __init__(self, cell: Cell, data: TrainingData, store: Store) -> None:
        self.cell, self.data, self.store = cell, data, store
        setting = self.setting = cell.setting
        self.steps = setting.steps(cell.tokens)
        model = build_model(setting, cell.seed)
        if cell.start is not None:
            path = store.weights(cell.start)
            model.load_state_dict(torch.load(path, map_location=setting.device, weights_only=True))
        self.contender: Contender = build(cell.variant, model, setting.shape.hidden, cell.hyper)
        self.contender.model.train()
        self.order = GlobalOrder(len(data.train), cell.seed)
        self.validation = held_out_rows(data, setting.eval_rows)
        # of a mixture the routers' loss is trained with, and is no part of what is compared
        self.evaluated = {"output_router_logits": False} if setting.shape.experts else {}
        self.step = 0
        self.batches = ""  # running digest of every token trained on
        self.step_seconds: list[float] = []
        self.cpu_seconds = 0.0
        self.window: list[float] = []
        self.curves: dict[str, Any] = {
            **{key: [] for key in ("tokens", "seconds", "train_loss", "device_bytes")},
            **{key: [] for key in ("eval_tokens", "eval_seconds", "val_loss", "grad_norm")},
            "ranks": {},
            "captured_energy": {},
        }
        self.memory, self.pcie = Memory(setting.device), Pcie(setting.device)
        self.held = SavedActivations()
        self.energy: dict[str, float] = {}
        self.diverged = False
        self.commits = [code_version()]

    # -- one step -------------------------------------------------------------------------------

    def train_step(self) -> None:
        setting, contender = self.setting, self.contender
        rows = self.order.rows(self.step * setting.batch_rows, setting.batch_rows)
        batch = self.data.train.batch(rows)
        digest = hashlib.sha256(self.batches.encode())
        digest.update(batch["input_ids"].numpy().tobytes())
        self.batches = digest.hexdigest()
        contender.set_learning_rate(learning_rate(setting, self.cell.lr, self.step, self.steps))
        contender.begin_step(self.step)
        begin, begin_cpu = now(), time.process_time()
        with arithmetic(setting.device, setting.dtype):
            loss = contender.model(**self.pcie.to_device(batch)).loss
        self.memory.sample()  # timed along: stopping the clock would wait for the device
        loss.backward()
        paused = now()
        self.memory.sample()
        if self._is_evaluation(self.step + 1):
            self.energy = captured_energy(contender)
        if contender.activations is not None:
            self.held.add(contender.activations.metrics())
        resumed = now()
        norm = contender.clip(setting.clip)
        contender.optimizer.step()
        contender.optimizer.zero_grad()
        self.step_seconds.append(paused - begin + now() - resumed)
        self.cpu_seconds += time.process_time() - begin_cpu
        self.memory.sample()
        self.memory.read_peaks()
        self.step += 1
        self.window.append(self.pcie.read(loss.detach()))
        self.diverged = not math.isfinite(self.window[-1])
        self._note(self.pcie.read(norm))

    def _is_evaluation(self, step: int) -> bool:
        return step == self.steps or step % max(1, self.steps // EVALUATIONS) == 0

    def _note(self, norm: float) -> None:
        tokens, seconds = self.step * self.setting.step_tokens, sum(self.step_seconds)
        curves = self.curves
        if self.step % max(1, self.steps // POINTS) == 0 or self.step == self.steps:
            curves["tokens"].append(tokens)
            curves["seconds"].append(round(seconds, 3))
            curves["train_loss"].append(round(mean(self.window), 6))
            curves["device_bytes"].append(self.memory.record()["peak_device_bytes"])
            curves["grad_norm"].append(round(norm, 6))
            self.window = []
        if self._is_evaluation(self.step) and not self.diverged:
            curves["eval_tokens"].append(tokens)
            curves["eval_seconds"].append(round(seconds, 3))
            curves["val_loss"].append(round(self.evaluate(self.validation[::4]), 6))
            for name, rank in ranks(self.contender).items():
                curves["ranks"].setdefault(name, []).append(rank)
            for name, share in self.energy.items():
                curves["captured_energy"].setdefault(name, []).append(round(share, 4))

    @torch.no_grad()
    def evaluate(self, validation: np.ndarray) -> float:
        """Mean loss of every predicted token of these held-out rows."""
        model = self.contender.model.eval()
        total, count = 0.0, 0
        for rows in np.array_split(validation, -(-len(validation) // 16)):
            batch = self.pcie.to_device(self.data.held_out.batch(rows))
            with arithmetic(self.setting.device, self.setting.dtype):
                loss = model(**batch, **self.evaluated).loss
            labels = self.data.held_out.count_labels(rows)
            total, count = total + float(loss) * labels, count + labels
        model.train()
        return total / count

    # -- checkpoint -----------------------------------------------------------------------------

    _PLAIN = (
        *("step", "batches", "step_seconds", "cpu_seconds"),
        *("window", "curves", "energy", "diverged"),
    )  # and commits, to which a resumed run adds its own

    def _trained(self) -> dict[str, Tensor]:
        """The trained parameters that hold their values.

        What is frozen comes from the base model; INT8 weights are among the optimizer's states.
        """
        model = self.contender.model
        encoded = {
            f"{name}.weight" for name, module in model.named_modules() if encoded_weight(module)
        }
        named = model.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad and name not in encoded}

    def save(self) -> int:
        """Write the checkpoint, whole or not at all; returns its bytes."""
        state = {
            "model": self._trained(),
            "optimizer": self.contender.optimizer.state_dict(),
            "progress": {name: getattr(self, name) for name in self._PLAIN},
            "commits": self.commits,
            "memory": self.memory.kept,
            "pcie": self.pcie.count,
            "held": self.held.kept,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.memory.cuda else [],
        }
        return _save(state, self.store.checkpoint(self.cell))

    def load(self) -> bool:
        """Continue from the cell's checkpoint, if it has one."""
        path = self.store.checkpoint(self.cell)
        if not path.is_file():
            return False
        # Our own file; the peers' states hold projector objects, which weights_only refuses.
        state = torch.load(path, map_location=self.setting.device, weights_only=False)
        for name, values in self._trained().items():
            values.copy_(state["model"][name])
        self.contender.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["progress"].items():
            setattr(self, name, value)
        before = state.get("commits", [])  # older checkpoints are without
        self.commits = list(dict.fromkeys([*before, *self.commits]))
        self.memory = Memory(self.setting.device, state["memory"])
        self.pcie = Pcie(self.setting.device, state["pcie"])
        self.held = SavedActivations(state.get("held"))  # older checkpoints are without
        torch.set_rng_state(state["rng"].cpu())
        if self.memory.cuda:
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
        return True

    # -- result ---------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """The numbers of a finished cell."""
        seconds = self.step_seconds
        return {
            "parameters": sum(p.numel() for p in self.contender.model.parameters()),
            "matrix_elements": elements(self.contender, self.contender.matrices),
            "steps": self.step,
            "diverged": self.diverged,
            "val_loss": None if self.diverged else self.evaluate(self.validation),
            "tokens_per_second": len(seconds) * self.setting.step_tokens / sum(seconds),
            "step_seconds_median": median(seconds),
            "step_seconds_p95": percentile(seconds, 0.95),
            "train_seconds": sum(seconds),
            "cpu_seconds": self.cpu_seconds,  # of all threads; blind to what else the machine did
            **self.memory.record(),
            **self.pcie.record(),
            "checkpoint_bytes": self.save(),
            "state_bytes": state_bytes(self.contender),
            **activation_error(self.contender, self.energy),
            **self.held.record(),
            "batches": self.batches,
            "threads": torch.get_num_threads(),
            "load_average_after": load_average(),
            "machine": machine(),
            # More than one: the code changed between two parts of the run.
            "commit": " ".join(commit or "unknown" for commit in self.commits),
            "curves": self.curves,
        }


def code_version() -> str | None:
    """The checkout's commit, "-dirty" when tracked files were changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    where = Path(__file__).parent
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def activation_error(contender: Contender, energy: Mapping[str, float]) -> dict[str, Any]:
    """Mean captured energy, and what saving `X [Q | P]` in place of `X` costs the weight gradient.

    The activation error is the share of the weight gradient's squared norm that is lost because the
    linear's input is saved projected: `G Q` is exact, the rest of `G` cannot be formed any more. It is
    1 - captured energy, a mean over the matrices whose input is saved so; those projected from the
    left or taking whole gradients keep theirs. HMT's own step does not use that part, apart from what
    its probe residual estimates of it.

    Args:
        energy: captured energy of each matrix, from 0 to 1.

    Returns:
        captured_energy_mean, over all matrices; activation_error, None with activation_error_reason
        where no input is saved projected; activation_error_matrices, how many it is a mean over.
    """
    captured = {"captured_energy_mean": mean(energy.values()) if energy else None}
    reasons = without_activation_error(contender)
    projected = [share for name, share in energy.items() if not reasons[name]]
    if projected:
        error = {"activation_error": 1 - mean(projected)}
        return {**captured, **error, "activation_error_matrices": len(projected)}
    found = "; ".join(sorted({reason for reason in reasons.values() if reason}))
    return {
        **captured,
        "activation_error": None,
        "activation_error_reason": found or "no energy has been measured",
        "activation_error_matrices": 0,
    }


def train_cell(
    cell: Cell,
    data: TrainingData,
    store: Store,
    should_stop: Callable[[int], bool] = lambda step: False,
    save_steps: int = 100,
) -> dict[str, Any] | None:
    """Train a cell to its end and store the result, or to where `should_stop(step)` and save.

    Returns:
        The result, or None when stopped; the next call goes on from there, bit for bit.
    """
    run = Run(cell, data, store)
    run.load()
    try:
        while run.step < run.steps and not run.diverged:
            if should_stop(run.step):
                run.save()
                return None
            run.train_step()
            if run.step % save_steps == 0:
                run.save()
        result = run.result()
        if cell.stage == "base":
            _save(run.contender.model.state_dict(), store.weights(cell.key))
        store.write(cell, result)
        store.checkpoint(cell).unlink()
        return result
    finally:
        run.contender.close()


def _save(state: Any, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save(state, temporary)
    size = temporary.stat().st_size
    os.replace(temporary, path)
    return size
