"""Errors of moving bytes."""

__all__ = ["PoolFull", "StoreError", "TransferError"]


class PoolFull(RuntimeError):
    """A pool or store has no room, and waiting would not make any."""


class TransferError(RuntimeError):
    """A copy between device and host failed; raised where its result is used."""


class StoreError(RuntimeError):
    """A file could not be written, or does not hold what was written to it."""
