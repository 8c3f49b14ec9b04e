"""Components held in fewer device bytes on Hugging Face models: what encodings lose, what swapping moves."""

import pytest
import torch
from backends import (
    SWAP,
    assert_equal,
    cosines,
    gradients,
    host_store,
    installed,
    poison,  # noqa: F401
)
from families import LENGTH, tiny, tokens

from hmt_deepspeed.activations import policy as policy_module

pytestmark = pytest.mark.usefixtures("poison")

TOKENS = 2 * LENGTH


# -- what an encoding loses ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outliers():
    """A model whose norms blow up two channels thirtyfold, as those of trained ones do."""
    model = tiny("llama", hidden_size=64, num_attention_heads=4)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "layernorm" in name:
                param[[3, 40]] *= 30
    batch = tokens(batch=4, length=64)
    return model, batch, gradients(model, batch)


def test_int8_loses_little_and_nothing_on_average(outliers):
    model, batch, expected = outliers
    runs = []
    with installed(model, error_interval=1) as backend:
        for _ in range(24):
            runs.append(gradients(model, batch))
        errors = backend.report().errors
    assert min(min(cosines(model, found, expected)) for found in runs) >= 0.999
    assert 0 < errors["attention_output"] < 0.02
    assert errors.keys() == {"attention_output", "mlp_intermediate"}
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        each = [float((found[name] - expected[name]).norm()) for found in runs]
        mean = torch.stack([found[name] for found in runs]).mean(0) - expected[name]
        # 24 independent unbiased errors average to 1/sqrt(24) = 0.20 of one; biased ones to 1
        assert float(mean.norm()) < 0.3 * sum(each) / len(each)


def test_errors_are_measured_at_their_interval():
    model = tiny("llama")
    with installed(model, error_interval=2) as backend:
        measured = []
        for _ in range(4):
            backend.begin_step()
            gradients(model)
            measured.append(bool(backend.report().errors))
    assert measured == [False, True, False, True]


def test_attention_is_run_again_where_its_inputs_come_back_with_an_error(outliers, monkeypatch):
    """Log-sum-exp and output of forward do not fit q and k recomputed from a layer's encoded input."""
    model, batch, expected = outliers
    policy = {"layer_input": "fp8", "attention_output": "keep"}

    def error():
        with installed(model, policy) as backend:
            found = gradients(model, batch)
            rerun = backend.report().rerun
        names = [n for n in expected if "q_proj" in n or "k_proj" in n]
        lost = sum((found[n] - expected[n]).square().sum() for n in names)
        return float((lost / sum(expected[n].square().sum() for n in names)).sqrt()), rerun

    consistent, rerun = error()
    assert rerun == {"attention_qkv": 6, "attention_output": 2}
    monkeypatch.setattr(policy_module.Policy, "_consistent", staticmethod(lambda *_: {}))
    inconsistent, rerun = error()
    assert rerun == {"attention_qkv": 6}
    assert consistent < inconsistent / 1.3


# -- swapping -----------------------------------------------------------------------------------------


def test_what_the_output_projection_reads_is_what_is_held():
    """Not what the attention operation gives when it is run again."""
    model = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()  # no error reaches o_proj from behind
    batch = tokens()
    expected = gradients(model, batch)
    name = "model.layers.0.self_attn.o_proj.weight"
    for choice, is_exact in (("keep", True), ("recompute", False)):
        with installed(model, {"layer_input": "fp8", "attention_output": choice}) as backend:
            assert torch.equal(gradients(model, batch)[name], expected[name]) is is_exact
            assert backend.report().rerun["attention_output"] == 1


@pytest.mark.parametrize("inputs", ["swap_host", "keep"])
def test_swapped_layers_come_back_one_ahead(inputs):
    policy = SWAP | {"layer_input": inputs}
    model = tiny("llama", num_hidden_layers=3)
    expected, store, log = gradients(model), host_store(), []
    for verb in ("prefetch", "get"):
        original = getattr(store, verb)

        def logged(name, verb=verb, original=original):
            layer = name.split("layers.")[1][0]
            log.append((verb, int(layer), name))
            return original(name)

        setattr(store, verb, logged)
    with installed(model, policy, store=store) as backend:
        assert_equal(gradients(model), expected)
        report = backend.report()
    first = {event: index for index, event in reversed(list(enumerate(log)))}
    fetched = {name: layer for verb, layer, name in log if verb == "get"}
    assert set(fetched.values()) == {0, 1, 2}
    for name, layer in fetched.items():
        assert first["prefetch", layer, name] < first["get", layer, name]
        if layer < 2:  # while the layer after it, whose backward is before, is being computed
            last_of_next = max(i for i, (verb, other, _) in enumerate(log) if other == layer + 1)
            assert first["prefetch", layer, name] < last_of_next
    if (
        inputs == "swap_host"
    ):  # all but attention's log-sum-exp and the norm's input left the device
        log_sum_exp = 3 * 4 * TOKENS * 4
        norm = TOKENS * 32 * 4
        assert report.bytes_by_label == {
            "attention_output": log_sum_exp,
            "layernorm": norm,
            "lm_head": norm,
        }


def test_what_is_swapped_is_reported():
    model, store = tiny("llama"), host_store()
    with installed(model, SWAP, store=store, transfers=[store.engine.counters]) as backend:
        gradients(model)
        backend.begin_step()
        before = store.engine.counters.bytes_out
        gradients(model)
        report = backend.report()
    # per layer: input, q, k, v, attention, o, gate, up in fp32
    per_layer = TOKENS * (32 + 32 + 16 + 16 + 32 + 32 + 48 + 48) * 4
    assert report.swapped_out_bytes == store.engine.counters.bytes_out - before == 2 * per_layer
    assert report.swapped_in_bytes == report.swapped_out_bytes
    assert report.seconds_waited > 0
