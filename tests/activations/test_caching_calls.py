"""Traps of graphs, threads, nested calls and calls without a graph, each on the smallest layer that has it."""

import copy
import gc
import threading
import types

import pytest
import torch
from backends import (
    CHOICES,
    Mlp,
    Stack,
    assert_equal,
    attribution_of,
    backend_on,
    batch,
    host_store,
    installed,
    make_backend,
    poison,  # noqa: F401
    stack,
    stack_gradients,
)
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

pytestmark = pytest.mark.usefixtures("poison")


# -- graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [*CHOICES, "int8"])
def test_backward_may_run_twice(choice):
    model = stack()
    with backend_on(model, choice, store=host_store()) as backend:
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        for operation in backend._last().operations:
            held = operation.held or ()
            assert not any(part.decode().requires_grad for part in held)  # no history of a replay
        del operation, held
        once = {n: p.grad.clone() for n, p in model.named_parameters()}
        loss.backward()
        assert_equal({n: p.grad / 2 for n, p in model.named_parameters()}, once)
        del loss
        assert backend.held_bytes == 0


def test_partial_backwards_of_one_graph():
    model = stack()
    expected = stack_gradients(model)
    with backend_on(model, "keep"):
        x = batch().requires_grad_()
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, model.layers[1].fc1.weight, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert_equal(
        {"layers.1.fc1.weight": first, "x": second},
        {"layers.1.fc1.weight": expected["layers.1.fc1.weight"], "x": expected["x"]},
    )


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_outlives_its_graph(choice):
    """Without the garbage collector: no cycles hold device memory."""
    model = stack()
    store = host_store()
    gc.collect()
    gc.disable()
    try:
        with backend_on(model, choice, store=store) as backend:
            loss = model(batch().requires_grad_()).square().sum()
            assert store.pool.used_bytes > 0 if choice == "swap_host" else backend.held_bytes > 0
            del loss  # never run backward
            assert backend.held_bytes == 0
            stack_gradients(model)
            assert backend.held_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("choice", [*CHOICES, "int8"])
