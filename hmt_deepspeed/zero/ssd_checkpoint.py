"""Moments on an SSD in checkpoints: their files get a second name there, and nothing is written again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.alternate import Piece, Record, read_kept
from hmt_deepspeed.zero.files import sync_folder
from hmt_deepspeed.zero.host_states import SsdStates
from hmt_deepspeed.zero.host_weight import HostWeight

if TYPE_CHECKING:
    from hmt_deepspeed.zero.entries import Entry
    from hmt_deepspeed.zero.optimizer import HMTZeroOptimizer

__all__ = ["FOLDER", "describe_files", "keep_files", "read_columns"]

FOLDER = "ssd_states"  # within the checkpoint


def _kept(optimizer: HMTZeroOptimizer) -> Iterator[tuple[Entry, SsdStates]]:
    """Entries whose moments are on an SSD. Masters without moments are in the ranks' files already."""
    for entry in optimizer.entries:
        if entry.dense_state is None or not isinstance(entry.weight, HostWeight):
            continue
        if isinstance(entry.weight.states, SsdStates):
            yield entry, entry.weight.states


def _names(optimizer: HMTZeroOptimizer) -> dict[Piece, str]:
    """The files' names, within the checkpoint."""
    pieces = [piece for _, states in _kept(optimizer) for piece in states.pieces]
    rank = optimizer.shard_rank
    return {p: f"{FOLDER}/rank_{rank}_{number:06d}.bin" for number, p in enumerate(pieces)}


def describe_files(optimizer: HMTZeroOptimizer) -> dict[str, dict[str, Any]]:
    """By parameter its columns and ``[file, begin, end]`` of each piece, for the rank's own file."""
    names = _names(optimizer)
    return {
        entry.name: {
            "columns": list(states.columns),
            "pieces": [
                [names[piece], *chunk]
                for piece, chunk in zip(states.pieces, states.chunks, strict=True)
            ],
        }
        for entry, states in _kept(optimizer)
    }


def keep_files(optimizer: HMTZeroOptimizer, folder: str) -> dict[str, dict[str, Any]]:
    """Link the committed files into a checkpoint's folder, or copy them to another file system.

    Returns:
        entries for its manifest.

    Raises:
        StoreError, OSError: naming the file.
    """
    names = _names(optimizer)
    if not names or optimizer.host is None or optimizer.host.ssd is None:
        return {}
    os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
    entries = {}
    for piece, name in names.items():
        record = optimizer.host.ssd.slots.keep(piece, os.path.join(folder, name))
        entries[name] = {
            "bytes": record.file_bytes,
            "content": record.nbytes,
            "checksum": record.digest,
        }
    sync_folder(os.path.join(folder, FOLDER))
    return entries


def read_columns(
    folder: str, files: Mapping[str, Mapping[str, Any]], held: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Columns of one parameter's part, flat fp32, as :func:`describe_files` put them down.

    Args:
        files: of the checkpoint's manifest.

    Raises:
        StoreError: a file is missing or holds something else.
    """
    begin, end = held["flat"]
    columns = {name: torch.empty(end - begin) for name in held["columns"]}
    for name, first, last in held["pieces"]:
        entry = files[name]
        record = Record(entry["bytes"], entry["content"], entry["checksum"])
        rows = read_kept(os.path.join(folder, name), record).view(torch.float32)
        for column, row in zip(columns.values(), rows.view(len(columns), -1), strict=True):
            column[first:last] = row
    return columns
