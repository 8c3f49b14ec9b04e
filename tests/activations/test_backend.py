"""A policy carried out on Hugging Face models: gradients, bytes, what is run again, kinds of models and calls."""

import copy

import pytest
import torch
from backends import (
    INSIDE,
    KEEP,
    PAPER_KEPT,
    RECOMPUTE,
    SWAP,
    assert_equal,
    bytes_of,
    cosines,
    gradients,
    host_store,
    installed,
    make_backend,
    poison,  # noqa: F401
)
from families import CONFIGS, LENGTH, tiny, tokens
from torch.utils.checkpoint import checkpoint as torch_checkpoint

pytestmark = pytest.mark.usefixtures("poison")

TOKENS = 2 * LENGTH
EXACT = {"paper": PAPER_KEPT, "keep": KEEP, "recompute": RECOMPUTE, "swap": SWAP}
RERUN = {  # of 2 layers
    "paper": {"attention_qkv": 6},
    "keep": {},
    "recompute": {"attention_qkv": 6, "attention_output": 2, "residual": 2, "mlp_intermediate": 4},
    "swap": {},
}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def expected(llama):
    return gradients(llama)


@pytest.mark.parametrize("name", EXACT)
def test_exact_policies_change_no_bit_and_run_again_what_they_say(llama, expected, name):
    store = host_store()
    with installed(llama, EXACT[name], store=store) as backend:
        for _ in range(2):
            backend.begin_step()
            assert_equal(gradients(llama), expected)
        report = backend.report()
        assert report.rerun == RERUN[name]  # down_proj never: its output only leaves the layer
        assert (report.unread, report.missed) == ({}, ())
        assert backend.held_bytes == 0
    assert_equal(gradients(llama), expected)


def test_flops_run_again():
    model = tiny("llama", num_hidden_layers=1)
    with installed(model, RECOMPUTE) as backend:
        gradients(model)
        flops = backend.report().rerun_flops
    hidden, kv, intermediate, heads, width = 32, 16, 48, 4, 8
    assert flops == {
        "attention_qkv": 2 * TOKENS * hidden * (hidden + 2 * kv),
        "attention_output": 2 * 2 * 2 * heads * LENGTH**2 * width,  # two products, batch of 2
        "residual": 2 * TOKENS * hidden * hidden,
        "mlp_intermediate": 2 * 2 * TOKENS * hidden * intermediate,
    }


def test_held_bytes_are_those_of_the_vocabulary(llama):
    hidden, intermediate, itemsize = 32, 48, 4
    with installed(llama) as backend:
        gradients(llama)
        report = backend.report()
    raw = bytes_of("keep", TOKENS, hidden, itemsize)
    # attention is encoded in heads x width channels of each sequence's tokens; log-sum-exp is fp32
    attention = bytes_of("int8", TOKENS, hidden, itemsize)
    gate_and_up = bytes_of("int8", TOKENS, 2 * intermediate, itemsize)
    log_sum_exp = 4 * TOKENS * 4
    of_layer = {"attention_output": attention + log_sum_exp, "mlp_intermediate": gate_and_up}
    assert report.held_bytes == {
        "model.layers.0": of_layer | {"layer_input": raw, "residual": raw},
        "model.layers.1": of_layer | {"layer_input": raw, "residual": raw},
        "model.norm": {"layernorm": raw},
        "lm_head": {"lm_head": raw},
    }
    assert report.total_bytes == sum(report.bytes_by_layer.values())


def test_norms_after_the_sums_do_not_run_the_mlp_again():
    model = tiny("opt", do_layer_norm_before=False)
    expected = gradients(model)
    with installed(model, PAPER_KEPT) as backend:
        assert_equal(gradients(model), expected)
        assert set(backend.report().rerun) == {"attention_qkv"}


@pytest.mark.parametrize("choice", ["keep", "int8", "fp8", "swap_host"])
def test_the_head_s_bytes_are_reported_and_gone_after_backward(llama, choice):
    policy = {"lm_head": choice}
    with installed(llama, policy, store=host_store(), error_interval=1) as backend:
        loss = llama(input_ids=tokens(), labels=tokens()).loss
        expected = bytes_of(choice, TOKENS, 32, 4)
        assert backend._ledger.held.get(("lm_head", "lm_head"), 0) == expected
        report = backend.report()
        assert report.bytes_by_label.get("lm_head", 0) == expected
        assert report.bytes_by_layer.get("lm_head", 0) == expected
        assert ("lm_head" in report.errors) is (choice in ("int8", "fp8"))
        loss.backward()
        del loss
        assert backend.held_bytes == 0
        llama(input_ids=tokens(), labels=tokens())  # an abandoned graph
        assert backend.held_bytes == 0
        with torch.no_grad():
            llama(input_ids=tokens())
        assert backend.report().bytes_by_label.get("lm_head", 0) == expected
    assert not llama.lm_head._forward_hooks
    assert "forward" not in vars(llama.lm_head)


