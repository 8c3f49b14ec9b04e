"""DeepSpeed's activation_checkpointing keys and the callers of deepspeed.checkpointing, on our backend."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn
from training import HIDDEN, VOCAB, make_engine, tiny_llama

import hmt_deepspeed
from hmt_deepspeed.activations.attribution import Attribution, attribute
from hmt_deepspeed.activations.backend import ActivationBackend
from hmt_deepspeed.activations.codecs import Codec, Int8, Keep, SwapHost
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.memory.host import HostStore
from hmt_deepspeed.memory.transfer import TransferEngine
from hmt_deepspeed.zero.activation_checkpointing import LayerInputs, Service
from hmt_deepspeed.zero.boundary import Boundary

STOCK = {
    name: getattr(checkpointing, name)
    for name in ("CheckpointFunction", "non_reentrant_checkpoint")
}
captured_checkpoint = checkpointing.checkpoint  # as Megatron does, long before any engine
WIDTH, BATCH = 8, 4


class Backend(ActivationBackend):
    """Counts what callers ask of it. By default of a model without attributed layers."""

    def __init__(self, inputs: LayerInputs, model: nn.Module | None = None, **policy: Any) -> None:
        found = Attribution((), None, None, ()) if model is None else attribute(model)
        super().__init__(
            model or nn.Identity(),
            found,
            policy,
            {"keep": Keep(), "int8": Int8()},
            of_inputs=inputs.codec,
            around=Boundary(inputs.keys).run,
        )
        self.num_calls = 0

    def checkpoint(self, fn: Any, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        return super().checkpoint(fn, *args, **options)


class Spy(LayerInputs):
    """Remembers what holds the inputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[Any] = []

    def codec(self, inner: Codec, position: int = 0) -> Any:
        codec: Any = super().codec(inner, position)
        if not hasattr(codec, "spied"):
            codec.spied, codec.encode = codec.encode, functools.partial(self._encode, codec)
        return codec

    def _encode(self, codec: Any, *args: Any) -> Any:
        self.held.append(codec.spied(*args))
        return self.held[-1]


def layer_inputs(mpu: Any = None, **keys: Any) -> Spy:
    store = HostStore(TransferEngine("cpu", 1 << 20), 1 << 20)
    return Spy(ActivationCheckpointing.from_section(keys), mpu, lambda: SwapHost(store))


def serve(module: nn.Module, mpu: Any = None, **keys: Any) -> Any:
    """A service, with its backend's ``inputs``."""
    inputs = layer_inputs(mpu, **keys)
    service: Any = Service(module, Backend(inputs))
    service.inputs = inputs
    return service


