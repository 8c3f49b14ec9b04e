"""Functions that are recorded once: what follows is the same in every bit, and cheap; what differs is noticed."""

import sys

import pytest
import torch
from backends import (
    CHOICES,
    KEEP,
    PAPER_KEPT,
    RECOMPUTE,
    Mlp,
    Stack,
    assert_equal,
    backend_on,
    batch,
    gradients,
    installed,
    poison,  # noqa: F401
    stack,
    stack_gradients,
)
from families import tiny, tokens
from tapes import CHECKED, RECORDED, usable
from torch import nn
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.usefixtures("poison")


class Counting(nn.Module):
    """Counts its calls, of which a tape makes none in backward. Not an attribute of the module: that would be a
    state that changes."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(1)
        return torch.tanh(x)


@pytest.mark.parametrize("choice", CHOICES)
def test_backward_runs_the_tape_and_not_the_function(choice):
    model = stack(between=Counting)
    expected = stack_gradients(model)
    with backend_on(model, choice) as backend:
        for calls in range(1, 6):
            for layer in model.layers:
                layer.between.log.clear()
            backend.begin_step()
            assert_equal(stack_gradients(model), expected)
            runs = 1 if calls > RECORDED else 2
            assert [len(layer.between.log) for layer in model.layers] == [runs, runs]
            report = backend.report()
            assert report.hits["layers.1"] == {"mlp_intermediate": 1, "exit": 1}
            assert report.rerun == ({"mlp_intermediate": 2} if choice == "recompute" else {})
            assert report.unread == {}
        assert backend.held_bytes == 0


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE, PAPER_KEPT, {}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
def test_models_compute_the_same_in_every_step(family, policy):
    """Stochastic rounding too: the keys of a call are those of an ordinary one."""
    model = tiny(family)
    found = []
    for _ in range(2):
        with installed(model, policy, seed=5) as backend:
            if found:
                backend._tapes.find = lambda *_: None
            found.append([gradients(model) for _ in range(CHECKED + 1)])
            if len(found) == 1:
                assert any(usable(backend))
    for taped, ordinary in zip(*found, strict=True):
        assert_equal(taped, ordinary)


# -- graphs and calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_backward_twice_and_several_forwards_before_it(choice):
    model = stack()
    expected = stack_gradients(model)
    with backend_on(model, choice) as backend:
        for _ in range(CHECKED):
            stack_gradients(model)
        model.zero_grad()
        x = batch().requires_grad_()
        losses = [model(x).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close(x.grad, 4 * expected["x"])
        del losses, loss
        assert backend.held_bytes == 0


def test_the_same_layer_twice_and_in_anothers_checkpoint():
    layer = Mlp()
    model = Stack(layer, layer)
    expected = stack_gradients(model)
    checkpointed = lambda x: torch.utils.checkpoint.checkpoint(  # noqa: E731
        model, x, use_reentrant=False
    )
    with backend_on(model, "keep") as backend:
        for run in (None, None, None, checkpointed, checkpointed, None):
            assert_equal(stack_gradients(model, run=run), expected)
        assert usable(backend) == [True]


def test_gradients_of_gradients():
    model = stack(count=2)

    def second():
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with backend_on(model, "keep"):
        for _ in range(CHECKED + 1):
            assert torch.equal(second(), expected)


def test_tensors_without_values():
    """Of which operations return devices and the like too; nothing is there to be compared."""
    with FakeTensorMode():
        model = stack()
        with backend_on(model) as backend:
            for _ in range(CHECKED + 1):
                model(torch.randn(4, 6, 16)).square().sum().backward()
            assert usable(backend) == [True, True]


# -- what cannot be taped -----------------------------------------------------------------------------


class Unseen(torch.autograd.Function):
    """Doubles a copy behind the dispatcher's back, as a Triton kernel that works in place does."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        out.numpy()[:] *= 2
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Raw(nn.Module):
    forward = staticmethod(lambda x: torch.tanh(Unseen.apply(x)))


def doubled(x):
    """A function of somebody's own that lets torch's modes see it as a whole, and nothing within."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(doubled, (x,), x)
    return 2 * x


class Own(nn.Module):
    forward = staticmethod(lambda x: torch.tanh(doubled(x)))


class Hidden(torch.autograd.Function):
    """Its operation is called by no function of torch."""

    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunction():
            return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Disabled(nn.Module):
    forward = staticmethod(lambda x: torch.tanh(Hidden.apply(x)))


@pytest.mark.parametrize(
    "between",
    [
        Raw,
        Own,
        Disabled,
        lambda: nn.Dropout(0.3),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Threshold(0.1, 0.0),
    ],
    ids=["unseen", "own", "disabled", "draws", "writes", "ordinary"],
)
def test_what_a_tape_cannot_hold_is_computed_again(between, request):
    model = stack(between=between)
    expected = stack_gradients(model)
    with backend_on(model, "keep") as backend:
        for _ in range(5):
            assert_equal(stack_gradients(model), expected)
        is_ordinary = "ordinary" in request.node.name
        assert usable(backend) == [is_ordinary] * 2


def test_weights_that_come_and_go_are_left_to_the_function():
    """Those of ZeRO-3, which its hooks gather for the function."""
    model = stack(count=1)
    model.layers[0].fc1.weight.ds_id = 0
    expected = stack_gradients(model)
    with backend_on(model, "recompute") as backend:
        for _ in range(4):
            assert_equal(stack_gradients(model), expected)
        assert usable(backend) == [False]


# -- what it costs ------------------------------------------------------------------------------------


def python_calls(run):
    """Functions called, of Python and of C."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_layer(policy):
    """Those of a step, which the backend adds for each layer."""
    added = []
    for layers in (2, 4):
        model = tiny("llama", num_hidden_layers=layers)
        rows = tokens()

        def step(model=model, rows=rows):
            model(input_ids=rows, labels=rows).loss.backward()

        step()
        plain = python_calls(step)
        with installed(model, policy):
            for _ in range(CHECKED):
                step()
            added.append(python_calls(step) - plain)
    return (added[1] - added[0]) / 2


@pytest.mark.parametrize(("policy", "most"), [(KEEP, 1600), (RECOMPUTE, 1500)], ids=["keep", "re"])
def test_calls_of_a_layer_and_micro_batch(policy, most):
    assert calls_of_a_layer(policy) <= most
