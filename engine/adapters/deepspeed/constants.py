"""Values that DeepSpeed's modules name, for scripts that import them: the keys of its config, mostly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .names import ANSWERS_FOR, VERSION


def _keys(*names: str) -> dict[str, str]:
    """Return names whose value is the name in lower case."""
    return {name: name.lower() for name in names}


def _optimizers(*names: str) -> dict[str, str]:
    return {f"{name.upper()}_OPTIMIZER": name for name in names}


_OPS = {
    f"{name}Builder": (op, served)
    for name, op, served in (
        ("CPUAdam", "cpu_adam", True),
        ("CPUAdagrad", "cpu_adagrad", True),
        ("CPULion", "cpu_lion", True),
        ("FusedAdam", "fused_adam", True),
        ("FusedLamb", "fused_lamb", True),
        ("FusedLion", "fused_lion", True),
        ("AsyncIO", "async_io", True),
        ("Utils", "utils", False),
        ("Inference", "transformer_inference", False),
        ("Transformer", "transformer", False),
        ("SparseAttn", "sparse_attn", False),
        ("FPQuantizer", "fp_quantizer", False),
        ("Quantizer", "quantizer", False),
        ("RandomLTD", "random_ltd", False),
        ("GDS", "gds", False),
    )
}
"""Name of a builder -> DeepSpeed's name of its operator, and whether what it serves is there."""


_PARTS = ("major", "minor", "patch")


def _version(text: str | None) -> str:
    return ".".join((text or "0.0").partition("+")[0].split(".")[:2])


_nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
_NCCL = ".".join(map(str, _nccl()[:2])) if torch.cuda.is_available() else "0.0"
_OLD_LR = ("WarmupLR", "WARMUP_LR"), ("WarmupDecayLR", "WARMUP_DECAY_LR"), ("WarmupCosineLR", "WARMUP_COSINE_LR")

CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "deepspeed": {
        **dict.fromkeys(("__version__", "version"), VERSION),
        **dict.fromkeys(("__git_branch__", "__git_hash__")),
        **{f"__version_{part}__": int(n) for part, n in zip(_PARTS, ANSWERS_FOR.split("."), strict=True)},
    },
    "deepspeed.checkpoint": _keys("UNIVERSAL_CHECKPOINT_INFO"),
    "deepspeed.checkpoint.constants": {
        **_keys(
            "BUFFER_NAMES",
            "DS_VERSION",
            "FROZEN_PARAM_FRAGMENTS",
            "FROZEN_PARAM_SHAPES",
            "OPTIMIZER_STATE_DICT",
            "PARAM_SHAPES",
            "PARTITION_COUNT",
            "UNIVERSAL_CHECKPOINT_INFO",
            "ZERO_STAGE",
        ),
        "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
        "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions",
        "CHECKPOINT_PP_DEGREE": "pp_degree",
        "CHECKPOINT_TP_DEGREE": "tp_degree",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
    },
    "deepspeed.git_version_info": {
        "version": VERSION,
        "torch_info": {
            "version": _version(torch.__version__),
            "bf16_support": True,
            "cuda_version": _version(torch.version.cuda),
            "nccl_version": _NCCL,
            "hip_version": _version(torch.version.hip),
        },
        "installed_ops": {op: False for op, _ in _OPS.values()},
    },
    "deepspeed.ops": {"__compatible_ops__": {**dict(_OPS.values()), "deepspeed_not_implemented": False}},
    "deepspeed.ops.op_builder": {name: type(name, (), {"NAME": op}) for name, (op, _) in _OPS.items()},
    "deepspeed.ops.aio": {"AsyncIOBuilder": type("AsyncIOBuilder", (), {"NAME": "async_io"})},
    "deepspeed.runtime.config": {
        **_optimizers("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd"),
        "DEEPSPEED_OPTIMIZERS": ["adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"],
    },
    "deepspeed.runtime.constants": {
        **_keys(
            "FP16",
            "BFLOAT16",
            "GRADIENT_CLIPPING",
            "GRADIENT_ACCUMULATION_STEPS",
            "OPTIMIZER",
            "SCHEDULER",
            "STEPS_PER_PRINT",
            "TRAIN_BATCH_SIZE",
            "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
            "ZERO_ALLOW_UNTESTED_OPTIMIZER",
        ),
        "BFLOAT16": "bf16",
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
    },
    "deepspeed.runtime.lr_schedules": {
        **{constant: name for name, constant in _OLD_LR},
        "LR_RANGE_TEST": "LRRangeTest",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_LINEAR_RATE": "linear",
        "WARMUP_LOG_RATE": "log",
        **_keys(
            "COS_MIN_RATIO",
            "CYCLE_FIRST_STAIR_COUNT",
            "CYCLE_FIRST_STEP_SIZE",
            "CYCLE_MAX_LR",
            "CYCLE_MAX_MOM",
            "CYCLE_MIN_LR",
            "CYCLE_MIN_MOM",
            "CYCLE_SECOND_STAIR_COUNT",
            "CYCLE_SECOND_STEP_SIZE",
            "DECAY_LR_RATE",
            "DECAY_MOM_RATE",
            "DECAY_STEP_SIZE",
            "LR_RANGE_TEST_MIN_LR",
            "LR_RANGE_TEST_STAIRCASE",
            "LR_RANGE_TEST_STEP_RATE",
            "LR_RANGE_TEST_STEP_SIZE",
            "TOTAL_NUM_STEPS",
            "WARMUP_MAX_LR",
            "WARMUP_MIN_LR",
            "WARMUP_MIN_RATIO",
            "WARMUP_NUM_STEPS",
            "WARMUP_TYPE",
        ),
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1024**2},
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": [
            f"transformers.models.{folder}.modeling_{folder}.{kind}SparseMoeBlock"
            for folder, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
        ],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "deepspeed.runtime.zero.config": {"ZERO_OPTIMIZATION": "zero_optimization"},
}
"""DeepSpeed's module -> name -> value."""
