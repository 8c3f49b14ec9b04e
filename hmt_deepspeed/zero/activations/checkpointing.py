"""DeepSpeed's ``activation_checkpointing`` keys, and the callers of ``deepspeed.checkpointing``, on our backend.

Two seams. :class:`LayerInputs` makes the keys codecs of what enters a checkpointed layer. :class:`Service`
answers ``deepspeed.checkpointing.checkpoint`` and ``non_reentrant_checkpoint`` for as long as an engine with
activations lives; without one both are DeepSpeed's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import groups
from torch import Tensor, nn

from hmt_deepspeed.activations.caching import active_mode
from hmt_deepspeed.activations.codecs import Codec, SavedTensor
from hmt_deepspeed.activations.contiguous import Contiguous
from hmt_deepspeed.activations.partition import Partitioned, Replicas
from hmt_deepspeed.config.activation_checkpointing import ActivationCheckpointing
from hmt_deepspeed.config.codecs import CODECS
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["LayerInputs", "Service", "restore_stock"]


# -- the keys ------------------------------------------------------------------------------------------


def _with_configured(keys: ActivationCheckpointing) -> ActivationCheckpointing:
    """The JSON's keys and what ``deepspeed.checkpointing.configure`` was told: on where either asks."""
    found = ActivationCheckpointing(
        partition_activations=keys.partition_activations
        or bool(checkpointing.PARTITION_ACTIVATIONS),
        cpu_checkpointing=keys.cpu_checkpointing or bool(checkpointing.CPU_CHECKPOINT),
        contiguous_memory_optimization=keys.contiguous_memory_optimization
        or bool(checkpointing.CONTIGUOUS_CHECKPOINTING),
        number_checkpoints=checkpointing.num_layers or keys.number_checkpoints,
        synchronize_checkpoint_boundary=keys.synchronize_checkpoint_boundary
        or bool(checkpointing.SYNCHRONIZE),
        profile=keys.profile or bool(checkpointing.PROFILE_TIME),
    )
    found.check()
    return found


def _model_parallel_group(mpu: Any) -> Any:
    """The model-parallel group: of ``configure``'s mpu, of the engine's, or DeepSpeed's own; None without."""
    if checkpointing.mp_group is not None:
        return checkpointing.mp_group
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if mpu is not None and mpu is not groups and hasattr(mpu, name):
            return getattr(mpu, name)()
    return groups._TENSOR_MODEL_PARALLEL_GROUP


class LayerInputs:
    """Codecs of what enters a checkpointed layer, as DeepSpeed's keys ask now: ``configure`` may come late.

    Args:
        keys: of the JSON.
        mpu: of the engine, or None.
        swap_host: makes the codec of ``cpu_checkpointing`` where that is asked for.
    """

    def __init__(
        self, keys: ActivationCheckpointing, mpu: Any, swap_host: Callable[[], Codec]
    ) -> None:
        self._json, self._mpu, self._swap_host = keys, mpu, swap_host
        self._made: dict[tuple[int, int], _Following] = {}
        self._contiguous: dict[tuple[int, int], Contiguous] = {}
        self._replicas: Replicas | None = None

    def keys(self) -> ActivationCheckpointing:
        """What is asked for now."""
        return _with_configured(self._json)

    def codec(self, inner: Codec, position: int = 0) -> Codec:
        """The codec of the ``position``-th input of each checkpoint, where the policy says ``inner``.

        The same codec for the same arguments: a backend's ``of_inputs``.

        Raises:
            ValueError: the keys and the policy, or the process groups, do not go together.
        """
        place = (id(inner), position)  # of a codec that the found one keeps alive
        if place not in self._made:
            self._made[place] = _Following(self, inner, position)
        return self._made[place]

    def compose(self, keys: ActivationCheckpointing, inner: Codec, position: int) -> Codec:
        """The codec of some keys. On the host, the host store is the memory that is allocated once.

        Args:
            keys: DeepSpeed's. inner: the policy's codec. position: of the input among the checkpoint's inputs.
        """
        if keys.cpu_checkpointing and inner.choice == "keep":
            inner = self._swap_host()
        elif keys.cpu_checkpointing and not CODECS[inner.choice].is_moved:
            raise _conflict("cpu_checkpointing", inner)
        elif keys.contiguous_memory_optimization and inner.choice == "keep":
            inner = self._slots(keys, position)
        elif keys.contiguous_memory_optimization and not CODECS[inner.choice].is_moved:
            raise _conflict("contiguous_memory_optimization", inner)
        if keys.partition_activations:
            return Partitioned(inner, self._model_parallel_ranks())
        return inner

    def _slots(self, keys: ActivationCheckpointing, position: int) -> Contiguous:
        """One allocation for all that enters at a position, whichever component it is."""
        assert keys.number_checkpoints is not None
        place = (keys.number_checkpoints, position)
        return self._contiguous.setdefault(place, Contiguous(keys.number_checkpoints))

    def _model_parallel_ranks(self) -> Replicas:
        if self._replicas is None:
            group = _model_parallel_group(self._mpu)
            size = 1 if group is None else torch.distributed.get_world_size(group)
            if size == 1:
                raise ValueError(
                    "activation_checkpointing.partition_activations is true, but there is no model-parallel "
                    "group of more than one rank whose ranks could share a layer's input. Call "
                    "deepspeed.checkpointing.configure(mpu) before the engine is built, give the engine an mpu, "
                    "or remove the key."
                )
            self._replicas = Collectives(group, overlap=False)
        return self._replicas


