"""Hard-links states on an SSD into checkpoints and snapshots, so that nothing is written again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.memory.alternate import Held, Piece, Record, read_kept
from hmt_deepspeed.zero.offload.states import SsdStates
from hmt_deepspeed.zero.offload.weight import HostWeight
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.saving.durable import sync_folder
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["FOLDER", "describe_files", "hold_files", "keep_files", "read_columns", "save_files"]

FOLDER = "ssd_states"  # within the checkpoint


def _on_ssd(zero: ZeroState, masters: bool) -> list[tuple[ParamState, SsdStates]]:
    """Entries with states on an SSD; without ``masters`` only those that have moments there."""
    return [
        (param_state, param_state.weight.states)
        for param_state in zero.param_states
        if isinstance(param_state.weight, HostWeight)
        and isinstance(param_state.weight.states, SsdStates)
        and (masters or param_state.dense_state is not None)
    ]


def _names(zero: ZeroState, masters: bool) -> dict[Piece, str]:
    """The files' names, within the checkpoint."""
    pieces = [piece for _, states in _on_ssd(zero, masters) for piece in states.pieces]
    rank = zero.collectives.rank
    return {p: f"{FOLDER}/rank_{rank}_{number:06d}.bin" for number, p in enumerate(pieces)}


def describe_files(zero: ZeroState, masters: bool = False) -> dict[str, dict[str, Any]]:
    """For the rank's own file: by parameter its columns and ``[file, begin, end]`` of each piece.

    Args:
        zero: states of the optimizer.
        masters: also of parameters of which nothing else is on the SSD; a checkpoint has masters in the ranks'
            own files.
    """
    names = _names(zero, masters)
    return {
        param_state.name: {
            "columns": list(states.columns),
            "pieces": [
                [names[piece], *chunk]
                for piece, chunk in zip(states.pieces, states.chunks, strict=True)
            ],
        }
        for param_state, states in _on_ssd(zero, masters)
    }


def save_files(zero: ZeroState, folder: str) -> dict[str, dict[str, Any]]:
    """:func:`hold_files`, :func:`keep_files` and the release; for a checkpoint.

    Args:
        zero: states of the optimizer. folder: of the checkpoint.
    """
    held = hold_files(zero)
    try:
        return keep_files(held, folder)
    finally:
        for file in held.values():
            file.release()


def hold_files(zero: ZeroState, masters: bool = False) -> dict[str, Held]:
    """The files that :func:`describe_files` names, as they were committed last; each is to be released.

    Args:
        zero, masters: as of :func:`describe_files`.
    """
    if zero.host is None or zero.host.ssd is None:
        return {}
    slots = zero.host.ssd.slots
    return {name: slots.hold(piece) for piece, name in _names(zero, masters).items()}


def keep_files(held: Mapping[str, Held], folder: str) -> dict[str, dict[str, Any]]:
    """Link held files into a checkpoint's folder, or copy them to another file system.

    Returns:
        entries for its manifest.

    Raises:
        StoreError, OSError: naming the file.
    """
    if not held:
        return {}
    os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
    entries = {}
    for name, file in held.items():
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):  # of an attempt that failed
            os.unlink(path)
        record = file.keep(path)
        entries[name] = {
            "bytes": record.file_bytes,
            "content": record.nbytes,
            "checksum": record.digest,
        }
    sync_folder(os.path.join(folder, FOLDER))
    return entries


def read_columns(
    folder: str, files: Mapping[str, Mapping[str, Any]], part: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Columns of one parameter's part, flat fp32, as :func:`describe_files` put them down.

    Args:
        folder: of the checkpoint. files: of its manifest. part: of the parameter, as it was put down.

    Raises:
        StoreError: a file is missing or holds something else.
    """
    begin, end = part["flat"]
    columns = {name: torch.empty(end - begin) for name in part["columns"]}
    for name, first, last in part["pieces"]:
        entry = files[name]
        record = Record(entry["bytes"], entry["content"], entry["checksum"])
        rows = read_kept(os.path.join(folder, name), record).view(torch.float32)
        for column, row in zip(columns.values(), rows.view(len(columns), -1), strict=True):
            column[first:last] = row
    return columns
