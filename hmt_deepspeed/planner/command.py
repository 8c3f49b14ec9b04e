"""``hmt-plan``: ask before the run. No GPU, no weights, no model on disk but its config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hmt_deepspeed.config.codecs import is_lossy
from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.advise.advise import Advice, advise
from hmt_deepspeed.planner.advise.deepspeed_json import deepspeed_json
from hmt_deepspeed.planner.advise.describe import describe, describe_plan
from hmt_deepspeed.planner.advise.setups import ROUNDED_INPUTS, Recommend, Request
from hmt_deepspeed.planner.hardware import MACHINES, Machine, machine_from_json, named_machine
from hmt_deepspeed.planner.model.models import SIZES, model_shape
from hmt_deepspeed.planner.model.shapes import ModelShape, num_parameters
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.solve.cost import estimate
from hmt_deepspeed.planner.solve.plan import Plan, plan_from_json
from hmt_deepspeed.planner.timeline.simulate import simulate
from hmt_deepspeed.rules import DEFAULT, DENSE, methods

__all__ = ["main"]

GIB = 2**30
_LENGTH = 2048
_RECOMMEND: Mapping[str, Recommend] = {
    "never": "exact",
    "auto": "worthwhile",
    "always": "fastest",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hmt-plan",
        description="Say before a run whether it fits, how fast it will be, and with which JSON.",
        epilog="example:\n  hmt-plan --model 7b --machine rtx4090 --seq_length 4096 --write ds.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_training(parser)
    _add_machine(parser)
    _add_setup(parser)
    _add_files(parser)
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is trained").add_argument
    add("--model", help=f"{', '.join(SIZES)}, or a folder with a config.json; required")
    add(
        "--vocab_size",
        type=int,
        default=32000,
        metavar="TOKENS",
        help="of a named size (default: %(default)s)",
    )
    add(
        "--seq_length",
        type=int,
        metavar="TOKENS",
        help="of a sequence (default: 2048, or what learned positions reach)",
    )
    add(
        "--micro_batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences of a GPU's micro-step (default: %(default)s)",
    )
    add(
        "--global_batch",
        type=int,
        metavar="N",
        help="sequences of an optimizer step (default: those of one micro-step)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("on what").add_argument
    add("--machine", help=f"{', '.join(MACHINES)}, or a profile (JSON); required")
    add("--num_gpus", type=int, metavar="N", help="GPUs (default: the machine's)")
    add(
        "--gpu_memory",
        type=float,
        metavar="GIB",
        help="of each GPU to use (default: all but 2 GiB)",
    )
    add(
        "--host_memory",
        type=float,
        metavar="GIB",
        help="of the host that training may use (default: the machine's)",
    )
    add(
        "--num_ssds",
        type=int,
        metavar="N",
        help="SSDs striped over (default: the machine's); 0 plans without",
    )
    add(
        "--price_per_hour",
        type=float,
        metavar="PRICE",
        help="of the machine, for the cost of a million tokens",
    )


def _add_setup(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "how; the fastest that fits is chosen where nothing is said"
    ).add_argument
    add(
        "--method",
        choices=("auto", *methods()),
        default="auto",
        help=f"auto: {DEFAULT} or {DENSE} (default: %(default)s)",
    )
    add(
        "--rank",
        type=_rank,
        default=128,
        help="of low-rank methods, lowered for narrower matrices, or full (default: %(default)s)",
    )
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="ZeRO's stage")
    add("--offload_param", choices=("none", "cpu", "nvme"), help="where weights wait at stage 3")
    add(
        "--policy",
        choices=("plan", "paper"),
        default="plan",
        help="of activations: planned, or the HMT paper's table (default: %(default)s)",
    )
    add(
        "--lossy",
        nargs="?",
        choices=("never", "auto", "always"),
        const="always",
        default="auto",
        metavar="WHEN",
        help="recommend a setup that rounds (no masters, INT8 states or weights, layers' inputs in INT8) never; auto: "
        "where it is three times as fast as any exact one, or faster and off the SSDs that this needs; always: where it is faster, with INT8 activations where the "
        "HMT paper's policy has them too, as --lossy alone (default: %(default)s)",
    )


def _rank(given: str) -> int | str:
    return given if given == "full" else int(given)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--write", metavar="FILE", help="write the DeepSpeed JSON of the recommendation")
    add("--nvme_path", metavar="FOLDER", help="on the SSDs, for that JSON")
    add("--save_plan", metavar="FILE", help="write the plan of the recommendation")
    add(
        "--picture",
        metavar="FILE",
        help="draw its timeline and the GPU's memory: .svg, .png or .pdf (matplotlib)",
    )
    add("--plan", metavar="FILE", help="say what a saved plan does with the recommended setup")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; bad input ends it with one line and status 1."""
    args = _parser().parse_args(arguments)
    try:
        _answer(args)
    except ValueError as error:
        sys.exit(f"error: {error}")


