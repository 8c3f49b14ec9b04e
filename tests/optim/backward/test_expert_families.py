"""Every family of transformers' experts interface, and Llama-4: loss and gradients as autograd has them."""

import copy

import pytest
import torch
from expert_families import FAMILIES, tiny
from expert_modules import links_of, patch, projected
from transformers import Llama4ForCausalLM, Llama4TextConfig

from hmt_deepspeed.optim.hmt import HMT

WIDTH = 4
# fp32's own distance from fp64 is up to 6.6e-6 in these: from the experts of one layer to those above.
MAGNIFYING = ("gemma4", "diffusion_gemma")
# Shared bases on the side of the model's width, own ones on the input side.
BASES = {"shared": ("width", False), "own": ("input", True)}


def distance(found, wanted):
    """Of two tensors, relative to the second's norm."""
    if not wanted.any():
        return found.abs().max().item()
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def loss_of(model):
    tokens = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    out = model(input_ids=tokens, use_cache=False)
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return (out * weights).mean()


def gradients_of(model):
    """Loss, and gradients by parameter name."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(model, allowed=1e-6):
    """Loss and projected gradients as close to autograd's as is allowed. Others are within 2e-5: some models magnify the rounding
    of what comes from above, as decays of states do."""
    wanted, whole = gradients_of(copy.deepcopy(model))
    for how in BASES.values():
        links = patch(model, links_of(model, *how, WIDTH))
        loss, gradients = gradients_of(model)
        assert distance(loss, wanted) <= allowed
        for name, gradient in whole.items():
            if name not in links:
                assert gradient is None or distance(gradients[name], gradient) <= 2e-5, name
                continue
            assert gradients[name] is None
            found = links[name].take()
            if gradient is None:  # of images' experts, which have no tokens here
                assert found is None
            else:
                assert distance(found, projected(links[name], gradient)) <= allowed, name
    return links


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family(family):
    model, modules = tiny(family)
    links = check(model, 1e-5 if family in MAGNIFYING else 1e-6)
    assert len(links) == 2 * len(modules)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_trained(family):
    model, modules = tiny(family)
    optimizer = HMT(model, lr=1e-3, rank=8, update_interval=4)
    rows = {row.name: row.rank for row in optimizer.describe()}
    in_low_rank = {name.rpartition(".")[0] for name, rank in rows.items() if rank is not None}
    assert in_low_rank >= modules.keys()
    losses = []
    for _ in range(6):
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_llama4():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 16}
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=64,
        num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    assert len(check(Llama4ForCausalLM(config))) == 4


def called(module, dtype, x, index, weights):
    """Output and gradients of a module in a dtype."""
    x, weights = (t.detach().bfloat16().to(dtype).requires_grad_() for t in (x, weights))
    y = module(x, index, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype))
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_each_family(family):
    """Gradients of their inputs, routing weights and parameters: fp32 within 1e-6 of autograd's; bf16 within twice the
    error of autograd in bf16, against fp32 on the same numbers."""
    model, modules = tiny(family)
    calls, hooks = {}, []
    for module in modules.values():
        hook = module.register_forward_pre_hook(lambda *call: calls.update([call]))
        hooks.append(hook)
    loss_of(model)
    for hook in hooks:
        hook.remove()
    for module, given in calls.items():
        module.config._experts_implementation = "grouped_mm"
        module.bfloat16()
        theirs = called(copy.deepcopy(module), torch.bfloat16, *given)
        module.float()
        exact = called(copy.deepcopy(module), torch.float32, *given)
        for basis, how in BASES.items():
            links = links_of(module, *how, WIDTH)
            wanted = exact | {k: projected(link, exact[k]) for k, link in links.items()}
            other = {k: projected(link, theirs[k].float()) for k, link in links.items()}
            for dtype in (torch.float32, torch.bfloat16):
                for link in links.values():
                    link.projection = link.projection.to(dtype)
                copied = copy.deepcopy(module).to(dtype)
                patch(copied, links)
                found = called(copied, dtype, *given) | {k: x.take() for k, x in links.items()}
                for key, value in found.items():
                    allowed = 1e-6
                    if dtype == torch.bfloat16:
                        allowed = 2 * distance((theirs | other)[key], wanted[key])
                    assert distance(value, wanted[key]) <= allowed, f"{basis} {dtype} {key}"