@pytest.fixture(autouse=True)
def _stock_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test ends with DeepSpeed as it was."""
    monkeypatch.setattr(checkpointing, "timers", None)
    yield
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK


# -- a caller in the manner of Megatron --------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.num_calls += 1
        y = nn.functional.dropout(self.up(x), 0.3)  # the data-parallel random state
        with checkpointing.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(nn.functional.gelu(y), 0.3)
        return x + self.down(y).masked_fill(mask, 0.0)


class Stack(nn.Module):
    """Four layers, checkpointed two by two; several outputs, arguments of several kinds."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        def custom(first: int, last: int) -> Any:
            def forward(x: Tensor, mask: Tensor, scale: float, flag: bool, none: None) -> Any:
                assert flag is True
                assert none is None
                for index in range(first, last):
                    x = self.layers[index](x, mask)
                return x * scale, x.detach().argmax(-1)

            return forward

        for first in (0, 2):
            x, index = self.checkpoint(custom(first, first + 2), x, mask, 0.5, True, None)
        return x, index


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def run(checkpoint: Any, stack: Stack | None = None) -> list[Tensor]:
    """Output, and gradients of input and weights, of a step whose random states are always the same."""
    stack = stack or Stack(checkpoint)
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 2)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    mask = torch.zeros(BATCH, WIDTH, dtype=torch.bool)
    mask[:, 0] = True
    y, index = stack(x, mask)
    y.square().sum().backward()
    after = torch.rand(1)  # random states go on as if nothing had been recomputed
    with tracker.fork():
        after_fork = torch.rand(1)
    return [y, index, after, after_fork, x.grad, *(p.grad for p in stack.parameters())]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "checkpoint", ["checkpoint", "captured", "non_reentrant_checkpoint", "CheckpointFunction"]
)
@pytest.mark.parametrize("served", [True, False])
def test_megatron_style_callers(checkpoint, served):
    def apply(function: Any, *args: Any) -> Any:
        outputs: list[Any] = []
        checkpointing.CheckpointFunction.apply(function, outputs, *args)
        return tuple(outputs)

    caller = {
        "checkpoint": lambda *args: deepspeed.checkpointing.checkpoint(*args),
        "captured": captured_checkpoint,
        "non_reentrant_checkpoint": lambda *args: deepspeed.checkpointing.non_reentrant_checkpoint(
            *args
        ),
        "CheckpointFunction": apply,
    }[checkpoint]
    stack = Stack(caller)
    service = serve(stack) if served else None
    found = run(caller, stack)
    assert [layer.num_calls for layer in stack.layers] == [2] * 4  # forward and recomputation
    if service is not None:
        assert service.backend.num_calls == 2
        # one activation each: mask and numbers are held as they are
        assert [held.nbytes for held in service.inputs.held] == [BATCH * WIDTH * 4] * 2
    assert_equal(found, run(plainly))


def test_recomputation_under_other_random_states_is_seen():
    """The test above would fail without the tracker's part."""
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack)
    tracker = checkpointing.get_cuda_rng_tracker()
    set_states, tracker.set_states = tracker.set_states, lambda states: None
    try:
        found = run(None, stack)
    finally:
        tracker.set_states = set_states
    expected = run(plainly)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[-1], expected[-1]) or not torch.equal(found[4], expected[4])
    service.close()


def test_outputs_alone_in_lists_and_keywords():
    service = serve(nn.Identity())
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for caller in (
        deepspeed.checkpointing.checkpoint,
        deepspeed.checkpointing.non_reentrant_checkpoint,
    ):
        assert isinstance(caller(lambda a: a * 2, x), Tensor)
        assert isinstance(caller(lambda a: [a * 2], x), Tensor)
        _first, second, third = caller(lambda a: [a * 2, None, a.sum()], x)
        assert second is None
        assert third.dim() == 0
    y = deepspeed.checkpointing.checkpoint(lambda a, b: (a * b).sin(), x, b=w)
    (grad,) = torch.autograd.grad(y.sum(), w)  # DeepSpeed's own refuses autograd.grad
    assert torch.equal(grad, torch.autograd.grad((x * w).sin().sum(), w)[0])
    assert not deepspeed.checkpointing.checkpoint(lambda a: a.detach() * 2, x).requires_grad
    service.close()


def test_without_gradients_nothing_is_held():
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack)
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 2)
    with torch.no_grad():
        stack(torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH, dtype=torch.bool))
    assert service.backend.num_calls == 0
    assert [layer.num_calls for layer in stack.layers] == [1] * 4


def test_which_inputs_are_held():
    service = serve(nn.Identity())
    x, kept = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    kept.no_checkpointing = True
    weight, mask = nn.Parameter(torch.randn(3)), torch.ones(3)
    frozen = torch.randn(3)
    for args in ((frozen, weight, x, kept, mask), (x, weight, kept, mask)):
        service.inputs.held.clear()
        x.grad = kept.grad = weight.grad = None
        y = checkpointing.checkpoint(lambda *args: functools.reduce(torch.mul, args), *args)
        y.sum().backward()
        assert len(service.inputs.held) == (2 if args[0] is frozen else 1)  # (frozen and) x
        others = frozen if args[0] is frozen else torch.ones(3)
        torch.testing.assert_close(kept.grad, x * weight * others)
        torch.testing.assert_close(x.grad, kept * weight * others)
        torch.testing.assert_close(weight.grad, kept * x * others)
    service.close()


