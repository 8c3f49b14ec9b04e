"""A cell is one run: what it is identified by, and where its result and its checkpoint are kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from comparison.contenders import Hyper
from comparison.variants import VARIANTS
from hmt_deepspeed.report.metrics import plain

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Shape:
    """A Llama with untied embeddings and the MLP 8/3 as wide as the model, rounded to 64; a Mixtral where it has experts,
    of which each token takes two, each half as wide.
    """

    hidden: int
    layers: int
    heads: int
    experts: int = 0

    @property
    def intermediate(self) -> int:
        """Width of the MLP, or of one expert."""
        whole = max(64, round(self.hidden * 8 / 3 / 64) * 64)
        return whole // 2 if self.experts else whole


# Named after the parameters in the linears, of experts those that a token takes; a vocabulary of 512 adds
# 2 x 512 x hidden. A vocabulary of 258 is bytes.
SHAPES = {
    "toy": Shape(64, 2, 4),
    "2m": Shape(192, 4, 4),
    "3m": Shape(256, 4, 4),
    "6m": Shape(256, 8, 4),
    "10m": Shape(384, 6, 6),
    "toy_moe": Shape(64, 2, 4, 4),
    "3m_moe": Shape(256, 4, 4, 8),
}


@dataclass(frozen=True)
class Setting:
    """What all cells of a comparison share. All of it identifies a result.

    batch_rows: rows of seq_length tokens per step. dtype: of the arithmetic, "bf16" computes under autocast;
    weights, gradients and states are fp32 unless the variant stores states or weights in fewer bits.
    eval_rows: fixed held-out rows.
    decay: what a step at the peak rate takes of a weight, the same at every learning rate, since those of
    the variants lie a factor of ten apart: weight_decay = decay / lr. warmup, final_lr: shares of the
    steps and of the learning rate.
    """

    model: str
    data: str
    finetune_data: str | None
    vocab_size: int
    seq_length: int = 256
    batch_rows: int = 8
    dtype: str = "fp32"
    device: str = "cpu"
    eval_rows: int = 256
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 1e-4
    clip: float = 1.0
    warmup: float = 0.05
    final_lr: float = 0.1

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def step_tokens(self) -> int:
        return self.batch_rows * self.seq_length

    def steps(self, tokens: int) -> int:
        return max(1, tokens // self.step_tokens)

    def hyper(self, lr: float, seed: int, decay: float | None = None) -> Hyper:
        """decay: in place of the setting's."""
        own = self.decay if decay is None else decay
        return Hyper(lr, self.betas, self.eps, own / lr, seed)


def choose_device(dtype: str | None) -> tuple[str, str]:
    """(device, dtype): CUDA first; bf16 there and fp32 on a CPU, unless `dtype` is given.

    Which of the two is faster on a CPU differs between CPUs, and cells of several are compared.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, dtype or ("bf16" if device == "cuda" else "fp32")


class Point(NamedTuple):
    """What is swept of a variant.

    embedding_lr_scale: factor on the learning rate of embeddings, head and vectors, of all but the matrices; None where
    the variant's own, which is 1 for peers. decay: in place of the setting's, unless None.
    """

    lr: float
    embedding_lr_scale: float | None = None
    decay: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.lr:g}"]
        if self.embedding_lr_scale is not None:
            parts.append(f"embeddings x {self.embedding_lr_scale:g}")
        return ", ".join([*parts, *([] if self.decay is None else [f"decay {self.decay:g}"])])


def point_of(record: Mapping[str, Any]) -> Point:
    """Of a record, or a line of the report; None for what an older one lacks."""
    return Point(record["lr"], record.get("embedding_lr_scale"), record.get("decay"))


@dataclass(frozen=True)
class Cell:
    """One run. stage: "base" (the checkpoint that finetuning starts from), sweep, final, finetune.

    text: digest of its tokens, known once they are read. start: key of the base cell it continues.
    embedding_lr_scale, decay: see :class:`Point`.
    """

    stage: str
    variant: str
    lr: float
    seed: int
    tokens: int
    setting: Setting
    text: str
    start: str | None = None
    embedding_lr_scale: float | None = None
    decay: float | None = None

    @property
    def key(self) -> str:
        digest = hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()
        scale, decay = self.embedding_lr_scale, self.decay
        swept = "" if scale is None else f"-embeddings{scale:g}"
        swept += "" if decay is None else f"-decay{decay:g}"
        return f"{self.stage}-{self.variant}-lr{self.lr:g}{swept}-seed{self.seed}-{digest[:10]}"

    def record(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON holds it; what is the variant's or the setting's own is left out."""
        variant, fields = VARIANTS[self.variant], asdict(self)
        for name in ("embedding_lr_scale", "decay"):
            if fields[name] is None:
                del fields[name]
        fields |= {"kind": variant.kind, "options": dict(variant.options)}
        return json.loads(json.dumps(fields))

    @property
    def hyper(self) -> Hyper:
        own = self.setting.hyper(self.lr, self.seed, self.decay)
        return replace(own, embedding_lr_scale=self.embedding_lr_scale)


