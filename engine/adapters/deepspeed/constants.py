"""Values that DeepSpeed's modules name, for scripts that import them: keys of its config, mostly, and groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as torch_dist

from zstore.ranks.world import World

from .names import ANSWERS_FOR, VERSION

_PARTS = ("major", "minor", "patch")
_BUILDERS = {
    "CPUAdam": "cpu_adam", "CPUAdagrad": "cpu_adagrad", "CPULion": "cpu_lion", "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb", "FusedLion": "fused_lion", "AsyncIO": "async_io",
}  # fmt: skip
"""Builders of operators that have a counterpart here, and DeepSpeed's names of the operators."""
_OPS = _BUILDERS | {
    "Utils": "utils", "Inference": "transformer_inference", "Transformer": "transformer", "SparseAttn": "sparse_attn",
    "FPQuantizer": "fp_quantizer", "Quantizer": "quantizer", "RandomLTD": "random_ltd", "GDS": "gds",
}  # fmt: skip
_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"]
_MOE = "transformers.models.{0}.modeling_{0}.{1}SparseMoeBlock"


def _keys(names: str) -> dict[str, str]:
    """Return names whose value is the name in lower case."""
    return {name: name.lower() for name in names.split()}


def _version(text: str | None) -> str:
    return ".".join((text or "0.0").partition("+")[0].split(".")[:2])


_nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
_NCCL = ".".join(map(str, _nccl()[:2])) if torch.cuda.is_available() else "0.0"


def _groups() -> dict[str, Callable[[], Any]]:
    """Return functions about the ranks of a kind: of data parallelism, over which gradients are averaged, all; of
    others one. The group is None if torch.distributed is not started."""
    all_ranks: dict[str, Callable[[], Any]] = {
        "world_size": lambda: World.current().world_size,
        "rank": lambda: World.current().rank,
        "group": lambda: torch_dist.group.WORLD if torch_dist.is_initialized() else None,
    }
    one: dict[str, Callable[[], Any]] = {"world_size": lambda: 1, "rank": lambda: 0, "group": lambda: None}
    return {
        f"{start}get_{kind}_parallel_{what}": answer
        for kind in ("data", "sequence_data", "model", "tensor_model", "sequence", "expert")
        for what, answer in (all_ranks if kind.endswith("data") else one).items()
        for start in ("", "_")
        if (kind, what) != ("expert", "group")
    }


CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "deepspeed": {
        "__version__": VERSION, "version": VERSION, "__git_branch__": None, "__git_hash__": None,
        **{f"__version_{part}__": int(n) for part, n in zip(_PARTS, ANSWERS_FOR.split("."), strict=True)},
    },
    "deepspeed.checkpoint": _keys("UNIVERSAL_CHECKPOINT_INFO"),
    "deepspeed.checkpoint.constants": {
        **_keys(
            "BUFFER_NAMES DS_VERSION FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT PARAM_SHAPES "
            "PARTITION_COUNT UNIVERSAL_CHECKPOINT_INFO ZERO_STAGE"
        ),
        "AUTOEP_LAYERS_KEY": "ds_autoep_layers", "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions",
        "CHECKPOINT_PP_DEGREE": "pp_degree", "CHECKPOINT_TP_DEGREE": "tp_degree",
        "MODEL_FILE_SUFFIX": "_model_states.pt", "OPTIM_FILE_SUFFIX": "_optim_states.pt", "ZERO_FILE_PREFIX": "zero_pp_rank_",
    },
    "deepspeed.git_version_info": {
        "version": VERSION,
        "torch_info": {
            "version": _version(torch.__version__), "bf16_support": True, "cuda_version": _version(torch.version.cuda),
            "nccl_version": _NCCL, "hip_version": _version(torch.version.hip),
        },
        "installed_ops": dict.fromkeys(_OPS.values(), False),
    },
    "deepspeed.ops": {
        "__compatible_ops__": {op: name in _BUILDERS for name, op in _OPS.items()} | {"deepspeed_not_implemented": False},
    },
    "deepspeed.ops.op_builder": {f"{name}Builder": type(f"{name}Builder", (), {"NAME": op}) for name, op in _OPS.items()},
    "deepspeed.ops.aio": {"AsyncIOBuilder": type("AsyncIOBuilder", (), {"NAME": "async_io"})},
    "deepspeed.runtime.config": {
        **{f"{name.upper()}_OPTIMIZER": name for name in _OPTIMIZERS}, "DEEPSPEED_OPTIMIZERS": _OPTIMIZERS,
    },
    "deepspeed.runtime.constants": {
        **_keys(
            "FP16 GRADIENT_CLIPPING GRADIENT_ACCUMULATION_STEPS OPTIMIZER SCHEDULER STEPS_PER_PRINT TRAIN_BATCH_SIZE "
            "TRAIN_MICRO_BATCH_SIZE_PER_GPU ZERO_ALLOW_UNTESTED_OPTIMIZER"
        ),
        "BFLOAT16": "bf16", "ROUTE_EVAL": "eval", "ROUTE_PREDICT": "predict", "ROUTE_TRAIN": "train",
    },
    "deepspeed.runtime.lr_schedules": {
        "WARMUP_LR": "WarmupLR", "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR",
        "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LINEAR_RATE": "linear", "WARMUP_LOG_RATE": "log",
        **_keys(
            "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR "
            "CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE "
            "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE TOTAL_NUM_STEPS "
            "WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE"
        ),
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024**2},
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": [
            _MOE.format(*pair) for pair in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
        ],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "deepspeed.runtime.zero.config": {"ZERO_OPTIMIZATION": "zero_optimization"},
    "deepspeed.utils.groups": _groups(),
}  # fmt: skip
"""DeepSpeed's module -> name -> value."""
