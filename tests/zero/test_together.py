"""Features that do not know of each other, together in one run: the same numbers as without them."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ranks
from training import assert_same, ds_config, make_engine, result, tiny_llama, train

# Loses nothing: what is held on the host comes back as it was.
SWAP = {"policy": {"attention_output": "swap_host", "mlp_intermediate": "recompute"}}
CHUNKS = {"enabled": True, "chunk_size": 5}
STEPS = 6  # with refreshes, and steps without


def together(
    stage: int, gas: int, overlap: str, section: str, value: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("plain", "together"):
        config = ds_config(stage, gas=gas)
        if name == "together":
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            config["hmt"] |= {"offload": {"overlap": overlap}, section: value}
        engine = make_engine(config, tiny_llama(use_cache=False))
        found[name] = result(engine, train(engine, STEPS))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "stage", "gas", "overlap"),
    [(1, 1, 2, "none"), (2, 2, 1, "backward"), (2, 3, 1, "forward")],
)
@pytest.mark.parametrize(("section", "value"), [("activations", SWAP), ("fpdt", CHUNKS)])
def test_offloaded_states_beside(
    ranks: Ranks,
    world: int,
    stage: int,
    gas: int,
    overlap: str,
    section: str,
    value: dict[str, Any],
) -> None:
    for found in ranks.run(together, world, stage, gas, overlap, section, value):
        assert_same(found["plain"], found["together"])
