"""Measures the host memory that is available."""

from __future__ import annotations

import os

import psutil

__all__ = ["free_host_memory", "host_memory_share"]


def free_host_memory() -> int:
    """Bytes that the machine, or the container that the process is in, could still give."""
    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


def host_memory_share() -> int:
    """Bytes that "auto" lets one rank take: half of what is free now, shared by the ranks of the machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    return free_host_memory() // 2 // ranks
