"""What a layer in chunks keeps, how often hooks see it, and that its submodules do the work."""

import pytest
import torch
from tiny import batch, error, fpdt, step, tiny
from torch import nn

from hmt_deepspeed.optim.backward.linear import patch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs


def test_each_gradient_hook_fires_once_per_backward():
    """ZeRO reduces a parameter when its hook fires: parts must not reach it."""
    model, inputs = tiny(), batch()
    fired = {}

    def note(name):
        return lambda parameter: fired.update({name: fired.get(name, 0) + 1})

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(note(name))
    with fpdt(model, chunk_size=5, piece_size=2):
        model(**inputs).loss.backward()
    assert fired == {name: 1 for name, _ in model.named_parameters()}


def test_only_the_layers_input_survives_a_layer():
    """By saved-tensor hooks, which is also how a backend would swap it."""
    model, inputs = tiny(num_hidden_layers=3), batch()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with fpdt(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        inside = []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda *_: inside.append(len(saved)))
        loss = model(**inputs).loss
    first, second, third = inside
    for begin, end in ((first, second), (second, third)):
        x, *rotary = saved[begin:end]
        assert x.shape == (2, 37, 32)
        assert [t.shape for t in rotary] == [(1, 37, 8)] * 2
        assert rotary[0] is saved[first + 1], "cos and sin are shared by all layers"
    loss.backward()


def test_submodules_are_called_as_modules():
    """Hooks of ZeRO-3 and of LoRA hang on them, in forward and when backward computes again."""
    model, inputs = tiny(), batch(rows=1)
    calls = {}
    for name, module in model.model.layers.named_modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda m, a, out, name=name: calls.setdefault(name, []).append(
                    torch.is_grad_enabled()
                )
            )
    with fpdt(model, chunk_size=20, piece_size=20):
        model(**inputs).loss.backward()
    before = [False] * 2 + [False] * 2 + [True] * 2  # forward, again in backward, then with grad
    after = [False] * 2 + [True] * 2
    for name, found in calls.items():
        expected = (
            before
            if name.split(".")[-1] in ("input_layernorm", "q_proj", "k_proj", "v_proj")
            else after
        )
        assert found == expected, name


def projected(model):
    """Linears of the layers, patched, and their sites, by name."""
    generator = torch.Generator().manual_seed(3)
    linears = {n: m for n, m in model.model.layers.named_modules() if isinstance(m, nn.Linear)}
    sites = {name: ProjectedLinear(name) for name in linears}
    shared = SharedInputs(sites.values())
    for name, linear in linears.items():
        sites[name].projection = torch.randn(linear.in_features, 3, generator=generator)
        patch_linear(linear, sites[name], shared)
    shared.lay_out()
    return linears, sites


def test_a_projected_linear_adds_up_its_products_over_chunks():
    """``D^T (X B)`` of all chunks is that of the whole sequence, and no weight gradient is formed."""
    model, inputs = tiny(), batch()
    _, whole = step(model, inputs)
    linears, sites = projected(model)
    fired = []
    for name, linear in linears.items():
        linear.weight.register_post_accumulate_grad_hook(
            lambda p, name=name: fired.append((name, p.grad))
        )
    with fpdt(model, chunk_size=8, piece_size=3):
        _, found = step(model, inputs)
    products = {name: site.take() for name, site in sites.items()}
    expected = {n: whole[f"model.layers.{n}.weight"] @ s.projection for n, s in sites.items()}
    assert error(products, expected) <= 1e-5
    assert sorted(name for name, _ in fired) == sorted(linears), "each hook fires once"
    assert all(grad is None for _, grad in fired)
    others = {name: grad for name, grad in whole.items() if name in found}
    assert len(others) == len(whole) - len(linears)
    assert error(found, others) <= 1e-5


def test_gradients_of_inputs_alone_leave_nothing_of_the_weights():
    """A layer's backward runs backwards of its own: what it was not asked for it must not ask for."""
    model, inputs = tiny(), batch()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    linears, sites = projected(model)
    wanted = "1.mlp.down_proj"
    with fpdt(model, chunk_size=8, piece_size=3):
        (found,) = torch.autograd.grad(model(inputs_embeds=embedded, **inputs).loss, embedded)
        assert [name for name, site in sites.items() if site.take() is not None] == []
        model(inputs_embeds=embedded, **inputs).loss.backward(inputs=[linears[wanted].weight])
        assert [name for name, site in sites.items() if site.take() is not None] == [wanted]
        model(inputs_embeds=embedded, **inputs).loss.backward()
    assert all(site.take() is not None for site in sites.values())
    torch.testing.assert_close(found, embedded.grad)


def test_autograd_grad_of_a_projected_weight_returns_its_gradient():
    """Backward computes the layer again and knows by then what was asked for."""
    model, inputs = tiny(), batch()
    _, whole = step(model, inputs)
    linears, sites = projected(model)
    asked = ["0.self_attn.q_proj", "1.mlp.down_proj"]
    with fpdt(model, chunk_size=8, piece_size=3):
        weights = [linears[name].weight for name in asked]
        found = torch.autograd.grad(model(**inputs).loss, weights)
    expected = {name: whole[f"model.layers.{name}.weight"] for name in asked}
    assert error(dict(zip(asked, found, strict=True)), expected) <= 1e-5
    assert [name for name, site in sites.items() if site.take() is not None] == []


def test_gradients_of_gradients_are_refused():
    model, inputs = tiny(), batch()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()

    def loss(embedded):
        return model(inputs_embeds=embedded, **inputs).loss

    with fpdt(model):
        with pytest.raises(ValueError, match=r"create_graph=True.*remove hmt\.fpdt"):
            torch.autograd.grad(loss(embedded), embedded, create_graph=True)
        with pytest.raises(ValueError, match=r"torch\.func.*remove hmt\.fpdt"):
            torch.func.grad(loss)(embedded)


def test_weight_gradients_are_summed_in_fp32():
    """In bf16 a sum of 37 pieces of one token would round each time."""
    model, inputs = tiny(dtype=torch.bfloat16), batch(rows=1)
    name = "model.layers.1.mlp.down_proj.weight"
    with fpdt(model, chunk_size=64, piece_size=64):
        whole = step(model, inputs)[1][name].float()
    with fpdt(model, chunk_size=64, piece_size=1):
        pieces = step(model, inputs)[1][name].float()
    # The last layer's MLP computes the same for a token alone, up to the product's own rounding.
    assert (pieces - whole).norm() <= 2**-8 * whole.norm()


def test_a_layer_whose_input_was_written_to_is_refused():
    """As any other function's saved input, by its version."""
    model, inputs = tiny(), batch()
    kept = []
    model.model.layers[1].register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    with fpdt(model):
        loss = model(**inputs).loss
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