def test_a_checkpoint_within_a_checkpoint():
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = lambda a: nn.functional.dropout(a.exp(), 0.5)  # noqa: E731
            return checkpointing.checkpoint(lambda a: checkpointing.checkpoint(inner, a).sin(), x)

    found = []
    for served in (True, False):
        model = Nested()
        service = serve(model) if served else None
        torch.manual_seed(3)
        x = torch.randn(16, requires_grad=True)
        model(x).sum().backward()
        found.append(x.grad)
        if service is not None:
            assert service.backend.num_calls == 1  # the inner one is part of the outer one
            service.close()
    assert torch.equal(*found)


# -- who answers -----------------------------------------------------------------------------------


def test_deepspeed_answers_again_when_the_engine_is_gone():
    service = serve(nn.Identity())
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    del service
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK


def test_unregister_restores_and_initialize_does_not(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", lambda: serve(nn.Identity()))
    service = hmt_deepspeed.initialize()  # whose registration ends with the call
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    hmt_deepspeed.unregister()
    assert {name: getattr(checkpointing, name) for name in STOCK} == STOCK
    other = serve(nn.Identity())
    service.close()
    assert checkpointing.CheckpointFunction is not STOCK["CheckpointFunction"]
    other.close()
    other.close()


def test_of_several_engines_the_computing_one_answers():
    models = [Stack(checkpointing.checkpoint) for _ in range(2)]
    services = [serve(model) for model in models]
    run(None, models[0])
    assert [s.backend.num_calls for s in services] == [2, 0]
    with pytest.raises(RuntimeError, match="shape"):
        models[0](torch.randn(BATCH, WIDTH + 1), torch.zeros(1, dtype=torch.bool))
    checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert [s.backend.num_calls for s in services] == [3, 1]
    for service in services:
        service.close()


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"partitioned_activations": True},
            'did you mean "activation_checkpointing.partition_activations"',
        ),
        (
            {"offload": True},
            "Legal: partition_activations, cpu_checkpointing, contiguous_memory_optimization",
        ),
        (
            {"profile": 1},
            "activation_checkpointing.profile: got 1. Legal: true, false|true or false",
        ),
        ({"number_checkpoints": 0}, "activation_checkpointing.number_checkpoints: got 0"),
        ([], "activation_checkpointing is .*legal is an object"),
        (
            {"contiguous_memory_optimization": True},
            "number_checkpoints is None, legal .* integer >= 1",
        ),
    ],
)
def test_sections_that_cannot_be_honoured(section, message):
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing.from_section(section)


def test_deepspeeds_own_defaults():
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT

    assert ActivationCheckpointing.from_section(None).model_dump() == ACT_CHKPT_DEFAULT
    assert (
        ActivationCheckpointing.from_section(dict(ACT_CHKPT_DEFAULT)).model_dump()
        == ACT_CHKPT_DEFAULT
    )


@pytest.mark.parametrize("key", ["cpu_checkpointing", "contiguous_memory_optimization"])
def test_a_lossy_policy_beside_a_key_that_would_replace_it(key):
    inputs = layer_inputs(**{key: True, "number_checkpoints": 2})
    with pytest.raises(ValueError, match=f"{key} is true.*'int8'.*legal.*\"keep\""):
        inputs.codec(Int8())


def test_partition_without_a_group_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"no model-parallel group.*checkpointing.configure\(mpu\)"
    ):
        layer_inputs(partition_activations=True).codec(Keep())


def test_cpu_checkpointing_holds_nothing_on_the_device():
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack, cpu_checkpointing=True)
    found = run(None, stack)
    assert [held.nbytes for held in service.inputs.held] == [0, 0]
    counters = service.inputs.codec(Keep()).current().store.engine.counters
    assert counters.bytes_out == counters.bytes_in == 2 * BATCH * WIDTH * 4
    assert_equal(found, run(plainly))


