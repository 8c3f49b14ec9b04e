"""Sites of a layer, what recomputes from what, and projected backward against the optimizer's own."""

from __future__ import annotations

import pytest
import torch
from low_rank_adamw import LOW_RANK_ADAMW, low_rank_adamw
from real_models import MICRO_BATCH, SEQ_LENGTH, config, flops, saved_bytes, tokens

from hmt_deepspeed.config.codecs import held_bytes
from hmt_deepspeed.config.components import COMPONENTS
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.flops import Projected
from hmt_deepspeed.planner.model.layer_sites import OUTSIDE
from hmt_deepspeed.planner.model.shapes import num_parameters, plain_shape
from hmt_deepspeed.planner.model.workload import build_workload, recompute_flops
from hmt_deepspeed.planner.run.memory import OptimizerMode

SIZES = {"micro_batch": MICRO_BATCH, "seq_length": SEQ_LENGTH}
KEPT = {
    "layer_input": "keep",
    "attention_qkv": "keep",
    "attention_output": "keep",
    "residual": "keep",
    "mlp_intermediate": "keep",
}


@pytest.fixture(scope="module")
def llama():
    return build_workload(shape_of_config(config("llama")), **SIZES)


@pytest.fixture(scope="module")
def layer(llama):
    return llama.layers[0]


def test_equal_layers_are_one_site_with_a_count():
    shape = plain_shape(layers=96, hidden=64, heads=4, vocab=100)
    work = build_workload(shape, **SIZES)
    assert [x.layers for x in work.layers] == [tuple(range(96))]
    counted = {}
    for site in work.sites:
        counted[site.component] = counted.get(site.component, 0) + site.count
    per_layer = ("layer_input", "attention_qkv", "attention_output", "residual", "mlp_intermediate")
    assert counted == {**dict.fromkeys(per_layer, 96), "layernorm": 1, "lm_head": 1}
    assert set(counted) == set(COMPONENTS) - {"projected_inputs", "experts"}
    assert work.sites[-1].layers == (OUTSIDE,)
    assert len(set(work.sites)) == len(work.sites)  # hashable and distinct: keys of a plan


def test_sites_have_the_shapes_of_their_tensors(layer):
    shape, count = shape_of_config(config("llama")), MICRO_BATCH * SEQ_LENGTH
    channels = {site.name: site.channels for site in layer.sites}
    assert channels == {
        "layer_input": shape.hidden,
        "attention_qkv": (4 + 2 + 2) * 16,
        "attention_output": 4 * 16,
        "residual": shape.hidden,
        "mlp_intermediate": 2 * shape.intermediate,
    }
    assert all(site.tokens == count and site.itemsize == 2 for site in layer.sites)


def test_bytes_of_choices_are_those_of_the_codecs(layer):
    qkv, output = layer.sites[1], layer.sites[2]
    sizes = (qkv.tokens, qkv.channels, qkv.itemsize)
    for choice in qkv.legal:
        assert qkv.device_bytes(choice) == held_bytes(choice, *sizes)
    log_sum_exp = (
        4 * 4 * output.tokens
    )  # fp32, four heads: kept raw beside the output, whatever that is
    assert output.device_bytes("swap_host") == log_sum_exp
    assert output.device_bytes("keep") == output.nbytes + log_sum_exp
    assert output.device_bytes("recompute") == 0
    with pytest.raises(ValueError, match=r"layer_input.*'recompute'.*legal"):
        layer.sites[0].device_bytes("recompute")


def test_what_is_held_is_not_made_again(layer):
    assert recompute_flops(layer, KEPT) == 0
    for site in layer.sites[1:]:
        assert recompute_flops(layer, {**KEPT, site.name: "recompute"}) == site.flops > 0
        assert recompute_flops(layer, {**KEPT, site.name: "swap_ssd"}) == 0


def test_saving_an_output_does_not_save_its_inputs_recompute(layer):
    # LoHan's error 5: attention's output is held, yet its backward reads q, k and v
    choices = {
        **dict.fromkeys(KEPT, "recompute"),
        "layer_input": "keep",
        "attention_output": "keep",
    }
    flops_of = {site.name: site.flops for site in layer.sites}
    assert recompute_flops(layer, choices) == sum(flops_of.values()) - flops_of["attention_output"]


@pytest.mark.parametrize("lossy", ["int8", "fp8"])
def test_attention_is_made_again_when_its_inputs_are_not_what_they_were(layer, lossy):
    flops_of = {site.name: site.flops for site in layer.sites}
    choices = {**KEPT, "layer_input": lossy, "attention_qkv": "recompute"}
    both = flops_of["attention_qkv"] + flops_of["attention_output"]
    assert recompute_flops(layer, choices) == both
    assert recompute_flops(layer, {**choices, "attention_output": "recompute"}) == both  # not twice
    assert recompute_flops(layer, {**choices, "attention_qkv": "keep"}) == 0
    assert recompute_flops(layer, {**KEPT, "attention_qkv": lossy}) == flops_of["attention_output"]
    assert (
        recompute_flops(layer, {**choices, "layer_input": "swap_host"}) == flops_of["attention_qkv"]
    )


def test_every_site_needs_a_legal_choice(layer):
    missing = {name: choice for name, choice in KEPT.items() if name != "residual"}
    for choices in (missing, {**KEPT, "residual": "project"}):
        with pytest.raises(ValueError, match=r"residual of layers 0\.\.1.*legal"):
            recompute_flops(layer, choices)


