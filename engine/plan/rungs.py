"""Advice for a lack of host memory: the next rung of `zstore plan`'s ladder."""

from __future__ import annotations

import json
from typing import Any

from zstore.ranks.world import World

from ..config.config import Config

FOLDER = "FOLDER_ON_A_DRIVE"


def next_rung(config: Config, world_size: int, *, device_is_host: bool) -> dict[str, Any]:
    """Return the keys of a resolved config to change so that ranks take less host memory, by their dotted names; none if
    everything that may be on disk is there. On the CPU that is memory of every kind, else offloaded state."""
    state, parameters = config.offload_optimizer.device, config.offload_param.device
    here = ("none", "cpu") if device_is_host else ("cpu",)
    batch = config.batch
    if device_is_host and batch.micro_batch_size > 1:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": batch.accumulation_steps * batch.micro_batch_size,
        }
    if device_is_host and not config.own.gradient_checkpointing:
        return {"zstore.gradient_checkpointing": True}
    if not device_is_host and config.activations == "host":
        return {"zstore.activations": "disk", "zstore.activations_path": FOLDER}
    if device_is_host and world_size > 1 and config.stage < 2:
        return {"zero_optimization.stage": 2}
    on_disk = {"device": "nvme", "nvme_path": FOLDER}
    if state in here:
        return {"zero_optimization.stage": max(1, config.stage), "zero_optimization.offload_optimizer": on_disk}
    if parameters in here:
        return {"zero_optimization.stage": 3, "zero_optimization.offload_param": on_disk}
    return {}


def advice(config: Config, world: World) -> str:
    """Return the next rung as a sentence."""
    rung = next_rung(config, world.world_size, device_is_host=world.device.type == "cpu")
    if not rung:
        return (
            "all that may be on disk is there already: lower zstore.host_budget_bytes, start fewer ranks or DataLoader workers "
            "on the machine, or build the model within zstore.Init"
        )
    return "set " + " and ".join(f"{key} to {json.dumps(value)}" for key, value in rung.items())
