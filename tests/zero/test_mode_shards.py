"""What each mode holds and sends per rank: its shard of states and gradients, and no byte more."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from harness import Ranks
from modes import mode_engine
from training import loss_of, micro_batches, train

STILL = {"update_interval": 1000, "max_full_gradient_bytes": 10**9}  # one refresh, at the start
FIXED = {**STILL, "rank": 8}
APOLLO = {"method": "apollo", "update_interval": 1000, "rank": 4}
SHARDED = {
    "right": FIXED,
    "left": {**FIXED, "projection": "left"},
    "auto": {**FIXED, "projection": "auto"},
    "two_sided": {**FIXED, "projection": "two_sided"},
    "full residual": {**FIXED, "residual": "full"},
    "left, full residual": {**FIXED, "projection": "left", "residual": "full"},
    "apollo": APOLLO,
    "muon": {**FIXED, "method": "muon"},
    "apollo_mini": {"method": "apollo_mini", "update_interval": 1000},
    "bf16 states": {**FIXED, "projection": "auto", "state_dtype": "bf16"},
    "factored": {**FIXED, "projection": "auto", "second_moment": "factored"},
    "muon, full": {"method": "muon", "rank": "full"},
}
WHOLE_GRADIENT = [
    "full residual",
    "left, full residual",
    "apollo",
    "apollo_mini",
    "muon, full",
]


def stages_of(name: str, world: int) -> list[int]:
    """Two stages on two ranks, the third on three: each mode meets every stage, each stage every world size."""
    last = 1 + list(SHARDED).index(name) % 3
    return [last] if world == 3 else [stage for stage in (1, 2, 3) if stage != last]


def held() -> dict[Any, dict[str, Any]]:
    """States, gradients between backward and step, and bytes of a step, by mode and stage."""
    world = dist.get_world_size()
    return {
        (name, stage): _held(name, stage) for name in SHARDED for stage in stages_of(name, world)
    }


def _held(name: str, stage: int) -> dict[str, Any]:
    engine = mode_engine(SHARDED[name], stage, zero_optimization={"reduce_bucket_size": 2000})
    optimizer = engine.optimizer
    train(engine, 2)
    optimizer.reducer.peak_bytes = 0
    engine.backward(loss_of(engine, micro_batches(engine, 2)[0]))
    gradients = [
        {
            "shape": tuple(entry.gradient.reduced.shape),
            "bytes": entry.gradient.nbytes(),
            "whole": [entry.gradient.param.grad, entry.gradient.full, entry.gradient.arrived],
            "counted": entry.gradient.reduced.nbytes,
        }
        for entry in optimizer.zero.param_states
    ]
    peak = optimizer.reducer.peak_bytes
    engine.step()
    entries = []
    for entry, gradient in zip(optimizer.zero.param_states, gradients, strict=True):
        matrix, known = entry.matrix, {"gradient": gradient, "shards": entry.gradient.shards}
        known |= {"weight": entry.weight.shards, "width": entry.gradient.width, "matrix": None}
        if matrix is not None:
            known["matrix"] = {
                "rank": matrix.rank,
                "left": matrix.transposed,
                "whole": matrix.takes_whole,
                "moments": matrix.moments.nbytes,
                "states": matrix.state_bytes(),
                "left_basis": getattr(matrix, "left_basis", None),
                "sums": _length_of_sums(matrix),
            }
        entries.append(known)
    found = {"entries": entries, "sent": optimizer.communication_bytes, "peak": peak}
    engine.destroy()
    return found


def _length_of_sums(matrix: Any) -> int:
    """Of what the table says that a rule adds up over rows."""
    stack = matrix.STACK([matrix])
    asked = {"gradient": True, "states": stack.sums_states, "update": stack.sums_updates}
    rule, sizes = matrix.settings.rule, (*matrix.shape, matrix.rank)
    return sum(
        sum(rule.sum_lengths(of, *sizes).values()) for of, is_asked in asked.items() if is_asked
    )


@pytest.fixture(scope="module", params=[2, 3])
def shards(ranks: Ranks, request: Any) -> list[dict[Any, dict[str, Any]]]:
    return ranks.run(held, request.param)


def matrices(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in found["entries"] if entry["matrix"] is not None]


@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_holds_the_states_of_its_rows(shards: Any, name: str) -> None:
    world = len(shards)
    size = 2 if name == "bf16 states" else 4
    for rank, by_run in enumerate(shards):
        for stage in stages_of(name, world):
            found = matrices(by_run[name, stage])
            assert len(found) == 7
            for entry in found:
                (begin, end), m = entry["shards"].rows(rank), entry["shards"].m
                r, matrix = entry["matrix"]["rank"], entry["matrix"]
                assert end - begin <= -(-m // world) + 1
                if name == "two_sided":  # the core on every rank, the rows of P here
                    assert matrix["moments"] == (3 * r * r + 1) * 4
                    assert matrix["left_basis"].shape == (end - begin, r)
                elif (
                    name == "factored"
                ):  # rows of the first moment, row and column means, mean of all
                    numbers = (end - begin) * (r + 1) + r + 1
                    assert matrix["moments"] == numbers * 4 + (r + 1) * 4
                elif name == "muon":  # a momentum, and a number a row
                    assert matrix["moments"] == (end - begin) * (r + 1) * 4
                elif name == "muon, full":
                    assert matrix["moments"] == (end - begin) * entry["width"] * 4
                else:
                    assert matrix["moments"] == 2 * (end - begin) * r * size + (r + 1) * 4
                    assert matrix["left_basis"] is None
    if name != "two_sided":
        for place in range(7):
            stage = stages_of(name, world)[0]
            parts = [matrices(by_run[name, stage])[place] for by_run in shards]
            m, r = parts[0]["shards"].m, parts[0]["matrix"]["rank"]
            whole = 2 * m * r * size
            # A row that two ranks touch is held by both.
            assert sum(p["matrix"]["moments"] - (r + 1) * 4 for p in parts) <= whole * (
                1 + world / m
            )


@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_keeps_its_shard_of_the_gradient_until_the_verdict(shards: Any, name: str) -> None:
    world = len(shards)
    for rank, by_run in enumerate(shards):
        for stage in stages_of(name, world):
            found = by_run[name, stage]
            held = full = largest = 0
            for entry in found["entries"]:
                begin, end = entry["shards"].rows(rank)
                gradient, width = entry["gradient"], entry["width"]
                assert gradient["shape"] == (end - begin, width)
                assert gradient["whole"] == [None, None, None]
                assert gradient["bytes"] == gradient["counted"] == (end - begin) * width * 4
                held += gradient["bytes"]
                full += entry["shards"].m * entry["shards"].n * 4
                largest = max(largest, entry["shards"].max_rows * world * width * 4)
            for entry in matrices(found):
                assert entry["matrix"]["whole"] == (name in WHOLE_GRADIENT)
                n = entry["shards"].n
                probes = entry["width"] - entry["matrix"]["rank"]
                assert probes == 8 or (name in WHOLE_GRADIENT and entry["width"] == n)
            assert held <= full / world * 1.1
            # Three buckets, and two gradients of this rank's own that wait for theirs.
            assert held <= found["peak"] <= held + 5 * max(largest, 2000 * 4)


@pytest.mark.parametrize("name", SHARDED)
def test_bytes_sent_are_the_formula(shards: Any, name: str) -> None:
    """Gradients (r + k) wide instead of n, also from the left; a whole update that was computed by
    columns travels once; weights are gathered as in ZeRO."""
    world = len(shards)
    ring = (world - 1) / world
    for rank, by_run in enumerate(shards):
        for stage in stages_of(name, world):
            found = by_run[name, stage]
            sent, numbers = 0.0, 0
            for entry in found["entries"]:
                rows, weight, matrix = entry["shards"], entry["weight"], entry["matrix"]
                reduced = rows.max_rows * world * entry["width"] * 4
                sent += ring * reduced
                sent += ring * weight.partition * world * 4 if stage < 3 else 0
                numbers += 1 if matrix is None else matrix["sums"]
                if matrix is None:
                    continue
                if matrix["left"] and matrix["whole"]:
                    first, last = rows.owned(rank)
                    others = [weight.rows(q) for q in range(world) if q != rank]
                    sent += (last - first) * sum(end - begin for begin, end in others) * 4
                elif matrix["left"]:
                    sent += ring * reduced  # the low-rank update, which every rank needs whole
                elif stage == 3 and not matrix["whole"]:
                    basis = -(-rows.n // world) * world * entry["width"] * 4
                    sent += 2 * ring * basis  # sharded: forward and update
                    drawn = entry["width"] - matrix["rank"]  # what new probes sum
                    sent += 2 * ring * 4 * drawn * entry["width"]
            assert sent - 200 <= found["sent"] <= sent + 2 * ring * 4 * numbers + 200


def test_left_reduces_columns_times_rank_and_probes(shards: Any) -> None:
    modes = ("left", "left, full residual")
    stages = [stages_of(name, len(shards)) for name in modes]
    for stage in stages[0]:
        for entry in matrices(shards[0]["left", stage]):
            assert entry["width"] == 8 + 8
            # One row of the sum per column of the weight.
            assert entry["shards"].m == entry["weight"].n
    both = set(stages[0]).intersection(stages[1])
    assert both or len(shards) == 3
    for stage in both:
        low, whole = (shards[0][name, stage]["sent"] for name in modes)
        assert low < whole
