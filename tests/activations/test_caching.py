"""Traps of holding some outputs and computing the others again, each on the smallest layer that has it."""

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
    poison,  # noqa: F401
    stack,
    stack_gradients,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("poison")

# -- what is held, and what is run again --------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "rerun"), [("keep", {}), ("recompute", {"mlp_intermediate": 2})]
)
def test_heavy_operations_run_again_as_the_policy_says(choice, rerun):
    model = stack()
    expected = stack_gradients(model)
    with backend_on(model, choice) as backend:
        assert_equal(stack_gradients(model), expected)
        report = backend.report()
    assert report.rerun == rerun  # never fc2: its output only leaves the layer
    # 2 M N K of two layers' fc1
    assert report.rerun_flops == {n: 2 * 2 * 24 * 32 * 16 for n in rerun}
    assert report.unread == {}


def test_what_no_saved_tensor_depends_on_is_neither_held_nor_run_again():
    class Frozen(Mlp):
        """Nothing is saved of ``side``'s output; a plain recompute would run it."""

        def __init__(self):
            super().__init__()
            self.side = nn.Linear(16, 16)

        def forward(self, x):
            return self.side(x) + super().forward(x)

    model = Stack(Frozen(), Frozen())
    expected = stack_gradients(model)
    for choice in ("keep", "recompute"):
        policy = {"residual": choice, "mlp_intermediate": "keep"}
        components = {"side": "residual", "fc1": "mlp_intermediate"}
        with installed(
            model, policy, attribution=attribution_of(model, components), store=host_store()
        ) as backend:
            loss = model(batch().requires_grad_()).square().sum()
            inputs_only = 4 * 6 * 16 * 4
            held = backend.report().held_bytes["layers.1"]
            assert (held["layer_input"], held.get("residual", 0)) == (inputs_only, 0)
            del loss
            assert_equal(stack_gradients(model), expected)
            assert backend.report().rerun == {}


class Chain(nn.Module):
    """``second`` is frozen, so that nothing saves what ``first`` computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x):
        return x + torch.tanh(self.second(self.first(x)))


@pytest.mark.parametrize(
    ("second", "rerun"), [("recompute", {"residual": 1, "mlp_intermediate": 1}), ("keep", {})]
)
def test_what_leads_to_a_held_output_is_not_run_again_and_what_leads_to_another_is(second, rerun):
    model = Stack(Chain())
    expected = stack_gradients(model)
    components = {"first": "residual", "second": "mlp_intermediate"}
    policy = {"residual": "recompute", "mlp_intermediate": second}
    with installed(model, policy, attribution=attribution_of(model, components, ())) as backend:
        assert_equal(stack_gradients(model), expected)
        assert backend.report().rerun == rerun


def test_an_operation_that_decides_what_is_computed_is_run_again():
    class Choosing(Mlp):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 1)

        def forward(self, x):
            with torch.no_grad():
                is_large = bool(self.gate(x).mean() > -100)
            return super().forward(x) if is_large else x

    model = Stack(Choosing())
    expected = stack_gradients(model)
    components = {"gate": "residual", "fc1": "mlp_intermediate"}
    policy = {"residual": "recompute", "mlp_intermediate": "recompute"}
    with installed(model, policy, attribution=attribution_of(model, components)) as backend:
        assert_equal(stack_gradients(model), expected)
        assert backend.report().rerun == {"residual": 1, "mlp_intermediate": 1}


class _Unseen(torch.autograd.Function):
    """Doubles into memory that it fills behind the dispatcher's back, as a raw Triton kernel does."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.numpy()[:] = 2 * x.numpy()
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_memory_that_is_filled_unseen_depends_on_all_before_it():
    class Raw(nn.Module):
        forward = staticmethod(lambda x: torch.tanh(_Unseen.apply(x)))

    model = stack(between=Raw)
    expected = stack_gradients(model)
    for choice in CHOICES:
        with backend_on(model, choice):
            assert_equal(stack_gradients(model), expected)


class _SavesLate(torch.autograd.Function):
    """A product that saves its weight after it, as a projected linear does."""

    @staticmethod
    def forward(ctx, x, weight):
        out = x @ weight.t()
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


def test_weights_that_are_gathered_on_the_way_depend_on_nothing():
    class Gathering(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.empty_like(self.weight).copy_(self.weight.data)
            return _SavesLate.apply(x, self.weight)

    model = stack()
    for layer in model.layers:
        layer.fc2 = Gathering(32, 16, bias=False)
    expected = stack_gradients(model)
    with backend_on(model, "keep") as backend:
        assert_equal(stack_gradients(model), expected)
        assert backend.report().rerun == {}


def test_memory_filled_in_parts_stays_open():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x):
            return x + torch.tanh(_Halves.apply(self.early(x), self.late)).sum(0)

    model = Stack(Parts())
    expected = stack_gradients(model)
    policy = {"residual": "recompute", "mlp_intermediate": "recompute"}
    components = {"early": "residual", "late": "mlp_intermediate"}
    with installed(model, policy, attribution=attribution_of(model, components, ())):
        assert_equal(stack_gradients(model), expected)


class _Halves(torch.autograd.Function):
    """Seen halfway, unseen in the rest."""

    @staticmethod
    def forward(ctx, x, late):
        out = torch.empty(2, *x.shape)
        out[0].copy_(x)
        out.numpy()[1] = late(x).numpy()
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad[0], None


