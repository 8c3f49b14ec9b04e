"""Tokens on disk, rows out of them, and the order in which a run reads the rows.

L = seq_length. The tokens of all documents stand one after another; row i is tokens
[i·L, (i+1)·L). A document that does not end in its row goes on in the next one, where it is
read without what came before. `position_ids` start at 0 with every document and every row, from
which Hugging Face models build a mask that keeps documents apart. The label of a document's
first token is -100: nothing before it should predict it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

IGNORED = -100
SPLITS = ("train", "held_out")
_PIECE_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 1 << 22


class PackedRows:
    """Rows of `seq_length` tokens; what is left at the end and does not fill a row is not used."""

    def __init__(self, tokens: np.ndarray, document_starts: np.ndarray, seq_length: int) -> None:
        self.tokens = tokens
        self.document_starts = document_starts
        self.seq_length = seq_length
        self.num_rows = len(tokens) // seq_length

    def __len__(self) -> int:
        return self.num_rows

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(input_ids, position_ids, labels), each int64 of shape (L,)."""
        begin = index * self.seq_length
        ids = self.tokens[begin : begin + self.seq_length].astype(np.int64)
        starts = self._starts_inside(begin)
        origin = np.zeros(self.seq_length, dtype=np.int64)
        origin[starts] = starts
        positions = np.arange(self.seq_length) - np.maximum.accumulate(origin)
        labels = ids.copy()
        labels[starts] = IGNORED
        labels[0] = IGNORED
        return ids, positions, labels

    def _starts_inside(self, begin: int) -> np.ndarray:
        low, high = np.searchsorted(self.document_starts, [begin, begin + self.seq_length])
        return self.document_starts[low:high] - begin

    def batch(self, indices: Iterable[int]) -> dict[str, torch.Tensor]:
        """input_ids, position_ids and labels of several rows, each int64 (rows, L)."""
        ids, positions, labels = zip(*(self.row(int(index)) for index in indices), strict=True)
        return {
            "input_ids": torch.from_numpy(np.stack(ids)),
            "position_ids": torch.from_numpy(np.stack(positions)),
            "labels": torch.from_numpy(np.stack(labels)),
        }

    def count_labels(self, indices: np.ndarray) -> int:
        """How many tokens of these rows are predicted, without reading them."""
        begins = np.asarray(indices, dtype=np.int64) * self.seq_length
        inner = np.searchsorted(self.document_starts, begins + self.seq_length)
        inner -= np.searchsorted(self.document_starts, begins + 1)
        return int(len(begins) * (self.seq_length - 1) - inner.sum())


class GlobalOrder:
    """The order of rows over the whole run: every epoch a permutation of its own, from the seed.

    Sample g of the run is one fixed row, whatever the number of ranks, so "samples consumed" is
    all that a resumed run needs. In a global batch that starts at sample s, rank r of n takes
    samples s + r, s + r + n, s + r + 2n, ... and cuts them into micro-batches in this order.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Row numbers of samples [start, start + count)."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.num_rows)
            part = self._of_epoch(epoch)[offset : offset + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = generator.permutation(self.num_rows)
            self._epoch = epoch
        return self._permutation


def share_of_rank(rows: np.ndarray, rank: int, num_ranks: int, micro_batch: int) -> np.ndarray:
    """One rank's part of a global batch's rows, as (accumulation steps, micro_batch)."""
    return rows[rank::num_ranks].reshape(-1, micro_batch)


class TokenCache(NamedTuple):
    """Tokens and document starts of both splits, memory-mapped, and a digest of their content."""

    tokens: dict[str, np.ndarray]
    document_starts: dict[str, np.ndarray]
    digest: str
    num_documents: int

    def rows(self, split: str, seq_length: int) -> PackedRows:
        return PackedRows(self.tokens[split], self.document_starts[split], seq_length)


def read_tokens(folder: Path) -> TokenCache | None:
    """The cache in `folder`, or None where there is none or files do not have their sizes."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    tokens: dict[str, np.ndarray] = {}
    starts: dict[str, np.ndarray] = {}
    for split in SPLITS:
        for name, kind in (("tokens", meta["dtype"]), ("starts", "int64")):
            path = folder / f"{split}.{name}"
            count = meta[split][name]
            if not path.exists() or path.stat().st_size != count * np.dtype(kind).itemsize:
                return None
            array = np.memmap(path, dtype=kind, mode="r") if count else np.empty(0, dtype=kind)
            (tokens if name == "tokens" else starts)[split] = array
    return TokenCache(tokens, starts, meta["digest"], meta["documents"])


def write_tokens(
    folder: Path,
    documents: Iterable[tuple[bool, str]],
    encode: Callable[[list[str]], list[list[int]]],
    vocab_size: int,
    bos: int | None,
    eos: int,
) -> None:
    """Encode (held out?, text) documents into `folder`, which appears whole or not at all."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        writers = {split: _SplitWriter(temporary, split, dtype) for split in SPLITS}
        for batch in _batches(_pieces(documents)):
            encoded = encode([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                writers["held_out" if piece.held_out else "train"].add(piece, ids, bos, eos)
        meta: dict[str, Any] = {split: writer.close() for split, writer in writers.items()}
        meta["dtype"] = np.dtype(dtype).name
        meta["documents"] = sum(len(writer.starts) for writer in writers.values())
        digests = "".join(writer.digest.hexdigest() for writer in writers.values())
        meta["digest"] = hashlib.sha256(digests.encode()).hexdigest()
        _write_synced(temporary / "meta.json", json.dumps(meta).encode())
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(temporary, folder)
        except OSError:  # another run on this machine was faster
            if read_tokens(folder) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Piece(NamedTuple):
    text: str
    held_out: bool
    first: bool
    last: bool


def _pieces(documents: Iterable[tuple[bool, str]]) -> Iterator[_Piece]:
    """Long documents in pieces of about a million characters, cut after a line where possible."""
    for held_out, text in documents:
        begin = 0
        while begin < len(text):
            end = begin + _PIECE_CHARACTERS
            if end < len(text):
                newline = text.rfind("\n", begin, end)
                end = newline + 1 if newline > begin else end
            end = min(end, len(text))
            yield _Piece(text[begin:end], held_out, begin == 0, end == len(text))
            begin = end


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    def __init__(self, folder: Path, split: str, dtype: type[np.generic]) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.starts: list[int] = []
        self.count = 0
        self.digest = hashlib.sha256()
        self._file = open(folder / f"{split}.tokens", "wb")  # noqa: SIM115 (closed by close)

    def add(self, piece: _Piece, ids: list[int], bos: int | None, eos: int) -> None:
        if piece.first:
            self.starts.append(self.count)
            if bos is not None:
                ids = [bos, *ids]
        if piece.last:
            ids = [*ids, eos]
        raw = np.asarray(ids, dtype=self.dtype).tobytes()
        self.count += len(ids)
        self.digest.update(raw)
        self._file.write(raw)

    def close(self) -> dict[str, int]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        starts = np.asarray(self.starts, dtype=np.int64).tobytes()
        self.digest.update(starts)
        _write_synced(self.folder / f"{self.split}.starts", starts)
        return {"tokens": self.count, "starts": len(self.starts)}


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
