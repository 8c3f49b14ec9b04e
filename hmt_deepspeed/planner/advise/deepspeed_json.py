"""Writes a recommendation as a DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

from hmt_deepspeed.planner.advise.advise import BUCKET_ELEMENTS, Answer
from hmt_deepspeed.planner.advise.setups import Request
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.run.host import WEIGHT_BUFFERS, largest_part
from hmt_deepspeed.planner.run.memory import OptimizerMode
from hmt_deepspeed.planner.run.problem import RunSetup
from hmt_deepspeed.planner.solve.plan import Plan

__all__ = ["deepspeed_json"]


def deepspeed_json(
    request: Request, answer: Answer, *, nvme_path: str | None = None
) -> dict[str, Any]:
    """The DeepSpeed configuration of an answer, ready for ``launch/run.py``.

    Raises:
        ValueError: an answer that does not fit, or SSDs without a folder on them.
    """
    setup, plan = answer.problem.setup, answer.plan
    if plan is None:
        raise ValueError(
            f"{answer.name} does not fit: there is nothing to write. Change what the report says first."
        )
    uses_ssd = plan.uses_ssd
    if (uses_ssd or "nvme" in (setup.offload_param, setup.offload_optimizer)) and nvme_path is None:
        raise ValueError(
            f"{answer.name} uses SSDs; legal: with --nvme_path, a folder on them. Give it, or --num_ssds 0 to "
            "plan without SSDs."
        )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": request.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {
            "type": "AdamW" if answer.is_stock else "HMT",
            "params": {"lr": answer.mode.rule.usual_lr},
        },
        "bf16": {"enabled": True},
        "zero_optimization": _zero_block(request, setup, nvme_path, answer.is_stock),
    }
    if not answer.is_stock:
        config["hmt"] = {"optimizer": _optimizer_block(answer.mode)}
        if setup.vertical:
            config["hmt"]["accumulation"] = "vertical"
        if not isinstance(request.shape, ListedShape) or request.shape.is_managed:
            config["hmt"]["activations"] = _activations_block(
                request, answer, plan, nvme_path if uses_ssd else None
            )
    return config


def _zero_block(
    request: Request, setup: RunSetup, nvme_path: str | None, is_stock: bool
) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.zero_stage}
    zero |= {"overlap_comm": True, "reduce_bucket_size": BUCKET_ELEMENTS}
    if setup.zero_stage in (1, 2):
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    if setup.zero_stage == 3:
        zero["stage3_prefetch_bucket_size"] = BUCKET_ELEMENTS
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for key, device in (
        ("offload_param", setup.offload_param),
        ("offload_optimizer", setup.offload_optimizer),
    ):
        if device != "none":
            # HMT's states travel through pools of their own: page-locking all of them would gain nothing
            pinned = key == "offload_param" or is_stock
            zero[key] = {"device": device, "pin_memory": pinned}
            if device == "nvme":
                zero[key]["nvme_path"] = nvme_path
    if setup.offload_param == "nvme":
        # by default buffers are too small for some, and 2 GB stay in memory
        size = largest_part(request.shape, setup.ranks)
        zero["offload_param"] |= {"buffer_count": WEIGHT_BUFFERS, "buffer_size": size}
        zero["offload_param"]["max_in_cpu"] = 0
    return zero


def _optimizer_block(mode: OptimizerMode) -> dict[str, Any]:
    block: dict[str, Any] = {"method": mode.method}
    rule = mode.rule
    if rule.reads_field("rank") and rule.fixed_rank is None:
        block["rank"] = mode.rank
    if rule.gradient != "whole" and not mode.projected_backward:
        block["projected_backward"] = False
    for field, default in (
        ("state_dtype", "auto"),
        ("second_moment", "full"),
        ("master_weights", "fp32"),
        ("weight_dtype", "auto"),
    ):
        if getattr(mode, field) != default:
            block[field] = getattr(mode, field)
    return block


def _activations_block(
    request: Request, answer: Answer, plan: Plan, nvme_path: str | None
) -> dict[str, Any]:
    block: dict[str, Any] = {"policy": plan.policy()}
    overrides = plan.overrides(request.shape.names.layer)
    if overrides:
        block["overrides"] = overrides
    if nvme_path is not None:
        block["nvme_path"] = nvme_path
    held = answer.estimate.memory["host"]
    if "staging" in held:  # something swaps: it may take all that the plan leaves, not half of it
        beside = sum(size for kind, size in held.items() if kind not in ("activations", "staging"))
        block["host_memory"] = int(answer.estimate.budget.host - beside)
    return block
