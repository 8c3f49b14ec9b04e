"""Projected backwards of experts on a device that is not there: nobody waits for it, and launches do not grow with
the number of experts."""

import json

import pytest
from forked_device import output_of

pytest.importorskip("triton")

# Launches of forward and backward of one module, by how gradients are found and whether experts have biases: those of
# autograd, and budgets that may only fall. Beside autograd's are the product X B, the gate computed again and products
# with routing weights; two are of Triton.
LAUNCHES = {
    (None, False): (16, 25),
    ("shared", False): (16, 34),
    ("own", False): (18, 30),
    (None, True): (20, 29),
    ("shared", True): (26, 49),
    ("own", True): (28, 45),
}


def test_launches_do_not_grow_with_experts_and_nobody_waits() -> None:
    counted = [json.loads(line) for line in output_of("count_experts.py").splitlines()]
    assert {n for _, _, n, _ in counted} == {8, 64}
    for basis, biases, _, phases in counted:
        found = tuple(phases[phase]["launches"] for phase in ("forward", "backward"))
        budget = LAUNCHES[basis, biases]
        assert all(n <= most for n, most in zip(found, budget, strict=True)), (basis, biases, found)
        for phase in phases.values():
            assert phase["waits"] == phase["unpinned"] == 0
        assert phases["backward"]["triton"] == (0 if basis is None else 2)
    assert len(counted) == 2 * len(LAUNCHES)
