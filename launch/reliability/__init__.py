"""What a run does under stress: one module a case, `launch/stress.py` runs them."""

from collections.abc import Callable

from reliability import random_configs
from reliability.results import CaseReport

CASES: dict[str, Callable[[int, bool], CaseReport]] = {
    "random_configs": random_configs.run_case,
}