def test_an_exception_in_backward_leaks_nothing_and_the_next_step_is_right(choice):
    class Failing(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails and torch._C._current_graph_task_id() != -1:
                raise ArithmeticError("in the middle of a backward")
            return torch.tanh(x)

    model = stack(between=Failing)
    store = host_store()
    with backend_on(model, choice, store=store) as backend:
        expected = stack_gradients(model)
        backend.calls = 0
        model.layers[0].between.fails = True
        with pytest.raises(ArithmeticError):
            stack_gradients(model)
        model.layers[0].between.fails = False
        assert backend.held_bytes == 0
        if choice == "swap_host":
            backend._policy.input_codec("swap_host", 0).sweep()
            assert store.pool.used_bytes == 0
        backend.calls = 0  # the same noise
        assert_equal(stack_gradients(model), expected)


def test_a_forward_that_fails_is_forgotten():
    class Failing(nn.Module):
        fails = True

        def forward(self, x):
            if self.fails:
                raise ArithmeticError("in the middle of a forward")
            return torch.tanh(x)

    model = stack(between=Failing)
    with backend_on(model, "keep") as backend:
        with pytest.raises(ArithmeticError):
            model(batch())
        for layer in model.layers:
            layer.between.fails = False
        assert backend.held_bytes == 0
        found = stack_gradients(model)
        assert backend.report().rerun == {}
    assert_equal(found, stack_gradients(model))


@pytest.mark.parametrize("choice", CHOICES)
def test_backward_in_another_thread(choice):
    """As on CUDA, where autograd has threads of its own."""
    model = stack()
    expected = stack_gradients(model)
    with backend_on(model, choice) as backend:
        model.zero_grad()
        x = batch().requires_grad_()
        loss = model(x).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert backend.report().rerun == ({"mlp_intermediate": 2} if choice == "recompute" else {})
        assert torch.equal(x.grad, expected["x"])


def test_two_threads_at_once():
    model = stack(count=4)
    expected = stack_gradients(model)["x"]
    found = {}

    def work(name):
        for _ in range(5):
            x = batch().requires_grad_()
            (found[name],) = torch.autograd.grad(model(x).square().sum(), x)

    with backend_on(model, "keep") as backend:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert backend.held_bytes == 0
    assert all(torch.equal(found[name], expected) for name in range(3))


def test_a_thread_does_not_take_anothers_call_for_its_own():
    class Interrupted(nn.Module):
        other = None

        def forward(self, x):
            other, self.other = self.other, None
            if other is not None:
                other.start()
                other.join()
            return torch.tanh(x)

    model = stack(count=1, between=Interrupted)
    expected = stack_gradients(model)
    with backend_on(model, "keep") as backend:
        found = []

        def other():
            x = batch().requires_grad_()
            found.extend(torch.autograd.grad(model(x).square().sum(), x))

        model.layers[0].between.other = threading.Thread(target=other)
        assert_equal(stack_gradients(model), expected)
        assert torch.equal(found[0], expected["x"])
        assert backend.calls == 2
        assert backend.report().rerun == {}


# -- calls in calls -----------------------------------------------------------------------------------


def test_one_checkpoint_of_several_layers():
    """Megatron's way; the layers' own checkpoints within it are part of it."""
    model = stack(count=3)
    expected = stack_gradients(model)
    with backend_on(model, "keep") as backend:
        found = stack_gradients(model, run=lambda x: backend.checkpoint(model.forward, x))
        assert_equal(found, expected)
        # what enters the second and third layer is computed again
        assert backend.report().rerun == {"exit": 2}


def test_layers_within_a_strangers_checkpoint():
    model = stack(count=3)
    expected = stack_gradients(model)
    with backend_on(model, "keep"):
        run = lambda x: torch_checkpoint(model, x, use_reentrant=False)  # noqa: E731
        assert_equal(stack_gradients(model, run=run), expected)
        run = lambda x: torch_checkpoint(model, x, use_reentrant=True)  # noqa: E731
        assert_equal(stack_gradients(model, run=run), expected)


def test_a_strangers_checkpoint_within_a_layer():
    class Nested(Mlp):
        def forward(self, x):
            return torch_checkpoint(super().forward, x, use_reentrant=False)

    model = Stack(Nested(), Nested())
    expected = stack_gradients(model)
    for choice in CHOICES:
        with backend_on(model, choice):
            assert_equal(stack_gradients(model), expected)


def test_a_strangers_function_is_computed_again_whole():
    model = stack()
    other = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    expected = stack_gradients(other)
    with backend_on(model) as backend:
        run = lambda x: backend.checkpoint(other, x, use_reentrant=True)  # noqa: E731
        assert_equal(stack_gradients(other, run=run), expected)
        report = backend.report()
    assert report.hits == {}
    assert report.held_bytes == {"": {"inputs": batch().nbytes}}


def test_the_same_layer_twice():
    layer = Mlp()
    model = Stack(layer, layer)
    expected = stack_gradients(model)
    for choice in CHOICES:
        with backend_on(model, choice):
            assert_equal(stack_gradients(model), expected)


def test_an_input_of_two_calls_is_held_once():
    model = stack()
    with backend_on(model, "swap_host") as backend:
        x = batch().requires_grad_()
        one, other = model.layers[1](x), model.layers[1](x)
        assert len({id(h) for h in backend._inputs._held.values()}) == 1
        (one.sum() + other.sum()).backward()
        found = x.grad
    with torch.no_grad():
        x.grad = None
    (2 * model.layers[1](x).sum()).backward()
    torch.testing.assert_close(found, x.grad)


def test_an_input_is_not_mistaken_for_one_before_a_write_or_at_its_address():
    model = stack(count=1)
    weight = model.layers[0].fc1.weight
    x, total, inputs = batch(), 0.0, []
    with installed(model, {"layer_input": "int8"}, attribution=attribution_of(model)):
        for number in range(4):
            total = total + model(x).square().sum()
            inputs.append(x.clone())
            if number % 2:
                x = inputs[-1] - 3  # memory that was freed, perhaps
            else:
                x.add_(1)
        (found,) = torch.autograd.grad(total, weight)
    (expected,) = torch.autograd.grad(sum(model(x).square().sum() for x in inputs), weight)
    assert (found - expected).norm() < 0.02 * expected.norm()  # taken for another: about 1


# -- no graph -----------------------------------------------------------------------------------------


def test_nothing_is_held_without_a_graph():
    model = stack()
    store = host_store()
    with backend_on(model, "swap_host", store=store) as backend:
        with torch.no_grad():
            plain = model(batch())
        model.eval()
        x = batch().requires_grad_()
        assert torch.equal(model(x), plain)
        model.train()
        assert store.engine.counters.num_out == 0
        assert (backend.calls, backend.report().total_bytes) == (0, 0)


def test_frozen_layers_hold_nothing():
    model = stack().requires_grad_(False)
    with backend_on(model, "keep") as backend:
        model(batch())
        assert "mlp_intermediate" not in backend.report().bytes_by_label


def test_torchs_options():
    model = stack()
    expected = stack_gradients(model)
    backend = make_backend(model, {"mlp_intermediate": "keep"}, attribution_of(model))
    run = lambda x: backend.checkpoint(  # noqa: E731
        model, x, early_stop=False, determinism_check="none", use_reentrant=False
    )
    assert_equal(stack_gradients(model, run=run), expected)
    with pytest.raises(ValueError, match="do not give context_fn"):
        backend.checkpoint(model, batch(), context_fn=lambda: None)


def test_hidden_states_given_by_name_are_held_too():
    class Named(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x=x)
            return x

    model = Named(Mlp(), Mlp())
    expected = stack_gradients(model)
    store = host_store()
    with backend_on(model, "swap_host", store=store):
        assert_equal(stack_gradients(model), expected)
        # per layer: its input and fc1's output
        assert store.engine.counters.num_out == 4


def test_a_copy_of_a_wrapped_layer_computes_what_the_layer_did():
    model = stack()
    layer = model.layers[0]
    layer.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), layer)
    expected = model(batch())
    with backend_on(model, "keep") as backend:
        assert torch.equal(model(batch()), expected)
        calls = backend.calls
        assert torch.equal(copy.deepcopy(model)(batch()), expected)
        assert backend.calls == calls
    assert torch.equal(model(batch()), expected)