def _conflict(key: str, inner: Codec) -> ValueError:
    moved = " or ".join(f'"{name}"' for name, row in CODECS.items() if row.is_moved)
    return ValueError(
        f"activation_checkpointing.{key} is true, but hmt.activations holds what enters a layer as "
        f'{inner.choice!r}: legal with it is "keep", {moved} for "layer_input". '
        "Change that, or remove the key."
    )


class _Following:
    """Encodes by the codec of the keys in force at that moment."""

    def __init__(self, inputs: LayerInputs, inner: Codec, position: int) -> None:
        self._inputs, self._inner, self._position = inputs, inner, position
        self._made_for: ActivationCheckpointing | None = None
        self._codec = inner
        self.choice, self.lossy = inner.choice, inner.lossy
        self.current()  # what cannot be honoured fails here

    def current(self) -> Codec:
        keys = self._inputs.keys()
        if keys != self._made_for:
            self._codec = self._inputs.compose(keys, self._inner, self._position)
            self.choice, self.lossy = self._codec.choice, self._codec.lossy
            self._made_for = keys
        return self._codec

    def encode(
        self,
        tensor: Tensor,
        token_dims: int | tuple[int, ...] = 0,
        key: int = 0,
        name: str = "activation",
    ) -> SavedTensor:
        return self.current().encode(tensor, token_dims, key, name)


# -- the callers ---------------------------------------------------------------------------------------


class Checkpoints(Protocol):
    """The part of the backend that is used here."""

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any: ...


class Service:
    """Answers the callers of ``deepspeed.checkpointing`` with an engine's backend while this object lives.

    Of several engines the one answers whose model computes just now, else the last built.

    What is as in DeepSpeed: CPU, accelerator and tracker (``get_cuda_rng_tracker``) random states are in
    recomputation what they were in forward; several outputs come back as a tuple; what carries
    ``no_checkpointing`` is saved as it is. So are parameters, and what needs no gradient beside the hidden
    states (the first floating-point tensor): masks are mostly the model's own.

    What is better: gradients need no input that requires grad, ``torch.autograd.grad`` and a second backward
    work, no input is emptied behind the caller's back, and what the policy saves of attributed layers within
    is not computed again. A checkpoint within a checkpoint is part of it. Inputs are not moved: DeepSpeed
    copies those on the host to the device.

    Args:
        module: the engine's model.
        backend: its activation backend, whose ``of_inputs`` is :meth:`LayerInputs.codec`.
    """

    def __init__(self, module: nn.Module, backend: Checkpoints) -> None:
        self.backend = backend
        this = weakref.ref(self)
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: _enter(this), prepend=True),
            module.register_forward_hook(lambda *_: _leave(this), always_call=True),
        ]
        _take_over(this)

    def close(self) -> None:
        """DeepSpeed's own functions answer again, unless another engine's service lives. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        _forget(weakref.ref(self))

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``; what it computed in between is computed again in backward."""
        if not torch.is_grad_enabled() or active_mode() is not None:
            return function(*args)
        where = _activations(args)
        return self.backend.checkpoint(
            _Replay(function, args, where),
            *(args[position] for position in where),
            use_reentrant=False,
            preserve_rng_state=False,
            redraws=True,
        )