def test_contiguous_memory_is_one_for_all_components():
    inputs = layer_inputs(contiguous_memory_optimization=True, number_checkpoints=3)
    residual, embedding = inputs.codec(Keep()), inputs.codec(Keep())
    held = [embedding.encode(torch.ones(200)), residual.encode(torch.ones(200))]
    first, second = (h.memory for h in held)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 1024
    other = inputs.codec(Keep(), position=1).encode(torch.ones(999))  # another size, other slots
    assert other.memory.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_what_configure_sets_counts_from_the_next_checkpoint_on(monkeypatch):
    service = serve(nn.Identity(), number_checkpoints=9)
    x = torch.randn(4, 8, requires_grad=True)
    ys = [checkpointing.checkpoint(torch.sin, x * 1)]
    monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
    deepspeed.checkpointing.set_num_layers(2)
    try:
        ys += [checkpointing.checkpoint(torch.sin, x * 1) for _ in range(2)]
        with pytest.raises(ValueError, match=r"number_checkpoints is 2, and .* is one more"):
            checkpointing.checkpoint(torch.sin, x * 1)
    finally:
        deepspeed.checkpointing.set_num_layers(None)
    assert [type(held).__name__ for held in service.inputs.held] == ["_Raw", "HeldSlot", "HeldSlot"]
    sum(y.sum() for y in ys).backward()
    assert torch.equal(x.grad, 3 * x.cos())
    service.close()


# -- a model whose layers the backend knows ----------------------------------------------------------


def llama_gradients(inputs: Any, **policy: Any) -> list[Tensor]:
    """Gradients of a step of a tiny Llama."""
    model = tiny_llama(layers=3).train()
    Backend(inputs, model, **policy).install()
    tokens = torch.arange(2 * 10).view(2, 10)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [p.grad for p in model.parameters()]


def test_keys_apply_to_the_layers_of_a_model():
    expected = llama_gradients(layer_inputs())
    contiguous = layer_inputs(
        contiguous_memory_optimization=True, number_checkpoints=3, profile=True
    )
    assert_equal(llama_gradients(contiguous), expected)
    memory = {held.memory.untyped_storage().data_ptr() for held in contiguous.held}
    assert (len(contiguous.held), len(memory)) == (3, 1)
    # the final norm is checkpointed too
    assert len(checkpointing.timers("backward").event_timers) == 4
    on_host = layer_inputs(cpu_checkpointing=True)
    assert_equal(llama_gradients(on_host), expected)
    assert [held.nbytes for held in on_host.held] == [0] * 3


def test_a_layer_given_to_deepspeed_is_held_as_the_policy_says():
    """And a function around it as it is."""
    model, inputs = tiny_llama(layers=2).train(), layer_inputs()
    service = Service(model, Backend(inputs, model, embedding="int8"))
    layer = model.model.layers[0]
    x = torch.randn(1, 4, HIDDEN, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(4)[None])
    forward = functools.partial(layer, position_embeddings=rotary)
    for function in (forward, lambda x: forward(x)):
        deepspeed.checkpointing.checkpoint(function, x).sum().backward()
    assert [type(held).__name__ for held in inputs.held] == ["HeldBlocks", "_Raw"]
    service.close()


def test_a_caller_over_several_layers_gets_the_policy_within():
    """Megatron's custom forward, over layers that the backend knows: only what is cheap runs again."""
    model, inputs = tiny_llama(layers=2).train(), layer_inputs()
    x = torch.randn(1, 4, HIDDEN, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(4)[None])

    def custom(x: Tensor) -> Tensor:
        for layer in model.model.layers:
            x = layer(x, position_embeddings=rotary)
        return x

    custom(x).sum().backward()
    expected = [x.grad, *(p.grad for p in model.model.layers.parameters())]
    x.grad = None
    model.zero_grad()
    backend = Backend(
        inputs, model, attention_qkv="keep", attention_output="keep", mlp_intermediate="keep"
    )
    backend.install()
    service = Service(model, backend)
    deepspeed.checkpointing.checkpoint(custom, x).sum().backward()
    assert_equal([x.grad, *(p.grad for p in model.model.layers.parameters())], expected)
    report = backend.report()
    held = {"attention_qkv", "attention_output", "residual", "mlp_intermediate"}
    assert [hits.keys() & held for hits in report.hits.values()] == [held, held]
    assert not report.rerun.keys() - {"exit"}
    assert len(inputs.held) == 1
    service.close()
    backend.uninstall()


