"""Installing and removing, attention alone, and everything that is refused."""

import pytest
import torch
from tiny import batch, error, fpdt, step, tiny

from hmt_deepspeed.fpdt.attention import ATTENTION
from hmt_deepspeed.fpdt.install import install, register_attention


def test_removal_restores_the_model():
    model, inputs = tiny(), batch()
    before = step(model, inputs)
    config = model.config.to_dict() | {"attention": model.config._attn_implementation}
    with fpdt(model) as installation:
        installation.remove()
        installation.remove()
    assert model.config.to_dict() | {"attention": model.config._attn_implementation} == config
    assert not any("forward" in vars(module) for module in model.modules())
    after = step(model, inputs)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_the_cache_is_off_so_that_documents_stay_apart():
    """With a cache HF looks for no documents, and a layer would keep all keys and values."""
    inputs = batch() | {"position_ids": torch.tensor([[*range(10), *range(27)]] * 2)}
    expected = step(tiny(), inputs)[0]
    with fpdt(model := tiny(use_cache=True)):
        torch.testing.assert_close(step(model, inputs)[0], expected, rtol=1e-5, atol=0)
    assert model.config.use_cache


def test_signatures_stay_those_of_the_model():
    """HF's Trainer looks at them to know which columns to keep."""
    import inspect

    model = tiny()
    expected = inspect.signature(model.forward)
    with fpdt(model):
        assert inspect.signature(model.forward) == expected


def test_a_tuple_is_returned_where_one_was():
    model, inputs = tiny(), batch()
    with fpdt(model), torch.no_grad():
        (loss,) = model(**inputs, return_dict=False)
        assert torch.equal(loss, model(**inputs).loss)


def test_hidden_states_are_recorded():
    model, inputs = tiny(), batch()
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states
        with fpdt(model):
            found = model(**inputs, output_hidden_states=True).hidden_states
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama, 4 heads on 2", "mistral, window", "gpt2", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_alone(kind, checkpointing):
    model, inputs = tiny(kind), batch()
    position_ids = torch.tensor([[*range(10), *range(27)]] * 2)
    inputs |= {"position_ids": position_ids}
    loss, expected = step(model, inputs)
    register_attention(chunk_size=8)
    model.set_attn_implementation(ATTENTION)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    found_loss, found = step(model, inputs)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    assert error(found, expected) <= 1e-5


def test_attention_alone_does_not_lose_the_padding_mask():
    """The trap: without a mask function under its name, HF passes None."""
    model, inputs = tiny(), batch()
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[1, 20:] = 0
    inputs |= {"attention_mask": mask}
    loss, expected = step(model, inputs)
    register_attention(chunk_size=8)
    model.set_attn_implementation(ATTENTION)
    found_loss, found = step(model, inputs)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    assert error(found, expected) <= 1e-5


# -- refusals -------------------------------------------------------------------------------------


def mask_without(tokens):
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[1, tokens] = 0
    return mask


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"attention_mask": mask_without(slice(0, 4))}, "padding on the right"),
        ({"attention_mask": mask_without(slice(10, 12))}, "padding on the right"),
        ({"attention_mask": mask_without(slice(0, 37))}, "padding on the right"),
        ({"attention_mask": torch.zeros(2, 1, 37, 37)}, "do not pass a mask"),
        ({"use_cache": True}, "cache"),
        ({"output_attentions": True}, "output_attentions"),
        ({"logits_to_keep": 3}, "logits_to_keep"),  # beside labels
    ],
    ids=["left", "middle", "nothing", "own mask", "cache", "attention weights", "some logits"],
)
def test_inputs_that_are_refused(inputs, match):
    model = tiny()
    with fpdt(model), pytest.raises(ValueError, match=match):
        model(**batch() | inputs)


def test_attention_that_is_not_causal():
    model = tiny()
    model.config.is_causal = False
    with fpdt(model), pytest.raises(ValueError, match="sees token"):
        model(**batch())


def test_a_mask_function_of_the_models_own():
    from transformers.masking_utils import create_causal_mask

    model = tiny()
    with fpdt(model), pytest.raises(ValueError, match="of the model's own"):
        create_causal_mask(
            model.config,
            torch.zeros(1, 9, 32),
            None,
            None,
            or_mask_function=lambda b, h, q, k: k == 0,
        )


