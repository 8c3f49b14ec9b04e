"""Orders of accumulation: micro-batch by micro-batch, or layer by layer (``"hmt": {"accumulation": "vertical"}``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hmt_deepspeed.fpdt.gradients import Around
from hmt_deepspeed.fpdt.head_loss import HeadLoss, replace, why_not
from hmt_deepspeed.interleave import Interleaver, largest_list
from hmt_deepspeed.memory.streams import Streams
from hmt_deepspeed.zero.weights.layer_weights import LayerWeights

__all__ = [
    "Call",
    "VerticalOrder",
    "arguments_of",
    "next_batches",
    "output_loss",
    "what_vertical_saves",
]

_AHEAD = "_PartitionedParameterCoordinator__prefetch_bucket_sz"

# Positional and named arguments of a forward.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class VerticalOrder:
    """Forwards of all micro-batches of a step at once, layer by layer, at stage 3.

    A layer's weights are gathered once in forward and once in backward, and stay while any micro-batch needs them; so do
    those of the embedding and of the head, whose logits are made in chunks, once in forward and again in backward.

    Args:
        model: of the engine, its parameters in parts. parameter_offload: DeepSpeed's ZeRO-3 hooks.
        streams: where this rank alone holds the weights, in host memory: they come by copies of our own.
        has_own_loss: the model's forward takes the loss in chunks already (``hmt.fpdt``).
        around_backward: entered for the time of the head's backward.

    Raises:
        ValueError: a model without a list of layers; a torch that cannot sum gradients wider than weights.
    """

    def __init__(
        self,
        model: Any,
        parameter_offload: Any,
        streams: Streams | None,
        has_own_loss: bool,
        around_backward: Around,
    ) -> None:
        self._layers = largest_list(model, lambda param: int(getattr(param, "ds_numel", 0)))
        if not self._layers:
            raise ValueError(
                f'hmt.accumulation is "vertical", but {type(model).__name__} has no list of layers (nn.ModuleList); legal '
                'for it is "horizontal". Remove the key.'
            )
        self._narrow = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4]
        if self._narrow and not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(
                f'hmt.accumulation is "vertical" with weights of 16 bits, whose gradients torch {torch.__version__} would '
                "sum in 16 bits too. Use a torch that has Tensor.grad_dtype (2.10), or remove the key."
            )
        self._model = model
        self._why_not = "" if has_own_loss else why_not(model)
        self._loss: HeadLoss | None = None
        if not has_own_loss and not self._why_not:
            self._loss = HeadLoss(model, around_backward)
        ends = [
            getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")
        ]
        modules = [one for one in (ends[0], *self._layers, ends[1]) if one is not None]
        self._coordinator = parameter_offload.get_param_coordinator()
        self.weights = LayerWeights(modules, self._coordinator, streams)
        self._interleaver = Interleaver(
            modules,
            lambda layer, backward: self.weights.begin(layer, backward),
            lambda layer, backward: self.weights.end(layer, backward),
        )

    def describe(self) -> str:
        """A line of the start."""
        line = (
            f"hmt: train_batch() takes all micro-batches of a step through each of {len(self._layers)} layers while its "
            "weights are there, which come twice a step"
        )
        if self._why_not:
            line += f"; logits of all of them wait for backward, for {self._why_not}"
        return line

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward of a step: the model's forward takes a list of :data:`Call` and returns a list of
        outputs; gradients of several uses of a weight are summed in fp32."""
        model, loss = self._model, self._loss
        one = model.forward
        call = one if loss is None else partial(loss.call, one)

        def all_of(calls: Sequence[Call]) -> list[Any]:
            return self._interleaver.run([partial(call, *args, **named) for args, named in calls])

        with ExitStack() as undo:
            undo.callback(self._end)
            if self.weights.brings:
                replace(self._coordinator, _AHEAD, 0, undo)  # DeepSpeed brings nothing ahead
            if loss is not None:
                undo.enter_context(loss.installed())
            replace(model, "forward", all_of, undo)
            for param in self._narrow:
                param.grad_dtype = torch.float32
                undo.callback(setattr, param, "grad_dtype", param.dtype)
            yield

    def _end(self) -> None:
        self._interleaver.end_backward()
        self.weights.end_step()

    def close(self) -> None:
        """Take the hooks off the model. Idempotent."""
        self._interleaver.close()


def what_vertical_saves(micro_batches: int, travels: bool) -> str:
    """A line of the start where weights come to the device with every micro-batch, else "".

    Args:
        micro_batches: of a step. travels: weights are in parts on several ranks, or in host memory.
    """
    if micro_batches == 1 or not travels:
        return ""
    return (
        f"hmt: weights come to the device in each of {micro_batches} micro-batches, forward and backward; with "
        '"accumulation": "vertical" in the block engine.train_batch() brings them once for all, forward and backward'
    )


def arguments_of(batch: Any, device: torch.device) -> Call:
    """How a model is called with a micro-batch: named by a mapping, in order by a tuple or list; tensors on ``device``."""
    if isinstance(batch, Mapping):
        return (), {str(key): _on(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_on(value, device) for value in batch), {}
    return (_on(batch, device),), {}


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def output_loss(output: Any, _: int) -> Tensor:
    """The loss in a model's output, as models of transformers return it: ``loss``, or the first element, or the output.

    Raises:
        ValueError: there is none.
    """
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"train_batch got {type(output).__name__} from the model, which has no loss; legal: an output with a scalar "
            '"loss", or one that begins with it. Give the model labels, or train_batch a loss_of(output, place).'
        )
    return found


def next_batches(data_iter: Iterable[Any], number: int) -> list[Any]:
    """The micro-batches of a step.

    Raises:
        StopIteration: there are fewer left.
    """
    iterator = iter(data_iter)
    return [next(iterator) for _ in range(number)]
