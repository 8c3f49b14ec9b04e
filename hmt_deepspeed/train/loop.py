"""The training loop over a DeepSpeed engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hmt_deepspeed.report.metrics import (
    MATRIX_INTERVAL,
    MetricsWriter,
    flops_utilization,
    format_bytes,
    monitor_events,
)
from hmt_deepspeed.train.data import TrainingData
from hmt_deepspeed.train.models import flops_per_token, keeps_documents_apart, num_parameters
from hmt_deepspeed.train.packing import GlobalOrder, PackedRows, share_of_rank
from hmt_deepspeed.train.ranks import rank

TRACED_STEPS = (3, 5)


@dataclass(frozen=True)
class LoopOptions:
    """What the loop does; `output_dir` is the run's folder, the same on every rank."""

    output_dir: Path
    max_steps: int
    eval_interval: int = 0
    eval_rows: int = 64
    save_interval: int = 0
    resume: bool = False
    trace: bool = False
    seed: int = 0
    peak_flops: float | None = None

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"


@dataclass
class Progress:
    """Where the run stands, and the step times of this process."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    step_seconds: list[float] = field(default_factory=list)

    def median_step_seconds(self) -> float | None:
        """Median without the first step, which also compiles, allocates and warms up."""
        times = self.step_seconds[1:] or self.step_seconds
        return median(times) if times else None

    def tokens_per_second(self, tokens_per_step: int) -> float | None:
        times = self.step_seconds[1:] or self.step_seconds
        return tokens_per_step * len(times) / sum(times) if times else None


class TrainingLoop:
    """Trains `engine` on packed rows up to `max_steps`; what a step does is independent of the
    number of ranks and of accumulation steps for the same global batch."""

    def __init__(
        self, engine: Any, data: TrainingData, options: LoopOptions, accelerator: Any
    ) -> None:
        self.engine = engine
        self.data = data
        self.options = options
        self.accelerator = accelerator
        self.progress = Progress()
        self.order = GlobalOrder(data.train.num_rows, options.seed)
        self.group = engine.data_parallel_group
        # Ranks that share their sequences count as one, and get the same rows.
        self.sharing = int(getattr(engine, "ranks_per_sequence", 1))
        self.num_ranks = dist.get_world_size(self.group) // self.sharing
        self.group_rank = dist.get_rank(self.group) // self.sharing
        self.global_batch = int(engine.train_batch_size()) // self.sharing
        self.tokens_per_step = self.global_batch * data.train.seq_length
        self.num_parameters = num_parameters(engine.module)
        self.packed = True
        self._peak_is_wrong = False
        self._saved_plan: Any = None
        self.skipped_steps = 0
        self.snapshots = getattr(engine, "hmt_snapshots", None)
        if self.snapshots is not None:  # taken within a step, before it is counted here
            engine.snapshot_client_state = partial(self._client_state, 1)

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> Progress:
        """Train, evaluate, save; returns where the run ended."""
        options, progress = self.options, self.progress
        if options.resume:
            self._load_checkpoint()
        steps_left = options.max_steps - progress.step
        if options.trace and steps_left < TRACED_STEPS[1]:
            raise ValueError(
                f"--trace records steps {TRACED_STEPS[0]} to {TRACED_STEPS[1]}, but this run has "
                f"{steps_left} left; raise --max_steps or leave --trace out"
            )
        self.packed = keeps_documents_apart(
            self.engine, self.data.train.seq_length, len(self.data.tokenizer)
        )
        if not self.packed and rank() == 0:
            family = type(self.engine.module).__name__
            print(
                f"{family} does not keep packed documents apart: they are separated by the "
                "end-of-document token only"
            )
        self.skipped_steps = int(self.engine.skipped_steps)
        resume_step = progress.step if options.resume else None
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(self._progress_bar())
            writer = None
            if rank() == 0:
                path = options.output_dir / "metrics.jsonl"
                writer = stack.enter_context(MetricsWriter(path, resume_step))
            trace = stack.enter_context(self._trace())
            self.engine.train()
            while progress.step < options.max_steps:
                record = self._timed_step()
                every_matrix = progress.step == 1 or _due(progress.step, MATRIX_INTERVAL)
                measured = self.engine.hmt_metrics.read(every_matrix)
                next(trace, None)
                last = progress.step == options.max_steps
                if last or _due(progress.step, options.eval_interval):
                    progress.eval_loss = self.evaluate()
                    record["eval_loss"] = progress.eval_loss
                self._publish(record, measured, writer, bar)
                self.check_loss(measured["skipped_steps"])
                if options.save_interval and (last or _due(progress.step, options.save_interval)):
                    self.save_checkpoint()
        if progress.eval_loss is None:
            progress.eval_loss = self.evaluate()
        return progress

    def check_loss(self, skipped_steps: int) -> None:
        """Say that a step with a bad loss was skipped; stop where it was not.

        Raises:
            ValueError: the update was made of gradients that are not finite.
        """
        progress = self.progress
        was_skipped, self.skipped_steps = skipped_steps > self.skipped_steps, skipped_steps
        if progress.loss is None or math.isfinite(progress.loss):
            return
        if was_skipped:
            if rank() == 0:
                print(f"step {progress.step}: the loss is {progress.loss}; the step was skipped")
            return
        raise ValueError(
            f"step {progress.step}: the loss is {progress.loss}, and the weights have been updated with its "
            "gradients. Look at the data and the learning rate, resume from the last checkpoint; HMT's optimizer "
            'skips such a step unless "bf16" has "check_grad_overflow": false.'
        )

    def _timed_step(self) -> dict[str, Any]:
        progress = self.progress
        self.accelerator.synchronize()
        begin = time.perf_counter()
        with record_function("step"):
            progress.loss = self._step()
        self.accelerator.synchronize()
        seconds = time.perf_counter() - begin
        progress.step += 1
        progress.samples += self.global_batch
        progress.tokens += self.tokens_per_step
        progress.step_seconds.append(seconds)
        self._save_plan()
        return self._record(seconds)

    def _save_plan(self) -> None:
        """Into the run's folder, whenever it is another one."""
        planner = getattr(self.engine, "hmt_planner", None)
        if planner is not None and planner.plan is not self._saved_plan:
            self._saved_plan = planner.plan
            if rank() == 0:
                planner.save(self.options.output_dir)

    def _step(self) -> float:
        """One optimizer step; returns the mean loss per predicted token of the global batch.

        Every micro-batch's mean loss is weighted by n·k·a/N (n its predicted tokens, N the
        global batch's, k ranks, a accumulation steps). DeepSpeed divides by k and a, so the
        gradient is that of the mean over all N tokens, however they are distributed over ranks.
        """
        engine, data = self.engine, self.data.train
        # Dropout depends on seed, step and rank only, so a resumed run draws the same numbers.
        seed = np.random.SeedSequence([self.options.seed, self.progress.step, rank()])
        torch.manual_seed(int(seed.generate_state(1)[0]))
        rows = self.order.rows(self.progress.samples, self.global_batch)
        num_labels = data.count_labels(rows)
        micro_batches = share_of_rank(
            rows, self.group_rank, self.num_ranks, engine.train_micro_batch_size_per_gpu()
        )
        total = torch.zeros((), dtype=torch.float64, device=engine.device)

        def weighted(output: Any, place: int) -> Tensor:
            labels_here = data.count_labels(micro_batches[place])
            loss: Tensor = output.loss
            total.add_(loss.detach().double() * labels_here)
            return loss * (labels_here * self.num_ranks * len(micro_batches) / num_labels)

        engine.train_batch((self._inputs(data, indices) for indices in micro_batches), weighted)
        dist.all_reduce(total, group=self.group)
        return float(total) / self.sharing / num_labels

    def _inputs(self, rows: PackedRows, indices: np.ndarray) -> dict[str, Any]:
        batch: dict[str, Any] = {
            name: tensor.to(self.engine.device) for name, tensor in rows.batch(indices).items()
        }
        if not self.packed:
            del batch["position_ids"]
        # A cache would make transformers skip the mask between packed documents.
        return {**batch, "use_cache": False}

    # -- evaluation ------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per predicted token of `eval_rows` held-out rows spread over all of them."""
        held_out = self.data.held_out
        count = min(self.options.eval_rows, held_out.num_rows)
        chosen = np.linspace(0, held_out.num_rows - 1, count).round().astype(np.int64)
        micro_batch = self.engine.train_micro_batch_size_per_gpu()
        # Under ZeRO-3 every forward is a collective: all ranks run equally many.
        num_batches = -(-count // (micro_batch * self.num_ranks))
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        mine = chosen[self.group_rank :: self.num_ranks]
        self.engine.eval()
        for index in range(num_batches):
            indices = mine[index * micro_batch : (index + 1) * micro_batch]
            inputs = self._inputs(held_out, indices if len(indices) else chosen[:1])
            loss = self.engine(**inputs).loss
            if len(indices):
                total += loss.double() * held_out.count_labels(indices)
        self.engine.train()
        dist.all_reduce(total, group=self.group)
        return float(total) / self.sharing / held_out.count_labels(chosen)

    # -- checkpoints -----------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """DeepSpeed's checkpoint with the position in the data, tagged `global_step<N>`."""
        folder = str(self.options.checkpoints)
        self.engine.save_checkpoint(folder, client_state=self._client_state(0))

    def _client_state(self, steps_ahead: int) -> dict[str, Any]:
        """Where the run stands, or will with the step that is being taken."""
        progress = self.progress
        return {
            "step": progress.step + steps_ahead,
            "samples": progress.samples + steps_ahead * self.global_batch,
            "tokens": progress.tokens + steps_ahead * self.tokens_per_step,
            "loss": progress.loss,
            "eval_loss": progress.eval_loss,
        }

    def _load_checkpoint(self) -> None:
        folder = str(self.options.checkpoints)
        if self.snapshots is not None:
            folder = self.snapshots.newest(folder)
        path, state = self.engine.load_checkpoint(folder)
        if path is None:
            raise ValueError(
                f"--resume found no checkpoint that loads in {self.options.checkpoints}; "
                "start again without --resume in another --output_dir"
            )
        for name in ("step", "samples", "tokens", "loss", "eval_loss"):
            setattr(self.progress, name, state[name])
        if rank() == 0:
            print(f"resumed at step {self.progress.step} from {path}")

    # -- what people see -------------------------------------------------------------------

    def _progress_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self.options.max_steps,
            initial=self.progress.step,
            disable=rank() != 0,
            unit="step",
            dynamic_ncols=True,
        )

    @contextlib.contextmanager
    def _trace(self) -> Iterator[Iterator[None]]:
        """Yields an iterator to advance after every step; profiles this process's steps 3 to 5."""
        if not self.options.trace or rank() != 0:
            yield iter(())
            return
        first, last = TRACED_STEPS
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.accelerator.device_name().startswith("cuda"):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        path = self.options.output_dir / "trace.json"

        def steps() -> Iterator[None]:
            for _ in range(first - 2):
                yield
            profiler.start()
            for _ in range(last - first + 1):
                yield
            profiler.stop()
            profiler.export_chrome_trace(str(path))
            yield

        advance = steps()
        yield advance

    def _record(self, seconds: float) -> dict[str, Any]:
        progress, speed = self.progress, self.tokens_per_step / seconds
        record: dict[str, Any] = {
            "step": progress.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "step_seconds": seconds,
            "tokens_per_second": speed,
        }
        if self.options.peak_flops is not None:
            record |= self.utilization(seconds, self.options.peak_flops)
        return record

    def utilization(self, seconds: float, peak_flops: float) -> dict[str, float]:
        """MFU, and HFU where it is known what is computed; nothing where the peak given cannot be the device's."""
        seq_length = self.data.train.seq_length
        micro_batch = int(self.engine.train_micro_batch_size_per_gpu())
        computed = self.engine.hmt_metrics.computed_flops(micro_batch, seq_length)
        per_token = flops_per_token(self.engine.module, seq_length)
        ordinary = per_token * self.tokens_per_step / dist.get_world_size()
        found = {"mfu": flops_utilization(ordinary, seconds, peak_flops)}
        if computed is not None:
            found["hfu"] = flops_utilization(computed, seconds, peak_flops)
        if found.get("hfu", found["mfu"]) <= 1:
            return found
        if rank() == 0 and not self._peak_is_wrong:
            done = ordinary if computed is None else computed
            print(
                f"--peak_tflops is {peak_flops / 1e12:g}, but a device computed "
                f"{done / seconds / 1e12:.3g} TFLOP/s: no MFU and HFU are shown. Give its peak at the "
                "training dtype."
            )
        self._peak_is_wrong = True
        return {}

    def _publish(
        self,
        record: dict[str, Any],
        measured: dict[str, Any],
        writer: MetricsWriter | None,
        bar: Any,
    ) -> None:
        """Line, progress bar, monitors; what the engine measured, it has told them itself."""
        if writer is not None:
            writer.write(record | measured)
        shown = {
            "loss": f"{record['loss']:.4f}",
            "tok/s": f"{record['tokens_per_second']:,.0f}",
            "mem": format_bytes(measured["device_bytes"]),
        }
        for name in ("mfu", "hfu"):
            if name in record:
                shown[name] = f"{record[name]:.1%}"
        if self.progress.eval_loss is not None:
            shown["eval"] = f"{self.progress.eval_loss:.4f}"
        bar.set_postfix(shown, refresh=False)
        bar.update()
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(monitor_events(record, record["samples"]))


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