def _answer(args: argparse.Namespace) -> None:
    request = _request(args)
    saved = _saved_plan(args.plan) if args.plan else None
    if args.picture:
        from hmt_deepspeed.planner.timeline.picture import require_matplotlib

        require_matplotlib(args.picture)
    advice = advise(request)
    print(describe(advice))
    if saved is not None:
        _compare(advice, saved, args.plan)
    if args.write:
        config = deepspeed_json(advice.request, advice.best, nvme_path=args.nvme_path)
        _write(args.write, json.dumps(config, indent=2))
    if args.save_plan or args.picture:
        plan = advice.best.plan
        if plan is None:
            raise ValueError(
                "nothing fits: there is no plan to save or draw. Change what the report says first."
            )
        if args.save_plan:
            _write(args.save_plan, plan.to_json())
        if args.picture:
            _draw(advice, args.picture)


def _request(args: argparse.Namespace) -> Request:
    for field in ("model", "machine"):
        if getattr(args, field) is None:
            known = SIZES if field == "model" else MACHINES
            raise ValueError(
                f"--{field} is missing; legal: {', '.join(known)}, or a file. Give one."
            )
    shape = model_shape(args.model, args.vocab_size)
    return Request(
        shape=shape,
        machine=_machine(args),
        seq_length=_usual_length(shape) if args.seq_length is None else args.seq_length,
        micro_batch=args.micro_batch,
        global_batch=args.global_batch,
        modes=_modes(args),
        lossy_modes=_lossy_modes(args),
        cpu_adam=args.method in ("auto", DENSE),
        zero_stage=args.zero_stage,
        offload_param=args.offload_param,
        lossy=_lossy(args),
        recommend=_RECOMMEND[args.lossy],
        fixed=PAPER_POLICY if args.policy == "paper" else None,
        gpu_memory=None if args.gpu_memory is None else int(args.gpu_memory * GIB),
        nvme=args.num_ssds != 0,
    )


def _usual_length(shape: ModelShape) -> int:
    return min(_LENGTH, shape.max_length) if shape.positions else _LENGTH


def _modes(args: argparse.Namespace) -> tuple[OptimizerMode, ...]:
    asked = (DEFAULT, DENSE) if args.method == "auto" else (args.method,)
    return tuple(
        OptimizerMode(method=method, rank=args.rank, expert_basis="auto") for method in asked
    )


def _lossy(args: argparse.Namespace) -> dict[Component, Choice]:
    """Codecs that activations may be held in with a loss."""
    of_paper = {c: x for c, x in PAPER_POLICY.items() if is_lossy(x) and args.lossy == "always"}
    return {**ROUNDED_INPUTS, **of_paper}


def _lossy_modes(args: argparse.Namespace) -> tuple[OptimizerMode, ...]:
    """Modes of each method without masters, with INT8 states, and both; low rank also with INT8 weights."""
    found = []
    for mode in _modes(args):
        no_masters = replace(mode, master_weights="none")
        both = replace(no_masters, state_dtype="int8")
        found += [no_masters, replace(mode, state_dtype="int8"), both]
        if mode.rule.reads_field("weight_dtype"):
            found.append(replace(both, weight_dtype="int8"))
    return tuple(found)


def _machine(args: argparse.Namespace) -> Machine:
    given: dict[str, Any] = {
        "num_gpus": args.num_gpus,
        "num_ssds": args.num_ssds,
        "host_memory": None if args.host_memory is None else int(args.host_memory * GIB),
        "price_per_hour": args.price_per_hour,
    }
    given = {field: value for field, value in given.items() if value is not None}
    if args.machine in MACHINES or not Path(args.machine).is_file():
        return named_machine(args.machine, **given)
    return replace(machine_from_json(Path(args.machine).read_text(encoding="utf-8")), **given)


def _saved_plan(path: str) -> Plan:
    if not Path(path).is_file():
        raise ValueError(f"--plan {path}: no such file. Write one with --save_plan.")
    return plan_from_json(Path(path).read_text(encoding="utf-8"))


def _compare(advice: Advice, plan: Plan, path: str) -> None:
    """Print what a plan from a file would do in place of the one just made."""
    problem = advice.best.problem
    plan.check_fits(problem.workload, problem.machine)
    played = simulate(problem, plan)
    print(f"\nthe plan in {path}:\n" + describe_plan(plan, estimate(problem, plan)))
    print(f"simulated: {played.seconds:.4g} s")


def _draw(advice: Advice, path: str) -> None:
    from hmt_deepspeed.planner.timeline.picture import draw

    assert advice.best.simulation is not None
    request, limit = advice.request, advice.best.problem.budget.gpu
    title = (
        f"{num_parameters(request.shape) / 1e9:.3g}B parameters ({request.shape.family}) on "
        f"{request.machine.name}, micro-batch {request.micro_batch} x {request.seq_length:,} tokens\n"
        f"{advice.best.name}"
    )
    draw(advice.best.simulation, path, gpu_limit=limit, title=title)
    print(f"wrote {path}")


def _write(path: str, text: str) -> None:
    Path(path).write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path}")
