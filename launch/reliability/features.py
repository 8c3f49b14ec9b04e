"""The configs that kills, deaths and long runs are tried on: one per feature that keeps a state of its own."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["FEATURES", "VERTICAL", "config"]

_OPTIMIZER = {
    "method": "lowrank_adamw",
    "rank_candidates": [4, 8],
    "energy_threshold": 0.6,
    "update_interval": 3,
}
FEATURES: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero_optimization": {"stage": 0}},
    "ZeRO-1": {"zero_optimization": {"stage": 1}},
    "ZeRO-2": {"zero_optimization": {"stage": 2}},
    "ZeRO-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}},
    "bf16 without masters": {
        "bf16": {"enabled": True},
        "hmt": {"optimizer": {**_OPTIMIZER, "master_weights": "none", "state_dtype": "bf16"}},
    },
    "INT8 weights": {
        "bf16": {"enabled": True},
        "hmt": {"optimizer": {**_OPTIMIZER, "weight_dtype": "int8"}},
    },
    "states on the host": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "hmt": {"optimizer": {"method": "adamw"}, "offload": {"overlap": "forward"}},
    },
    "activations": {
        "hmt": {
            "optimizer": _OPTIMIZER,
            "activations": {"policy": {"mlp_intermediate": "swap_host", "layer_input": "int8"}},
        }
    },
    "FPDT": {"hmt": {"optimizer": _OPTIMIZER, "fpdt": {"chunk_size": 7}}},
    "APOLLO": {"hmt": {"optimizer": {"method": "apollo", "rank": 4}}},
}
# recipe_70b_24gb.json's: weights in host memory, layer by layer, whose inputs alone are held; one rank, where chosen ones
# are new shapes after hundreds of steps, for which oneDNN keeps kernels of half a megabyte.
VERTICAL: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 3,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 100,
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "hmt": {
        "accumulation": "vertical",
        "optimizer": {
            "method": "lowrank_adamw",
            "rank": 4,
            "update_interval": 3,
            "master_weights": "none",
            "state_dtype": "int8",
        },
        "activations": {
            "policy": {
                "layer_input": "swap_host_int8",
                "lm_head": "swap_host",
                **dict.fromkeys(
                    ("attention_qkv", "attention_output", "mlp_intermediate", "residual"),
                    "recompute",
                ),
            }
        },
    },
}


def config(feature: str, **changes: Any) -> dict[str, Any]:
    """The whole JSON of a feature; micro-batches of two rows."""
    whole: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "HMT", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10**9,
        "hmt": {"optimizer": _OPTIMIZER},
    }
    features = {**FEATURES, "vertical": VERTICAL}
    return copy.deepcopy({**whole, **features[feature], **changes})
