"""Keys that earlier versions had, and what a user of one does now."""

from __future__ import annotations

__all__ = ["REMOVED"]

# full key -> what replaced it, as a sentence of the error message
REMOVED: dict[str, str] = {
    "hmt.optimizer.early_refresh": "Remove it: a basis is replaced every update_interval steps and never earlier.",
    "hmt.optimizer.rank_stabilized": 'Remove it, and leave "scale" at "auto" for updates with AdamW\'s root mean '
    "square at every rank, or write the factor on the update (the default was 0.25).",
}
