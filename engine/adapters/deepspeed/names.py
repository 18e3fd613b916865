"""DeepSpeed's names on zstore, by module; replacements for missing names; and the modules that `import deepspeed` provides.
Torch is imported with the first of these modules, not with this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from zstore._version import __version__
from zstore.errors import UsageError

EMULATED_VERSION = "0.19.8"
"""The DeepSpeed release whose names these are."""
VERSION = f"{EMULATED_VERSION}+zstore.{__version__.replace('+', '.')}"
"""DeepSpeed's version, as reported to scripts."""

_ENGINE = "zstore.engine"
_ACCESS, _CHECKPOINTING = f"{_ENGINE}.access.safe_access", f"{_ENGINE}.activations.checkpointing"
_TO_FP32 = "zstore.tools.zero_to_fp32"

SCHEDULES = "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"
LEAF_FUNCTIONS = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules z3_leaf_module"
)
TORCH_COMM = (
    "ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list destroy_process_group gather get_backend get_global_rank get_rank get_world_size irecv is_available "
    "is_initialized isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send"
)
SAFE_ACCESSORS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)
_INIT = "GatheredParameters Init register_external_parameter unregister_external_parameter"


def _expand(rows: Mapping[str, Mapping[str, str]]) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Expand `rows`: the key of a row lists modules within deepspeed."""
    return {
        f"deepspeed.{module}".removesuffix(".root"): {source: tuple(names.split()) for source, names in sources.items()}
        for modules, sources in rows.items()
        for module in modules.split()
    }


MODULES = _expand({
    "root": {
        "engine": "DeepSpeedEngine initialize", f"{_ENGINE}.config.config": "add_config_arguments",
        f"{_ENGINE}.runtime.process": "init_distributed",
        "utils": "OnDevice get_accelerator log_dist logger",
    },
    "accelerator": {"utils": "get_accelerator is_current_accelerator_supported"},
    "accelerator.real_accelerator": {"utils": "get_accelerator"},
    "checkpoint.utils": {"utils": "clone_tensors_for_torch_save"},
    "checkpointing runtime.activation_checkpointing.checkpointing": {
        _CHECKPOINTING: "checkpoint configure is_configured non_reentrant_checkpoint reset",
    },
    "comm comm.comm": {
        "torch.distributed": TORCH_COMM, f"{_ENGINE}.runtime.process": "init_distributed",
        "utils": "get_local_rank get_world_group",
    },
    "compression.helper": {"utils": "recursive_getattr recursive_setattr"},
    "elasticity elasticity.elasticity": {
        f"{_ENGINE}.extras.elasticity": (
            "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize compute_elastic_config"
        ),
    },
    "ops.adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {"optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"optimizers": "FusedAdam"},
    "ops.lamb ops.lamb.fused_lamb": {"optimizers": "FusedLamb"},
    "ops.lion": {"optimizers": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {"optimizers": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"optimizers": "FusedLion"},
    "runtime.dataloader": {"utils": "RepeatingLoader"},
    "runtime.engine": {"engine": "DeepSpeedEngine"},
    "runtime.lr_schedules": {"optimizers": f"{SCHEDULES} VALID_LR_SCHEDULES"},
    "runtime.utils": {"utils": "move_to_device see_memory_usage set_random_seed"},
    "runtime.zero": {"zero": f"{_INIT} ZeroParamStatus"},
    "runtime.zero.config": {"zero": "ZeroStageEnum"},
    "runtime.zero.offload_config": {"zero": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "runtime.zero.partition_parameters": {
        "zero": f"{_INIT} ZeroParamStatus zero_wrapper_for_fp_tensor_constructor", "utils": "get_accelerator",
    },
    "runtime.zero.utils": {"zero": "is_zero_param"},
    "utils": {
        "utils": f"OnDevice RepeatingLoader instrument_w_nvtx log_dist logger {LEAF_FUNCTIONS}",
        _ACCESS: SAFE_ACCESSORS,
    },
    "utils.logging": {"utils": "log_dist logger"},
    "utils.nvtx": {"utils": "instrument_w_nvtx"},
    "utils.tensor_fragment": {_ACCESS: SAFE_ACCESSORS},
    "utils.torch": {"utils": "required_torch_version"},
    "utils.z3_leaf_module": {"utils": LEAF_FUNCTIONS},
    "utils.zero_to_fp32": {
        _TO_FP32: (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint get_optim_files "
            "load_state_dict_from_zero_checkpoint"
        ),
    },
    "zero": {"zero": _INIT},
})  # fmt: skip
"""DeepSpeed's module -> module of this package, or full name of another module -> names imported from it."""

