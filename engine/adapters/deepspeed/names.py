"""Which names of DeepSpeed's are answered, by module; and of others, what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from zstore._version import __version__

ANSWERS_FOR = "0.19.8"
"""The DeepSpeed whose names these are."""
VERSION = f"{ANSWERS_FOR}+zstore.{__version__.replace('+', '.')}"
"""DeepSpeed's version, as it is told."""

_OPTIMIZERS = ("DeepSpeedCPUAdam", "FusedAdam")
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
_INIT = ("GatheredParameters", "Init", "MiCS_Init", "register_external_parameter", "unregister_external_parameter")
_ENUMS = ("OffloadDeviceEnum", "OffloadStateTypeEnum")
_SAFE = (
    *(
        f"safe_{verb}_{part}_{what}"
        for verb in ("get", "set")
        for part in ("full", "local")
        for what in ("fp32_param", "grad", "optimizer_state")
    ),
    "safe_update_full_grad_vectorized",
)
_LOGGING = ("log_dist", "log_dist_once", "logger", "set_log_level_from_string")
_LEAVES = (
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
)
_TO_FP32 = (
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
)
_TORCH_COMM = (
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_global_rank",
    "get_rank",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_COMM = (
    *_TORCH_COMM,
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_world_group",
    "inference_all_reduce",
    "init_distributed",
    "log_summary",
)
_LAUNCHER = (
    "DEEPSPEED_ENVIRONMENT_NAME",
    "_parse_hostfile",
    "encode_world_info",
    "fetch_hostfile",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
)
_RUNTIME_UTILS = (
    "call_to_str",
    "clip_grad_norm_",
    "copy_to_device",
    "ensure_directory_exists",
    "get_global_norm",
    "is_model_parallel_parameter",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
)
_ZERO_CONFIGS = ("DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
_PROFILER = ("FlopsProfiler", "get_model_profile")
_ZERO2_MEMORY = tuple(f"estimate_zero2_model_states_mem_needs{which}" for which in ("", "_all_cold", "_all_live"))
_ZERO3_MEMORY = tuple(f"estimate_zero3_model_states_mem_needs{which}" for which in ("", "_all_cold", "_all_live"))
_SPARSE = (
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
)
_CHECKPOINTING = (
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
)
_ELASTICITY = (
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
)
_GROUPS = tuple(
    f"{start}get_{kind}_parallel_{what}"
    for kind in ("data", "model", "tensor_model", "sequence", "sequence_data", "expert")
    for start, what in (
        ("", "world_size"),
        ("", "rank"),
        ("", "group"),
        ("_", "world_size"),
        ("_", "rank"),
        ("_", "group"),
    )
    if kind != "expert" or what != "group"
)

_ACCESS = "zstore.engine.access.safe_access"
_CHECKPOINTING_HOME = "zstore.engine.activations.checkpointing"
_PROFILER_HOME, _MEMORY_HOME = "zstore.engine.profile.profiler", "zstore.engine.profile.memory_needs"
_TO_FP32_HOME, _LAUNCHER_HOME = "zstore.tools.zero_to_fp32", "zstore.tools.run.deepspeed"

MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "deepspeed": {
        "engine": ("DeepSpeedEngine",),
        "initialize": ("add_config_arguments", "init_distributed", "initialize"),
        "utils": ("OnDevice", "log_dist", "logger"),
        "accelerator": ("get_accelerator",),
    },
    "deepspeed.accelerator": {"accelerator": ("get_accelerator", "is_current_accelerator_supported")},
    "deepspeed.accelerator.real_accelerator": {"accelerator": ("get_accelerator",)},
    "deepspeed.checkpoint": {"reshape": ("model_3d_desc",)},
    "deepspeed.checkpoint.utils": {"utils": ("clone_tensors_for_torch_save",)},
    "deepspeed.checkpointing": {_CHECKPOINTING_HOME: _CHECKPOINTING},
    "deepspeed.comm": {"comm": _COMM},
    "deepspeed.comm.comm": {"comm": _COMM},
    "deepspeed.compression": {},
    "deepspeed.compression.helper": {"utils": ("recursive_getattr", "recursive_setattr")},
    "deepspeed.elasticity": {"elasticity": _ELASTICITY},
    "deepspeed.elasticity.elasticity": {"elasticity": _ELASTICITY},
    "deepspeed.launcher": {},
    "deepspeed.launcher.multinode_runner": {
        _LAUNCHER_HOME: ("IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner"),
    },
    "deepspeed.launcher.runner": {_LAUNCHER_HOME: _LAUNCHER},
    "deepspeed.moe": {},
    "deepspeed.moe.utils": {"utils": ("is_moe_param", "split_params_into_different_moe_groups_for_optimizer")},
    "deepspeed.monitor": {},
    "deepspeed.monitor.config": {"config": ("DeepSpeedMonitorConfig",)},
    "deepspeed.monitor.csv_monitor": {"monitor": ("csvMonitor",)},
    "deepspeed.monitor.monitor": {"monitor": ("MonitorMaster",)},
    "deepspeed.monitor.tensorboard": {"monitor": ("TensorBoardMonitor",)},
    "deepspeed.monitor.wandb": {"monitor": ("WandbMonitor",)},
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": {"optimizers": ("DeepSpeedCPUAdagrad",)},
    "deepspeed.ops.adam": {"optimizers": _OPTIMIZERS},
    "deepspeed.ops.adam.cpu_adam": {"optimizers": ("DeepSpeedCPUAdam",)},
    "deepspeed.ops.adam.fused_adam": {"optimizers": ("FusedAdam",)},
    "deepspeed.ops.lamb": {"optimizers": ("FusedLamb",)},
    "deepspeed.ops.lamb.fused_lamb": {"optimizers": ("FusedLamb",)},
    "deepspeed.ops.lion": {"optimizers": ("DeepSpeedCPULion", "FusedLion")},
    "deepspeed.ops.lion.cpu_lion": {"optimizers": ("DeepSpeedCPULion",)},
    "deepspeed.ops.lion.fused_lion": {"optimizers": ("FusedLion",)},
    "deepspeed.ops.sparse_attention": {"sparse_attention": _SPARSE},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": {_PROFILER_HOME: _PROFILER},
    "deepspeed.profiling.flops_profiler.profiler": {_PROFILER_HOME: _PROFILER},
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {_CHECKPOINTING_HOME: _CHECKPOINTING},
    "deepspeed.runtime.engine": {"engine": ("DeepSpeedEngine",)},
    "deepspeed.runtime.lr_schedules": {"lr_schedules": (*_SCHEDULES, "VALID_LR_SCHEDULES")},
    "deepspeed.runtime.utils": {"runtime": _RUNTIME_UTILS},
    "deepspeed.runtime.base_optimizer": {},
    "deepspeed.runtime.config": {"config": ("DeepSpeedConfig", "get_gradient_clipping")},
    "deepspeed.runtime.config_utils": {"config": ("DeepSpeedConfigModel",)},
    "deepspeed.runtime.constants": {"config": ("GRADIENT_CLIPPING_DEFAULT",)},
    "deepspeed.runtime.dataloader": {"utils": ("RepeatingLoader",)},
    "deepspeed.runtime.precision_config": {
        "config": ("DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config"),
    },
    "deepspeed.runtime.zero": {"zero": (*_INIT, "unwrap_model_for_generation"), "zero_types": ("ZeroParamStatus",)},
    "deepspeed.runtime.zero.config": {"config": _ZERO_CONFIGS, "zero_types": ("ZeroStageEnum",)},
    "deepspeed.runtime.zero.muon": {},
    "deepspeed.runtime.zero.muon.original_muon": {"optimizers": ("Muon", "MuonWithAuxAdam")},
    "deepspeed.runtime.zero.offload_states": {"engine": ("get_state_devices",)},
    "deepspeed.runtime.zero.offload_config": {"config": _ZERO_CONFIGS[1:], "zero_types": _ENUMS},
    "deepspeed.runtime.zero.partition_parameters": {
        "zero": (*_INIT, "zero_wrapper_for_fp_tensor_constructor"),
        "zero_types": ("ZeroParamStatus",),
        "accelerator": ("get_accelerator",),
    },
    "deepspeed.runtime.zero.stage3": {_MEMORY_HOME: _ZERO3_MEMORY, "zero": ("unwrap_model_for_generation",)},
    "deepspeed.runtime.zero.stage_1_and_2": {_MEMORY_HOME: _ZERO2_MEMORY},
    "deepspeed.runtime.zero.tiling": {"tiling": ("TiledLinear",)},
    "deepspeed.runtime.zero.utils": {"zero": ("ZeRORuntimeException", "is_zero_param")},
    "deepspeed.utils": {
        "utils": ("OnDevice", "RepeatingLoader", "instrument_w_nvtx", *_LOGGING, *_LEAVES),
        _ACCESS: _SAFE,
    },
    "deepspeed.utils.groups": {"groups": _GROUPS},
    "deepspeed.utils.logging": {"utils": _LOGGING},
    "deepspeed.utils.nvtx": {"utils": ("instrument_w_nvtx",)},
    "deepspeed.utils.z3_leaf_module": {"utils": _LEAVES},
    "deepspeed.utils.numa": {"utils": ("parse_range", "parse_range_list")},
    "deepspeed.utils.tensor_fragment": {_ACCESS: _SAFE},
    "deepspeed.utils.timer": {"utils": ("trim_mean",)},
    "deepspeed.utils.torch": {"runtime": ("required_torch_version",)},
    "deepspeed.utils.zero_to_fp32": {_TO_FP32_HOME: (*_TO_FP32, "get_optim_files")},
    "deepspeed.zero": {"zero": _INIT, "tiling": ("TiledLinear",)},
}
"""DeepSpeed's module -> this package's module, or one by its whole name -> names that it gives."""

ABSENT: Mapping[str, tuple[str, ...]] = {
    "deepspeed": ("InferenceEngine", "PipelineEngine", "PipelineModule"),
    "deepspeed.checkpoint": ("DeepSpeedCheckpoint", "ZeROCheckpoint", "get_model_3d_descriptor"),
    "deepspeed.checkpoint.utils": ("get_model_ckpt_name_for_rank",),
    "deepspeed.checkpoint.ds_to_universal": ("_aggregate_autoep_zero12_metadata", "main"),
    "deepspeed.compression.compress": ("init_compression", "redundancy_clean"),
    "deepspeed.inference": (),
    "deepspeed.inference.config": ("DeepSpeedInferenceConfig",),
    "deepspeed.launcher.multinode_runner": ("PDSHRunner", "SlurmRunner"),
    "deepspeed.moe.layer": ("MoE",),
    "deepspeed.moe.sharded_moe": ("MOELayer", "TopKGate"),
    "deepspeed.moe.utils": (
        "has_moe_layers",
        "is_moe_param_group",
        "split_params_grads_into_shared_and_expert_params",
        "split_params_into_shared_and_expert_params",
    ),
    "deepspeed.launcher.runner": ("main",),
    "deepspeed.monitor.comet": ("CometMonitor",),
    "deepspeed.monitor.monitor": ("Monitor",),
    "deepspeed.ops.op_builder": ("OpBuilder",),
    "deepspeed.pipe": ("LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"),
    "deepspeed.runtime.base_optimizer": ("DeepSpeedOptimizer", "ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": ("BF16_Optimizer",),
    "deepspeed.runtime.data_pipeline": (),
    "deepspeed.runtime.engine": ("_checkpoint_parallel_metadata",),
    "deepspeed.runtime.fp16": (),
    "deepspeed.runtime.fp16.fused_optimizer": ("FP16_Optimizer",),
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.fp16.onebit": ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": ("OnebitLamb",),
    "deepspeed.runtime.fp16.unfused_optimizer": ("FP16_UnfusedOptimizer",),
    "deepspeed.runtime.pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "deepspeed.runtime.pipe.engine": ("PipelineEngine",),
    "deepspeed.runtime.pipe.module": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "deepspeed.runtime.pipe.topology": (
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineParallelGrid",
        "ProcessTopology",
    ),
    "deepspeed.runtime.torch_autocast": ("get_comm_dtype", "has_comm_dtype"),
    "deepspeed.runtime.zero.linear": (
        "LinearFunctionForZeroStage3",
        "LinearModuleForZeroStage3",
        "zero3_linear_wrap",
    ),
    "deepspeed.runtime.zero.partition_parameters": ("CUDAQuantizer", "MultipleAllGatherHandles"),
    "deepspeed.runtime.zero.stage3": ("DeepSpeedZeroOptimizer_Stage3",),
    "deepspeed.runtime.zero.stage_1_and_2": ("DeepSpeedZeroOptimizer",),
    "deepspeed.runtime.zero.tiling": ("TiledLinearReturnBias",),
    "deepspeed.utils.comms_logging": ("CommsLogger",),
    "deepspeed.utils.timer": ("SynchronizedWallClockTimer", "ThroughputTimer"),
}
"""DeepSpeed's module -> names that can be imported, and raise when they are used."""

INSTEAD: Mapping[str, str] = {
    "autotuning": "`zstore tune --config FILE -- SCRIPT` searches for a config",
    "checkpointing": "configure() and checkpoint() are there; the rest is torch.utils.checkpoint's",
    "comm": "use torch.distributed, whose groups these are",
    "compression": "nothing is compressed; quantize or prune with torchao after `zstore consolidate`",
    "runtime.config_utils": "a config is a dict or a path",
    "add_tuning_arguments": "write arguments of the script's own; the schedule stands in the config",
    "DeepSpeedTransformerConfig": "there are no transformer kernels; use torch's attention",
    "DeepSpeedTransformerLayer": "there are no transformer kernels; use torch's attention",
    "elasticity.elastic_agent": "`zstore run` and torchrun start ranks anew",
    "HybridEngine": "there is no inference engine",
    "inference": "there is no inference engine; `zstore consolidate` writes safetensors for a server",
    "InferenceEngine": "there is no inference engine; `zstore consolidate` writes safetensors for a server",
    "init_inference": "there is no inference engine; `zstore consolidate` writes safetensors for a server",
    "launcher": "`zstore run` starts the ranks",
    "linear": "take LoRA from peft",
    "module_inject": "modules are not replaced; use torch's attention",
    "moe": "there is no expert parallelism; the experts of transformers' models are parameters like any others",
    "monitor": "monitor.monitor.MonitorMaster and engine.monitor take a script's values; the config says where they go",
    "ops": "kernels are torch's; optimizers are in ops.adam, ops.adagrad, ops.lamb and ops.lion, masks in ops.sparse_attention",
    "pipe": "there is no pipeline parallelism; use ZeRO stage 3, with offload_param for models larger than memory",
    "PipelineEngine": "there is no pipeline parallelism; use ZeRO stage 3",
    "PipelineModule": "there is no pipeline parallelism; use ZeRO stage 3, with offload_param for models larger than memory",
    "profiling": "use profiling.flops_profiler, or torch.profiler",
    "runtime.config": "a config is a dict or a path",
    "runtime.lr_schedules.add_tuning_arguments": "write arguments of the script's own; the schedule stands in the config",
    "runtime.pipe": "there is no pipeline parallelism; use ZeRO stage 3",
    "runtime.sequence_parallel": "there is no sequence parallelism; checkpointing takes activations off the device",
    "runtime.zero.stage_1_and_2": "the memory estimators are there; the optimizer is engine.optimizer",
    "runtime.zero.stage3": "the memory estimators are there; the optimizer is engine.optimizer",
    "runtime.zero.tiling.TiledLinearReturnBias": "TiledLinear is there, for layers that add their bias themselves",
    "sequence": "there is no sequence parallelism",
    "tp_model_init": "there is no tensor parallelism; use ZeRO stage 3",
    "utils.groups": "there is one group, of all ranks",
    "utils.timer": 'set "wall_clock_breakdown": true, or read engine.statistics()',
    "zero.estimate_zero2_model_states_mem_needs_all_live": "it is in runtime.zero.stage_1_and_2",
    "zero.estimate_zero3_model_states_mem_needs_all_live": "it is in runtime.zero.stage3",
    "zero.TiledLinearReturnBias": "TiledLinear is there, for layers that add their bias themselves",
}
"""Name within deepspeed, or a module's -> what to use instead, for it and all in it."""

ENGINE_INSTEAD: Mapping[str, str] = {
    "allreduce_gradients": "engine.step() does it",
    "clip_fp32_gradients": 'engine.step() does it; set "gradient_clipping" in the config',
    "deepspeed_io": "pass training_data to initialize(), or use a loader of the script's own",
    "flops_profiler": "make deepspeed.profiling.flops_profiler.FlopsProfiler(engine.module, engine)",
    "get_pld_theta": "layers are not dropped",
    "load_universal_checkpoint": "engine.load_checkpoint() loads it",
    "mpu": "there is no model parallelism",
    "print_forward_breakdown": 'set "wall_clock_breakdown": true, or read engine.statistics()',
    "set_dataloader": "use a loader of the script's own",
}
"""Attribute of DeepSpeed's engine -> what to use instead."""

_WHO = "zstore answers `import deepspeed` in this run (--as-deepspeed)"
_WHERE = "docs/deepspeed.md lists the names that are there"


def missing(dotted: str) -> str:
    """Return the message about a name that is not there."""
    inner = dotted.removeprefix("deepspeed.").split(".")
    paths = (".".join(inner[:depth]) for depth in range(len(inner), 0, -1))
    instead = next((INSTEAD[path] for path in paths if path in INSTEAD), None)
    return f"{dotted} is not there: {_WHO}. " + (f"Instead: {instead}. {_WHERE}" if instead else _WHERE)


def missing_of_engine(name: str) -> str | None:
    """Return the message about an attribute of DeepSpeed's engine that is not there; None where nothing is known of it."""
    instead = ENGINE_INSTEAD.get(name)
    return None if instead is None else f"engine.{name} is not there: {_WHO}. Instead: {instead}. {_WHERE}"
