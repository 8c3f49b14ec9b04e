"""Who has hooks, forwards or attributes on a model's modules and parameters, so that two never train the same ones.

Whatever puts something on modules registers itself as their owner, and first takes them over from earlier owners.
Owners that share nothing live side by side.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

__all__ = ["Owner", "claim", "is_owned", "leave", "take_over"]


class Owner(Protocol):
    """An engine, optimizer, activation backend or FPDT installation.

    It must not be reachable from what it owns: dropped by its user, it takes itself apart, or does so when
    :func:`take_over` collects garbage.

    Attributes:
        dropped: nobody can use it any more, though it lives.
    """

    dropped: bool

    def owner_name(self) -> str:
        """What it is and of which model, for messages."""
        ...

    def owned(self) -> Iterable[Any]:
        """Modules and parameters that carry something of it."""
        ...

    def unfinished(self) -> str:
        """What would be lost if it were taken apart now, as "it has ..."; empty between steps."""
        ...

    def give_up(self, to: str) -> None:
        """Take itself apart, weights written back; using it from now on is an error that names ``to``."""
        ...


_owners: list[weakref.ref[Any]] = []


def claim(owner: Owner) -> None:
    """Register an owner; it leaves by itself when it is garbage. Idempotent."""
    if all(known() is not owner for known in _owners):
        _owners.append(weakref.ref(owner, _owners.remove))


def leave(owner: Owner) -> None:
    """Forget an owner that has taken itself apart. Idempotent."""
    _owners[:] = [known for known in _owners if known() is not owner]


def is_owned(thing: Any) -> bool:
    """Whether a module or parameter carries something of a living owner."""
    return bool(_sharing({id(thing): thing}))


def take_over(
    wanted: Iterable[Any],
    by: str,
    say: Callable[[str], object],
    displaces: Callable[[Owner], bool] = lambda _: True,
) -> None:
    """Take apart whoever owns something of ``wanted``: in silence if it is garbage, else ``say`` is told in one line.

    Args:
        wanted: modules and parameters. by: who wants them, for messages.
        displaces: whether an owner is in the way at all.

    Raises:
        ValueError: an owner is in the middle of something that would be lost; nothing has been changed.
    """
    ids = {id(thing): thing for thing in wanted}  # held, so that no id is used again
    if not any(displaces(owner) for owner in _sharing(ids)):
        return
    gc.collect()
    found = [owner for owner in _sharing(ids) if displaces(owner)]
    for owner in found:
        if unfinished := owner.unfinished():
            raise ValueError(
                f"{by} needs modules or parameters of {owner.owner_name()}, but {unfinished}. Legal is "
                "one owner at a time: finish with the earlier one first, or take it apart with its destroy() "
                "(an engine), close() (an HMT optimizer), uninstall() (an activation backend) or remove() (FPDT)."
            )
    for owner in found:
        if not owner.dropped:
            say(
                f"{by} takes the place of {owner.owner_name()}, whose modules or parameters it needs: that one is "
                "taken apart, its weights are kept and its states are not, and it is no longer to be used"
            )
        owner.give_up(by)


def _sharing(ids: dict[int, Any]) -> list[Owner]:
    living = [owner for known in list(_owners) if (owner := known()) is not None]
    return [owner for owner in living if any(id(thing) in ids for thing in owner.owned())]