@pytest.mark.parametrize("length", [9, 4096])
def test_tokens_that_see_each_other_both_ways(length):
    """A few among many too, where no token of the block is among those compared one by one."""
    from transformers.masking_utils import create_causal_mask

    model = tiny()
    blocks = torch.full((1, length), -1)
    blocks[0, length // 4 : length // 4 + 3] = 0
    with fpdt(model), pytest.raises(ValueError, match="sees token"):
        create_causal_mask(
            model.config, torch.zeros(1, length, 32), None, None, block_sequence_ids=blocks
        )


@pytest.mark.parametrize(
    ("name", "special", "match"),
    [
        ("llama, 4 heads on 2", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt_neox, parallel residual", {"hidden_dropout": 0.2}, "hidden_dropout is 0.2"),
        ("opt", {"dropout": 0.1}, "dropout is 0.1"),
        ("llama, 4 heads on 2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_settings_of_a_model_that_would_change_the_result(name, special, match):
    with pytest.raises(ValueError, match=match):
        install(tiny(name, **special))


def test_dropout_of_an_adapter_is_refused_by_name():
    """Backward would draw other masks than forward."""
    peft = pytest.importorskip("peft")

    def adapted(dropout):
        targets = ["q_proj", "down_proj"]
        config = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=targets)
        return peft.inject_adapter_in_model(config, tiny())

    with pytest.raises(
        ValueError, match=r"0\.self_attn\.q_proj\.lora_dropout.* p=0\.5.*lora_dropout"
    ):
        install(adapted(0.5))
    install(adapted(0.0)).remove()


def test_other_families_are_refused_with_the_list():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(ValueError, match=r"llama, mistral, qwen2, qwen3, gemma, gpt2.*'gemma2'"):
        install(AutoModelForCausalLM.from_config(config))


def test_attention_alone_refuses_a_soft_cap_and_sinks():
    """Gemma 2 passes ``softcap``, GPT-OSS ``s_aux``, to any attention function."""
    from transformers import AttentionInterface

    from hmt_deepspeed.fpdt.visibility import Visibility

    register_attention()
    attention = AttentionInterface()[ATTENTION]
    q = torch.randn(1, 2, 4, 8)
    for name, value in (
        ("softcap", 50.0),
        ("s_aux", torch.zeros(2)),
        ("dropout", 0.1),
        ("is_causal", False),
    ):
        with pytest.raises(ValueError, match=name):
            attention(None, q, q, q, Visibility.causal(4), **{name: value})


def test_layers_that_are_not_what_the_family_says():
    model = tiny()
    model.model.layers[1].forward = lambda *a, **k: None
    with pytest.raises(ValueError, match="replaced already"):
        install(model)
    assert "forward" not in vars(model.model.layers[0])


def test_a_second_installation_takes_the_place_of_an_idle_one():
    model = tiny()
    with fpdt(model) as first:
        with pytest.warns(UserWarning, match="takes the place of"):
            second = install(model)
        replaced = {name for name, m in model.named_modules() if "forward" in vars(m)}
        first.remove()
        assert {name for name, m in model.named_modules() if "forward" in vars(m)} == replaced
        second.remove()
    assert replaced
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_base_model_without_a_head():
    with pytest.raises(ValueError, match="without a language-model head"):
        install(tiny().model)


def test_a_loss_of_the_users_own():
    model = tiny()
    model.loss_function = lambda **_: torch.zeros(())
    with fpdt(model), pytest.raises(ValueError, match="loss function of its own"):
        model(**batch())


@pytest.mark.parametrize("sizes", [(0, None), (8, 0)])
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        install(tiny(), *sizes)


def test_installing_leaves_registered_attention_as_it_is():
    from transformers import AttentionInterface

    register_attention(chunk_size=8)
    before = AttentionInterface()[ATTENTION]
    with fpdt(tiny()):
        assert AttentionInterface()[ATTENTION] is before


def test_generate_uses_the_models_own_layers_and_cache():
    model, inputs = tiny(), batch(rows=1)
    prompt = inputs["input_ids"][:, :9]
    asked = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(prompt, **asked)
    with fpdt(model):
        before = step(model, inputs)[0]
        assert torch.equal(model.generate(prompt, **asked), expected)
        assert torch.equal(step(model, inputs)[0], before), "FPDT is back"
        assert model.config._attn_implementation == ATTENTION
