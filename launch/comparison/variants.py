"""What is compared: one table of plain data. Adding a variant is adding an entry.

A string "d/4" among the options stands for the model's hidden size divided by 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STAGES = ("sweep", "final", "finetune", "speed")
# Steps between two bases, for every method: GaLore's, and the default here. Timings are of so many steps, or of a
# divisor, so that the means count what the refreshes take.
INTERVAL = 200


@dataclass(frozen=True)
class Variant:
    """kind: who builds it (a key of `contenders.BUILDERS`). options: JSON-able, given to that builder; of "hmt" it
    is the "hmt" block of a DeepSpeed JSON.

    learning_rates: for pretraining, the most informative first. finetunes_only: adapters need a
    pretrained model under them.
    """

    kind: str
    options: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    finetunes_only: bool = False


_ADAMW = (1e-3, 5e-4, 2e-3, 2.5e-4)
_MUON = (1e-3, 2e-3, 5e-4)
# A factor of 0.25 on the low-rank update asks for a learning rate some four times AdamW's.
_QUARTER = (1e-2, 5e-3, 2e-2)
# Lion's papers ask for a third to a tenth of AdamW's, SOAP's for three times it.
_LION, _SOAP = (3e-4, 1e-4, 1e-3), (3e-3, 1e-3, 6e-3)
_ADAPTER = (4e-3, 1e-3, 1.6e-2)

_GALORE = {"rank": "d/4", "update_proj_gap": INTERVAL, "scale": 0.25}
_APOLLO = {"rank": "d/4", "update_proj_gap": INTERVAL, "proj": "random", "proj_type": "std"}

_LOW_RANK = {"method": "lowrank_adamw"}


VARIANTS: dict[str, Variant] = {
    "adamw": Variant("adamw", {}, _ADAMW),
    "galore_interval_200": Variant("galore", {**_GALORE, "proj_type": "std"}, _QUARTER),
    "fira_interval_200": Variant("fira", {**_GALORE, "norm_growth_limit": 1.01}, _QUARTER),
    "apollo_interval_200": Variant(
        "apollo", {**_APOLLO, "scale": 1.0, "scale_type": "channel"}, _QUARTER
    ),
    # at AdamW's rate and decay (Moonshot's factor)
    "muon": Variant("muon", {"adjust_lr_fn": "match_rms_adamw"}, (2e-3, 4e-3, 1e-3, 8e-3)),
    "soap": Variant("soap", {"betas": [0.95, 0.95], "precondition_frequency": 10}, _SOAP),
    "adam_mini": Variant("adam_mini", {}, _ADAMW),
    # of its paper, for language
    "lion": Variant("lion", {"betas": [0.95, 0.98]}, _LION),
    "adamw_8bit": Variant("adamw_8bit", {}, _ADAMW),
    "hmt": Variant("hmt", {}, _MUON),
    "hmt_lowrank_adamw": Variant("hmt", {"optimizer": _LOW_RANK}, _ADAMW),
    "hmt_memory": Variant("hmt", {"preset": "memory"}, _MUON),
    "hmt_paper": Variant("hmt", {"preset": "paper"}, _ADAMW),
    # whole matrices, whose momentum in 8 bits takes fewer bytes than the default's with bases
    "hmt_muon_full": Variant("hmt", {"optimizer": {"method": "muon", "rank": "full"}}, _MUON),
    # the default within fewer bytes, moments and bases together: a thirty-second of AdamW's moments
    "hmt_thirty_second": Variant(
        "hmt", {"optimizer": {"rank_budget": 0.117}}, (1e-3, 1.5e-3, 2e-3)
    ),
    "lora": Variant("lora", {"rank": "d/16", "alpha": "d/8"}, _ADAPTER, finetunes_only=True),
    "qlora": Variant("qlora", {"rank": "d/16", "alpha": "d/8"}, _ADAPTER, finetunes_only=True),
}


def select(names: Iterable[str] | None, stage: str) -> list[str]:
    """The variants that a stage can train: all of them, or those of `names`.

    Raises:
        ValueError: a name that is not in the table, or an adapter in a pretraining stage.
    """
    if names is None:
        return [n for n in VARIANTS if stage == "finetune" or not VARIANTS[n].finetunes_only]
    chosen = list(names)
    for name in chosen:
        if name not in VARIANTS:
            raise ValueError(f"--variants {name!r} is unknown; legal: {', '.join(VARIANTS)}")
        if VARIANTS[name].finetunes_only and stage != "finetune":
            legal = ", ".join(n for n, v in VARIANTS.items() if not v.finetunes_only)
            raise ValueError(
                f"--variants {name!r} trains adapters on a frozen model, which pretrains nothing; "
                f"legal for it: the finetune stage, here: {legal}"
            )
    return chosen


def resolve(options: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """The options with "d/N" and "kd/N" replaced by k `hidden` // N."""
    return {key: _resolved(value, hidden) for key, value in options.items()}


def _resolved(value: Any, hidden: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, hidden) for item in value]
    share = re.fullmatch(r"(\d*)d/([1-9]\d*)", value) if isinstance(value, str) else None
    return max(1, int(share[1] or 1) * hidden // int(share[2])) if share else value