UNSUPPORTED = {
    f"deepspeed.{module}".removesuffix(".root"): tuple(names.split())
    for module, names in {
        "root": "InferenceEngine PipelineEngine PipelineModule",
        "moe.layer": "MoE",
        "moe.utils": "is_moe_param split_params_into_different_moe_groups_for_optimizer",
        "monitor.monitor": "MonitorMaster",
        "pipe": "LayerSpec PipelineModule ProcessTopology TiedLayerSpec",
        "runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
        "runtime.bf16_optimizer": "BF16_Optimizer",
        "runtime.config": "DeepSpeedConfig",
        "runtime.fp16.fused_optimizer": "FP16_Optimizer",
        "runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
        "runtime.pipe": "LayerSpec PipelineModule TiedLayerSpec",
        "runtime.pipe.engine": "PipelineEngine",
        "runtime.pipe.module": "LayerSpec PipelineModule TiedLayerSpec",
        "runtime.pipe.topology": "PipelineParallelGrid ProcessTopology",
        "runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
        "runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
        "runtime.zero.tiling": "TiledLinear",
        "zero": "TiledLinear",
    }.items()
}
"""DeepSpeed's module -> names that can be imported but raise when called."""

REPLACEMENTS = {
    name: text
    for names, text in {
        "add_tuning_arguments runtime.lr_schedules.add_tuning_arguments": (
            "define arguments in the script; the schedule is in the config"
        ),
        "autotuning": "`zstore plan --config FILE` says what fits",
        "checkpointing": "configure() and checkpoint() are available; use torch.utils.checkpoint for everything else",
        "comm": "use torch.distributed, whose groups these are",
        "compression": "nothing is compressed; quantize or prune with torchao after `zstore consolidate`",
        "DeepSpeedTransformerConfig DeepSpeedTransformerLayer": "there are no transformer kernels; use torch's attention",
        "elasticity.elastic_agent": "`zstore run` and torchrun restart ranks",
        "checkpoint": "a checkpoint loads at any world size; nothing is reshaped or converted",
        "HybridEngine inference InferenceEngine init_inference": (
            "there is no inference engine; `zstore consolidate` writes safetensors for a server"
        ),
        "launcher": "`zstore run` starts the ranks",
        "linear": "use LoRA from peft",
        "module_inject": "modules are not replaced; use torch's attention",
        "moe": "there is no expert parallelism; the experts of transformers' models are ordinary parameters",
        "monitor": "engine.monitor.write_events() takes a script's values; the config sets their destinations",
        "ops": ("kernels are torch's; optimizers are in ops.adam, ops.adagrad, ops.lamb and ops.lion"),
        "ops.sparse_attention": "zstore.attention has its patterns, and the config's section sparse_attention",
        "runtime.zero.muon": (
            "name Muon in the config's optimizer, or use torch.optim.Muon and zstore.optim.MuonWithAdam"
        ),
        "pipe runtime.pipe PipelineEngine PipelineModule": (
            "there is no pipeline parallelism; use ZeRO stage 3, with offload_param for models larger than memory"
        ),
        "profiling": "use torch.profiler, and torch.utils.flop_counter.FlopCounterMode to count by module",
        "runtime.config": "a config is a dict or a path",
        "sequence runtime.sequence_parallel": (
            "there is no sequence parallelism; activation checkpointing reduces activations on the device"
        ),
        "runtime.zero.stage_1_and_2 runtime.zero.stage3": (
            "`zstore plan` estimates memory; the optimizer is engine.optimizer"
        ),
        "zero.TiledLinear runtime.zero.tiling": (
            "split the layer into modules of a ModuleList, which are gathered separately"
        ),
        "tp_model_init": "there is no tensor parallelism; use ZeRO stage 3",
        "utils.timer": 'set "wall_clock_breakdown": true, or read engine.statistics()',
        "zero.estimate_zero2_model_states_mem_needs_all_live": "`zstore plan` says what fits",
        "zero.estimate_zero3_model_states_mem_needs_all_live": "`zstore plan` says what fits",
    }.items()
    for name in names.split()
}
"""Name or module within deepspeed -> replacement, which also applies to names in the module."""

ENGINE_REPLACEMENTS: Mapping[str, str] = {
    "allreduce_gradients": "engine.step() does it",
    "clip_fp32_gradients": 'engine.step() does it; set "gradient_clipping" in the config',
    "deepspeed_io": "pass training_data to initialize(), or create a loader in the script",
    "flops_profiler": "use torch.profiler, and torch.utils.flop_counter.FlopCounterMode to count by module",
    "get_pld_theta": "layers are not dropped",
    "load_universal_checkpoint": "engine.load_checkpoint() loads it",
    "mpu": "there is no model parallelism",
    "print_forward_breakdown": 'set "wall_clock_breakdown": true, or read engine.statistics()',
    "set_dataloader": "create a loader in the script",
}
"""Attribute of DeepSpeed's engine -> replacement."""

