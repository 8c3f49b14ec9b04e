"""Checkpoints and snapshots: written whole or not at all, read by name on any layout."""
