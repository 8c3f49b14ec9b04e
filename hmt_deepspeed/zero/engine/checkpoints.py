"""DeepSpeed's calls that save and load, carried out by :mod:`hmt_deepspeed.zero.saving.checkpoint`."""

from __future__ import annotations

import os
from typing import Any

from hmt_deepspeed.zero.engine.inference import InferenceEngine
from hmt_deepspeed.zero.engine.metrics import StepMetrics
from hmt_deepspeed.zero.engine.resolve import Resolved
from hmt_deepspeed.zero.engine.tenure import Tenure
from hmt_deepspeed.zero.saving import checkpoint
from hmt_deepspeed.zero.saving.client_objects import storable
from hmt_deepspeed.zero.saving.durable import AtomicCheckpointEngine
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.saving.universal import refusal_fields
from hmt_deepspeed.zero.sharding.parallel_experts import expert_parallel_layers
from hmt_deepspeed.zero.weights.residency import resident

__all__ = ["CheckpointingEngine"]


class CheckpointingEngine(InferenceEngine):
    """Saves and loads HMT's checkpoints where it runs HMT's optimizer; else does as DeepSpeed does."""

    hmt_metrics: StepMetrics
    _tenure: Tenure
    _hmt: Resolved | None = None  # what the JSON says of HMT's optimizer

    @property
    def hmt_enabled(self) -> bool:
        """Whether this engine runs HMT's optimizer."""
        return self._hmt is not None

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if self.hmt_enabled:
            self.checkpoint_engine: Any = AtomicCheckpointEngine(self._config)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in DeepSpeed; every file whole or absent, and the tag committed by its manifest.

        Raises:
            RuntimeError: another owner has taken the parameters over, whose states these would not be.
        """
        self._tenure.check("save_checkpoint()")
        client_state = {} if client_state is None else client_state
        if not self.hmt_enabled:
            return super().save_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
        checkpoint.check_folder("save_dir", save_dir)
        client_state = {key: storable(value) for key, value in client_state.items()}
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._exclude_frozen = exclude_frozen_parameters
        checkpoint.prepare(self, save_dir, tag)
        super().save_checkpoint(
            save_dir, checkpoint.saving_tag(tag), client_state, False, exclude_frozen_parameters
        )
        saved = checkpoint.commit(self, save_dir, tag, save_latest)
        self.hmt_metrics.checkpoint_bytes = saved
        return True

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in DeepSpeed.

        Raises:
            ValueError: ranks hold different experts, of which DeepSpeed would save the first one's.
        """
        if self.hmt_enabled and expert_parallel_layers(self.module):
            raise ValueError(
                "save_16bit_model() would save the first rank's experts only, and under their numbers there: ep_size is "
                "above 1. Use save_checkpoint(), whose files layer_*_expert_* have the weights of every expert."
            )
        return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))

    def _copy_recovery_script(self, save_path: str) -> None:
        if not self.hmt_enabled:
            super()._copy_recovery_script(save_path)
            return
        with self.checkpoint_engine.remembering(save_path):
            super()._copy_recovery_script(save_path)

    def _common_checkpoint_state(
        self, module_state_dict: Any, zero_optimizer_state: Any, save_frozen_param: bool
    ) -> dict[str, Any]:
        if not self.hmt_enabled:
            found: dict[str, Any] = super()._common_checkpoint_state(
                module_state_dict, zero_optimizer_state, save_frozen_param
            )
            return found
        # Stock leaves frozen weights out at stages 0 and 1, and zero_to_fp32.py then loses them.
        state = checkpoint.common_state(self, module_state_dict, not self._exclude_frozen)
        return state | refusal_fields(int(self.zero_optimization_stage()))

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        if not self.hmt_enabled:
            return list(super()._get_all_ckpt_names(checkpoints_path, tag))
        # whatever world size and stage have written it; one is enough, for only the weights differ
        return SavedState.model_paths(os.path.join(checkpoints_path, tag))[:1]

    def _get_param_fragment_func(self, param: Any) -> Any:
        if not self.hmt_enabled or not hasattr(param, "ds_tensor"):
            return super()._get_param_fragment_func(param)
        # Stock would save the one element that a frozen weight on an SSD leaves in memory.
        with resident(param) as part:
            return part.to("cpu", copy=True)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As in DeepSpeed, from any world size and ZeRO stage, verified against the manifest.

        Raises:
            RuntimeError: another owner has taken the parameters over.
        """
        self._tenure.check("load_checkpoint()")
        if not self.hmt_enabled:
            return super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if custom_load_fn is not None:
            raise ValueError(
                "custom_load_fn is not supported with HMT: weights are loaded from the fp32 masters, "
                "shard by shard. Load them into the model before deepspeed.initialize."
            )
        checkpoint.check_folder("load_dir", load_dir)
        return checkpoint.load(
            self,
            load_dir,
            tag,
            optimizer_states=load_optimizer_states and not load_module_only,
            lr_scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
            strict=load_module_strict,
        )
