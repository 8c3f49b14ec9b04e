"""Reads HMT's checkpoints, whatever world size and ZeRO stage wrote them.

Files are memory-mapped; a parameter is assembled from the ranks' parts when it is asked for.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.rules import RULES
from hmt_deepspeed.zero.offload.states import MASTER, MOMENTS
from hmt_deepspeed.zero.saving.durable import MANIFEST
from hmt_deepspeed.zero.saving.raw_tensors import read_state
from hmt_deepspeed.zero.saving.ssd_files import read_columns

__all__ = ["SavedState"]

# Names of what is kept by rows with a basis that was left; means of columns are whole.
_RECALLED_ROWS = {
    s.name for rule in RULES.values() for s in rule.states if s.recalled and s.by_rows
}


def _by_rank(folder: str, kind: str) -> list[str]:
    """Files of one kind, in order of rank."""

    def rank(path: str) -> int:
        found = re.search(r"zero_pp_rank_(\d+)", os.path.basename(path))
        return int(found.group(1)) if found else -1

    files = glob.glob(os.path.join(glob.escape(folder), f"*_{kind}_states.pt"))
    return sorted((path for path in files if not _is_of_expert(path)), key=rank)


def _is_of_expert(path: str) -> bool:
    """Whether it is one of the files that DeepSpeed writes of the weights of single experts."""
    return re.match(r"layer_\d+_expert_\d+_", os.path.basename(path)) is not None


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's part, with what the others alone have saved by name: of experts that it does not hold."""
    first = parts[0]
    if all(part["shapes"].keys() == first["shapes"].keys() for part in parts):
        return first

    def by_name(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {name: value for part in reversed(values) for name, value in part.items()}

    named = ("shapes", "schedule", "rules", "matrices", "dense")
    return {
        **first,
        **{key: by_name([part[key] for part in parts]) for key in named},
        "policy": {key: by_name([p["policy"][key] for p in parts]) for key in first["policy"]},
        "shared_inputs": [g for p in parts for g in p["shared_inputs"]],
        "groups": [
            list(dict.fromkeys(name for names in group for name in names))
            for group in zip(*(part["groups"] for part in parts), strict=True)
        ],
    }


def _made(value: Tensor | Callable[[], Tensor]) -> Tensor:
    """A tensor, or one that a snapshot holds as the difference to another's."""
    return value if isinstance(value, Tensor) else value()


def _own_last(parts: list[dict[str, Any]], rows: tuple[int, int]) -> list[dict[str, Any]]:
    return sorted(parts, key=lambda part: tuple(part["rows"]) == rows)


def _rows_of(
    parts: Sequence[Mapping[str, Any]], key: str, height: int, rows: tuple[int, int]
) -> Tensor:
    """Some rows of a matrix of ``height``, of what ranks hold of it; later parts replace earlier ones."""
    like: Tensor = parts[0][key]
    whole = torch.empty(height, like.shape[1], dtype=like.dtype)
    for part in parts:
        begin, end = part["rows"]
        whole[begin:end] = part[key]
    return whole[rows[0] : rows[1]]


class SavedState:
    """One checkpoint folder.

    Args:
        folder: of the tag.

    Raises:
        ValueError: files of some ranks are missing.

    Attributes:
        hmt: our part of the first rank's optimizer state; what is there by name, of all ranks.
        model_state: DeepSpeed's model-state file of the first rank.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        files = map(read_state, _by_rank(folder, "optim"))
        self._optimizer = [file["optimizer_state_dict"] for file in files]
        self._models = [read_state(path) for path in self.model_paths(folder)]
        self.hmt = _merged([state["hmt"] for state in self._optimizer])
        self.model_state = self._models[0]
        if len(self._optimizer) != self.hmt["world"]:
            raise ValueError(
                f"{folder} was written by {self.hmt['world']} ranks, but holds "
                f"{len(self._optimizer)} optimizer files. Copy the missing ones."
            )

    @staticmethod
    def model_paths(folder: str) -> list[str]:
        """DeepSpeed's model-state files, in order of rank."""
        return _by_rank(folder, "model")

    @staticmethod
    def is_ours(folder: str) -> bool:
        """Whether HMT wrote the checkpoint; raises where it did, by its manifest, and cannot be read."""
        files = _by_rank(folder, "optim")
        if not files:
            return False
        try:
            return "hmt" in read_state(files[0])["optimizer_state_dict"]
        except Exception:  # stock files hold pickled classes that weights_only refuses
            if os.path.isfile(os.path.join(folder, MANIFEST)):
                raise
            return False

    # -- checks -----------------------------------------------------------------------------------

    def check_same_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError when trainable parameters differ in name or shape."""
        saved = {name: tuple(shape) for name, shape in self.hmt["shapes"].items()}
        wrong = [n for n in sorted(saved.keys() | shapes.keys()) if saved.get(n) != shapes.get(n)]
        if wrong:
            lines = [f"{n}: saved {saved.get(n)}, model {shapes.get(n)}" for n in wrong[:5]]
            raise ValueError(
                f"{self.folder} belongs to another model; {len(wrong)} trainable parameters differ: "
                + "; ".join(lines)
            )

    def check_same_rules(self, rules: Mapping[str, str]) -> None:
        """Raises ValueError when a parameter had another method or projection."""
        saved = self.hmt["rules"]
        wrong = [f"{n} ({saved[n]}, now {rule})" for n, rule in rules.items() if saved[n] != rule]
        if wrong:
            raise ValueError(
                f"{self.folder}: the rule of {wrong[:5]} is another one in this config, so their states "
                "do not fit. Keep method, projection, second_moment, module_rules and target_modules, "
                "and where bases are drawn range_finder and rank, or load with "
                "load_optimizer_states=False."
            )

    def check_same_groups(self, groups: Sequence[Sequence[str]]) -> None:
        """Raises ValueError when parameters are grouped otherwise: lr and the like are per group."""
        saved = [sorted(names) for names in self.hmt["groups"]]
        if saved != [sorted(names) for names in groups]:
            raise ValueError(
                f"{self.folder} has parameter groups of {[len(g) for g in saved]} parameters, this run "
                f"of {[len(g) for g in groups]}, or others in them. Group them as in the saved run, or "
                "load with load_optimizer_states=False."
            )

    # -- weights ----------------------------------------------------------------------------------

    def master(self, name: str) -> Tensor:
        """Whole weight of a trainable parameter, flat fp32 on the host."""
        if name in self._by_name:
            return self._master_by_name(name)
        if "fp32_flat_groups" in self._optimizer[0]:
            return self._master_stage3(name)
        return self._master_stage12(name)

    def int8_weight(self, name: str) -> dict[str, Tensor] | None:
        """``codes`` (int8, of its shape) and ``scales`` of a weight that was stored in INT8, else None."""
        found: dict[str, Tensor] | None = self.hmt.get("int8_weights", {}).get(name)
        return found

    @cached_property
    def _by_name(self) -> set[str]:
        """Parameters of which ranks have saved masters by name: all in a snapshot, else experts."""
        return {name for state in self._optimizer for name in state.get("masters", {})}

    def _master_by_name(self, name: str) -> Tensor:
        whole = torch.empty(self._numel(name))
        for state in self._optimizer:
            part = state.get("masters", {}).get(name)
            if part is None:
                continue
            if "pieces" in part:
                values = read_columns(self.folder, self._files, part)[MASTER]
            else:
                values = _made(part["values"])
            whole[part["flat"][0] : part["flat"][1]] = values
        return whole

    def _place(self, name: str) -> tuple[int, list[str]]:
        for index, names in enumerate(self.hmt["groups"]):
            if name in names:
                before = names[: names.index(name)]
                return index, [other for other in before if other not in self._by_name]
        raise KeyError(name)

    def _numel(self, name: str) -> int:
        return prod(self.hmt["shapes"][name])

    def _master_stage12(self, name: str) -> Tensor:
        group, before = self._place(name)
        begin = sum(map(self._numel, before))
        end = begin + self._numel(name)
        pieces, offset = [], 0
        for state in self._optimizer:
            part = state["single_partition_of_fp32_groups"][group]
            first, last = max(begin, offset), min(end, offset + part.numel())
            if first < last:
                pieces.append(part[first - offset : last - offset])
            offset += part.numel()
        return torch.cat(pieces)

    def _master_stage3(self, name: str) -> Tensor:
        group, before = self._place(name)
        world = self.hmt["world"]
        offset = sum(-(-self._numel(n) // world) for n in before)
        length = -(-self._numel(name) // world)
        parts = [s["fp32_flat_groups"][group][offset : offset + length] for s in self._optimizer]
        return torch.cat(parts)[: self._numel(name)]

    def holds_frozen(self, name: str) -> bool:
        """Whether the weight of a parameter that is not trained was saved."""
        fragments = self.model_state.get("frozen_param_fragments") or {}
        return any(
            name in held for held in (fragments, self.model_state["module"] or {}, self._experts)
        )

    def frozen(self, name: str) -> Tensor:
        """Whole weight of a parameter that is not trained, any shape.

        Raises:
            ValueError: it was not saved.
        """
        if not self.holds_frozen(name):
            raise ValueError(
                f"{self.folder} holds no weights for the frozen parameter {name}: it was saved with "
                "exclude_frozen_parameters. Pass load_module_strict=False to keep the model's own."
            )
        fragments = self.model_state.get("frozen_param_fragments") or {}
        if name in self._experts:
            return self._experts[name]
        if name not in fragments:
            return self.model_state["module"][name]
        shape = self.model_state["frozen_param_shapes"][name]
        parts = [_made(m["frozen_param_fragments"][name]).reshape(-1) for m in self._models]
        return torch.cat(parts)[: prod(shape)]

    # -- states -----------------------------------------------------------------------------------

    def matrix(
        self, name: str, rows: tuple[int, int], experts: tuple[int, int] = (0, 1)
    ) -> dict[str, Any]:
        """State of a matrix rule; of its tensors by rows only the given rows, of those by experts only the given ones.

        A row that two ranks touch was saved by both, and copies in 8 or 16 bits were rounded apart: a
        rank of the same layout gets its own again.

        Args:
            name: of the parameter. rows: half-open, of the matrix as its rule is handed it, of experts one below the other.
            experts: half-open.
        """
        common = dict(self.hmt["matrices"][name])
        common.pop("rows")
        common.pop("experts", None)
        parts = [state["hmt"]["matrices"].get(name) for state in self._optimizer]
        parts = _own_last([part for part in parts if part is not None], rows)
        for key in common.pop("held_states", ()):
            common[key] = torch.empty(common["count"], *common[key].shape[1:])
            for part in parts:
                begin, end = part["experts"]
                common[key][begin:end] = part[key]
            common[key] = common[key][experts[0] : experts[1]]
        for key in common.pop("row_states"):
            common[key] = _rows_of(parts, key, common["height"], rows)
        return common

    def old_bases(self) -> dict[str, Tensor]:
        """Old bases by name of the matrix; each was kept by the rank that finds its bases."""
        found: dict[str, Tensor] = {}
        for state in self._optimizer:
            found |= state["hmt"].get("old_bases", {})
        return found

    def previous_moments(self, rows: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
        """Previous bases and the moments in them, oldest first; only those that every rank had kept.

        Args:
            rows: half-open range of the rows wanted, by matrix name.

        Returns:
            For each previous basis its ``owner``, ``steps``, ``columns``, ``basis`` (n x r) and by matrix name in
            ``members`` the moments of the rows.
        """
        saved = [
            state["hmt"].get("left_moments", {}).get("entries", []) for state in self._optimizer
        ]
        by_rank = [{(entry["owner"], entry["steps"]): entry for entry in part} for part in saved]
        found = []
        for place, entry in by_rank[0].items():
            parts = [part.get(place) for part in by_rank]
            known = [part for part in parts if part is not None]
            basis = next((part["basis"] for part in known if part["basis"] is not None), None)
            if len(known) < len(parts) or basis is None:
                continue
            members = {
                name: self._previous_rows(name, [p["members"] for p in known], rows[name])
                for name in entry["members"]
                if name in rows
            }
            found.append({**entry, "basis": basis, "members": members})
        return found

    @staticmethod
    def _previous_rows(
        name: str, by_rank: Sequence[Mapping[str, Any]], rows: tuple[int, int]
    ) -> dict[str, Any]:
        parts = _own_last([part[name] for part in by_rank if name in part], rows)
        common = dict(parts[0])
        for key in common.keys() & _RECALLED_ROWS:
            common[key] = _rows_of(parts, key, common["height"], rows)
        return common

    def order_of_use(self, rank: int) -> list[str]:
        """Keys of previous bases in a rank's cache, least recently used first; none for ranks that did not save."""
        if rank >= len(self._optimizer):
            return []
        order: list[str] = self._optimizer[rank]["hmt"].get("left_moments", {}).get("order", [])
        return order

    def dense(self, name: str, flat: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Moments of flat elements of a dense parameter, and its step count.

        Args:
            name: of the parameter. flat: half-open range of its elements.

        Returns:
            exp_avg and exp_avg_sq, flat fp32, and the count, 0-dim.
        """
        whole = {key: torch.empty(self._numel(name)) for key in MOMENTS}
        for state in self._optimizer:
            part = state["hmt"]["dense"].get(name)
            if part is None:
                continue
            begin, end = part["flat"]
            columns = part
            if "pieces" in part:
                columns = read_columns(self.folder, self._files, part)
            for key, values in whole.items():
                values[begin:end] = columns[key]
        first, second = (values[flat[0] : flat[1]] for values in whole.values())
        return first, second, torch.as_tensor(self.hmt["dense"][name]["step"])

    @cached_property
    def _experts(self) -> dict[str, Tensor]:
        """Weights of experts in files of their own, by name among all experts."""
        files = filter(_is_of_expert, sorted(os.listdir(self.folder)))
        found: dict[str, Tensor] = {}
        for name in files:
            found |= read_state(os.path.join(self.folder, name))
        return found

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Files of the checkpoint's manifest."""
        with open(os.path.join(self.folder, MANIFEST)) as file:
            files: dict[str, Any] = json.load(file)["files"]
        return files

    def rng(self, rank: int) -> dict[str, Tensor]:
        """Random number states (uint8) that a rank saved, by generator."""
        state: dict[str, Tensor] = self._optimizer[rank]["hmt"]["rng"]
        return {key: value.clone() for key, value in state.items()}  # torch ignores a view's offset
