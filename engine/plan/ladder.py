"""What to change in a config when memory runs out, rung by rung: for `zstore plan`, and as advice of an engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zstore.ranks.world import World

from ..config.config import Config

FOLDER = "FOLDER_ON_A_DRIVE"
_ZERO, _MICRO, _ACCUMULATION = "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Rung:
    """One change of a config that saves memory; it adds to those of the rungs before."""

    title: str
    changes: Mapping[str, Any]
    """New values of keys, by their dotted names."""


def rungs(
    config: Config, world_size: int, *, device_is_host: bool, folder: str = FOLDER, for_host: bool = False
) -> Iterator[Rung]:
    """Yield what to change in a resolved config, in the order to try it; `folder` is on the drive that it may use.

    With `for_host` only what takes less host memory: on the CPU that is memory of every kind, else offloaded state.
    """
    batch, stage = config.batch, config.stage
    state, parameters = config.offload_optimizer.device, config.offload_param.device
    if device_is_host or not for_host:
        if batch.micro_batch_size > 1 and config.settings.batch_section is None:
            steps = batch.accumulation_steps * batch.micro_batch_size
            yield Rung("micro-batch 1", {_MICRO: 1, _ACCUMULATION: steps})
        if not config.own.gradient_checkpointing:
            yield Rung("activation checkpointing", {"zstore.gradient_checkpointing": True})
        if world_size > 1 and stage < 2:
            stage = 2
            yield Rung("ZeRO-2", {f"{_ZERO}.stage": 2})
    if not device_is_host and not for_host:
        if state == "none":
            stage, state = max(1, stage), "cpu"
            yield Rung("optimizer to CPU", {f"{_ZERO}.stage": stage, f"{_ZERO}.offload_optimizer.device": "cpu"})
        if world_size > 1 and stage < 3:
            stage = 3
            yield Rung("ZeRO-3", {f"{_ZERO}.stage": 3})
        if parameters == "none":
            stage, parameters = 3, "cpu"
            yield Rung("parameters to CPU", {f"{_ZERO}.stage": 3, f"{_ZERO}.offload_param.device": "cpu"})
    if not device_is_host and config.activations == "host":
        yield Rung("activations to disk", {"zstore.activations": "disk", "zstore.activations_path": folder})
    here = ("none", "cpu") if device_is_host else ("cpu",)
    if state in here:
        stage = max(1, stage)
        yield Rung("optimizer to NVMe", {f"{_ZERO}.stage": stage, **_on_disk("offload_optimizer", folder)})
    if parameters in here:
        yield Rung("parameters to NVMe", {f"{_ZERO}.stage": 3, **_on_disk("offload_param", folder)})


def _on_disk(section: str, folder: str) -> dict[str, Any]:
    return {f"{_ZERO}.{section}.device": "nvme", f"{_ZERO}.{section}.nvme_path": folder}


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config, as JSON, with the values of `changes` at their dotted keys."""
    found = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = found
        for one in sections:
            if not isinstance(section.get(one), dict):
                section[one] = {}
            section = section[one]
            for older in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
                if sections[1:] and one == _ZERO:
                    section.pop(older, None)
        section[name] = value
    return found


def advice(config: Config, world: World) -> str:
    """Return the next rung that takes less host memory as a sentence."""
    device_is_host = world.device.type == "cpu"
    rung = next(rungs(config, world.world_size, device_is_host=device_is_host, for_host=True), None)
    if rung is None:
        return (
            "all that may be on disk is there already: lower zstore.host_budget_bytes, start fewer ranks or DataLoader workers "
            "on the machine, or build the model within zstore.Init"
        )
    return "set " + " and ".join(f"{key} to {json.dumps(value)}" for key, value in rung.changes.items())
