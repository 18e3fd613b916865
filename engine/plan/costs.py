"""The memory that a config needs on a machine, and a ladder of changes that reduce it, for `zstore plan`. Pure functions.
The plan is the engine's own; activations and memory in transit are estimates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zstore.errors import BudgetError, ConfigError, format_bytes

from ..config.config import Config, load_config
from ..config.optimizers import OptimizerSection
from ..config.resolve import ResolveContext, precision_note
from .placement import HEADROOM_PERCENT, fill_device, make_plan, without_headroom
from .plan import Bytes, Dims, ParameterShape, Plan, Slots, activations_of, find_needs, itemsize_of, placement_settings

AUTO_PERCENT = 60
"""Share of the host's available memory that a host budget of "auto" uses."""
_ZERO, _MICRO, _ACCUMULATION = "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

Changes = dict[str, Any]
"""New values of keys, by their dotted names."""


def rungs(config: Config, world_size: int, *, device_is_host: bool, folder: str) -> Iterator[tuple[str, Changes]]:
    """Yield (title, changes) that save memory in a resolved config, in the order to try them; each adds to the previous
    ones. `folder` is on the drive to use."""
    batch, stage = config.batch, config.stage
    state, parameters = config.offload_optimizer.device, config.offload_param.device
    if batch.micro_batch_size > 1 and config.settings.batch_section is None:
        yield "micro-batch 1", {_MICRO: 1, _ACCUMULATION: batch.accumulation_steps * batch.micro_batch_size}
    if not config.zstore.gradient_checkpointing:
        yield "activation checkpointing", {"zstore.gradient_checkpointing": True}
    if world_size > 1 and stage < 2:
        stage = 2
        yield "ZeRO-2", {f"{_ZERO}.stage": 2}
    if not device_is_host:
        if state == "none":
            stage = max(1, stage)
            yield "optimizer to CPU", {f"{_ZERO}.stage": stage, f"{_ZERO}.offload_optimizer.device": "cpu"}
        if world_size > 1 and stage < 3:
            stage = 3
            yield "ZeRO-3", {f"{_ZERO}.stage": 3}
        if parameters == "none":
            stage = 3
            yield "parameters to CPU", {f"{_ZERO}.stage": 3, f"{_ZERO}.offload_param.device": "cpu"}
        if config.activations == "host":
            yield "activations to disk", {"zstore.activations": "disk", "zstore.activations_path": folder}
    for title, tier, section, min_stage in (
        ("optimizer to NVMe", state, f"{_ZERO}.offload_optimizer", 1),
        ("parameters to NVMe", parameters, f"{_ZERO}.offload_param", 3),
    ):
        if tier != "nvme":
            on_disk = {f"{section}.device": "nvme", f"{section}.nvme_path": folder}
            yield title, {f"{_ZERO}.stage": max(min_stage, stage), **on_disk}


