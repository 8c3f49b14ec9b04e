"""Every public name of DeepSpeed's ZeRO optimizers, and what the engine and the tools ask of one: ours, inherited,
or not applicable and why. A DeepSpeed that adds a name fails here until somebody has looked at it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import ModuleType

import deepspeed.runtime.engine as engine_module
import deepspeed.runtime.zero.offload_states as offload_states
import deepspeed.utils.tensor_fragment as tensor_fragment
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from hmt_deepspeed.zero.optimizer.interface import OptimizerInterface
from hmt_deepspeed.zero.optimizer.optimizer import HMTZeroOptimizer
from hmt_deepspeed.zero.optimizer.state_access import StateAccess

OURS = """
    backward_epilogue checkpoint_event_epilogue checkpoint_event_prologue clip_grad cur_scale custom_loss_scaler destroy
    dp_process_group dynamic_loss_scale empty_partition_cache external_loss_scale
    finalize_gradient_accumulation_boundary get_hp_param_device get_lr loss_scale loss_scaler module mpu offload_states optimizer overflow
    overlapping_partition_gradients_reduce_epilogue override_loss_scale param_groups param_names parameter_offload
    partition_gradients reduce_gradients refresh_fp32_params reload_states round_robin_bit16_groups set_lr state
    state_dict step swap_optimizer torch_autocast_gradscaler zero_grad
    _coalesce_grad_reduction _global_grad_norm _restore_from_bit16_weights
"""

# Of the base class, which counts the gradient hooks of a backward the same way for every stage.
INHERITED = """
    clear_backward_seen_flag enter_backward exit_backward is_gradient_accumulation_boundary needs_scaler
    queue_post_backward_callback reenter_backward_if_needed register_grad_acc_post_hook run_grad_acc_post_hooks
    scale_if_loss set_gradient_accumulation_boundary should_refresh_expected_hook_count
    unregister_grad_acc_post_hooks update_hook_state_and_maybe_run_epilogue _backward_active_depth
    backward_prologue
"""  # the last does nothing: stage 3's reads swapped states ahead and starts ZenFlow, both not ours

# Stage 3's methods that DeepSpeed's tools find at ``param._z3_optimizer``.
TOOLS = """
    get_fp32_grad_for_param get_full_hp_param get_local_fp32_grad_for_param get_local_fp32_param
    set_fp32_grad_for_param set_full_hp_param set_local_grad_for_param set_local_hp_param
    update_fp32_grad_for_param_vectorized
