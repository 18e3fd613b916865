"""Runs that are saved and resumed at any world size: their config, and training by global sample number."""

from __future__ import annotations

from typing import Any

from tests.engine.models import batch
from zstore.engine import Engine


def config(stage: int, tier: str, folder: str, *, batch_size: int = 12, precision: str = "bf16") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
    found: dict[str, Any] = {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }
    if precision != "fp32":
        found[precision] = {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})
    return found


def train(engine: Engine, steps: int) -> list[float]:
    """Train from where the engine stands; return this rank's losses. Data depends on the global sample number alone."""
    losses = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            number = micro * engine.world_size + engine.global_rank
            loss = engine(*batch(engine.global_steps, 0, number))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses
