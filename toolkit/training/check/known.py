"""The keys that Accelerate 1.15 and DeepSpeed 0.19 know. Tests hold them to the installed versions.

Sources: accelerate/commands/config/config_args.py (ClusterConfig), accelerate/commands/launch.py (the
    launcher's options), deepspeed/runtime/zero/config.py, deepspeed/runtime/zero/offload_config.py,
    deepspeed/runtime/precision_config.py, deepspeed/runtime/config.py.
"""

from __future__ import annotations

from toolkit.strategies.parallel.launch import PREFIX


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCELERATE = _words("""
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
    gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function
    enable_cpu_affinity fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config
    mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm
    tpu_env dynamo_config
""")
LEGACY = _words("fp16 dynamo_backend")
"""Keys of older files that Accelerate still converts."""
FSDP = frozenset(
    "fsdp_" + word
    for word in _words("""
    version offload_params min_num_params sharding_strategy reshard_after_forward auto_wrap_policy
    transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params
    cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload
    ignored_modules
""")
)
FSDP1_ONLY = frozenset(
    "fsdp_" + word for word in _words("sharding_strategy backward_prefetch forward_prefetch use_orig_params sync_module_states")
)
"""Keys that version 2 does not read."""
PLUGIN = _words("""
    zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path
    offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag
    zero3_save_16bit_model deepspeed_config_file deepspeed_hostfile deepspeed_exclusion_filter
    deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names
""")
IN_JSON = _words("""
    gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device offload_param_device
    offload_param_nvme_path offload_optimizer_nvme_path zero3_save_16bit_model mixed_precision
""")
"""Keys that Accelerate refuses in its own file when a DeepSpeed JSON is given (`_deepspeed_config_checks`).
"""
PARALLELISM = frozenset(
    PREFIX + word
    for word in _words("""
    dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend
    sp_seq_length sp_seq_length_is_variable sp_attn_implementation
""")
)
DEEPSPEED = _words("""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler fp16 bf16 bfloat16 amp zero_optimization gradient_clipping prescale_gradients
    gradient_predivide_factor gradient_allreduce_op sparse_gradients steps_per_print wall_clock_breakdown
    memory_breakdown dump_state log_level communication_data_type seq_parallel_communication_data_type
    disable_allgather disable_python_gc zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    activation_checkpointing aio flops_profiler tensorboard wandb csv_monitor comet autotuning elasticity
    comms_logger compression_training data_efficiency curriculum_learning progressive_layer_drop eigenvalue
    pipeline checkpoint data_types torch_autocast hybrid_engine dataloader_drop_last
    use_data_before_expert_parallelism weight_quantization compile timers tensor_parallel expert_parallel
    vocabulary_size datastates_ckpt msamp nebula sparse_attention
""")
ZERO = _words("""
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
    elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
    cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
""")
ZERO_ALIASES = frozenset(word.removeprefix("stage3_") for word in ZERO if word.startswith("stage3_"))
"""DeepSpeed takes these without their `stage3_` as well."""
DEPRECATED = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
OFFLOAD = {
    "offload_param": _words("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    "offload_optimizer": _words(
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"
    ),
}
PRECISION = {
    "bf16": _words("enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"),
    "fp16": _words(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads"
    ),
}
VARIABLES = (
    frozenset(
        "FSDP_" + word
        for word in _words("""
    VERSION SHARDING_STRATEGY RESHARD_AFTER_FORWARD OFFLOAD_PARAMS MIN_NUM_PARAMS AUTO_WRAP_POLICY
    TRANSFORMER_CLS_TO_WRAP BACKWARD_PREFETCH STATE_DICT_TYPE FORWARD_PREFETCH USE_ORIG_PARAMS
    CPU_RAM_EFFICIENT_LOADING SYNC_MODULE_STATES ACTIVATION_CHECKPOINTING ACTIVATION_CHECKPOINTING_OFFLOAD
    IGNORED_MODULES
""")
    )
    | frozenset(
        "ACCELERATE_" + word
        for word in _words("""
    ALLOW_CP_STANDALONE BYPASS_DEVICE_MAP CONFIG_DS_FIELDS CPU_AFFINITY DEBUG_MODE DEBUG_RDV_FILE
    DEEPSPEED_CONFIG_FILE DEEPSPEED_MOE_LAYER_CLS_NAMES DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE
    DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH DEEPSPEED_OFFLOAD_PARAM_DEVICE DEEPSPEED_OFFLOAD_PARAM_NVME_PATH
    DEEPSPEED_ZERO3_INIT DEEPSPEED_ZERO3_SAVE_16BIT_MODEL DEEPSPEED_ZERO_STAGE DOWNCAST_BF16 DYNAMO_BACKEND
    DYNAMO_MODE DYNAMO_USE_DYNAMIC DYNAMO_USE_FULLGRAPH DYNAMO_USE_REGIONAL_COMPILATION ENABLE_RICH
    FP8_BACKEND FP8_OPT_LEVEL GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING INIT_INCLUDE_BUFFERS IN_TPU_POD
    LOG_LEVEL MIXED_PRECISION NUM_PROCESSES SAGEMAKER_DISTRIBUTED_TYPE TORCH_DEVICE USE_CPU USE_DEEPSPEED
    USE_FSDP USE_MEGATRON_LM USE_PARALLELISM_CONFIG USE_SAGEMAKER
""")
    )
    | frozenset(
        "PARALLELISM_CONFIG_" + word
        for word in _words("""
    DP_REPLICATE_SIZE DP_SHARD_SIZE TP_SIZE CP_SIZE CP_BACKEND CP_COMM_STRATEGY SP_SIZE SP_BACKEND
    SP_SEQ_LENGTH SP_SEQ_LENGTH_IS_VARIABLE SP_ATTN_IMPLEMENTATION
""")
    )
)
"""What Accelerate reads from the environment under its own prefixes (ACCELERATE_FP8_* besides, by prefix)."""
SWITCHES = frozenset(
    "FSDP_" + word
    for word in _words("""
    OFFLOAD_PARAMS FORWARD_PREFETCH USE_ORIG_PARAMS CPU_RAM_EFFICIENT_LOADING SYNC_MODULE_STATES
    ACTIVATION_CHECKPOINTING ACTIVATION_CHECKPOINTING_OFFLOAD
""")
) | frozenset(
    "ACCELERATE_" + word
    for word in _words("""
    CPU_AFFINITY DEBUG_MODE DEEPSPEED_ZERO3_INIT DEEPSPEED_ZERO3_SAVE_16BIT_MODEL USE_CPU USE_DEEPSPEED
    USE_FSDP USE_MEGATRON_LM USE_PARALLELISM_CONFIG
""")
)
"""Those of them that are true or false."""