def _activations(args: tuple[Any, ...]) -> list[int]:
    """Positions of the hidden states, which come first, and of what else is computed with gradients."""
    found: list[int] = []
    for position, arg in enumerate(args):
        if (
            isinstance(arg, Tensor)
            and arg.is_floating_point()
            and not isinstance(arg, nn.Parameter)
            and not getattr(arg, "no_checkpointing", False)
            and (arg.requires_grad or not found)
        ):
            found.append(position)
    return found


class _Replay:
    """A caller's function of its activations alone, under forward's random states when it runs again.

    Attributes:
        __wrapped__: the function, which tells the backend whose forward it is.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], where: list[int]
    ) -> None:
        self.__wrapped__ = function
        self._args: list[Any] = list(args)
        self._where = where
        for position in where:
            self._args[position] = None
        self._forward_states: _RandomStates | None = None

    def __call__(self, *activations: Tensor) -> Any:
        args = list(self._args)
        for position, activation in zip(self._where, activations, strict=True):
            args[position] = activation
        if self._forward_states is None:
            self._forward_states = _RandomStates()
            return self.__wrapped__(*args)
        now = _RandomStates()
        self._forward_states.restore()
        try:
            return self.__wrapped__(*args)
        finally:
            now.restore()


class _RandomStates:
    """CPU's, accelerator's and tracker's, as they are."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._accelerator = get_accelerator().get_rng_state()
        self._tracked = checkpointing.get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        checkpointing._set_cuda_rng_state(self._accelerator)
        # a copy: fork writes into the dict
        checkpointing.get_cuda_rng_tracker().set_states(dict(self._tracked))


# -- the names in DeepSpeed ----------------------------------------------------------------------------

# ``checkpoint`` looks CheckpointFunction up when it is called, so that callers who took the function
# itself long before the engine was built (Megatron does) are reached by replacing the class.
_NAMES = ("CheckpointFunction", "non_reentrant_checkpoint")
_stock: dict[str, Any] = {}
_living: list[weakref.ref[Service]] = []
_computing: list[weakref.ref[Service]] = []


def restore_stock() -> None:
    """DeepSpeed's own functions answer from now on, whatever engines live."""
    _living.clear()
    for name, value in _stock.items():
        setattr(checkpointing, name, value)
    _stock.clear()


def _take_over(service: weakref.ref[Service]) -> None:
    _living.append(service)
    weakref.finalize(service(), _forget, service)
    if not _stock:
        _stock.update({name: getattr(checkpointing, name) for name in _NAMES})
        checkpointing.CheckpointFunction = _CheckpointFunction
        checkpointing.non_reentrant_checkpoint = _non_reentrant_checkpoint


def _forget(service: weakref.ref[Service]) -> None:
    if service in _living:
        _living.remove(service)
        if not _living:
            restore_stock()


def _enter(service: weakref.ref[Service]) -> None:
    _computing.append(service)


def _leave(service: weakref.ref[Service]) -> None:
    if service in _computing:
        _computing.remove(service)


def _service() -> Service:
    """The one to answer."""
    found = next(filter(None, (ref() for ref in reversed(_living + _computing))), None)
    assert found is not None, "the last service restores DeepSpeed's names when it goes"
    return found


class _CheckpointFunction:
    """Stands where ``deepspeed.checkpointing.checkpoint`` looks for its autograd function."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """As of DeepSpeed's: outputs of every kind are appended to ``all_outputs``."""
        outputs = _service().checkpoint(function, *args)
        all_outputs += [outputs] if isinstance(outputs, Tensor) else outputs
        return outputs


def _non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """As DeepSpeed's: one output comes back alone, several as a tuple."""
    outputs = _service().checkpoint(function, *args)
    if isinstance(outputs, Tensor):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
