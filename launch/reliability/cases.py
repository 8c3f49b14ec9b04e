"""All cases by name: (seed, small) -> what was found."""

from collections.abc import Callable

from reliability import (
    bad_batch,
    corrupt_checkpoint,
    dead_rank,
    full_disk,
    kills,
    long_run,
    random_configs,
)
from reliability.results import CaseReport

__all__ = ["CASES"]

CASES: dict[str, Callable[[int, bool], CaseReport]] = {
    "random_configs": random_configs.run_case,
    "dead_rank": dead_rank.run_case,
    "bad_batch": bad_batch.run_case,
    "full_disk": full_disk.run_case,
    "corrupt_checkpoint": corrupt_checkpoint.run_case,
    "long_run": long_run.run_case,
    "long_run_fpdt": long_run.run_fpdt_case,
    "long_run_vertical": long_run.run_vertical_case,
    "kills": kills.run_case,
    "kills_vertical": kills.run_vertical_case,
}