@pytest.mark.parametrize("kind", ["more", "others"])
def test_a_layer_that_computes_otherwise_in_backward_is_an_error(kind):
    class Moody(Mlp):
        calls = 0

        def __init__(self):
            super().__init__()
            self.other = nn.Linear(16, 32)

        def forward(self, x):
            self.calls += 1
            if self.calls == 1:
                return super().forward(x)
            if kind == "more":
                return super().forward(self.fc1(x)[..., :16])
            return x + self.fc2(self.between(self.other(x)))

    model = Stack(Moody())
    components = {"fc1": "mlp_intermediate", "other": "residual"}
    with (
        backend_on(model, components=components),
        pytest.raises(RuntimeError, match="otherwise than forward did"),
    ):
        stack_gradients(model)


def test_operations_of_no_component_are_kept_and_counted():
    model = stack()
    expected = stack_gradients(model)
    with backend_on(
        model, "recompute", components={"fc2": "mlp_intermediate"}, exits=()
    ) as backend:
        assert_equal(stack_gradients(model), expected)
        report = backend.report()
    assert report.hits["layers.0"] == {"unattributed": 1, "mlp_intermediate": 1}
    assert report.held_bytes["layers.0"]["unattributed"] == 4 * 6 * 32 * 4
    assert report.rerun == {}


def test_a_policy_without_an_operation_is_reported():
    model = stack()
    with backend_on(
        model, components={"between": "attention_output", "fc1": "mlp_intermediate"}
    ) as b:
        stack_gradients(model)
        assert b.report().missed == ("layers.0: attention_output", "layers.1: attention_output")


# -- writes in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_a_held_output_may_be_overwritten_in_the_function(choice):
    model = stack(between=lambda: nn.ReLU(inplace=True))
    expected = stack_gradients(model)
    with backend_on(model, choice):
        assert_equal(stack_gradients(model), expected)
        x = batch().requires_grad_()  # and by a replay, before another one
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, expected["x"])


@pytest.mark.parametrize(
    ("choice", "raises"), [("keep", True), ("swap_host", True), ("int8", False)]
)
def test_a_write_after_the_function_is_noticed(choice, raises):
    class Leaking(Mlp):
        def forward(self, x):
            self.leaked = self.fc1(x)
            return x + self.fc2(torch.tanh(self.leaked))

    model = Stack(Leaking())
    with backend_on(model, choice, store=host_store()):
        loss = model(batch().requires_grad_()).square().sum()
        with torch.no_grad():
            model.layers[0].leaked.zero_()
        if not raises:
            loss.backward()
            return
        with pytest.raises(
            RuntimeError, match=r"mlp_intermediate.*changed by an in-place operation"
        ):
            loss.backward()


# -- random numbers -----------------------------------------------------------------------------------


@torch.library.custom_op(
    "hmt_test::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def tagged_attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    return x * mask, mask


@torch.library.custom_op("hmt_test::untagged_attn_forward", mutates_args=())
def untagged_attention(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As FlashAttention's."""
    mask = torch.bernoulli(torch.full_like(x, 1 - dropout_p))
    return x * mask, mask


tagged_attention.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)
untagged_attention.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Drawing(Mlp):
    """An attention operation that draws, and a dropout after it."""

    class Attention(nn.Module):
        def __init__(self, operation):
            super().__init__()
            self.operation, self.out = operation, nn.Linear(16, 16)

        def forward(self, x):
            return self.out(self.operation(x)[0])

    def __init__(self, operation=tagged_attention):
        super().__init__(after=lambda: nn.Dropout(0.3))
        self.attention = self.Attention(operation)

    def forward(self, x):
        return super().forward(nn.functional.dropout(x + self.attention(x), 0.3))


@pytest.mark.parametrize(
    "operation",
    [tagged_attention, lambda x: untagged_attention(x, 0.5)],
    ids=["tagged", "untagged"],
)
@pytest.mark.parametrize("choice", ["keep", "recompute", "int8"])
def test_an_operation_that_draws_leaves_the_generator_where_forward_did(choice, operation):
    model = Stack(Drawing(operation), Drawing(operation))
    expected = stack_gradients(model)
    after = torch.get_rng_state()
    components = {"attention": "attention_output", "attention.out": "residual"}
    components["fc1"] = "mlp_intermediate"
    policy = {"attention_output": choice, "mlp_intermediate": "keep", "residual": "keep"}
    with installed(model, policy, attribution=attribution_of(model, components)) as backend:
        found = stack_gradients(model)
        assert torch.equal(torch.get_rng_state(), after)  # encoding drew nothing either
        assert backend.report().rerun == ({"attention_output": 2} if choice == "recompute" else {})
    if choice == "int8":
        errors = [(found[n] - e).norm() / e.norm() for n, e in expected.items()]
        assert 0 < max(errors) < 0.02  # a wrong mask is an error of 1
    else:
        assert_equal(found, expected)


class NativeDropout(nn.Module):
    """The one operation that dropout is on CUDA."""

    forward = staticmethod(lambda x: torch.native_dropout(x, 0.3, True)[0])


@pytest.mark.parametrize("dropout", [lambda: nn.Dropout(0.3), NativeDropout])
def test_dropout_does_not_need_what_it_drops(dropout):
    model = stack(after=dropout)
    expected = stack_gradients(model)
    with backend_on(model, "keep") as backend:
        assert_equal(stack_gradients(model), expected)
        assert backend.report().rerun == {}  # the mask is saved after fc2, but not computed from it


def test_without_preserved_random_state_the_generator_is_left_alone():
    model = Stack(Drawing())
    components = {"attention": "attention_output", "attention.out": "residual"}
    policy = {"attention_output": "keep", "residual": "keep"}
    with installed(model, policy, attribution=attribution_of(model, components)) as backend:
        loss = backend.checkpoint(model, batch(), preserve_rng_state=False).square().sum()
        assert backend.report().hits["layers.0"]["attention_output"] == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "set_rng_state", lambda _: pytest.fail("the generator was set"))
            loss.backward()
