"""What a recorded function does otherwise in a later call is noticed, and computed."""

import pytest
import torch
from backends import (
    Mlp,
    Stack,
    assert_equal,
    backend_on,
    batch,
    poison,  # noqa: F401
    stack,
    stack_gradients,
)
from tapes import CHECKED, tapes, usable
from torch import nn

pytestmark = pytest.mark.usefixtures("poison")


class Changing(Mlp):
    """Does something else in a later call, as a flag says."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 32)
        self.flag = ""

    def forward(self, x):
        hidden = self.fc1(x)
        if self.flag == "other operation":
            hidden = torch.sin(hidden)
        elif self.flag == "other module":
            hidden = self.other(x)
        elif self.flag == "drawn":
            hidden = nn.functional.dropout(hidden, 0.3)
        elif self.flag == "written":
            hidden.mul_(2)
        elif self.flag == "set":
            hidden = hidden.clone()
            hidden.data = hidden.data.sin()
        elif self.flag == "no gradient":
            with torch.no_grad():
                hidden = self.fc1(x)
        hidden = torch.tanh(hidden) * (3.0 if self.flag == "other constant" else 2.0)
        parts = [hidden[..., :16], hidden[..., 16:]]
        if self.flag == "other order":
            parts.reverse()
        with torch.autocast("cpu", enabled=self.flag == "autocast"):
            out = self.fc2(torch.cat(parts, dim=-1)).float()
        if self.flag == "other input":
            return x + torch.tanh(out) + torch.tanh(hidden[..., :16])
        if self.flag == "shorter":
            return out
        return x + torch.tanh(out)


KINDS = [
    "other operation",
    "other module",
    "other constant",
    "other input",
    "shorter",
    "other order",
    "drawn",
    "written",
    "set",
    "no gradient",
    "autocast",
]


# What is held elsewhere or in other bits is asked for by kinds in turns: whether they are noticed does not depend on it.
CHANGES = [(choice, kind) for choice in ("keep", "recompute") for kind in KINDS]
CHANGES += [(("swap_host", "int8")[place % 2], kind) for place, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("choice", "kind"), CHANGES)
def test_a_function_that_changes_is_noticed(kind, choice):
    model = Stack(Changing(), Changing())
    components = {"fc1": "mlp_intermediate", "other": "mlp_intermediate"}
    with backend_on(model, choice, components=components) as backend:
        for flag in ("", "", "", kind, "", kind, kind, kind, kind, "", ""):
            for layer in model.layers:
                layer.flag = flag
            found = stack_gradients(model)
            backend.uninstall()
            expected = stack_gradients(model)
            backend.install()
            if choice == "int8":
                errors = [(found[n] - e).norm() / e.norm() for n, e in expected.items()]
                assert max(errors) < 0.05  # memory that holds nothing is an error of NaN
            else:
                assert_equal(found, expected)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_needs_no_gradient_any_more_is_noticed(frozen):
    """A square linear saves its input or its weight: as many tensors of the same shape."""
    layer = Mlp()
    layer.fc1 = nn.Linear(16, 16)
    layer.fc2 = nn.Linear(16, 16)
    model = Stack(layer)
    x = batch(16, 16)

    def step():
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        named = {"x": x, **dict(model.named_parameters())}
        return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}

    thawed = {"x": x, "weight": layer.fc1.weight, "bias": layer.fc1.bias}
    with backend_on(model) as backend:
        for frees in [None, None, None, frozen, frozen, None, frozen, frozen, frozen, None]:
            for name, tensor in thawed.items():
                tensor.requires_grad_(name != frees)
            found = step()
            backend.uninstall()
            assert_equal(found, step())
            backend.install()


def test_another_kernel_of_attention_is_noticed():
    class Attention(Mlp):
        def forward(self, x):
            q = self.fc1(x)
            return x + nn.functional.scaled_dot_product_attention(q, q, q)[..., :16]

    model = Stack(Attention())
    x = batch(1, 2, 8, 16)
    with backend_on(model, "recompute", exits=()) as backend:
        for enabled in (True, True, True, False, True, False, False, False, True):
            torch.backends.cuda.enable_flash_sdp(enabled)
            try:
                found = stack_gradients(model, x)
                backend.uninstall()
                assert_equal(found, stack_gradients(model, x))
                backend.install()
            finally:
                torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("kind", ["other operation", "other constant"])
def test_what_changes_for_good_is_recorded_anew(kind):
    model = Stack(Changing(), Changing())
    with backend_on(model) as backend:
        for flag in ["", "", "", *[kind] * 5]:
            for layer in model.layers:
                layer.flag = flag
            stack_gradients(model)
        assert usable(backend) == [True, True]
        assert all(tape.misses == 0 for tape in tapes(backend))


def test_another_shape_is_another_tape():
    model = stack()
    with backend_on(model) as backend:
        for _ in range(4):
            for shape in ((4, 6, 16), (2, 3, 16)):
                x = batch(*shape)
                backend.uninstall()
                expected = stack_gradients(model, x)
                backend.install()
                assert_equal(stack_gradients(model, x), expected)
        assert usable(backend) == [True] * 4


def test_shapes_that_never_come_again_are_forgotten():
    model = stack(count=1)
    with backend_on(model) as backend:
        for length in range(1, 30):
            model(batch(1, length, 16)).sum().backward()
        assert len(tapes(backend)) == 16


def test_another_weight_of_another_dtype():
    model = stack(count=1)
    with backend_on(model) as backend:
        for dtype in [torch.float32] * 3 + [torch.float64] * 4:
            model.to(dtype)
            x = batch().to(dtype)
            found = stack_gradients(model, x)
            backend.uninstall()
            assert_equal(found, stack_gradients(model, x))
            backend.install()


def test_weights_that_changed_between_forward_and_backward_are_those_of_backward():
    """As where the function is computed again."""
    results = []
    for calls in (1, CHECKED):
        model = stack(count=1)
        with backend_on(model, "recompute"):
            for _ in range(calls):
                stack_gradients(model)
            model.zero_grad()
            loss = model(batch()).square().sum()
            model.layers[0].fc1.weight.data.mul_(2)
            loss.backward()
            results.append({n: p.grad for n, p in model.named_parameters()})
    assert_equal(*results)
