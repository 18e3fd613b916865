"""Lets DeepSpeed's own tests import what no script does: values of its inside, and classes that raise when they are used.

A process of those tests imports this once: the one that collects them, and the server that their ranks are forked from.
"""

import importlib
from typing import Any

import torch

from zstore.engine.adapters.deepspeed import names

_BUILDERS = {
    "CPUAdam": "cpu_adam", "CPUAdagrad": "cpu_adagrad", "CPULion": "cpu_lion", "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb", "FusedLion": "fused_lion", "AsyncIO": "async_io",
}  # fmt: skip
"""Builders of operators that have a counterpart here, and DeepSpeed's names of the operators."""
_VALUES: dict[str, Any] = {
    "deepspeed.git_version_info.torch_info": {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": True,
        **dict.fromkeys(("cuda_version", "nccl_version", "hip_version"), "0.0"),
    },
    "deepspeed.ops.__compatible_ops__": dict.fromkeys(_BUILDERS.values(), True) | {"deepspeed_not_implemented": False},
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1024**2,
    "deepspeed.runtime.constants.BFLOAT16": "bf16",
    "deepspeed.runtime.config.ADAM_OPTIMIZER": "adam",
}
_SCHEDULES = {
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_LR": "WarmupLR",
}  # fmt: skip
_KINDS = {"WARMUP_LINEAR_RATE": "linear", "WARMUP_LOG_RATE": "log"} | _SCHEDULES
_own: Any = names.StandInModule.__getattr__


def _lenient(module: Any, name: str) -> Any:
    """Return what the module has, else a value of DeepSpeed's, a key by its name, or a class that raises when it is used."""
    dotted = f"{module.__name__}.{name}"
    if dotted in _VALUES:
        return _VALUES[dotted]
    try:
        return _own(module, name)
    except AttributeError:
        if name.startswith("__") and name.endswith("__"):
            raise
    if name.isupper():
        return _KINDS.get(name, name.lower())
    if name.endswith("Builder"):
        return type(name, (), {"NAME": _BUILDERS.get(name.removesuffix("Builder"), name.lower())})
    return importlib.import_module(dotted) if name in ("ds_to_universal", "lr_schedules") else names.unsupported(dotted)


names.StandInModule.__getattr__ = _lenient  # type: ignore[method-assign]
names.require_module = lambda dotted: None