_CONTEXT = "`import deepspeed` imports zstore in this run (--as-deepspeed)"
_SEE_DOCS = "docs/deepspeed.md lists the available names"


def missing_text(dotted: str) -> str:
    """Return the message about a missing name."""
    inner = dotted.removeprefix("deepspeed.").split(".")
    paths = (".".join(inner[:depth]) for depth in range(len(inner), 0, -1))
    instead = next((REPLACEMENTS[path] for path in paths if path in REPLACEMENTS), None)
    return f"{dotted} is not available: {_CONTEXT}. " + (f"Instead: {instead}. {_SEE_DOCS}" if instead else _SEE_DOCS)


def missing_attribute_text(name: str) -> str | None:
    """Return the message about a missing attribute of DeepSpeed's engine; None if it has no replacement."""
    instead = ENGINE_REPLACEMENTS.get(name)
    return None if instead is None else f"engine.{name} is not available: {_CONTEXT}. Instead: {instead}. {_SEE_DOCS}"


def _groups() -> dict[str, Callable[[], Any]]:
    """Return the process group functions: data parallelism spans all ranks, other kinds one rank. The group is None if
    torch.distributed is not initialized."""

    def world() -> Any:
        from zstore.ranks.world import World

        return World.current()

    def group() -> Any:
        import torch.distributed as torch_dist

        return torch_dist.group.WORLD if torch_dist.is_initialized() else None

    all_ranks: dict[str, Callable[[], Any]] = {
        "world_size": lambda: world().world_size,
        "rank": lambda: world().rank,
        "group": group,
    }
    single_rank: dict[str, Callable[[], Any]] = {"world_size": lambda: 1, "rank": lambda: 0, "group": lambda: None}
    return {
        f"{prefix}get_{kind}_parallel_{what}": function
        for kind in ("data", "sequence_data", "model", "tensor_model", "sequence")
        for what, function in (all_ranks if kind.endswith("data") else single_rank).items()
        for prefix in ("", "_")
    }


_VERSION_PARTS = zip(("major", "minor", "patch"), map(int, EMULATED_VERSION.split(".")), strict=True)
VALUES: dict[str, dict[str, Any]] = {
    "deepspeed": {f"__version_{part}__": number for part, number in _VERSION_PARTS}
    | {"__version__": VERSION, "version": VERSION},
    "deepspeed.git_version_info": {"version": VERSION},
    "deepspeed.utils.groups": _groups(),
}
"""Module -> its remaining values."""
_MODULE_PARTS = [dotted.split(".") for dotted in (*MODULES, *UNSUPPORTED, *VALUES)]
ALL_MODULES = frozenset(".".join(parts[:depth]) for parts in _MODULE_PARTS for depth in range(1, len(parts) + 1))
"""All modules, including packages that contain only modules."""


class StandInModule(ModuleType):
    """A module with DeepSpeed's name and zstore's contents. The error for a missing name names its replacement."""

    def __getattr__(self, name: str) -> Any:
        """Return the submodule of that name, if there is one, since DeepSpeed imports its submodules."""
        dotted = f"{self.__name__}.{name}"
        if dotted in ALL_MODULES:
            return importlib.import_module(dotted)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(missing_text(dotted), name=name, obj=self)

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        inner = (dotted.removeprefix(prefix) for dotted in ALL_MODULES if dotted.startswith(prefix))
        return sorted({*self.__dict__, *(name for name in inner if "." not in name)})


def populate(module: ModuleType) -> None:
    """Set the listed names of a module."""
    for source, names in MODULES.get(module.__name__, {}).items():
        imported = importlib.import_module(source if "." in source else f"{__package__}.{source}")
        for name in names:
            setattr(module, name, getattr(imported, name))
    for name in UNSUPPORTED.get(module.__name__, ()):
        setattr(module, name, unsupported(f"{module.__name__}.{name}"))
    vars(module).update(VALUES.get(module.__name__, {}))


def require_module(dotted: str) -> None:
    """Raise ModuleNotFoundError naming the replacement for a missing module.

    Its `name` stays unset: otherwise `from deepspeed import NAME` would replace this message with Python's.
    """
    if dotted not in ALL_MODULES:
        raise ModuleNotFoundError(missing_text(dotted))


def unsupported(dotted: str) -> type:
    """Return a class named `dotted`; calling it raises UsageError naming the replacement."""
    text = missing_text(dotted)

    def refuse(cls: type, *args: object, **kwargs: object) -> Any:
        raise UsageError(text)

    module, _, name = dotted.rpartition(".")
    return type(name, (), {"__new__": refuse, "__doc__": text, "__module__": module})
