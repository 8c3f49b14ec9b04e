"""Vertical accumulation in the planner: weights travel once a pass, what is held is that of all micro-steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hmt_deepspeed.config.components import COMPONENTS, Choice, Component
from hmt_deepspeed.planner.advise.advise import Answer, advise, evaluate
from hmt_deepspeed.planner.advise.deepspeed_json import deepspeed_json
from hmt_deepspeed.planner.advise.describe import describe
from hmt_deepspeed.planner.advise.setups import Request, setups
from hmt_deepspeed.planner.hardware import named_machine
from hmt_deepspeed.planner.model.models import model_shape
from hmt_deepspeed.planner.run.loads import Amount
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.problem import RunSetup
from hmt_deepspeed.planner.timeline.simulate import AGREEMENT

TIMES = 4
POLICY: dict[Component, Choice] = dict.fromkeys(COMPONENTS, "recompute")
POLICY |= {"layer_input": "swap_host", "residual": "swap_host"}
POLICY |= {"lm_head": "swap_host", "experts": "keep", "layernorm": "keep"}
MODE = OptimizerMode("lowrank_adamw", rank=128, master_weights="none")
REQUEST = Request(
    model_shape("7b", 32000),
    named_machine("rtx4090", num_gpus=1, host_memory=256 * 2**30),
    1024,
    micro_batch=2,
    global_batch=2 * TIMES,
    modes=(MODE,),
    zero_stage=3,
    offload_param="cpu",
    fixed=POLICY,
)


def answers() -> tuple[Answer, Answer]:
    """Horizontal and vertical."""
    horizontal, vertical = setups(REQUEST)
    assert not horizontal.vertical
    assert vertical == replace(horizontal, vertical=True)
    return evaluate(REQUEST, horizontal, MODE), evaluate(REQUEST, vertical, MODE)


def moved(answer: Answer, amount: Amount, phases: tuple[str, ...]) -> float:
    return sum(p.weight * p.load[amount] for p in answer.estimate.phases if p.name in phases)


def test_weights_travel_once_a_pass_and_once_for_their_update() -> None:
    horizontal, vertical = answers()
    weights = vertical.estimate.memory["host"]["weights"]
    passes = ("forward", "backward", "last backward")
    swapped = moved(vertical, Amount.TO_HOST, passes)
    assert moved(horizontal, Amount.TO_HOST, passes) == pytest.approx(swapped)
    assert moved(vertical, Amount.TO_GPU, passes) - swapped == pytest.approx(2 * weights)
    assert moved(horizontal, Amount.TO_GPU, passes) - swapped == pytest.approx(2 * TIMES * weights)
    for answer in (horizontal, vertical):
        assert moved(answer, Amount.TO_GPU, ("update",)) == pytest.approx(weights)
        assert moved(answer, Amount.TO_HOST, ("update",)) == pytest.approx(weights)


def test_all_micro_steps_hold_and_one_works() -> None:
    horizontal, vertical = answers()
    one, all_of_them = (answer.estimate.memory for answer in (horizontal, vertical))
    assert all_of_them["host"]["activations"] == TIMES * one["host"]["activations"]
    assert all_of_them["gpu"]["activations"] == TIMES * one["gpu"]["activations"]
    # Of the largest matrix, with a gradient on its way in bf16 and in fp32, and sums in fp32 where a layer finds bases.
    more = all_of_them["gpu"]["working"] - one["gpu"]["working"]
    largest, layer = 11008 * 4096, 4 * 4096**2 + 3 * 11008 * 4096 + 2 * 4096
    assert 6 * largest < more <= 6 * largest + 2 * layer
    hidden = 2 * 1024 * REQUEST.shape.hidden * 2  # a micro-batch's, in 16 bits
    assert all_of_them["gpu"]["between layers"] == TIMES * hidden


def test_inputs_of_layers_may_wait_without_the_sum_after_attention() -> None:
    """Which attention's second run gives: a product more in backward, half of the bytes in host memory."""
    _, vertical = answers()
    request = replace(REQUEST, fixed=POLICY | {"residual": "recompute"})
    *_, setup = setups(request)
    answer = evaluate(request, setup, MODE)
    hidden = 2 * 1024 * REQUEST.shape.hidden * 2
    swapped = vertical.estimate.memory["host"]["activations"]
    assert answer.estimate.memory["host"]["activations"] == swapped - TIMES * 32 * hidden
    assert answer.estimate.memory["gpu"]["activations"] == TIMES * hidden  # at the last norm
    assert answer.estimate.hardware_flops > vertical.estimate.hardware_flops
    policy = deepspeed_json(request, answer)["hmt"]["activations"]["policy"]
    assert (policy["layer_input"], policy["residual"]) == ("swap_host", "recompute")


