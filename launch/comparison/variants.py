"""What is compared: one table of plain data. Adding a variant is adding an entry.

A string "d/4" among the options stands for the model's hidden size divided by 4, "gradients/4" for a
quarter of the bytes of all matrices' gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Steps between two bases, for every method. GaLore's 200 is for runs of 10,000 steps and more; here a
# sweep cell has a few hundred.
INTERVAL = 50
# Full gradients that HMT may hold at once. By its default, a thirty-second of all, the matrices of the small
# model wait up to 28 steps for their first basis: nothing in 10,000 steps, much in a few hundred.
FIRST_ROUND = "gradients/4"
# The HMT paper's table of activations, and X [Q | P] held of projected linears' inputs, of which the table
# says nothing. Every tenth step measures what encoding loses.
ACTIVATIONS = {
    "policy": {
        "embedding": "keep",
        "attention_qkv": "recompute",
        "attention_output": "int8",
        "mlp_intermediate": "int8",
        "residual": "keep",
        "layernorm": "keep",
        "projected_inputs": "project",
        "lm_head": "keep",
    },
    "error_interval": 10,
}
STAGES = ("sweep", "final", "finetune", "speed")


@dataclass(frozen=True)
class Variant:
    """kind: who builds it (a key of `contenders.BUILDERS`). options: JSON-able, given to that builder.

    learning_rates: for pretraining, the most informative first. finetunes_only: adapters need a
    pretrained model under them.
    """

    kind: str
    options: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    finetunes_only: bool = False


def _galore(**options: Any) -> dict[str, Any]:
    return {"rank": "d/4", "update_proj_gap": INTERVAL, "scale": 0.25, **options}


def _apollo(**options: Any) -> dict[str, Any]:
    common = {"update_proj_gap": INTERVAL, "proj": "random", "proj_type": "std"}
    return {**common, **options}


def _hmt(**options: Any) -> dict[str, Any]:
    common = {"rank": "d/4", "scale": 0.25, "update_interval": INTERVAL}
    return {**common, "max_full_gradient_bytes": FIRST_ROUND, **options}


_ENERGY = {"projection": "auto", "rank": "auto", "rank_candidates": ["d/8", "d/4", "d/2"]}
# Five candidates, d/8 to d/2, and the bytes, bases included, that d/4 takes everywhere.
_FINE = {**_ENERGY, "rank_candidates": ["d/8", "3d/16", "d/4", "3d/8", "d/2"]}
_BYTES_OF_D4 = {**_FINE, "rank_budget": 0.322}
_MATCH = {"scale": "auto"}
_LATER = {"energy_estimate": "out_of_sample"}
# A factor of 0.25 on the low-rank update asks for a learning rate some four times AdamW's.
_QUARTER = (1e-2, 5e-3, 2e-2)
# The update's norm grows with the root of the rank.
_QUARTER_3D8 = (8e-3, 4e-3, 1.6e-2)
_QUARTER_D2 = (7e-3, 3.5e-3, 1.4e-2)
_MATCHED = (1e-3, 2e-3, 5e-4)
_WHOLE = (2e-3, 4e-3, 1e-3)
_ADAPTER = (4e-3, 1e-3, 1.6e-2)

VARIANTS: dict[str, Variant] = {
    "adamw": Variant("adamw", {}, (1e-3, 5e-4, 2e-3, 2.5e-4)),
    # What a factor on the matrices' update does by itself: embeddings and head get the whole rate.
    "adamw_quarter": Variant("adamw", {"scale": 0.25}, (4e-3, 2e-3, 8e-3)),
    "galore": Variant("galore", _galore(proj_type="std"), _QUARTER),
    "fira": Variant("fira", _galore(norm_growth_limit=1.01), _QUARTER),
    "apollo": Variant("apollo", _apollo(rank="d/4", scale=1.0, scale_type="channel"), _QUARTER),
    "apollo_mini": Variant("apollo", _apollo(rank=1, scale=128.0, scale_type="tensor"), _QUARTER),
    "hmt_d4": Variant("hmt", _hmt(), _QUARTER),
    "hmt_d2": Variant("hmt", _hmt(rank="d/2"), _QUARTER),
    "hmt_d32": Variant("hmt", _hmt(rank="d/32"), _QUARTER),  # a thirtieth of the moments
    "hmt_energy": Variant(
        "hmt", _hmt(rank="auto", rank_candidates=["d/8", "d/4", "d/2"]), _QUARTER
    ),
    "hmt_budget": Variant(
        "hmt",
        _hmt(rank="auto", rank_candidates=["d/16", "d/8", "d/4", "d/2"], rank_budget=0.3),
        _QUARTER,
    ),
    # the paper's "Proposed": ranks by energy and the activations above
    "hmt_proposed": Variant("hmt", _hmt(**_ENERGY, activations=ACTIVATIONS), _QUARTER),
    "hmt_auto_side_energy": Variant("hmt", _hmt(**_ENERGY), _QUARTER),  # its ranks alone
    "hmt_auto_side_d4": Variant("hmt", _hmt(projection="auto"), _QUARTER),
    "hmt_d4_early_05": Variant("hmt", _hmt(), _QUARTER),
    "hmt_auto_side_d4_early_05": Variant("hmt", _hmt(projection="auto"), _QUARTER),
    # ranks where a basis captures least of the gradients that follow it: queries and keys
    "hmt_queries_keys_d2": Variant(
        "hmt",
        _hmt(projection="auto", module_rules={r"\.[qk]_proj\b": {"rank": "d/2"}}),
        _QUARTER,
    ),
    # the same strength of their updates at d/4
    "hmt_queries_keys_scaled": Variant(
        "hmt",
        _hmt(projection="auto", module_rules={r"\.[qk]_proj\b": {"scale": 0.25 * 2**0.5}}),
        _QUARTER,
    ),
    # ranks by the energy of the gradients that a basis is made from, and of those that follow it
    "hmt_budget_in_sample": Variant("hmt", _hmt(**_BYTES_OF_D4), _QUARTER),
    "hmt_budget_out_of_sample": Variant("hmt", _hmt(**_BYTES_OF_D4, **_LATER), _QUARTER),
    "hmt_energy_out_of_sample": Variant(
        "hmt", _hmt(**_FINE, **_LATER, energy_threshold=0.7), _QUARTER
    ),
    # fewer columns where they matter less: not the energy but its worth differs between layer types
    "hmt_energy_by_type": Variant(
        "hmt",
        _hmt(
            **_FINE,
            **_LATER,
            energy_threshold=0.65,
            module_rules={r"\.[qk]_proj\b": {"energy_threshold": 0.85}},
        ),
        _QUARTER,
    ),
    # bases that remember past gradients
    "hmt_basis_momentum_08_d4": Variant(
        "hmt", _hmt(projection="auto", basis_momentum=0.8), _QUARTER
    ),
    # or bases that change less because they seldom do, and the peers' so
    "galore_interval_200": Variant(
        "galore", _galore(proj_type="std", update_proj_gap=200), _QUARTER
    ),
    "fira_interval_200": Variant(
        "fira", _galore(norm_growth_limit=1.01, update_proj_gap=200), _QUARTER
    ),
    "apollo_interval_200": Variant(
        "apollo",
        _apollo(rank="d/4", scale=1.0, scale_type="channel", update_proj_gap=200),
        _QUARTER,
    ),
    "hmt_auto_side_d4_interval_200": Variant(
        "hmt", _hmt(projection="auto", update_interval=200), _QUARTER
    ),
    # with a residual as wide as the basis, none, or whole
    "hmt_early_085_interval_200": Variant(
        "hmt", _hmt(projection="auto", update_interval=200), _QUARTER
    ),
    "hmt_not_early_200": Variant("hmt", _hmt(projection="auto", update_interval=200), _QUARTER),
    "hmt_wide_residual_200": Variant(
        "hmt",
        _hmt(projection="auto", update_interval=200, probes="d/4"),
        _QUARTER,
    ),
    "hmt_no_residual_200": Variant(
        "hmt",
        _hmt(projection="auto", update_interval=200, residual="none"),
        _QUARTER,
    ),
    "hmt_full_residual_200": Variant(
        "hmt",
        _hmt(projection="auto", update_interval=200, residual="full"),
        _QUARTER,
    ),
    # half as wide, for the time that the columns take
    "hmt_half_wide_residual_200": Variant(
        "hmt",
        _hmt(projection="auto", update_interval=200, probes="d/8"),
        _QUARTER,
    ),
    # ranks by energy and by budget under the same residual, and a fixed rank of more columns
    "hmt_wide_residual_energy_200": Variant(
        "hmt",
        _hmt(
            **_FINE,
            **_LATER,
            energy_threshold=0.7,
            update_interval=200,
            probes="d/4",
        ),
        _QUARTER,
    ),
    "hmt_wide_residual_budget_200": Variant(
        "hmt",
        _hmt(
            **_BYTES_OF_D4,
            **_LATER,
            update_interval=200,
            probes="d/4",
        ),
        _QUARTER,
    ),
    "hmt_wide_residual_3d8_200": Variant(
        "hmt",
        _hmt(
            projection="auto",
            rank="3d/8",
            update_interval=200,
            probes="d/4",
        ),
        _QUARTER,
    ),
    "hmt_auto_side_d2": Variant("hmt", _hmt(projection="auto", rank="d/2"), _QUARTER_D2),
    "hmt_two_sided_d2": Variant("hmt", _hmt(projection="two_sided", rank="d/2"), _QUARTER),
    "hmt_auto_side_5d16": Variant("hmt", _hmt(projection="auto", rank="5d/16"), _QUARTER),
    "hmt_shared_d4": Variant("hmt", _hmt(share_basis=True), _QUARTER),
    "hmt_full_residual_d4": Variant("hmt", _hmt(residual="full"), _QUARTER),
    "hmt_apollo": Variant("hmt", {"method": "apollo", "update_interval": INTERVAL}, _QUARTER),
    "hmt_apollo_mini": Variant(
        "hmt", {"method": "apollo_mini", "update_interval": INTERVAL}, _QUARTER
    ),
    # apollo_torch's own interval
    "hmt_apollo_mini_interval_200": Variant(
        "hmt", {"method": "apollo_mini", "update_interval": 200}, _QUARTER
    ),
    "hmt_apollo_mini_together": Variant(
        "hmt", {"method": "apollo_mini", "update_interval": INTERVAL}, _QUARTER
    ),
    # Mini's rule at more than rank 1
    "hmt_apollo_tensor_d32": Variant(
        "hmt",
        {
            "method": "apollo",
            "scale_type": "tensor",
            "rank": "d/32",
            "update_interval": INTERVAL,
        },
        _QUARTER,
    ),
    "hmt_int8_states_d4": Variant("hmt", _hmt(state_dtype="int8"), _QUARTER),
    # four times the rank in the same bytes: an eighth and a thirtieth (hmt_d32) of the moments' bytes
    "hmt_auto_side_int8_states_d2": Variant(
        "hmt", _hmt(projection="auto", rank="d/2", state_dtype="int8"), _QUARTER_D2
    ),
    "hmt_auto_side_int8_states_d8": Variant(
        "hmt", _hmt(projection="auto", rank="d/8", state_dtype="int8"), _QUARTER
    ),
    # a first moment in INT8 and a factored second one: half the bytes of the same rank, 5 % and less
    "hmt_auto_side_int8_factored_3d8": Variant(
        "hmt",
        _hmt(projection="auto", rank="3d/8", state_dtype="int8", second_moment="factored"),
        _QUARTER_3D8,
    ),
    "hmt_auto_side_int8_factored_d4": Variant(
        "hmt", _hmt(projection="auto", state_dtype="int8", second_moment="factored"), _QUARTER
    ),
    # what the activations alone cost: the same without them are hmt_auto_side_d4 and adamw
    "hmt_auto_side_d4_activations": Variant(
        "hmt", _hmt(projection="auto", activations=ACTIVATIONS), _QUARTER
    ),
    "adamw_activations": Variant("adamw", {"activations": ACTIVATIONS}, (1e-3, 5e-4, 2e-3)),
    # updates as large as AdamW's at every rank, at AdamW's learning rates
    "hmt_matched_d4": Variant("hmt", _hmt(projection="auto", **_MATCH), _MATCHED),
    # ablations of the rule at d/4: the factor, no residual, its columns and scale, the moments across a
    # refresh, when bases are refreshed, the finder
    "hmt_auto_side_d4_scale_035": Variant("hmt", _hmt(projection="auto", scale=0.35), _QUARTER),
    "hmt_auto_side_d4_scale_050": Variant("hmt", _hmt(projection="auto", scale=0.5), _QUARTER),
    "hmt_auto_side_d4_whole": Variant("hmt", _hmt(projection="auto", scale=1.0), _WHOLE),
    "hmt_d4_no_residual": Variant("hmt", _hmt(residual="none"), _QUARTER),
    "hmt_d4_probes_8": Variant("hmt", _hmt(probes=8), _QUARTER),
    "hmt_d4_probes_32": Variant("hmt", _hmt(probes=32), _QUARTER),
    "hmt_d4_residual_1": Variant("hmt", _hmt(residual_scale=1.0), _QUARTER),
    "hmt_d4_residual_4": Variant("hmt", _hmt(residual_scale=4.0), _QUARTER),
    "hmt_d4_unlimited": Variant("hmt", _hmt(norm_growth_limit=None), _QUARTER),
    "hmt_d4_staggered": Variant("hmt", _hmt(), _QUARTER),
    "hmt_d4_keep": Variant("hmt", _hmt(moment_transfer="keep"), _QUARTER),
    "hmt_d4_reset": Variant("hmt", _hmt(moment_transfer="reset"), _QUARTER),
    "hmt_d4_random": Variant(
        "hmt", _hmt(range_finder="random", max_full_gradient_bytes="auto"), _QUARTER
    ),
    # Above (n - r) / k of every matrix: the estimate of the residual is the unbiased one.
    "hmt_d4_residual_unbiased": Variant("hmt", _hmt(residual_scale=64.0), _QUARTER),
    "hmt_auto_side_d4_no_residual": Variant(
        "hmt", _hmt(projection="auto", residual="none"), _QUARTER
    ),
    "hmt_two_sided_d2_no_residual": Variant(
        "hmt", _hmt(projection="two_sided", rank="d/2", residual="none"), _QUARTER
    ),
    # the side, the finder, and how states and weights are stored
    "hmt_left_d4": Variant("hmt", _hmt(projection="left"), _QUARTER),
    "hmt_subspace_d4": Variant("hmt", _hmt(range_finder="subspace"), _QUARTER),
    "hmt_bf16_states_d4": Variant("hmt", _hmt(state_dtype="bf16"), _QUARTER),
    "hmt_int8_weights_d4": Variant("hmt", _hmt(weight_dtype="int8"), _QUARTER),
    # Embeddings and head are on AdamW elsewhere.
    "hmt_apollo_head": Variant(
        "hmt",
        _hmt(
            projection="auto",
            module_rules={"embed_tokens": {"method": "apollo"}, "lm_head": {"method": "apollo"}},
        ),
        _QUARTER,
    ),
    "hmt_defaults": Variant("hmt", {}, _MATCHED),
    "lora": Variant("lora", {"rank": "d/16", "alpha": "d/8"}, _ADAPTER, finetunes_only=True),
    "qlora": Variant("qlora", {"rank": "d/16", "alpha": "d/8"}, _ADAPTER, finetunes_only=True),
}


# What a stage runs when --variants does not say: the paper's experiment. The others answer questions of
# their own, each beside one of these.
EXPERIMENT = (
    *("adamw", "galore", "galore_interval_200", "fira", "fira_interval_200"),
    *("apollo", "apollo_interval_200", "hmt_auto_side_d4"),
    *("hmt_half_wide_residual_200", "hmt_wide_residual_200"),
    *("hmt_proposed", "hmt_auto_side_int8_states_d2", "hmt_auto_side_int8_factored_3d8"),
    *("apollo_mini", "hmt_apollo_mini", "lora", "qlora"),
)


def select(names: Iterable[str] | None, stage: str) -> list[str]:
    """The experiment's variants that a stage can train, or those of `names`.

    Raises:
        ValueError: a name that is not in the table, or an adapter in a pretraining stage.
    """
    if names is None:
        return [n for n in EXPERIMENT if stage == "finetune" or not VARIANTS[n].finetunes_only]
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


def resolve(options: Mapping[str, Any], hidden: int, gradient_bytes: int) -> dict[str, Any]:
    """The options with "d/N" and "kd/N" replaced by k `hidden` // N, "gradients/N" by `gradient_bytes` // N."""
    wholes = {"d": hidden, "gradients": gradient_bytes}
    return {key: _resolved(value, wholes) for key, value in options.items()}


def _resolved(value: Any, wholes: Mapping[str, int]) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(item, wholes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, wholes) for item in value]
    share = (
        re.fullmatch(r"(\d*)(d|gradients)/([1-9]\d*)", value) if isinstance(value, str) else None
    )
    return max(1, int(share[1] or 1) * wholes[share[2]] // int(share[3])) if share else value
