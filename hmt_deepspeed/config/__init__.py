"""The "hmt" block of a DeepSpeed JSON, checked before anything is built.

`HMTConfig.from_block` turns the parsed block into a model, or raises one `ValueError` that lists
every problem by its full key. `read_json_config` reads the file the block came from.
"""

from hmt_deepspeed.config.activations import ActivationsConfig
from hmt_deepspeed.config.block import HMTConfig, describe_fields
from hmt_deepspeed.config.fields import BLOCK_NAME
from hmt_deepspeed.config.json_file import read_json_config
from hmt_deepspeed.config.optimizer import ModuleRule, OptimizerConfig
from hmt_deepspeed.config.planner import PlannerConfig
from hmt_deepspeed.config.sections import (
    BasisCacheConfig,
    FpdtConfig,
    OffloadConfig,
    SnapshotConfig,
)

__all__ = [
    "BLOCK_NAME",
    "ActivationsConfig",
    "BasisCacheConfig",
    "FpdtConfig",
    "HMTConfig",
    "ModuleRule",
    "OffloadConfig",
    "OptimizerConfig",
    "PlannerConfig",
    "SnapshotConfig",
    "describe_fields",
    "read_json_config",
]
