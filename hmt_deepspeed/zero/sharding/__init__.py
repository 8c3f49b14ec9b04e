"""Sharding by rows over ranks, and the collectives of a data-parallel group."""
