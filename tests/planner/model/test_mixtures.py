"""Mixtures of experts: parameters, FLOPs and bytes of six families at their published sizes, and of small ones as counted.

``mixtures/`` has the configs: Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-20b, DeepSeek-V3, Llama-4 Scout and OLMoE-1B-7B.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import model_type, tiny_config
from low_rank_adamw import LOW_RANK_ADAMW
from torch.utils.flop_counter import FlopCounterMode

from hmt_deepspeed.families.table import in_chunks
from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.model.listed import ListedShape, Product
from hmt_deepspeed.planner.model.listed_workload import workload_of
from hmt_deepspeed.planner.model.models import model_shape
from hmt_deepspeed.planner.model.shapes import num_parameters, parameters
from hmt_deepspeed.planner.model.structure import listed_shape
from hmt_deepspeed.planner.model.workload import Layer, recompute_flops
from hmt_deepspeed.planner.run.memory import Sharding, model_states
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.refresh import worst_refresh
from hmt_deepspeed.planner.run.states import states_by_parameter

MIXTURES = Path(__file__).resolve().parents[1] / "mixtures"
# Parameters as published, in billions: all, and those of a token (gpt-oss and Llama 4 without the table of embeddings,
# Llama 4 with its vision tower), to the digits that are published; GPUs that its training fits on.
PUBLISHED = {
    "qwen3_30b_a3b": (30.5, 3.3, 8),
    "mixtral_8x7b": (46.7, 12.9, 8),
    "gpt_oss_20b": (20.9, 3.6, 8),
    "deepseek_v3": (671, 37, 256),
    "llama4_scout": (109, 17, 32),
    "olmoe_1b_7b": (6.9, 1.3, 1),
}
WITHOUT_TABLE = {"gpt_oss_20b": 201088 * 2880, "llama4_scout": 202048 * 5120}
TINY = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "llama4")
BATCH, LENGTH = 2, 48
# Qwen3-30B-A3B
E, H, M, LAYERS, CHOSEN = 128, 2048, 768, 48, 8
R, K = 128, 8
LEFT = {"adamw_modules": ("experts",)}  # to AdamW


def basis_of(basis: str | None) -> dict[str, Any]:
    return LEFT if basis is None else {"expert_basis": basis}


def published(name: str) -> ListedShape:
    shape = model_shape(str(MIXTURES / name))
    assert isinstance(shape, ListedShape)
    return shape


@pytest.fixture(scope="module")
def qwen3() -> ListedShape:
    return published("qwen3_30b_a3b")


# -- parameters and FLOPs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    shape = published(name)
    total, active, _ = PUBLISHED[name]
    assert num_parameters(shape) / 1e9 == pytest.approx(total, rel=0.004)
    met = shape.active - WITHOUT_TABLE.get(name, 0)
    assert met / 1e9 == pytest.approx(active, rel=0.02)


def of_experts(shape: ListedShape) -> list[Product]:
    tokens = shape.groups[-1].tokens
    return [product for product in tokens.products if product.place == "experts"]


@pytest.mark.parametrize("name", TINY)
def test_experts_take_the_flops_of_the_tokens_that_they_compute(name: str) -> None:
    """Of Llama 4 each of them computes every token; what MFU counts are those of the tokens that it is sent."""
    config = tiny_config(name)
    config._attn_implementation = config._experts_implementation = "eager"
    model = model_type(name)(config).train()
    ids = torch.arange(BATCH * LENGTH).remainder(100).view(BATCH, LENGTH) + 2
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    path = next(n for n, _ in model.model.layers[-1].named_modules() if n.endswith("experts"))
    counts = counter.get_flop_counts()
    layer = f"{type(model).__name__}.model.layers.{len(model.model.layers) - 1}.{path}"
    products = of_experts(listed_shape(model))
    computed = 2 * BATCH * LENGTH * sum(product.elements for product in products)
    assert sum(counts[layer].values()) == computed
    useful = sum(product.useful * product.elements for product in products)
    times = 4 if name == "llama4" else 1
    assert computed == 2 * BATCH * LENGTH * times * useful


def test_mfu_counts_the_parameters_that_a_token_meets(qwen3: ListedShape) -> None:
    """6 N of PaLM with N the active ones, without the table that tokens are looked up in, and attention."""
    work = workload_of(qwen3, micro_batch=2, seq_length=1024)
    table, norms = 151936 * H, 48 * (2 * H + 2 * 128) + H
    attention = 12 * LAYERS * (32 * 128) * 1024
    expected = 6 * (qwen3.active - table - norms) + attention
    assert work.model_flops / work.tokens == pytest.approx(expected, rel=1e-9)


def test_experts_that_the_optimizer_does_not_know_stay_dense() -> None:
    """A forward of somebody's own: nobody knows what it does with the weights."""
    model = model_type("mixtral")(tiny_config("mixtral"))
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda *tokens: type(experts).forward(experts, *tokens)
    mode = OptimizerMode("lowrank_adamw", rank=4, expert_basis="shared")
    low_rank = [p.name for p in parameters(listed_shape(model)) if mode.is_low_rank(p)]
    found = [name for name in low_rank if "experts" in name]
    assert len(found) == 2  # of the other layer
    assert len(low_rank) == 2 + 2 * 4  # and attention of both