class Store:
    """Results (one file of finished cells, committed) and running state (ignored by git).

    Args:
        results: the comparison's folder, shared by machines: every cell names its own.
        runs: checkpoints of unfinished cells, the weights of base models and the report's pictures.
    """

    def __init__(self, results: Path, runs: Path) -> None:
        self.results, self.runs = results, runs
        self.cells = results / "cells.jsonl.xz"

    def is_finished(self, cell: Cell) -> bool:
        """A skipped cell is asked again; a base model is finished while its weights are there."""
        record = read_cells(self.cells).get(cell.key)
        done = record is not None and "skipped" not in record
        return done and (cell.stage != "base" or self.weights(cell.key).is_file())

    def write(self, cell: Cell, result: Mapping[str, Any]) -> None:
        add_cells(self.cells, [{"key": cell.key, **cell.record(), **result}])

    def merge(self, other: Path) -> list[str]:
        """Add another machine's file of cells; returns the keys that were added.

        A finished cell of this store stays, as one that is finished is not run again; a skipped one gives
        way to one that another machine could run.

        Raises:
            ValueError: there is no such file, or it is damaged.
        """
        if not other.is_file():
            raise ValueError(f"{other} is no file: give the cells.jsonl.xz of the other machine")
        here = read_cells(self.cells)
        found = {
            key: record
            for key, record in read_cells(other).items()
            if key not in here or ("skipped" in here[key] and "skipped" not in record)
        }
        if found:
            add_cells(self.cells, found.values())
        return list(found)

    def records(self) -> list[dict[str, Any]]:
        """Every record in the store by its key, finished or skipped."""
        return list(read_cells(self.cells).values())

    def checkpoint(self, cell: Cell) -> Path:
        return self.runs / cell.key / "checkpoint.pt"

    def weights(self, key: str) -> Path:
        """Final weights of a base cell."""
        return self.runs / key / "model.pt"

    @contextlib.contextmanager
    def claimed(self, cell: Cell) -> Iterator[bool]:
        """Whether this process has the cell: two queues on one store do not run the same one."""
        folder = self.runs / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


# -- the file of finished cells ---------------------------------------------------------------------


def read_cells(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a file of cells by their key, in its order; none where there is no file.

    Raises:
        ValueError: the file is truncated or not one that :func:`add_cells` wrote.
    """
    return {key: json.loads(line) for key, line in _read_lines(path).items()}


def add_cells(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a file of cells, each in place of the one of its key, if there is one.

    The file is compressed JSON, one line a cell, sorted by key, so that the same cells are the same bytes.
    Other cells' lines stay as they are. Processes add in turn, under a lock beside the file; it is
    replaced whole, so that one that is killed on the way leaves the file as it was.

    Raises:
        ValueError: as :func:`read_cells`; the file is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = _read_lines(path)
        lines |= {record["key"]: json.dumps(plain(record)) for record in records}
        text = "".join(f"{lines[key]}\n" for key in sorted(lines))
        # One name for all: what a killed process left is overwritten.
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            file.write(lzma.compress(text.encode()))
            file.flush()
            os.fsync(file.fileno())  # all results are in this file: a power cut must not empty it
        os.replace(temporary, path)


def _read_lines(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        found = {json.loads(line)["key"]: line for line in lines}
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or not a file of cells ({error}): take it from git again with "
            f"`git checkout -- {path}`, or from a copy; without it every cell would be run again"
        ) from error
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_rows(path: Path, record: Mapping[str, Any]) -> None:
    """JSON with one line per key, so that long lists stay small; the whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(plain(value))}" for key, value in record.items()]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(temporary, path)