# -- profile, synchronize_checkpoint_boundary --------------------------------------------------------


def test_profile_times_checkpoints_and_waits_for_nothing(monkeypatch):
    logged, waits = [], []
    monkeypatch.setattr("deepspeed.utils.timer.print_dist", lambda text, ranks: logged.append(text))
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(1))
    stack = Stack(checkpointing.checkpoint)
    service = serve(stack, profile=True)
    expected = run(plainly)
    assert_equal(run(None, stack), expected)
    timers = checkpointing.timers.get_timers()
    assert {name: len(timer.event_timers) for name, timer in timers.items()} == {
        "fwd": 2,
        "backward": 2,
    }
    assert all(seconds > 0 for timer in timers.values() for seconds in timer.event_timers)
    assert logged == waits == []
    stack.zero_grad()
    run(None, stack)  # one line per pass, when the next begins
    (line,) = logged
    assert "fwd:" in line
    assert "backward:" in line
    assert {name: len(timer.event_timers) for name, timer in timers.items()} == {
        "fwd": 2,
        "backward": 2,
    }
    service.close()


def test_profile_goes_on_after_a_broken_backward():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("broken")

    service = serve(nn.Identity(), profile=True)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="broken"):
        checkpointing.checkpoint(Broken.apply, x).sum().backward()
    for _ in range(2):
        checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(checkpointing.timers("backward").event_timers) == 1
    inner = []

    def function(x: Tensor) -> Tensor:
        inner.append(x.exp())
        return inner[0].sin()

    checkpointing.checkpoint(function, x)
    inner[0].sum().backward()  # past the output, whose gradient nobody asks for
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert len(checkpointing.timers("backward").event_timers) == 1
    service.close()


def test_synchronize_waits_at_every_boundary(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: events.append("wait"))

    def function(x: Tensor) -> Tensor:
        events.append("run")
        return x.sin()

    service = serve(nn.Identity(), synchronize_checkpoint_boundary=True)
    x = torch.randn(3, requires_grad=True)
    other = x * 1  # whose backward comes after the checkpoint's and is no part of it
    other.register_hook(lambda _: events.append("other"))
    (other.sum() + checkpointing.checkpoint(function, x).sum()).backward()
    assert events == ["wait", "run", "wait", "wait", "run", "wait", "other"]
    service.close()


# -- on two ranks ------------------------------------------------------------------------------------


class Grid:
    """An mpu whose only group is the whole world, as tensor-parallel ranks."""

    get_model_parallel_rank = staticmethod(lambda: torch.distributed.get_rank())
    get_model_parallel_world_size = staticmethod(lambda: torch.distributed.get_world_size())
    get_model_parallel_group = staticmethod(lambda: torch.distributed.group.WORLD)
    get_data_parallel_rank = staticmethod(lambda: 0)


class _Copy(torch.autograd.Function):
    """Megatron's f: identity forward, sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Megatron's g: sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ParallelLayer(nn.Module):
    """Columns of the first weight and rows of the second on each rank; dropout differs between ranks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(_Copy.apply(x)))
        with checkpointing.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(y, 0.2)
        return x + nn.functional.dropout(_Reduce.apply(self.down(y)), 0.2)


def tensor_parallel_gradients(checkpoint: Any) -> list[Tensor]:
    checkpointing.model_parallel_cuda_manual_seed(11)
    layers = nn.ModuleList(ParallelLayer() for _ in range(3))
    with checkpointing.get_cuda_rng_tracker().fork():
        for p in layers.parameters():
            nn.init.normal_(p)
    x = torch.randn(BATCH, WIDTH).requires_grad_()
    y = x * 1
    for layer in layers:
        y = checkpoint(layer, y)
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters())]