def apply_changes(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy of a JSON config with `changes` applied at their dotted keys."""
    result = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = result
        for section_name in sections:
            if not isinstance(section.get(section_name), dict):
                section[section_name] = {}
            section = section[section_name]
            if section_name == _ZERO and len(sections) > 1:
                for deprecated in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
                    section.pop(deprecated, None)
        section[name] = value
    return result


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The needs of a config. Device bytes are per rank; host and disk bytes are for all ranks of the machine."""

    title: str
    config: Mapping[str, Any]
    """The config as JSON."""
    changes: Changes
    """The keys that the ladder changed."""
    plan: Plan
    """Rank 0's plan."""
    activations_bytes: int
    """Estimated."""
    needed: Bytes
    """All bytes; if the device is the host, its bytes count as host bytes."""
    moved_bytes: int
    """Disk traffic per step."""
    lacking: tuple[str, ...]
    """A message for each tier that is too small; empty if everything fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRun:
    """A model, and the machine to train it on."""

    name: str
    shapes: Sequence[ParameterShape]
    units_of: Callable[[int], Sequence[Sequence[str]]]
    """Returns the names of the parameters of each unit, given the maximum number of gathered elements."""
    slots_of: Callable[[OptimizerSection | None, int], Mapping[str, Slots]]
    """Returns the slots of each parameter for an optimizer and a world size, by name."""
    dims: Dims
    seq_length: int
    """Tokens in a sample."""
    gpus: int
    """Devices of the machine, one rank each; 0: one rank on the CPU."""
    gpu_bytes: int
    """Total memory of one device."""
    memory_bytes: int
    """Total memory of the host."""
    disk_bytes: int | None
    """Free bytes on the drive; None if unknown, and assumed to be enough."""
    context: ResolveContext
    """For "auto": the devices' native dtypes, and placeholders for a training script's values."""

    @property
    def world_size(self) -> int:
        """Ranks on the machine."""
        return self.gpus or 1

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(parameter.shape) for parameter in self.shapes)

    def resolved(self, config: Mapping[str, Any]) -> Config:
        """Return `config` loaded and resolved, as the engine reads it."""
        return load_config(dict(config)).resolve(self.context)

    def make_plan_of(self, config: Config, budget_bytes: int | None) -> Plan:
        """Return the engine's plan of a resolved config on rank 0, with a host budget for the machine. Raises
        BudgetError."""
        slots = self.slots_of(config.settings.optimizer, self.world_size)
        needs = find_needs(self.shapes, slots, config, world_size=self.world_size, rank=0)
        units = self.units_of(config.zero.stage3_max_live_parameters)
        rank_budget = None if budget_bytes is None else budget_bytes // self.world_size
        settings = placement_settings(config, budget_bytes=rank_budget, device_is_host=not self.gpus)
        if config.fills_device_memory and self.gpus:
            activations, _ = activations_of(config, self.dims, self.seq_length)
            settings = fill_device(needs, settings, units, without_headroom(self.gpu_bytes) - activations)
        return make_plan(needs, settings, units)

    def estimate(self, config: Mapping[str, Any], title: str = "this config", changes: Changes | None = None) -> Costs:
        """Return the needs of a config with `changes`, and what the machine lacks."""
        config = apply_changes(config, changes or {})
        resolved = self.resolved(config)
        budget = resolved.zstore.host_budget_bytes
        if budget == "auto":
            budget = self.memory_bytes * AUTO_PERCENT // 100
        lacking: list[str] = []
        try:
            plan = self.make_plan_of(resolved, budget)
        except BudgetError as error:
            lacking.append(f"host budget: {error}")
            plan = self.make_plan_of(resolved, None)
        activations, moved = activations_of(resolved, self.dims, self.seq_length, device_is_host=not self.gpus)
        transit = self._transit_bytes(resolved, plan)
        # Whole tensors are updated after the backward pass has freed its memory.
        on_device = plan.held_total.device + max(transit + activations, plan.update_bytes)
        in_host = plan.held_total.host + (moved if resolved.activations == "host" else 0)
        on_disk = plan.file_bytes + (moved if resolved.activations == "disk" else 0)
        if not self.gpus:
            on_device, in_host = 0, in_host + on_device
        needed = Bytes(device=on_device, host=self.world_size * in_host, disk=self.world_size * on_disk)
        usable = Bytes(
            device=without_headroom(self.gpu_bytes),
            host=without_headroom(self.memory_bytes),
            disk=needed.disk if self.disk_bytes is None else self.disk_bytes,
        )
        for tier, nbytes in vars(needed).items():
            if nbytes > getattr(usable, tier):
                lacking.append(f"{tier}: {format_bytes(nbytes)} needed, {format_bytes(getattr(usable, tier))} usable")
        return Costs(
            title=title,
            config=config,
            changes=changes or {},
            plan=plan,
            activations_bytes=activations + moved,
            needed=needed,
            moved_bytes=self.world_size * (plan.read_bytes + plan.written_bytes),
            lacking=tuple(lacking),
        )

    def ladder(self, config: Mapping[str, Any], folder: str = "/local_nvme") -> Iterator[Costs]:
        """Yield the needs of a config with the ladder's changes up to each rung. State goes to the config's drive, or to
        `folder`; if no host budget is set, one is added that keeps as much in memory as fits. A rung that conflicts with
        other keys of the config is skipped."""
        changes, resolved = Changes(), self.resolved(config)
        drives = (*resolved.offload_optimizer.nvme_paths, *resolved.offload_param.nvme_paths, folder)
        ladder = rungs(resolved, self.world_size, device_is_host=not self.gpus, folder=str(drives[0]))
        for title, rung_changes in ladder:
            candidate = changes | rung_changes
            try:
                costs = self.estimate(config, title, candidate)
            except ConfigError:  # such as for a 1-bit optimizer, which works at stage 0 only
                continue
            changes = candidate
            settings = costs.plan.settings
            if "nvme" in (settings.optimizer, settings.parameters) and settings.budget_bytes is None:
                # As much as "auto", but no more than the model and activations leave free.
                other_bytes = costs.needed.host - self.world_size * costs.plan.held_total.host
                free_bytes = without_headroom(self.memory_bytes) - other_bytes
                budget = max(1, min(self.memory_bytes * AUTO_PERCENT // 100, free_bytes))
                budgeted = self.estimate(config, title, changes | {"zstore.host_budget_bytes": budget})
                if budgeted.plan.settings.budget_bytes is not None:  # else it is too small
                    costs, changes = budgeted, budgeted.changes
            yield costs

    def notes(self, config: Mapping[str, Any]) -> list[str]:
        """Return notes on the numbers."""
        estimates_note = (
            f"activations and buffers in transit are estimates; {HEADROOM_PERCENT} % of each memory tier is left free"
        )
        device, precision = "GPU" if self.gpus else "CPU", self.resolved(config).precision
        precision_remark = precision_note(load_config(dict(config)).settings, precision, self.context.native, device)
        return [estimates_note] if precision_remark is None else [estimates_note, precision_remark[1]]

    def _transit_bytes(self, config: Config, plan: Plan) -> int:
        """Return the estimated bytes that a device needs in addition to its state: gathered parameters of two units,
        gradients of a unit (unless autograd's own remain), and buckets of collectives."""
        sizes = {parameter.name: math.prod(parameter.shape) for parameter in self.shapes}
        units = self.units_of(config.zero.stage3_max_live_parameters)
        unit_numel = max((sum(sizes[name] for name in unit) for unit in units), default=0)
        bucket_numel = min(int(config.zero.reduce_bucket_size), self.num_parameters if config.stage < 2 else unit_numel)
        num_buckets = 0 if self.world_size == 1 else 2
        gradients = plan.held["gradients"]
        cast = plan.settings.accumulation_steps > 1 and config.precision != "fp32"
        keeps = 0 < gradients.total == gradients.device and not cast and (config.stage < 2 or self.world_size == 1)
        return plan.gathered_bytes + ((0 if keeps else unit_numel) + num_buckets * bucket_numel) * itemsize_of(config)
