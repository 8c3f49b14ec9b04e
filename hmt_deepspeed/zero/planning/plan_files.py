"""Files of a run that plans: the plan that ``hmt.planner.plan`` names, and the profile in the user's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.solve.plan import Plan, plan_from_json
from hmt_deepspeed.zero.planning.facts import RunFacts, Shapes
from hmt_deepspeed.zero.planning.profile_files import cache_file, read_profile, write_profile

__all__ = ["find_profile", "keep_profile", "read_plan", "write_plan"]


def read_plan(hmt: HMTConfig, facts: RunFacts, shapes: Shapes) -> str | None:
    """JSON of the file ``hmt.planner.plan``; None where none is named or there is none yet.

    Args:
        hmt: the block. facts: of the run. shapes: of the micro-batch that is to be planned for.

    Raises:
        ValueError: it cannot be read, is no plan, or not one for this run.
    """
    path = hmt.planner.plan
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(
            f"hmt.planner.plan {path!r} cannot be read ({error}); legal: null, or a file that a run or "
            "hmt-plan --save_plan wrote or that is not there yet. Correct the path, or remove the key."
        ) from error
    try:
        plan = plan_from_json(text)
        plan.check_fits(facts.workload(*shapes))
        if plan.uses_ssd and hmt.activations.nvme_path is None:
            raise ValueError(
                "the plan swaps to an SSD, for which hmt.activations.nvme_path names no folder. Set it."
            )
    except ValueError as error:
        raise ValueError(
            f"hmt.planner.plan {path!r}: {error} Or name a file that is not there, so that the run plans for "
            "itself."
        ) from error
    return text


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.to_json() + "\n", encoding="utf-8")


def find_profile(hmt: HMTConfig, facts: RunFacts) -> str | None:
    """The machine that an earlier run like this one has measured, as JSON; None where none has."""
    path = cache_file(_profile_key(hmt, facts))
    return read_profile(path).to_json() if path.exists() else None


def keep_profile(machine: Machine, hmt: HMTConfig, facts: RunFacts) -> None:
    """Keep a machine for later runs like this one."""
    write_profile(machine, cache_file(_profile_key(hmt, facts)))


def _profile_key(hmt: HMTConfig, facts: RunFacts) -> str:
    """All that a profile depends on but the machine; host memory beside the plan is no part of that."""
    setup = replace(facts.setup, engine=None)
    return repr((replace(facts, setup=setup), tuple(hmt.planner.lossy.values())))