def configured_on_two_ranks(cpu: bool) -> dict[str, Any]:
    """What ``configure`` is told reaches us, before or after the service is made."""
    deepspeed.checkpointing.configure(Grid(), partition_activations=False)
    expected = tensor_parallel_gradients(plainly)
    service = serve(nn.Identity())
    found: dict[str, Any] = {"bytes": []}
    for partition in (False, True):
        deepspeed.checkpointing.configure(
            Grid(), partition_activations=partition, checkpoint_in_cpu=cpu and partition
        )
        assert deepspeed.checkpointing.is_configured()
        service.inputs.held.clear()
        gradients = tensor_parallel_gradients(deepspeed.checkpointing.checkpoint)
        assert_equal(gradients, expected)
        found["bytes"].append([held.nbytes for held in service.inputs.held])
    service.inputs.held.clear()
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    tensor_parallel_gradients(deepspeed.checkpointing.checkpoint)
    found["bytes"].append([held.nbytes for held in service.inputs.held])
    service.close()
    deepspeed.checkpointing.configure(Grid(), partition_activations=True)
    assert_equal(tensor_parallel_gradients(deepspeed.checkpointing.checkpoint), expected)  # stock
    return found


def groups_on_two_ranks() -> dict[str, Any]:
    """Without ``configure``: the engine's mpu, then DeepSpeed's own tensor-parallel group."""
    from deepspeed.utils import groups

    by_mpu = layer_inputs(Grid(), partition_activations=True).codec(Keep()).current()
    error = ""
    try:
        layer_inputs(partition_activations=True).codec(Keep())
    except ValueError as refused:
        error = str(refused)
    groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    for mpu in (None, groups):  # AutoTP makes the module the engine's mpu
        held = layer_inputs(mpu, partition_activations=True).codec(Keep()).encode(torch.ones(6, 2))
    return {
        "mpu": by_mpu.replicas.world,
        "error": error,
        "autotp": held.nbytes,
        "back": held.decode(),
    }


def trained_with_tensor_parallelism() -> dict[str, Any]:
    """DeepSpeed's AutoTP and AdamW, HMT's activations: from the JSON alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    found = {}
    for name, keys in (
        ("whole", {}),
        ("partitioned", {"partition_activations": True}),
        ("on the host", {"partition_activations": True, "cpu_checkpointing": True}),
    ):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2},
            "activation_checkpointing": keys,
            "hmt": {"activations": {}},
        }
        engine = make_engine(config, LlamaForCausalLM(shape))
        for step in range(2):
            tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        held = engine.hmt_activations.backend.report().held_bytes
        weights = [p.detach().clone() for p in engine.module.parameters()]
        found[name] = (weights, [sum(layer.values()) for layer in held.values()])
        engine.destroy()
    return found


def test_the_json_alone_under_autotp(ranks):
    layer_input = 2 * 8 * 32 * 4
    for found in ranks.run(trained_with_tensor_parallelism, 2):
        expected, whole = found["whole"]
        for name, held_part in (("partitioned", layer_input // 2), ("on the host", 0)):
            weights, held = found[name]
            assert_equal(weights, expected)
            less = [w - h for w, h in zip(whole, held, strict=True)]
            assert less == [layer_input - held_part] * 2 + [0]  # and the final norm's input


@pytest.mark.parametrize("cpu", [False, True])
def test_configured_partitioning_on_two_ranks(ranks, cpu):
    whole = BATCH * WIDTH * 4
    for found in ranks.run(configured_on_two_ranks, 2, cpu):
        assert found["bytes"] == [
            [whole] * 3,
            [0 if cpu else whole // 2] * 3,
            [0 if cpu else whole] * 3,
        ]


def test_model_parallel_groups_on_two_ranks(ranks):
    for found in ranks.run(groups_on_two_ranks, 2):
        assert found["mpu"] == 2
        assert "no model-parallel group" in found["error"]
        assert found["autotp"] == 3 * 2 * 4
        assert torch.equal(found["back"], torch.ones(6, 2))
