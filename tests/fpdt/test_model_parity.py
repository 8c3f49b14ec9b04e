"""A model with FPDT against the same model without: loss and every gradient."""

import pytest
import torch
from tiny import FP32, LENGTH, MODELS, batch, compare, error, fpdt, step, tiny


@pytest.mark.parametrize("name", MODELS)
def test_every_family_in_fp32(name):
    compare(tiny(name), batch(), piece_size=3)


@pytest.mark.parametrize("chunk_size", [2, 5, 36, 37, 1000])
def test_every_chunk_size(chunk_size):
    compare(tiny(), batch(), chunk_size=chunk_size)


@pytest.mark.parametrize("piece_size", [1, 8, 100])
def test_every_piece_size(piece_size):
    compare(tiny(), batch(), piece_size=piece_size)


@pytest.mark.parametrize("length", [2, 8, 9])
def test_every_length(length):
    inputs = batch(length)
    inputs["labels"] = torch.randint(61, inputs["labels"].shape)
    compare(tiny(), inputs)


def test_resident_chunks_compute_the_same():
    model, inputs = tiny(), batch()
    with fpdt(model, offload_kv=True):
        loss, expected = step(model, inputs)
    with fpdt(model, offload_kv=False):
        found_loss, found = step(model, inputs)
    assert torch.equal(loss, found_loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name", ["llama, 4 heads on 2", "gemma", "gpt2", "gpt_neox, parallel residual", "opt"]
)
def test_bf16_is_within_twice_the_error_of_hf(name):
    """Both against fp32 of the same (bf16) weights."""
    inputs = batch()
    exact_loss, exact = step(tiny(name, torch.bfloat16).float(), inputs)
    model = tiny(name, torch.bfloat16)
    loss, theirs = step(model, inputs)
    with fpdt(model, chunk_size=5, piece_size=2):
        found_loss, ours = step(model, inputs)
    assert (
        abs(found_loss - exact_loss) <= 2 * abs(loss - exact_loss) + 4e-3 * exact_loss
    )  # one rounding
    assert error(ours, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("factor", [0.25, 1024.0])
def test_a_loss_that_is_scaled_afterwards(factor):
    compare(tiny(), batch(), factor)


def test_labels_that_do_not_count_in_whole_chunks():
    inputs = batch()
    inputs["labels"][:, :20] = -100
    inputs["labels"][1] = -100
    compare(tiny(), inputs)


def test_no_label_that_counts():
    """HF's mean of nothing is not a number; ours is 0, with gradients of 0."""
    inputs = batch()
    inputs["labels"][:] = -100
    model = tiny()
    with fpdt(model):
        loss, found = step(model, inputs)
    assert loss == 0
    assert all(not grad.any() for grad in found.values())


@pytest.mark.parametrize("num_items", [11, torch.tensor(11)])
def test_the_sum_over_items_of_a_larger_batch(num_items):
    compare(tiny(), batch() | {"num_items_in_batch": num_items})


def test_labels_that_are_shifted_already():
    inputs = batch()
    shifted = torch.cat([inputs["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)
    compare(tiny(), inputs | {"shift_labels": shifted})


PACKED = torch.tensor([[*range(1), *range(9), *range(20), *range(7)], [*range(37)]])


@pytest.mark.parametrize("name", [n for n in MODELS if "norms after" not in n])
def test_packed_documents(name):
    """OPT's mask is made without position_ids: there documents see each other, as they do in HF."""
    model, inputs = tiny(name), batch() | {"position_ids": PACKED}
    compare(model, inputs)


def test_documents_do_not_see_each_other():
    model, inputs = tiny(), batch(rows=1) | {"position_ids": PACKED[:1]}
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, :10] = 1
    with fpdt(model), torch.no_grad():
        first, second = (
            model.model(**{**i, "labels": None}).last_hidden_state for i in (inputs, other)
        )
    torch.testing.assert_close(first[0, 10:], second[0, 10:], rtol=0, atol=0)
    assert not torch.equal(first[0, :10], second[0, :10])


@pytest.mark.parametrize("name", [n for n in MODELS if "biases" not in n])
def test_padding_on_the_right(name):
    """Also what padding itself computes, where somebody counts its labels."""
    inputs = batch()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 21:] = 0
    model = tiny(name)
    compare(model, inputs | {"attention_mask": mask})


def test_frozen_parameters_and_a_frozen_embedding():
    model = tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name and "weight" in name)
    compare(model, batch())
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_()
    compare(model, batch())


def test_inputs_as_embeddings_get_their_gradient():
    model, inputs = tiny(), batch()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model(inputs_embeds=embedded, **inputs).loss, embedded)
    with fpdt(model):
        (found,) = torch.autograd.grad(model(inputs_embeds=embedded, **inputs).loss, embedded)
    assert (found - expected).norm() <= FP32 * expected.norm()


def test_under_autocast():
    """bf16 arithmetic on fp32 weights, also in backward, where the caller's autocast has ended."""
    model, inputs = tiny(), batch()
    _, exact = step(model, inputs)

    def autocast_step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    theirs = autocast_step()
    with fpdt(model, piece_size=3):
        ours = autocast_step()
    assert error(ours, exact) <= 2 * error(theirs, exact)


def test_gradients_accumulate_over_micro_batches():
    model = tiny()

    def two_steps():
        model.zero_grad()
        for seed in (1, 2):
            model(**batch(seed=seed)).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = two_steps()
    with fpdt(model):
        assert error(two_steps(), expected) <= FP32


def test_evaluation_and_logits_without_labels():
    model, inputs = tiny(), batch()
    ids = inputs["input_ids"]
    with torch.no_grad():
        loss, logits = model(**inputs).loss, model(input_ids=ids).logits
        with fpdt(model):
            torch.testing.assert_close(model(**inputs).loss, loss, rtol=FP32, atol=0)
            torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5)