def test_what_is_counted_is_what_is_there():
    """Storages that live between forward and backward, against the report's sum."""
    model, batch = tiny("llama"), tokens()
    before = _float_storages()
    with installed(model, PAPER_KEPT) as backend:
        loss = model.model(input_ids=batch).last_hidden_state.sum()
        added = _float_storages().items() - before.items()
        held = sum(nbytes for _, nbytes in added)
        report = backend.report()
        # rotary's cos and sin, T x head width, and sums
        outside = 2 * LENGTH * 8 * 4
        assert 0 <= held - report.total_bytes - outside < 100
        del loss


def _float_storages():
    import gc

    found = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.is_floating_point():
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


# -- kinds of models and calls ------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", ["paper", "recompute"])
def test_dropout_is_that_of_forward(attention, policy):
    """Dropout in attention makes it two products, of which the second is the component."""
    dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    model = tiny("gpt2", attn_implementation=attention, **dropout)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(model)
    after = torch.get_rng_state()
    model.gradient_checkpointing_disable()
    with installed(model, EXACT[policy]) as backend:
        assert_equal(gradients(model), expected)
        report = backend.report()
    assert torch.equal(torch.get_rng_state(), after)
    scores = {"attention_scores": 2}  # T x T, never held
    gpt2 = {"attention_qkv": 2, "attention_output": 2, "residual": 2, "mlp_intermediate": 2}
    assert report.rerun == scores | ({"attention_qkv": 2} if policy == "paper" else gpt2)
    assert (report.missed, report.unread) == ((), {})