def test_states_bases_and_gradients_of_the_70b_are_their_formulas() -> None:
    """Right bases of r columns and 32 probes, both bf16; two moments in 8 bits with an fp32 scale for 256 of them."""
    mode = OptimizerMode(
        "lowrank_adamw", rank=128, master_weights="none", state_dtype="int8", on_gpu=True
    )
    request = replace(REQUEST, shape=model_shape("70b", 32000), modes=(mode,))
    _, setup = setups(request)
    memory = evaluate(request, setup, mode).estimate.memory
    rows, columns = 2 * 8192 + 2 * 1024 + 2 * 28672 + 8192, 6 * 8192 + 28672  # of a layer's seven
    dense, vectors, moment = 2 * 32000 * 8192, 161 * 8192, 2 * (1 + 4 / 256)
    states = moment * (80 * 128 * rows + dense) + 2 * 4 * vectors
    found = {**memory["gpu"], "weights": memory["host"]["weights"]}
    expected = {
        "weights": 2 * 68_976_648_192,
        "probes": 2 * 80 * 32 * columns,
        "gradients": 2 * (80 * (128 + 32) * rows + dense),
        "optimizer states": states + 2 * 80 * 128 * columns,
    }
    # Beside them, less than a thousandth: gradients of vectors, evidence of ranks and keys.
    for kind, nbytes in expected.items():
        assert found[kind] == pytest.approx(nbytes, rel=1e-3), kind
    assert memory["host"]["weights"] <= 2.1 * 68_976_648_192


def test_the_same_work_by_the_formula_and_played() -> None:
    horizontal, vertical = answers()
    assert vertical.estimate.hardware_flops == horizontal.estimate.hardware_flops
    assert vertical.estimate.tokens == horizontal.estimate.tokens
    assert vertical.plan is not None
    assert horizontal.plan is not None
    assert vertical.plan.seconds < horizontal.plan.seconds
    assert vertical.simulation is not None
    played = vertical.simulation.seconds
    assert vertical.estimate.seconds == pytest.approx(played, rel=AGREEMENT)


def test_the_json_says_so() -> None:
    horizontal, vertical = answers()
    assert deepspeed_json(REQUEST, vertical)["hmt"]["accumulation"] == "vertical"
    assert "accumulation" not in deepspeed_json(REQUEST, horizontal)["hmt"]
    assert "vertical" in vertical.name


@pytest.mark.parametrize("given", [{"zero_stage": 2}, {"zero_stage": 3, "offload_param": "nvme"}])
def test_what_does_not_run_vertically_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="legal: stage 3 without nvme"):
        RunSetup(accumulation=2, vertical=True, **given)  # type: ignore[arg-type]


def test_one_micro_step_has_no_order() -> None:
    one = replace(REQUEST, global_batch=REQUEST.micro_batch)
    assert all(not setup.vertical for setup in setups(one))


def test_where_the_step_is_open_vertical_order_may_make_it_larger() -> None:
    """Of 65,536 tokens, and recommended where it is three times as fast: weights travel twice a step."""
    request = replace(REQUEST, global_batch=None)
    (vertical,) = (setup for setup in setups(request) if setup.vertical)
    assert vertical.accumulation * request.micro_batch * request.seq_length == 2**16
    request = replace(request, modes=(replace(MODE, master_weights="fp32"),), fixed=None)
    advice = advise(request)
    best, plain = advice.best, advice.plain
    assert plain is not None
    assert best.problem.setup.vertical
    assert best.problem.setup.accumulation == vertical.accumulation
    assert best.tokens_per_second > 3 * plain.tokens_per_second
    told = " ".join(describe(advice).split())
    assert f"--global_batch {vertical.accumulation * request.micro_batch}" in told
    assert f"Exact, in steps as asked for: {plain.name}" in told
    assert "are page-locked in" in told
    exact = advise(replace(request, recommend="exact")).best
    assert (exact.problem.setup.accumulation, exact.is_lossy) == (1, False)