"""

NOT_APPLICABLE = {
    "stock's flat groups and partitions: ours are one ParamState per parameter": """
        bit16_groups bit16_groups_flat bf16_groups device dtype first_offset first_param_index_in_partition flatten
        flatten_and_print flatten_dense_tensors_aligned fp16_groups fp16_partitioned_groups
        fp16_partitioned_groups_flat fp16_partitioned_groups_flat_id fp16_partitioned_groups_flat_numel
        fp32_partitioned_groups_flat get_bit16_param_group get_data_parallel_partitions get_first_param_index
        get_flat_partition get_groups_without_padding get_lean_optimizer_state get_param_id get_partition_info
        groups_padding initialize_optimizer_states is_param_in_current_partition lp_param_buffer
        master_weights_and_grads_dtype nccl_start_alignment_factor parallel_partitioned_bit16_groups param_dict param_id
        param_to_partition_ids parameter_alignment params_in_partition params_not_in_partition partition_count
        partition_size persistent_parameters round_robin_bit16_indices round_robin_bit16_meta
        round_robin_bit16_offsets round_robin_bit16_padding round_robin_gradients single_partition_of_fp32_groups
        sub_group_partition_counts sub_group_process_groups sub_group_size sub_group_to_group_id subgroup_to_device
        trainable_param_groups unflatten update_lp_params
    """,
    "stock's buckets and streams: ours are GradientReducer's": """
        all_grad_tensors all_reduce_print allgather_bucket_size allreduce_and_copy allreduce_and_copy_with_multiple_ranks
        allreduce_and_scatter allreduce_bucket allreduce_no_retain average_tensor averaged_gradients
        buffered_reduce_fallback callback_queued clear_grad_attribute communication_data_type contiguous_gradients
        copy_grads_in_partition create_gradient_handling_hooks create_reduce_and_remove_grad_hooks
        extra_large_param_to_reduce fill_grad_accum_attribute free_grad_in_param_list get_all_grad_tensors
        get_grad_position get_gradient_for_reduction get_grads_for_reduction get_grads_to_reduce
        get_param_comm_dtype get_param_gradient_attribute grad_partition_insertion_offset grad_partitions_flat_buffer
        grad_position grad_start_offset gradient_accumulation_dtype gradient_accumulation_steps gradient_average
        gradient_predivide_factor gradient_reduction_w_predivide grads_in_partition grads_in_partition_offset
        independent_gradient_partition_epilogue initialize_gradient_partition
        initialize_gradient_partitioning_data_structures ipg_buckets is_grad_computed is_partition_reduced
        leaf_parameters max_param_reduce_events micro_step_id param_reduce_events params_already_reduced
        partition_grads postscale_gradients previous_reduced_grads process_gradients ready_for_gradients
        real_dp_process_group reduce_and_partition_stream reduce_bucket_size
        reduce_independent_p_g_buckets_and_remove_grads reduce_ipg_grads reduce_ready_partitions_and_remove_grads
        reduce_scatter reduction_stream remaining_grads_in_partition report_ipg_memory_usage
        reset_partition_gradient_structures sequential_execution set_grad_positions set_none_gradients_to_zero
        setup_buckets total_grads_in_partition use_grad_accum_attribute use_multi_rank_bucket_allreduce
        use_separate_grad_accum zero_reduced_gradients overlap_comm
    """,
    "inside stock's step: ours is ZeroStep, and `overflow` says what it found": """
        check_grad_overflow check_overflow compute_grad_norm complete_grad_norm_calculation_for_cpu_offload
        get_grad_norm_direct has_overflow has_overflow_partitioned_grads_serial has_overflow_serial
        inf_or_nan_tracker local_overflow model_parallel_group model_parallel_rank model_parallel_world_size
        n_caching_allocator_flushes norm_for_param_grads scaled_global_norm set_norm_for_param_grad
        set_norm_for_param_grad_in_gpu timers unscale_and_clip_grads
    """,
    "stock's states in host memory or on NVMe: ours are HostWorker's": """
        accumulated_grads_in_cpu async_accumulate_grad_in_cpu_via_gpu
        async_inplace_copy_grad_to_fp32_buffer_from_gpu backup_optimizer cpu_offload cpu_offload_pin_memory
        deepspeed_adam_offload hp_params_pin_buffers initialize_ds_offload lp_grad_partitions_flat_pin_buffers
        lp_param_contiguous_pin_buffer lp_params_pin_buffers max_params_in_cpu next_swappable_fp32_partitioned_groups
        offload_gradient_dict offload_optimizer offload_optimizer_fast_init offload_optimizer_pin_memory
        offload_param offload_param_pin_memory offloaded_states optimizer_swapper
        param_buffer_of_bit16_for_cpu_offload_groups param_groups_fp16_flat_cpu_memory params_in_nvme_and_cpu
        partial_offload prefetch_elements reset_cpu_buffers reset_swap_buffers temp_grad_buffer_for_cpu_offload
        temp_grad_buffer_for_gpu_offload update_offload_overflow_tracker
        update_offload_overflow_tracker_for_param_grad
    """,
    "stock's checkpoints: HMTEngine.load_checkpoint reads ours, from any stage and world size": """
        elastic_checkpoint load_hp_checkpoint_state load_hp_checkpoint_state_from_checkpoint_dir
        load_hp_checkpoint_state_from_checkpoint_dir_stage3 load_module_checkpoint_state_from_checkpoint_dir_stage3
        load_state_dict
    """,
    "experts and tensor parallelism, refused": """
        all2all_process_group autoep_folding_spec autoep_folding_tp_group
        configure_autoep_folding_tp_gradient_reduction ep_process_group expert_dp_process_group get_ep_ranks
        has_moe_layers is_moe_group is_moe_param_group sequence_parallel_size
    """,
    "Muon, ZenFlow and ZeRO++, other optimizers or refused": """
        create_zenflow_hooks groups_lacking_loss_scale invalidate_secondary_tensor muon_beta
        muon_momentum_buffer_partitioned_groups_flat muon_ns_method quantize_nontrainable_params
        save_muon_momentum_buffer_in_memory sub_groups_lacking_loss_scale sub_groups_using_muon use_muon zenflow
        zenflow_state zero_hpz_partition_size zero_quantized_nontrainable_weights _sync_selective_optimizer_lr
    """,
    "keys of the JSON, which ours takes from ZeroSettings or refuses": """
        bf16_master_weights_and_gradients bf16_optimizer_states fp16_master_weights_and_gradients
        ignore_unused_parameters low_precision_master_weights_and_grads zero_stage_string
    """,
    "debugging of stock's": """
        debug_fp16_grads dump_post_step_gradients dump_pre_step_gradients enable_sanity_checks print_rank_0
    """,
    "calls backward_prologue(loss), which no stage takes; the engine's backward() is what is called": "backward",
    "FP16_Optimizer's": "loss_scale_config",
    "nothing calls it; safe_get_local_grad reads one parameter's": "get_fp32_grad_partitions",
}


def defined_by(cls: type) -> set[str]:
    """Members of a class itself, and what its methods set on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return stored | {name for name in vars(cls) if not name.startswith("__")}


def asked_by(module: ModuleType) -> set[str]:
    """Names that a module reads, sets or looks for on something called ``optimizer`` or ``_z3_optimizer``."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and is_optimizer(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and len(node.args) > 1 and is_optimizer(node.args[0]):
            name = node.args[1]
            is_lookup = isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
            if is_lookup and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def is_optimizer(node: ast.expr) -> bool:
    name = getattr(node, "attr", getattr(node, "id", None))
    return name in ("optimizer", "_z3_optimizer")


def stock_names() -> set[str]:
    classes = (ZeROOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    names = {name for cls in classes for name in defined_by(cls) if not name.startswith("_")}
    for module in (engine_module, tensor_fragment, offload_states):
        names |= asked_by(module)
    return names - {"__class__"}


def test_every_name_of_stocks_optimizers_is_accounted_for() -> None:
    listed = [*OURS.split(), *INHERITED.split(), *TOOLS.split()]
    listed += [name for names in NOT_APPLICABLE.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    names = stock_names()
    assert names - set(listed) == set(), "new in DeepSpeed: does HMTZeroOptimizer need it?"
    assert set(listed) - names == set(), "no longer in DeepSpeed"


def test_each_is_what_the_table_says() -> None:
    ours = defined_by(HMTZeroOptimizer) | defined_by(OptimizerInterface)
    assert set(OURS.split()) <= ours
    assert not set(INHERITED.split()) & ours
    assert all(hasattr(ZeROOptimizer, name) for name in INHERITED.split())
    assert all(hasattr(StateAccess, name) for name in TOOLS.split())
    for reason, names in NOT_APPLICABLE.items():
        assert not set(names.split()) & ours, reason
