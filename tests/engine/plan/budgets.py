"""Configs with everything on disk, whose host budget a test chooses."""

from __future__ import annotations

from typing import Any


def make_config(nvme: str, **keys: Any) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": nvme}
    zero = {"stage": 3, "offload_optimizer": dict(where), "offload_param": dict(where)}
    zero["stage3_param_persistence_threshold"] = 1000
    zero |= keys.pop("zero", {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }
    return config | keys