# -- states ---------------------------------------------------------------------------------------------


def difference(shape: ListedShape, mode: OptimizerMode, dense: OptimizerMode) -> dict[str, int]:
    """Bytes of the experts: of states with and without them in low rank, what they have densely put back."""
    numel = LAYERS * E * 3 * H * M
    left = {"gradients": 2 * numel, "moments": 8 * numel}
    low, high = (vars(model_states(shape, m)) for m in (mode, dense))
    return {kind: low[kind] - high[kind] + left.get(kind, 0) for kind in low}


@pytest.mark.parametrize("basis", ["shared", "auto", "own"])
def test_states_of_experts_are_their_formulas(qwen3: ListedShape, basis: str) -> None:
    given = {"rank": R, "probes": K, "master_weights": "none"}
    own = basis == "own"
    # until down projections have decided, bases of their own at equal bytes lie beside the shared one
    proposed = E * M * 40 * 2 if basis == "auto" else 0
    mode = OptimizerMode(**{**LOW_RANK_ADAMW, **given}, expert_basis=basis)
    found = difference(qwen3, mode, OptimizerMode(**{**LOW_RANK_ADAMW, **given}, **LEFT))
    rows = 2 * M + (
        H if own else M
    )  # of gate and up; of down by its outputs or, transposed, its inputs
    evidence = 2 * E * (R + 1) * 4
    columns = E * (H + M) if own else 2 * H
    assert found == {
        "weights": 0,
        "masters": 0,
        "moments": LAYERS * (2 * 4 * E * rows * R + evidence),
        "gradients": LAYERS * 2 * E * rows * (R + K),
        "bases": LAYERS * 2 * columns * R,
        "probes": LAYERS * (2 * columns * K + proposed),
    }


@pytest.mark.parametrize("basis", ["shared", "own"])
def test_bases_of_experts_are_whole_on_every_rank_of_stage_3(
    qwen3: ListedShape, basis: str
) -> None:
    """Those of linears are sharded there by rows."""
    mode = OptimizerMode("lowrank_adamw", rank=R, probes=K, expert_basis=basis)
    whole, part = (
        {
            p.name.rpartition("layers.*.")[2]: found
            for p, found in states_by_parameter(qwen3, mode, on)
        }
        for on in (Sharding(0, 1), Sharding(3, 8))
    )
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        for kind in ("bases", "probes"):
            assert part[name][kind] == whole[name][kind] > 0
        assert part[name]["moments"] < whole[name]["moments"] / 7
    linear = "self_attn.q_proj.weight"
    assert part[linear]["bases"] == whole[linear]["bases"] / 8


