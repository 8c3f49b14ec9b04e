"""The linear that saves the codes of its input: what is saved, and the gradients that come of it."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from hmt_deepspeed.activations.codecs import Fp8, Int8
from hmt_deepspeed.activations.linear import EncodedInputs, patch_linear, unpatch_linear
from hmt_deepspeed.config.codecs import block_bytes

BLOCK = 32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODECS = pytest.mark.parametrize("codec_type", [Int8, Fp8], ids=["int8", "fp8"])


def make(codec_type=Int8, **options):
    torch.manual_seed(0)
    module = nn.Linear(24, 20, **options)
    keys = itertools.count()
    inputs = EncodedInputs(codec_type(BLOCK), lambda: next(keys))
    patch_linear(module, inputs, "lm_head")
    return module, inputs


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(module, x, seed=9):
    """Output and gradients of x, weight and bias, each in the dtype that autograd gives them."""
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=seed))
    return y, leaf.grad, *(p.grad for p in module.parameters())


def plain(module):
    clone = copy.deepcopy(module)
    unpatch_linear(clone)
    vars(clone).pop("forward", None)
    return clone


def decoded(codec, x, key=0):
    return codec.encode(x, tuple(range(x.dim() - 1)), key).decode()


@CODECS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 50, 24), (70, 24), (24,), (2, 3, 10, 24), (0, 24)], ids=str)
def test_gradients(codec_type, dtype, bias, shape):
    module, inputs = make(codec_type, bias=bias, dtype=dtype)
    x = randn(*shape, dtype=dtype)
    found, exact = gradients(module, x), gradients(plain(module), x)
    assert [g.dtype for g in found] == [dtype] * len(exact)
    for index, (one, other) in enumerate(zip(found, exact, strict=True)):
        if index != 2:  # all but the weight's do not depend on X
            assert torch.equal(one, other)
    x = decoded(inputs.codec, x)
    delta = randn(*found[0].shape, dtype=dtype, seed=9).reshape(-1, 20).double()
    expected = delta.t() @ x.reshape(-1, 24).double()
    terms = delta.abs().t() @ x.reshape(-1, 24).double().abs()
    # X is rounded to dtype here and not there, and the result to dtype in both; sums are fp32.
    rounding = torch.finfo(dtype).eps
    assert ((found[2] - expected).abs() <= (rounding + 2.0**-20) * terms).all()


@CODECS
def test_what_is_saved(codec_type):
    """The codes instead of the input, and nothing after backward."""
    module, _ = make(codec_type, bias=False, dtype=torch.bfloat16)
    saved = []
    x = randn(100, 24, dtype=torch.bfloat16)
    original = StorageWeakRef(x.untyped_storage())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = module(x)
    del x
    assert original.expired()
    own = [t for t in saved if t.data_ptr() != module.weight.data_ptr()]
    assert sum(t.nbytes for t in own) == block_bytes(100, 24, 2, BLOCK)
    codes = StorageWeakRef(own[0].untyped_storage())
    saved.clear()
    own.clear()
    y.sum().backward(retain_graph=True)
    assert not codes.expired()
    first = module.weight.grad.clone()
    y.sum().backward()
    assert torch.equal(module.weight.grad, 2 * first)
    assert codes.expired()  # y and its graph are still here
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_an_abandoned_graph_frees_the_codes():
    module, inputs = make()
    y = module(randn(100, 24))
    codes = StorageWeakRef(inputs._last._codes().untyped_storage())
    gc.disable()
    try:
        del y
        assert codes.expired()
    finally:
        gc.enable()


def test_nothing_is_encoded_without_need():
    module, inputs = make()
    x = randn(10, 24)
    with torch.no_grad():
        assert torch.equal(module(x), plain(module)(x))
    with torch.inference_mode():
        module(x)
    module.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(10, 20) @ module.weight)
    assert module.bias.grad is not None
    assert inputs.num_encoded == 0


def test_an_input_without_gradient_and_gradients_of_some():
    module, _ = make()
    module(randn(10, 24)).sum().backward()
    assert module.weight.grad is not None
    leaf = randn(10, 24).requires_grad_()
    (dx,) = torch.autograd.grad(module(leaf).sum(), leaf)
    assert torch.equal(dx, torch.ones(10, 20) @ module.weight)


def test_one_input_is_encoded_once():
    module, inputs = make()
    other, _ = make()
    unpatch_linear(other)
    patch_linear(other, inputs, "other")
    x = randn(2, 10, 24)
    y = module(x), module(x[:, :]), other(x.view(2, 10, 24)), module(x.detach())
    assert inputs.num_encoded == 1
    codes = inputs._last._codes()
    y[0].sum().backward()  # the others' are still there
    assert codes.any()
    sum(one.sum() for one in y[1:]).backward()
    assert module.weight.grad.isfinite().all()


@pytest.mark.parametrize("change", ["values", "view", "in place", "memory", "graph gone"])
def test_another_input_is_encoded_anew(change):
    module, inputs = make()
    x = randn(20, 24)
    y = module(x[:10])
    if change == "values":
        z = randn(20, 24, seed=1)[:10]
    elif change == "view":
        z = x[10:]
    elif change == "in place":
        z = x.mul_(3)[:10]
    elif change == "memory":  # freed, and perhaps taken again
        del x
        z = randn(20, 24, seed=1)[:10]
    else:
        del y
        z = x[:10]
    y = module(z)
    assert inputs.num_encoded == 2
    module.zero_grad()
    delta = randn(10, 20, seed=3)
    y.backward(delta)
    exact = delta.t() @ z
    assert (module.weight.grad - exact).norm() < 0.02 * exact.norm()


def test_encodings_of_one_input_differ_from_step_to_step():
    module, _ = make()
    x = randn(64, 24)
    first, second = (gradients(module, x)[2].clone() for _ in range(2))
    exact = gradients(plain(module), x)[2]
    assert not torch.equal(first, second)
    steps = torch.stack([gradients(module, x)[2].clone() for _ in range(64)])
    ratio = (first - exact).norm() / (steps.mean(0) - exact).norm()
    assert ratio > 5  # 8 for independent errors


def test_tied_weights():
    torch.manual_seed(0)
    embedding, (head, _) = nn.Embedding(20, 24), make(bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(0, 20, (2, 30))

    def gradient():
        embedding.zero_grad()
        loss = F.cross_entropy(head(embedding(tokens)).flatten(0, 1), tokens.flatten())
        loss.backward()
        return embedding.weight.grad.clone()

    found = gradient()
    unpatch_linear(head)
    exact = gradient()
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(inside):
    module, _ = make()
    results = []
    for linear in (module, plain(module)):
        leaf = randn(64, 24).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(leaf)
            if inside:
                y.backward(randn(*y.shape, dtype=y.dtype))
        if not inside:
            y.backward(randn(*y.shape, dtype=y.dtype))
        results.append((y, leaf.grad, linear.weight.grad, linear.bias.grad))
    for found, exact in zip(*results, strict=True):
        assert found.dtype == exact.dtype
        assert (found.double() - exact.double()).norm() < 0.01 * exact.double().norm()
    assert torch.equal(results[0][0], results[1][0])


def test_the_parameter_itself_is_saved():
    """What ZeRO-3 does: the weight's memory is given up after forward and gathered again for backward."""
    module, _ = make(bias=False)
    leaf = randn(10, 24).requires_grad_()
    weight = module.weight.detach().clone()
    memory = StorageWeakRef(module.weight.untyped_storage())
    y = module(leaf)
    module.weight.data = torch.empty(0)
    assert memory.expired()
    module.weight.data = weight
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(10, 20) @ weight)
    assert module.weight.grad.shape == weight.shape


def test_a_weight_changed_before_backward_is_noticed():
    module, _ = make()
    y = module(randn(10, 24).requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_infinite_input_reaches_the_gradient():
    module, _ = make()
    x = randn(64, 24)
    x[3, 5] = torch.inf
    module(x).nan_to_num().sum().backward()
    assert not module.weight.grad.isfinite()[:, 5].any()


def test_patching_is_undone_and_not_copied():
    module, inputs = make()
    clone = copy.deepcopy(module)
    clone(randn(4, 24)).sum().backward()
    assert inputs.num_encoded == 0
    unpatch_linear(module)
    unpatch_linear(module)
    assert "forward" not in vars(module)
    module(randn(4, 24)).sum().backward()
    assert inputs.num_encoded == 0


def test_refuses():
    module, inputs = make()
    with pytest.raises(ValueError, match=r"lm_head \(Linear\) has a forward of its own"):
        patch_linear(module, inputs, "lm_head")

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(ValueError, match="Own"):
        patch_linear(Own(3, 3), inputs, "own")
    module.double()
    with pytest.raises(ValueError, match="float64"):
        module(randn(4, 24).double())
