"""Bytes of a recipe's step, counted on a CUDA device that is not there, beside the planner's by kind."""

import json

import pytest
from forked_device import output_of

pytest.importorskip("triton")

LAYER = 2 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)  # bytes of its matrices
SCALED = ("--layers", "3", "--vocabulary", "8000", "--micro_batches", "2", "--steps", "2")
# A layer's bases are found in a step, as those of the second of 80 are in the recipe's first.
SCALED += ("--set", f"max_full_gradient_bytes={LAYER}")


def counted(*options: str) -> tuple[dict, dict, dict]:
    """What was found, and what is planned on the card and on the host."""
    found = json.loads(output_of("count_bytes.py", "recipe_70b_24gb", *options).splitlines()[-1])
    return found, found["planned"]["gpu"], found["planned"]["host"]


def test_what_the_70b_recipe_takes_is_planned_by_kind() -> None:
    """The 70B's widths. Activations are page-locked in pieces of 256 MiB."""
    found, gpu, host = counted(*SCALED)
    first, peak = found["steps"]
    assert found["weights"] == host["weights"] < 2.1 * found["parameters"]
    assert peak["activations"] == host["activations"]
    assert peak["host"] - peak["pinned"] < 2.1 * found["parameters"]
    assert peak["host"] == pytest.approx(sum(host.values()), rel=0.05)
    assert found["optimizer states"] == pytest.approx(gpu["optimizer states"], rel=1e-3)
    # What a layer finds its bases in is working memory of the plan.
    beside = {"gathered weights": 0, "gradients": LAYER}
    for kind, others in beside.items():
        assert first["by kind"][kind] <= peak["by kind"][kind]
        assert peak["by kind"][kind] - others == pytest.approx(gpu[kind], rel=1e-3)
    assert peak["gpu"] == pytest.approx(sum(gpu.values()), rel=0.05)
    recorded = sum(n for line, n in peak["makers"].items() if "activations/record" in line)
    assert recorded <= gpu["activations"]  # in front of the last norm: all other inputs are away
    assert found["rest"]["gpu"] < gpu["optimizer states"] + gpu["probes"] + 2**26


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_80_layers_of_the_70b() -> None:
    """69.0G parameters, two micro-batches."""
    found, gpu, host = counted("--layers", "80", "--micro_batches", "2", "--steps", "2")
    peak = found["steps"][-1]
    assert found["parameters"] > 68.9e9
    assert peak["gpu"] == pytest.approx(sum(gpu.values()), rel=0.05)
    assert peak["host"] == pytest.approx(sum(host.values()), rel=0.05)
    assert peak["host"] - peak["pinned"] < 2.1 * found["parameters"]
