"""DeepSpeed extension for training large language models on too little GPU memory.

Importing has no side effects: nothing is patched, compiled or put on a device before
:func:`register`, :func:`initialize` or an optimizer is called for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hmt_deepspeed.version import __version__

if TYPE_CHECKING:
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.optim.hmt import HMT
    from hmt_deepspeed.zero.registration import initialize, register, unregister

__all__ = ["HMT", "HMTConfig", "__version__", "initialize", "register", "unregister"]

_HOMES = {
    "HMT": "hmt_deepspeed.optim.hmt",
    "HMTConfig": "hmt_deepspeed.config",
    "initialize": "hmt_deepspeed.zero.registration",
    "register": "hmt_deepspeed.zero.registration",
    "unregister": "hmt_deepspeed.zero.registration",
}


def __getattr__(name: str) -> Any:
    """Import a public name's room when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