@pytest.mark.parametrize("family", ["phi", "gpt_neox", "gemma3", "opt"])
def test_families(family):
    model = tiny(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(model)
    model.gradient_checkpointing_disable()
    for policy in (PAPER_KEPT, RECOMPUTE):
        with installed(model, policy) as backend:
            assert_equal(gradients(model), expected)
            report = backend.report()
        assert report.unread == {}
        assert "exit" not in report.rerun
    if family in (
        "phi",
        "gpt_neox",
    ):  # attention and MLP side by side: nobody reads o_proj's output
        assert "residual" not in report.rerun


def test_padding_and_repeated_key_heads():
    """A mask makes HF expand and clone the key heads, whose strides are not those of a product."""
    model = tiny("llama")
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    expected = gradients(model, attention_mask=mask)
    for policy in EXACT.values():
        with installed(model, policy, store=host_store()):
            assert_equal(gradients(model, attention_mask=mask), expected)
    with installed(model, dict.fromkeys(INSIDE, "int8")):
        found = gradients(model, attention_mask=mask)
    assert min(cosines(model, found, expected)) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = tiny("llama").to(dtype)
    expected = gradients(model)
    with installed(model, KEEP):
        assert_equal(gradients(model), expected)
    with installed(model):
        assert min(cosines(model, gradients(model), expected)) > 0.999


def test_autocast(llama):
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(llama)
    for policy in (PAPER_KEPT, RECOMPUTE):
        with installed(llama, policy) as backend:
            model_inputs = tokens()
            llama.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = llama(input_ids=model_inputs, labels=model_inputs).loss
            loss.backward()  # outside: the replay restores it
            found = {n: p.grad.clone() for n, p in llama.named_parameters()}
            held = backend.report().bytes_by_label
        for name in expected:  # autocast's cache of weights sums their gradients in another order
            torch.testing.assert_close(found[name], expected[name], rtol=2**-7, atol=1e-4)
    assert held["layer_input"] == 2 * TOKENS * 32 * 4


def test_gradient_accumulation(llama, expected):
    with installed(llama, PAPER_KEPT) as backend:
        llama.zero_grad()
        losses = [llama(input_ids=tokens(), labels=tokens()).loss for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
        del loss, losses
        assert backend.held_bytes == 0
        for name, param in llama.named_parameters():
            torch.testing.assert_close(param.grad, 3 * expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_and_generation_are_left_alone(llama):
    store = host_store()
    llama.eval()
    plain = llama(tokens()).logits
    text = llama.generate(tokens(), max_new_tokens=3, do_sample=False)
    with installed(llama, SWAP, store=store) as backend:
        assert torch.equal(llama(tokens()).logits, plain)
        assert torch.equal(llama.generate(tokens(), max_new_tokens=3, do_sample=False), text)
        llama.train()
        with torch.no_grad():
            llama(tokens())
        assert (backend.calls, store.engine.counters.num_out) == (0, 0)
    llama.train()


@pytest.mark.parametrize("family", sorted({*CONFIGS} - {"mamba"}))  # its parts have no names
def test_a_model_in_training_generates_with_its_cache(family):
    """As when samples are drawn to learn from: a layer that checkpoints would drop its cache."""
    model, asked = tiny(family).train(), {"max_new_tokens": 4, "do_sample": False}
    text = model.generate(tokens(), **asked)
    with installed(model, {}):
        assert torch.equal(model.generate(tokens(), **asked), text)
        assert model.generate.__func__ is not type(model).generate
        loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()  # and is checkpointed after it
    assert "generate" not in vars(model)


def test_a_cache_is_not_filled_twice(llama, expected):
    with installed(llama, PAPER_KEPT):
        assert_equal(gradients(llama, use_cache=True), expected)


# -- installation -------------------------------------------------------------------------------------


def test_uninstall_restores_everything_and_so_does_the_next_backend():
    model = tiny("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def state():
        names = ("gradient_checkpointing", "_gradient_checkpointing_func", "forward")
        return [
            (set(vars(m)), [vars(m).get(name) for name in names], len(m._forward_hooks))
            for m in model.modules()
        ]

    before = state()
    backend = make_backend(model)
    backend.install()
    backend.install()  # once more is nothing more
    assert state() != before
    backend.uninstall()
    assert state() == before
    backend.install()
    other = make_backend(model)
    loss = model(
        input_ids=tokens(), labels=tokens()
    ).loss  # a graph that its backend will be asked to compute again
    with pytest.raises(ValueError, match=r"a forward whose backward has not run.*uninstall\(\)"):
        other.install()
    loss.backward()
    with pytest.warns(UserWarning, match="takes the place of an earlier activation backend"):
        other.install()
    backend.uninstall()  # is not there any more
    assert state() != before
    other.uninstall()
    assert state() == before


def test_gradient_checkpointing_enable_enables_ours(llama, expected):
    with installed(llama, PAPER_KEPT) as backend:
        llama.gradient_checkpointing_enable({"use_reentrant": False})
        assert_equal(gradients(llama), expected)
        assert backend.report().rerun == RERUN["paper"]
        backend.begin_step()
        llama.gradient_checkpointing_disable()
        assert_equal(gradients(llama), expected)
        assert backend.report().hits == {}
        with pytest.raises(ValueError, match='"layer_input": "swap_host"'):
            llama.activation_checkpointing_enable(offload=True)
    llama.disable_input_require_grads()


def test_what_was_enabled_before_is_heeded(expected):
    model = tiny("llama")
    model._set_gradient_checkpointing(True, every_n_layers=2)
    with installed(model, PAPER_KEPT) as backend:
        assert_equal(gradients(model), expected)
        assert backend.calls == 2  # the first of two layers, and what lies outside them
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    model.activation_checkpointing_enable(offload=True)
    with pytest.raises(ValueError, match='"layer_input": "swap_host"'):
        make_backend(model).install()


def test_a_copy_of_the_model_is_its_own(llama, expected):
    with installed(llama, PAPER_KEPT) as backend:
        twin = copy.deepcopy(llama)
        for param in twin.parameters():
            param.data.mul_(1.0)
        assert_equal(gradients(twin), expected)
        calls = backend.calls
        twin.eval()(tokens())
        assert backend.calls == calls
        assert all(
            p.grad is None or (p.grad == g).all()
            for p, g in zip(llama.parameters(), expected.values(), strict=True)
        )


def test_overrides(llama):
    overrides = {
        r"layers\.0$": {"mlp_intermediate": "recompute"},
        r"layers\.1\.mlp\.up_proj": {"mlp_intermediate": "keep"},
    }
    with installed(llama, overrides=overrides) as backend:
        gradients(llama)
        held = backend.report().held_bytes
        assert backend.report().rerun["mlp_intermediate"] == 2
    assert "mlp_intermediate" not in held["model.layers.0"]
    gate = bytes_of("int8", TOKENS, 48, 4)
    assert held["model.layers.1"]["mlp_intermediate"] == gate + TOKENS * 48 * 4


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"layer_input": "recompute"}, r"policy\.layer_input is 'recompute', legal: keep, int8"),
        ({"residual": "swap_host"}, r"policy\.residual is 'swap_host', but .* codecs of keep"),
        ({"attention_qkv": "project"}, r"policy\.attention_qkv is 'project', legal"),
    ],
)
def test_choices_that_cannot_be_honoured(llama, policy, message):
    with pytest.raises(ValueError, match=message):
        make_backend(llama, policy)


def test_torchs_checkpoint_is_not_touched(llama, expected):
    with installed(llama, PAPER_KEPT) as backend:
        x = torch.randn(3, 8, requires_grad=True)
        calls = backend.calls
        torch_checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
        assert backend.calls == calls
