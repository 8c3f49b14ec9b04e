"""Makes the next use of a parameter wait for its update when updates overlap the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

__all__ = ["Gates"]


class Gates:
    """Calls ``finish(params)`` before parameters are used; until :meth:`close`.

    At stage 3 a parameter is used where its gather is launched. Prefetches launch gathers long before the
    forward hooks of the module they are for, and would read old shards without an error; so the gates sit in
    ``all_gather`` and ``all_gather_coalesced`` of every parameter, each of which may be called for any list.

    Below stage 3 they are forward pre-hooks of the modules that hold the parameters, and pre-hooks of their
    ``state_dict``. What reads ``module.weight`` elsewhere is not seen. The model's forward ends with all updates
    finished, so that ranks that used other modules of it have gathered the same before any gradient is reduced.

    Args:
        module: the model. finish_all: for all parameters. partitioned: whether it is at stage 3.
    """

    def __init__(
        self,
        module: nn.Module,
        finish: Callable[[Iterable[nn.Parameter]], None],
        finish_all: Callable[[], None],
        partitioned: bool,
    ) -> None:
        self._finish_params = finish
        self._before_next: Callable[[], None] | None = None
        self._handles: list[Any] = []
        self._gathers: list[tuple[Any, str, Any]] = []
        if partitioned:
            for param in module.parameters():
                self._gate_gathers(param)
        else:
            for inner in module.modules():
                self._gate_forward(inner)
            self._handles.append(module.register_forward_hook(lambda *_: finish_all()))

    def before_next_use(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, before the next use of any parameter."""
        self._before_next = action

    def _finish(self, params: Iterable[nn.Parameter]) -> None:
        action, self._before_next = self._before_next, None
        if action is not None:
            action()
        self._finish_params(params)

    def close(self) -> None:
        """Take the gates away."""
        for handle in self._handles:
            handle.remove()
        for param, name, gather in self._gathers:
            setattr(param, name, gather)
        self._handles, self._gathers = [], []

    def _gate_gathers(self, param: Any) -> None:
        gather, coalesced = param.all_gather, param.all_gather_coalesced

        def all_gather(
            param_list: Sequence[nn.Parameter] | None = None, *args: Any, **keyword: Any
        ) -> Any:
            self._finish([param] if param_list is None else param_list)
            return gather(param_list, *args, **keyword)

        def all_gather_coalesced(params: Iterable[nn.Parameter], *args: Any, **keyword: Any) -> Any:
            params = list(params)
            self._finish(params)
            return coalesced(params, *args, **keyword)

        self._gathers += [
            (param, "all_gather", gather),
            (param, "all_gather_coalesced", coalesced),
        ]
        param.all_gather, param.all_gather_coalesced = all_gather, all_gather_coalesced

    def _gate_forward(self, module: nn.Module) -> None:
        def wait(module: nn.Module, *_: Any) -> None:
            self._finish(module.parameters(recurse=False))

        if next(module.parameters(recurse=False), None) is not None:
            self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(wait))
