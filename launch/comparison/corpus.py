"""The texts: one to pretrain on; for fine-tuning two disjoint ones, for the base model and for tuning.

The base model reads every second document. Of the standard library the other half gives its
documentation strings, so that the model meets prose after code; of other data the other half is tuned
on as it is. With a file of its own (`--finetune_data`) the base model reads all of `--data`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from comparison.cells import Setting
from hmt_deepspeed.train.data import TrainingData, prepare_data
from hmt_deepspeed.train.sources import Source, open_source


def pretraining_text(setting: Setting, cache: str) -> TrainingData:
    return prepare_data(
        setting.data, "bpe", setting.seq_length, setting.vocab_size, cache_dir=cache
    )


def finetuning_texts(setting: Setting, cache: str) -> tuple[TrainingData, TrainingData]:
    """(what the base model is pretrained on, what is tuned on), in the tokens of the first."""
    first, second = setting.data, setting.finetune_data
    if second is None:
        first, second = _halves(setting.data, Path(cache).expanduser() / "comparison")
    base = prepare_data(first, "bpe", setting.seq_length, setting.vocab_size, cache_dir=cache)
    folder = Path(cache).expanduser() / "comparison" / f"tokenizer-{base.digest[:16]}"
    if not (folder / "tokenizer_config.json").is_file():
        base.tokenizer.save_pretrained(folder)
    tuning = prepare_data(second, str(folder), setting.seq_length, cache_dir=cache)
    return base, tuning


def held_out_rows(data: TrainingData, count: int) -> np.ndarray:
    """`count` rows spread evenly over the held-out text, the same in every run."""
    count = min(count, len(data.held_out))
    return np.linspace(0, len(data.held_out) - 1, count).round().astype(np.int64)


def _halves(data: str, cache: Path) -> tuple[str, str]:
    """Files with the two halves of a source, written once."""
    source = open_source(data)
    digest = hashlib.sha256(f"{data}:{source.fingerprint()}".encode()).hexdigest()[:16]
    paths = (cache / f"{digest}-base.jsonl", cache / f"{digest}-tuning.jsonl")
    if not all(path.is_file() for path in paths):
        cache.mkdir(parents=True, exist_ok=True)
        for half, path in enumerate(paths):
            _write_lines(path, _half(source, half, prose=data == "stdlib" and half == 1))
    return str(paths[0]), str(paths[1])


def _half(source: Source, half: int, prose: bool) -> Iterator[str]:
    for index, text in enumerate(source.documents()):
        if index % 2 == half:
            kept = documentation(text) if prose else text
            if kept.strip():
                yield kept


def documentation(source: str) -> str:
    """The documentation strings of a Python file; empty where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners))
    return "\n\n".join(text for text in found if text)


def _write_lines(path: Path, texts: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    os.replace(temporary, path)
