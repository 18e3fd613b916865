"""The memory that a config needs on a machine, for `zstore plan`: the plan that the engine makes, and estimates of what that
leaves out, which are activations and memory in transit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from zstore.errors import BudgetError
from zstore.format import numpy_dtype
from zstore.sizes import format_bytes

from ..config.config import DTYPES, Config, OptimizerConfig, load_config
from ..config.resolve import ResolveContext
from .activations import Width
from .ladder import changed, rungs
from .needs import find_needs, placement_settings
from .placement import fill_device, make_plan, without_headroom
from .plan import Plan, Slots
from .run import AUTO_PERCENT, activations_of, shapes_of_model, units_of_model


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine. Bytes are the total of each kind of memory."""

    gpus: int
    """Devices, one rank each; 0: the CPU computes, in one rank."""
    gpu_bytes: int
    """Memory of one device."""
    memory_bytes: int
    disk_bytes: int | None
    """Room on the drive; None: not known, and taken to be enough."""
    machines: int = 1
    """Machines like this one that train together."""

    @property
    def num_ranks(self) -> int:
        """Ranks on this machine."""
        return self.gpus or 1

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.machines * self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The needs of a config. Bytes of the device are one rank's, those of host and disk all ranks' of the machine."""

    title: str
    config: Mapping[str, Any]
    """As JSON."""
    plan: Plan
    """Rank 0's."""
    activations_bytes: int
    """An estimate, as `transit_bytes` is."""
    transit_bytes: int
    device_bytes: int
    """Everything on one device; 0 if the device is the host."""
    host_bytes: int
    disk_bytes: int
    lacking: tuple[str, ...] = ()
    """A text for each memory that is too small; empty if everything fits."""

    @property
    def fits(self) -> bool:
        """Whether the machine can do it."""
        return not self.lacking


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRun:
    """A model to train on a machine."""

    name: str
    model: nn.Module
    """On the meta device."""
    width: Width
    seq_length: int
    """Tokens in a sample."""
    machine: Machine
    native: frozenset[str]
    """The 16-bit types that the devices compute natively."""
    slots_of: Callable[[OptimizerConfig | None], Mapping[str, Slots]]
    """Returns what an optimizer keeps of each parameter, by its name."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    """The values for "auto" that only a training script has."""

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def resolved(self, config: Mapping[str, Any]) -> Config:
        """Return a config as the engine would read it."""
        return load_config(dict(config)).resolve(
            ResolveContext(
                world_size=self.machine.world_size,
                hidden_size=self.width.hidden,
                native=self.native,
                answers=self.answers,
            )
        )

    def plan_of(self, config: Config, budget_bytes: int | None) -> Plan:
        """Return rank 0's plan of a resolved config, as the engine makes it, with a host budget for the machine. Raises
        BudgetError as the engine does."""
        machine, is_host = self.machine, not self.machine.gpus
        share = None if budget_bytes is None else budget_bytes // machine.num_ranks
        settings = placement_settings(config, budget_bytes=share, device_is_host=is_host)
        shapes = shapes_of_model(self.model, config.precision)
        units = units_of_model(self.model, config.zero.stage3_max_live_parameters)
        needs = find_needs(shapes, self.slots_of(config.optimizer), config, world_size=machine.world_size, rank=0)
        plan = make_plan(needs, settings, units)
        if config.fills_device and not is_host:
            kept_bytes = activations_of(config, self.width, self.seq_length).bytes_on_device(config.activations)
            usable_bytes = without_headroom(machine.gpu_bytes) - kept_bytes
            plan = make_plan(needs, fill_device(plan, needs, units, usable_bytes), units)
        return plan

    def weigh(self, config: Mapping[str, Any], title: str = "this config") -> Costs:
        """Return the needs of a config, and which of them the machine lacks."""
        resolved = self.resolved(config)
        budget = resolved.own.host_budget_bytes
        if budget == "auto":
            budget = self.machine.memory_bytes * AUTO_PERCENT // 100
        try:
            return self._weighed(title, config, resolved, self.plan_of(resolved, budget))
        except BudgetError as error:
            costs = self._weighed(title, config, resolved, self.plan_of(resolved, None))
            return replace(costs, lacking=(f"host budget: {error}", *costs.lacking))

    def climb(self, config: Mapping[str, Any], folder: str) -> Iterator[tuple[dict[str, Any], Costs]]:
        """Yield for each rung that follows on a config the keys that it changes, and the needs of the config with all changes
        up to it. State on disk without a host budget gets one, which keeps in memory as much as fits."""
        on_cpu = not self.machine.gpus
        for rung in rungs(self.resolved(config), self.machine.world_size, device_is_host=on_cpu, folder=folder):
            changes = dict(rung.changes)
            costs = self.weigh(changed(config, changes), rung.title)
            settings = costs.plan.settings
            if "nvme" in (settings.optimizer, settings.parameters) and settings.budget_bytes is None:
                budget = {"zstore.host_budget_bytes": self._budget_for(costs)}
                budgeted = self.weigh(changed(costs.config, budget), rung.title)
                if budgeted.plan.settings.budget_bytes is not None:  # else it is too small for the least that is needed
                    costs, changes = budgeted, changes | budget
            config = costs.config
            yield changes, costs

    def _budget_for(self, costs: Costs) -> int:
        """Return a host budget: as much as "auto" takes, but on a CPU no more than the model leaves."""
        memory = self.machine.memory_bytes
        budget = memory * AUTO_PERCENT // 100
        if not self.machine.gpus:
            beside = costs.plan.held_total.device + costs.transit_bytes + costs.activations_bytes
            budget = min(budget, without_headroom(memory) - beside)
        return max(1, budget)

    def _weighed(self, title: str, config: Mapping[str, Any], resolved: Config, plan: Plan) -> Costs:
        machine, held, is_host = self.machine, plan.held_total, not self.machine.gpus
        activations = activations_of(resolved, self.width, self.seq_length)
        transit, rest = self._transit_bytes(resolved, plan), resolved.activations
        moved = activations.kept_bytes if rest == "disk" or (rest == "host" and not is_host) else 0
        # When whole tensors are updated, nothing of the backward remains.
        on_device = held.device + max(transit + activations.total_bytes - moved, plan.update_bytes)
        in_host = held.host + (moved if rest == "host" else 0)
        costs = Costs(
            title=title,
            config=config,
            plan=plan,
            activations_bytes=activations.total_bytes,
            transit_bytes=transit,
            device_bytes=0 if is_host else on_device,
            host_bytes=machine.num_ranks * (in_host + (on_device if is_host else 0)),
            disk_bytes=machine.num_ranks * (plan.file_bytes + (moved if rest == "disk" else 0)),
        )
        usable = (
            ("device", costs.device_bytes, without_headroom(machine.gpu_bytes)),
            ("host", costs.host_bytes, without_headroom(machine.memory_bytes)),
            ("disk", costs.disk_bytes, machine.disk_bytes),
        )
        lacking = (
            f"{name}: {format_bytes(needed)} needed, {format_bytes(there)} usable"
            for name, needed, there in usable
            if there is not None and needed > there
        )
        return replace(costs, lacking=tuple(lacking))

    def _transit_bytes(self, config: Config, plan: Plan) -> int:
        """Return the estimated bytes that pass through a device's memory beside the state that it holds: gathered parameters
        of a unit and the next, gradients of a unit if they do not stay as autograd made them, and buckets of collectives."""
        itemsize = numpy_dtype(DTYPES[config.precision]).itemsize
        sizes = {one.name: math.prod(one.shape) for one in shapes_of_model(self.model, config.precision)}
        unit_numel = max((sum(sizes[name] for name in unit) for unit in units_of_model(self.model)), default=0)
        whole = config.stage < 2 or self.machine.world_size == 1
        cast = plan.settings.accumulation_steps > 1 and config.precision != "fp32"
        in_backward = 0 if whole and plan.held["gradients"].device and not cast else unit_numel * itemsize
        if self.machine.world_size == 1:
            return plan.gathered_bytes + in_backward
        bucket_numel = min(config.reduce_bucket_numel, self.num_parameters if config.stage < 2 else unit_numel)
        return plan.gathered_bytes + in_backward + 2 * bucket_numel * itemsize