def test_int8_weights_of_experts(qwen3: ListedShape) -> None:
    """A byte an element, a scale for 256 of a row."""
    given = {"rank": R, "master_weights": "none", "expert_basis": "shared"}
    plain, coded = (
        model_states(qwen3, OptimizerMode(**{**LOW_RANK_ADAMW, **given}, weight_dtype=dtype))
        for dtype in ("auto", "int8")
    )
    rows, of_output = 4096 + 2 * 512, 4096  # of q, k and v; columns of the output projection
    linears = (rows + of_output) * H
    scales = (rows * H // 256 + H * of_output // 256) * 4
    experts, of_experts = E * 3 * H * M, E * (2 * M * H // 256 + H * M // 256) * 4
    assert plain.weights - coded.weights == LAYERS * (linears - scales + experts - of_experts)


def test_experts_have_no_core(qwen3: ListedShape) -> None:
    two_sided, right = (
        model_states(
            qwen3, OptimizerMode("lowrank_adamw", rank=R, expert_basis="shared", projection=side)
        )
        for side in ("two_sided", "right")
    )
    experts = LAYERS * 2 * 4 * E * 3 * M * R
    assert two_sided.moments > experts
    assert two_sided.moments < right.moments


def test_rows_of_all_experts_are_divided_over_ranks(qwen3: ListedShape) -> None:
    mode = OptimizerMode("lowrank_adamw", rank=R, probes=K, expert_basis="shared")
    whole, part = (model_states(qwen3, mode, Sharding(2, ranks)) for ranks in (1, 8))
    assert part.moments == pytest.approx(whole.moments / 8, rel=0.01)
    assert part.gradients == pytest.approx(whole.gradients / 8, rel=0.01)
    assert part.bases == whole.bases


def test_a_refresh_forms_the_gradients_of_all_experts_of_a_weight(qwen3: ListedShape) -> None:
    mode = OptimizerMode(
        "lowrank_adamw", rank=R, probes=K, expert_basis="shared", max_full_gradient_bytes=2**30
    )
    beyond = 2 * E * 2 * M * (H - R - K)
    assert worst_refresh(qwen3, mode, 2).full_gradients >= beyond
    with_all = OptimizerMode("lowrank_adamw", rank=R, probes=K, expert_basis="shared")
    assert worst_refresh(qwen3, with_all, 2).full_gradients >= beyond


# -- activations ----------------------------------------------------------------------------------------


def layer_of(shape: ListedShape, mode: OptimizerMode | None = None) -> Layer:
    projected = None if mode is None else mode.backward()
    return workload_of(shape, micro_batch=1, seq_length=1024, projected=projected).layers[-1]


def test_inputs_of_experts_are_saved_as_products_of_their_tokens(qwen3: ListedShape) -> None:
    """Bytes of a token: of rows (pairs of a token and an expert) two inputs and the last output; projected r + k
    columns of the token, or with bases of their own of each row."""
    ordinary, shared, own = (
        layer_of(qwen3, OptimizerMode("lowrank_adamw", rank=R, probes=K, **basis_of(basis)))
        for basis in (None, "shared", "own")
    )
    freed = CHOSEN * (H + M + H) * 2
    assert (ordinary.saved_bytes - shared.saved_bytes) // 1024 == freed - 2 * (R + K)
    assert (ordinary.saved_bytes - own.saved_bytes) // 1024 == freed - CHOSEN * 2 * (R + K)
    assert shared.freed_inputs["up"] == 1024 * CHOSEN * H * 2
    assert ordinary.weight_gradient_bytes == 2 * E * 2 * M * H
    assert shared.weight_gradient_bytes == 2 * E * 2 * M * (R + K)


def test_flops_of_projected_experts(qwen3: ListedShape) -> None:
    """``X B`` by token and ``D^T (X B)`` by row for gate and up; ``D B`` by token and its product by row for down."""
    ordinary, shared, own = (
        layer_of(qwen3, OptimizerMode("lowrank_adamw", rank=R, probes=K, **basis_of(basis)))
        for basis in (None, "shared", "own")
    )
    width, whole = R + K, 2 * CHOSEN * 3 * H * M
    more = 1024 * 2 * H * width
    assert shared.projection_flops - ordinary.projection_flops == more
    assert own.projection_flops - ordinary.projection_flops == CHOSEN * more
    by_row = 2 * CHOSEN * width * (2 * M + M)
    assert ordinary.backward_flops - shared.backward_flops == 1024 * (
        whole - by_row - 2 * H * width
    )
    of_own = 2 * CHOSEN * width * (2 * M + M + H)
    assert ordinary.backward_flops - own.backward_flops == 1024 * (whole - of_own)


@pytest.mark.parametrize("projected", [False, True])
def test_choices_of_experts(qwen3: ListedShape, projected: bool) -> None:
    """What the routing weights read of a row goes with its gate and up, unless down is projected; the router's output
    is held whatever is chosen, and not computed again."""
    mode = OptimizerMode(
        "lowrank_adamw", rank=R, probes=K, **basis_of("shared" if projected else None)
    )
    layer = layer_of(qwen3, mode)
    sites = {site.name: site for site in layer.sites}
    experts, router = sites["experts"], sites["router"]
    assert experts.component == router.component == "experts"
    assert experts.tokens == 1024 * CHOSEN  # rows
    assert experts.channels == 2 * M + (0 if projected else H)
    assert set(experts.legal) >= {"keep", "recompute", "int8", "fp8", "swap_host", "swap_ssd"}
    assert (router.channels, router.legal) == (E, ("keep",))
    kept = dict.fromkeys(sites, "keep") | {"projected_inputs": "project"}
    again = recompute_flops(layer, kept | {"experts": "recompute"}) - recompute_flops(layer, kept)
    assert again == 1024 * 2 * CHOSEN * (2 if projected else 3) * H * M


# -- the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_command_plans_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape, gpus = published(name), PUBLISHED[name][2]
    size = ["--model", str(MIXTURES / name), "--machine", "h200", "--num_ssds", "0"]
    size += ["--num_gpus", str(gpus), "--zero_stage", "3"]
    main([*size, "--policy", "paper", "--method", "lowrank_adamw"])
    told = capsys.readouterr().out
    assert f"{num_parameters(shape):,} parameters ({shape.active:,} of them for each" in told
    assert "It fits. Recommended " in told
    assert "experts           int8 x" in told
    assert ("longest sequence in chunks (hmt.fpdt)" in told) == (shape.family in in_chunks())
