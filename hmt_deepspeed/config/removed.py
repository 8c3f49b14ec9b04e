"""Keys that earlier versions had, and what a user of one does now."""

from __future__ import annotations

__all__ = ["REMOVED"]

# full key -> what replaced it, as a sentence of the error message
REMOVED: dict[str, str] = {
    "hmt.optimizer.moment_transfer": 'Remove it: moments are rotated into each new basis, as with "rotate".',
    "hmt.optimizer.basis_momentum": "Remove it: a basis is made of the latest gradient alone, as with 0.",
    "hmt.activations.policy.layernorm": "Remove it: of a norm only its input is held, which is residual.",
    "hmt.activations.layernorm": "Remove it: of a norm only its input is held, which is residual.",
    "hmt.activations.rounding": "Remove it: int8 and fp8 round stochastically, which is unbiased.",
    "hmt.activations.block_size": "Remove it: 256 tokens of a channel share a scale.",
    "hmt.activations.error_interval": "Remove it: runs do not measure the error of int8 and fp8.",
    "hmt.planner.host_memory": "Give it as hmt.activations.host_memory, which limits a plan too.",
    "hmt.planner.profile": "Remove it: a run measures its machine once. To plan for another machine use hmt-plan "
    "--machine, and execute the plan that it saves by hmt.planner.plan.",
    "hmt.planner.save_plan": "Give the file as hmt.planner.plan: where there is none the plan is written there.",
    "hmt.basis_cache.max_entries": "Remove it: as many bases wait in host memory as have room in half of what is free.",
    "hmt.basis_cache.max_bytes": "Remove it: bases take up to half of the host memory that is free, shared by the ranks "
    "of a machine.",
    "hmt.basis_cache.prefetch": "Remove it: two bases are on their way to the device beside the one in use.",
    "hmt.basis_cache.old_bases": 'Set "history" to how many of the bases that a matrix has left are kept.',
    "hmt.basis_cache.old_moments": 'Rename it to "history", which keeps the bases with their moments.',
    "hmt.snapshot.keep": "Remove it: the last two snapshots are kept, beside those whose weights they are differences to.",
    "hmt.fpdt.enabled": 'Remove it: chunks are on where the block has the section "fpdt", and off without it.',
    "hmt.offload.schedule": "Remove it: states on an SSD are read, updated and written all at once. For one after "
    "another set pipeline_read and pipeline_write of zero_optimization.offload_optimizer to false.",
    "hmt.optimizer.refresh": 'Remove it: each matrix refreshes at a step of its own, as with "staggered".',
    "hmt.optimizer.early_refresh": "Remove it: a basis is replaced every update_interval steps and never earlier.",
    "hmt.optimizer.rank_stabilized": 'Remove it, and leave "scale" at "auto" for updates with AdamW\'s root mean '
    "square at every rank, or write the factor on the update (the default was 0.25).",
    "hmt.optimizer.residual_scale": "Remove it: the factor on the probe residual is the unbiased (n - r) / k, at most 8.",
    "hmt.optimizer.norm_growth_limit": "Remove it: the norm of the residual, or of APOLLO's update, grows by at most "
    "1.01 from step to step.",
    "hmt.optimizer.scale_type": 'Remove it: "apollo" has a scale per channel, "apollo_mini" one per matrix.',
    "hmt.optimizer.exclude_modules": 'Write "module_rules": {PATTERN: {"method": "adamw"}} for each of its patterns.',
}