def test_dependencies_follow_the_residual_stream(layer):
    depends = {site.name: site.depends for site in layer.sites}
    assert depends["mlp_intermediate"] == ("layer_input", "residual")
    parallel = build_workload(shape_of_config(config("phi")), **SIZES).layers[0]
    depends = {site.name: site.depends for site in parallel.sites}
    assert depends["mlp_intermediate"] == ("layer_input",)
    assert "residual" not in depends  # no operation of the layer reads what attention adds
    sandwich = build_workload(shape_of_config(config("gemma3")), **SIZES).layers[0]
    assert sandwich.sites[-1].name == "mlp_output"  # a norm reads it
    for work in (layer, parallel, sandwich):
        names = [site.name for site in work.sites]
        for position, site in enumerate(work.sites):
            assert set(site.depends) <= set(names[:position])  # in forward order


ADAMW = {"method": "adamw"}
MODES = {
    "right": {"rank": 8},
    "left": {"rank": 8, "projection": "left"},
    "two_sided": {"rank": 8, "projection": "two_sided"},
    "smaller side": {"rank": 8, "projection": "auto"},
    "shared": {"rank": 8, "share_basis": True},
    "targets": {"rank": 8, "target_modules": ("mlp", "q_proj"), "module_rules": {"up_proj": ADAMW}},
    "no q": {"rank": 8, "module_rules": {"q_proj": ADAMW}},
    "no fc1": {"rank": 8, "module_rules": {"fc1": ADAMW}},
    "no probes": {"rank": 8, "residual": "none", "probes": 0},
    # 64 columns, from q, gate and up's inputs, is all that there are; down has 160
    "full rank": {"rank": 64, "target_modules": ("q_proj", "gate", "up", "down")},
    "full on the left": {"rank": 64, "projection": "left", "target_modules": ("q_proj", "down")},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    # Phi's q, k, v and fc1 read the output of one norm
    [("llama", mode) for mode in MODES if mode != "no fc1"]
    + [("phi", "right"), ("phi", "no q"), ("phi", "no fc1")],
)
def test_projected_backward_is_what_the_optimizer_runs(name, mode):
    from transformers import AutoModelForCausalLM

    made = config(name)
    network = AutoModelForCausalLM.from_config(made, attn_implementation="eager").train()
    optimizer = low_rank_adamw(network, lr=1e-4, max_full_gradient_bytes=2**30, **MODES[mode])
    for _ in range(2):  # all bases are found in the first step, the second projects
        network(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fields = dict(MODES[mode])
    left = tuple(fields.pop("module_rules", ()))
    planned = build_workload(
        shape_of_config(made),
        **SIZES,
        itemsize=4,
        attention="eager",
        projected=OptimizerMode(**{**LOW_RANK_ADAMW, **fields}, adamw_modules=left).backward(),
    )
    assert flops(network) == (planned.forward_flops, planned.backward_flops)
    assert saved_bytes(network)["layer"] == planned.layers[0].saved_bytes
    ordinary = build_workload(shape_of_config(made), **SIZES, itemsize=4, attention="eager")
    assert planned.model_flops == ordinary.model_flops  # of ordinary training, whatever is computed
    assert ordinary.model_flops == ordinary.forward_flops + ordinary.backward_flops


def test_projections_are_no_wider_than_a_matrix():
    shape = shape_of_config(config("llama"))  # keys and values have 32 rows
    wide = build_workload(shape, **SIZES, projected=Projected(4096, 4096))
    whole = build_workload(shape, **SIZES)
    assert wide.backward_flops == whole.backward_flops
    columns = wide.layers[0].projected_bytes // (2 * MICRO_BATCH * SEQ_LENGTH)
    # rank and probes together are the inputs of k, v and down; bases of q, o, gate and up would span everything
    assert columns == 2 * 64 + 160
    stays = Projected(4096, 4096, whole_at_full=False)
    columns = build_workload(shape, **SIZES, projected=stays).layers[0].projected_bytes
    assert columns // (2 * MICRO_BATCH * SEQ_LENGTH) == 6 * 64 + 160


def test_model_flops_are_those_of_palm():
    """6 N + 12 L H Q T per token: no difference between masks, projections and ways to compute attention."""
    shape = shape_of_config(config("llama"))
    multiplied = num_parameters(shape) - shape.vocab * shape.hidden - 5 * shape.hidden  # no norms
    per_token = 6 * multiplied + 12 * shape.layers * shape.query_width * SEQ_LENGTH
    for given in ({}, {"attention": "eager"}, {"projected": Projected(8, 8)}):
        work = build_workload(shape, **SIZES, **given)
        assert work.model_flops == per_token * work.tokens


def test_conv1d_is_never_projected():
    shape = shape_of_config(config("gpt2"))
    assert build_workload(shape, **SIZES, projected=Projected(8, 8)).layers[0].projected_bytes == 0


@pytest.mark.parametrize(("rank", "probes", "text"), [(0, 8, "rank is 0"), (8, -1, "probes is -1")])
def test_projection_refuses(rank, probes, text):
    with pytest.raises(ValueError, match=f"{text}; legal"):
        Projected(rank, probes)


def test_nothing_is_built_or_measured(monkeypatch):
    """A 175B model costs arithmetic only: no tensor is made."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the planner made a tensor")

    for name in ("empty", "zeros", "ones", "randn", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    shape = plain_shape(layers=96, hidden=12288, heads=96, vocab=50257)
    work = build_workload(shape, micro_batch=8, seq_length=2048)
    # 6 N per token and attention's share T / 6 h of it, within what norms, biases and positions make up
    ordinary = 6 * work.parameters * (1 + 2048 / (6 * 12288)) * work.tokens
    assert work.model_flops == pytest.approx(ordinary, rel=1e-3)
