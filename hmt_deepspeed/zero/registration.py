"""Put HMT where ``deepspeed.initialize`` looks, and take it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed
import torch
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.zero import utils as zero_utils

from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.zero.compat import check_deepspeed
from hmt_deepspeed.zero.operator_locks import telling_waits

__all__ = ["initialize", "is_registered", "register", "registered", "unregister"]

# Engines that cannot run HMT, and what to do instead.
_OTHER_ENGINES = {
    "PipelineEngine": "Use ZeRO-3 in place of pipeline stages.",
    "DualPipeVEngine": "Use ZeRO-3 in place of pipeline stages.",
    "DeepSpeedHybridEngine": "Turn hybrid_engine off.",
}

_FILL_IN = "deepspeed_config_process"  # recursive over the JSON, ``prefix`` names the section

_stock: dict[str, Any] = {}
_undo = ExitStack()


def is_registered() -> bool:
    """Whether ``deepspeed.initialize`` builds HMT's engine."""
    return bool(_stock)


def register() -> None:
    """Let every later ``deepspeed.initialize`` honour the ``"hmt"`` block. Idempotent.

    What changes: the engine classes that ``deepspeed.initialize`` looks up in ``deepspeed`` (the
    pipeline and hybrid engines only learn to refuse the block), ``torch.optim.HMT`` (where DeepSpeed
    looks optimizer types up), DeepSpeed's list of optimizers that ZeRO accepts, Accelerate's filling in
    of ``"auto"``, which leaves the block alone, and that whoever waits for an operator's lock says so.

    Raises:
        ImportError: when the installed DeepSpeed lacks what we rely on.
    """
    if _stock:
        return
    check_deepspeed()
    # after the check: they need the symbols
    from hmt_deepspeed.zero.engine.engine import HMTEngine
    from hmt_deepspeed.zero.engine.selection import refusing

    for name in ("DeepSpeedEngine", *_OTHER_ENGINES):
        _stock[name] = getattr(deepspeed, name)
    deepspeed.DeepSpeedEngine = HMTEngine
    for name, remedy in _OTHER_ENGINES.items():
        setattr(deepspeed, name, refusing(_stock[name], remedy))
    _stock[_FILL_IN] = getattr(DeepSpeedPlugin, _FILL_IN)
    setattr(DeepSpeedPlugin, _FILL_IN, _leaving_our_block(_stock[_FILL_IN]))
    torch.optim.HMT = HMT  # type: ignore[attr-defined]
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(HMT)
    _undo.enter_context(telling_waits())


def unregister() -> None:
    """Undo :func:`register`; a no-op when not registered. Engines already built go on working.

    ``deepspeed.checkpointing`` is DeepSpeed's own again, also for their models.
    """
    from hmt_deepspeed.zero.activations.checkpointing import restore_stock

    restore_stock()
    _take_out()


def _take_out() -> None:
    """Undo :func:`register`; what engines that live have put into DeepSpeed stays."""
    if not _stock:
        return
    setattr(DeepSpeedPlugin, _FILL_IN, _stock.pop(_FILL_IN))
    for name, engine in _stock.items():
        setattr(deepspeed, name, engine)
    _stock.clear()
    del torch.optim.HMT  # type: ignore[attr-defined]
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.remove(HMT)
    _undo.close()


def _leaving_our_block(fill_in: Callable[..., None]) -> Callable[..., None]:
    """Accelerate, and so the Trainer, refuses every ``"auto"`` that it has no value for; the block's are ours."""

    def deepspeed_config_process(
        self: DeepSpeedPlugin, prefix: str = "", *args: Any, **kwargs: Any
    ) -> None:
        if prefix != "hmt.":
            fill_in(self, prefix, *args, **kwargs)

    return deepspeed_config_process


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with HMT registered for the call; same signature and return."""
    with registered():
        return deepspeed.initialize(*args, **kwargs)


@contextmanager
def registered() -> Iterator[None]:
    """HMT registered for the block, and afterwards as it was."""
    was_registered = is_registered()
    register()
    try:
        yield
    finally:
        if not was_registered:
            _take_out()
