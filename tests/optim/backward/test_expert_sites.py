"""Which weights are known as experts, and what users do to the modules of those that have projected backwards."""

import copy
from typing import ClassVar

import pytest
import torch
from expert_modules import E, H, experts, inputs, links_of, patch, routes
from torch import nn
from torch.func import functional_call, grad
from torch.testing import assert_close
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from hmt_deepspeed.optim.backward.experts import expert_sites, unpatch_experts
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear
from hmt_deepspeed.optim.backward.zero_grad import Accumulated, patch_zero_grad, unpatch_zero_grad


class Mixed(nn.Module):
    """What a user's own code reads."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(E, 4, H))
        self.positions = nn.Parameter(torch.randn(1, 4, H))

    def forward(self, x):
        return torch.einsum("th,emh->tem", x, self.maps)


def reason_of(model, name):
    site = expert_sites(model)[name]
    return site.reason


def test_weights_of_other_modules_have_a_reason():
    model = nn.ModuleDict({"mixed": Mixed(), "conv": nn.Conv1d(4, 4, 3)})
    assert list(expert_sites(model)) == ["mixed.maps"]
    site = expert_sites(model)["mixed.maps"]
    assert site.role is None
    assert site.reason == "belongs to a Mixed, whose forward is not known to be that of experts"


def test_roles_and_orientation_of_the_interface():
    module = experts(is_transposed=True, has_gate=False)
    found = {k: (s.role, s.is_transposed, s.reason) for k, s in expert_sites(module).items()}
    assert found == {"up_proj": ("up", True, ""), "down_proj": ("down", True, "")}


def test_experts_that_cannot_be_known_have_a_reason():
    replaced = experts()
    replaced.forward = lambda *given: None
    assert "whose forward has been replaced" in reason_of(replaced, "down_proj")
    overridden = experts()
    kind = type(overridden)
    overridden.__class__ = type("Louder", (kind,), {"forward": lambda self, *x: 2 * x[0]})
    assert "Louder, whose forward is not known" in reason_of(overridden, "down_proj")
    shared = nn.ModuleList([experts(), experts()])
    shared[1].down_proj = shared[0].down_proj
    assert reason_of(shared, "0.down_proj") == "is also 1.down_proj (tied)"
    assert reason_of(shared, "0.gate_up_proj") == ""
    more = experts()
    more.extra = nn.Parameter(torch.randn(E, 3, 3))
    assert reason_of(more, "extra") == "is not what Experts computes its experts by"


def test_experts_of_another_interface_are_left_alone():
    """Whose functions of transformers' names may compute something else, as those of FP8 weights do."""

    class Own(ExpertsInterface):
        _global_mapping: ClassVar = {}

    module = experts(experts_interface=Own())
    assert "Experts, whose forward is not known" in reason_of(module, "down_proj")


def test_an_experts_implementation_of_the_user_s_is_left_alone():
    def doubled(self, x, index, weights):
        return 2 * x + self.down_proj.sum()

    ALL_EXPERTS_FUNCTIONS.register("doubled", doubled)
    module = experts(implementation="doubled")
    assert "implementation is 'doubled', not transformers' own" in reason_of(module, "down_proj")
    module = experts()
    links = patch(module, links_of(module, "input", False))
    module.config._experts_implementation = "doubled"  # chosen later
    x = inputs(3)
    module(x, *routes(3, 2)).sum().backward()
    assert_close(x.grad, torch.full_like(x, 2))
    assert all(link.take() is None for link in links.values())


# -- what users do ------------------------------------------------------------------------------


def test_without_grad_and_of_frozen_weights_it_is_the_ordinary_forward():
    module, x = experts(), inputs(11)
    index, weights = routes(11, 2)
    expected = copy.deepcopy(module)(x, index, weights)
    links = patch(module, links_of(module, "input", False))
    with torch.no_grad():
        assert torch.equal(module(x, index, weights), expected)
    module.requires_grad_(False)
    module(x, index, weights).sum().backward()
    assert all(link.take() is None for link in links.values())
    assert x.grad is not None


def test_transforms_and_other_weights_compute_what_the_class_does():
    module, x = experts(), inputs(11)
    index, weights = routes(11, 2)
    twin, own = copy.deepcopy(module), dict(module.named_parameters())
    links = patch(module, links_of(module, "input", False))

    def loss(model, parameters):
        return functional_call(model, parameters, (x, index, weights)).square().sum()

    expected = grad(lambda p: loss(twin, p))({name: p.detach() for name, p in own.items()})
    found = grad(lambda p: loss(module, p))({name: p.detach() for name, p in own.items()})
    assert_close(found, expected)
    others = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    loss(module, others).backward()
    assert_close({name: p.grad for name, p in others.items()}, expected)
    assert all(link.take() is None for link in links.values())


def test_copies_and_unpatched_modules_are_ordinary():
    module, x = experts(), inputs(11)
    index, weights = routes(11, 2)
    links = patch(module, links_of(module, "input", False))
    twin = copy.deepcopy(module)
    twin(x, index, weights).sum().backward()
    assert twin.down_proj.grad is not None
    assert all(not site.reason for site in expert_sites(twin).values())  # another may train it
    unpatch_experts(module, ProjectedLinear("another's"))
    module(x, index, weights).sum().backward()
    assert module.down_proj.grad is None
    assert links["down_proj"].take() is not None
    unpatch_experts(module, links["gate_up_proj"])
    module(x, index, weights).sum().backward()
    assert_close(module.down_proj.grad, twin.down_proj.grad)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm", "eager"])
def test_a_window_without_a_projection_computes_by_what_the_user_chose(implementation):
    module, x = experts(torch.float32, implementation), inputs(11, dtype=torch.float32)
    index, weights = routes(11, 2, dtype=torch.float32)
    links = patch(module, links_of(module, "input", False))
    for link in links.values():
        link.projection = None
    if implementation == "eager":
        with pytest.raises(NotImplementedError):  # the class's own forward
            module(x, index, weights)
        return
    module(x, index, weights).sum().backward()
    assert module.down_proj.grad is not None
    assert all(link.take() is None for link in links.values())


def test_zero_grad_drops_both_projected_gradients_of_a_module():
    module = experts()
    links = patch(module, links_of(module, "input", False))
    model = nn.Sequential(module)
    whole = Accumulated(list(links.values()))
    holders = patch_zero_grad(model, whole, [(module, link) for link in links.values()])
    for holder in (model, module):
        module(inputs(11), *routes(11, 2)).sum().backward()
        holder.zero_grad()
        assert all(link.pending is None for link in links.values())
    unpatch_zero_grad(holders, whole)
