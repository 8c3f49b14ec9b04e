"""What the planner says of a policy against what the activation backend counts when it carries it out."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from low_rank_adamw import LOW_RANK_ADAMW
from real_models import MICRO_BATCH, SEQ_LENGTH, config, model, run

from hmt_deepspeed.config.components import PAPER_POLICY
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.model.workload import build_workload, recompute_flops
from hmt_deepspeed.planner.run.memory import OptimizerMode, choices_of

pytest.importorskip("hmt_deepspeed.activations.backend", reason="the backend is not merged yet")

RECOMPUTED = dict.fromkeys(
    ("attention_qkv", "attention_output", "mlp_intermediate", "residual"), "recompute"
)
POLICIES = {
    "paper": PAPER_POLICY,
    "recompute": PAPER_POLICY | RECOMPUTED,
    "keep": dict.fromkeys(PAPER_POLICY, "keep") | {"projected_inputs": "project"},
    "int8 input": PAPER_POLICY | {"layer_input": "int8", "residual": "int8"},
    "int8 qkv": PAPER_POLICY | {"attention_qkv": "int8"},
}
NAMES = ("llama", "gemma3", "phi", "gpt2", "gpt_neox", "opt")


@contextmanager
def installed(network, policy):
    from hmt_deepspeed.activations.backend import ActivationBackend
    from hmt_deepspeed.activations.codecs import build_codec
    from hmt_deepspeed.attribution import attribute

    codecs = {c: build_codec(c) for c in ("keep", "int8", "fp8")}
    backend = ActivationBackend(network, attribute(network), policy, codecs)
    backend.install()
    backend.begin_step()
    try:
        run(network).backward()
        yield backend.report()
    finally:
        backend.uninstall()
        network.zero_grad()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_held_are_those_that_the_backend_counts(name, policy):
    shape, sizes = (
        shape_of_config(config(name)),
        {"micro_batch": MICRO_BATCH, "seq_length": SEQ_LENGTH},
    )
    work = build_workload(shape, **sizes)
    planned = {}
    for site, choice in choices_of(work, POLICIES[policy]).items():
        held = site.count * site.device_bytes(choice)
        planned[site.component] = planned.get(site.component, 0) + held
    if policy.startswith(
        "int8"
    ):  # attention runs again, its log-sum-exp is not held: 4 bytes a head, planned
        planned["attention_output"] -= shape.layers * work.tokens * shape.heads * 4
    with installed(model(name, "sdpa", torch.bfloat16), POLICIES[policy]) as report:
        counted = report.bytes_by_label
    assert counted == {component: size for component, size in planned.items() if size}


@pytest.mark.parametrize("shared", [False, True])
def test_projections_held_are_those_that_the_backend_counts(shared):
    from transformers import AutoModelForCausalLM

    made, fields = config("llama"), {"rank": 8, "share_basis": shared}
    network = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()
    optimizer = HMT(network, lr=1e-4, max_full_gradient_bytes=2**30, **fields)
    for _ in range(2):  # all bases are found in the first step, the second projects
        run(network).backward()
        optimizer.step()
        optimizer.zero_grad()
    work = build_workload(
        shape_of_config(made),
        micro_batch=MICRO_BATCH,
        seq_length=SEQ_LENGTH,
        projected=OptimizerMode(**{**LOW_RANK_ADAMW, **fields}).backward(),
    )
    planned = sum(layer.count * layer.projected_bytes for layer in work.layers)
    with installed(network, PAPER_POLICY | {"projected_inputs": "project"}) as report:
        assert report.bytes_by_label["projected_inputs"] == planned > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_flops_run_again_are_those_that_the_backend_counts(name, policy):
    shape, sizes = (
        shape_of_config(config(name)),
        {"micro_batch": MICRO_BATCH, "seq_length": SEQ_LENGTH},
    )
    work = build_workload(
        shape, **sizes, attention="eager"
    )  # all pairs, as the backend counts them
    choices = choices_of(work, POLICIES[policy])
    planned = sum(
        layer.count * recompute_flops(layer, {site.name: choices[site] for site in layer.sites})
        for layer in work.layers
    )
    with installed(model(name, "sdpa", torch.bfloat16), POLICIES[policy]) as report:
        assert sum(report.rerun_flops.values()) == planned
