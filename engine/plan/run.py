"""The plan of a run: the placement of this rank's training state, checked against the machine's memory and drives."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from zstore.errors import BudgetError, DiskFullError, UsageError, format_bytes
from zstore.io import HostMemory, read_host_memory
from zstore.io.memory import dtype_name
from zstore.ranks.world import World, cpu_capabilities
from zstore.store import Drives, Store

from ..config.config import Config
from ..params.record import named_parameters
from ..params.sharding import unit_parameters
from .costs import AUTO_PERCENT
from .placement import fill_device, make_plan, without_headroom
from .plan import Dims, ParameterShape, Plan, Slots, activations_of, describe, find_needs, placement_settings

_log = logging.getLogger("zstore")


def budget_of_rank(config: Config, world: World) -> int | None:
    """Return this rank's share of the machine's host budget in bytes; None means no limit. "auto" is a share of the available
    memory, limited by control groups. Raises UsageError if that is unknown."""
    budget = config.zstore.host_budget_bytes
    if budget == "auto":
        available = read_host_memory().available_bytes
        if available is None:
            raise UsageError('host_budget_bytes "auto": this system does not report its available memory: set a number')
        budget = available * AUTO_PERCENT // 100
    return None if budget is None else budget // world.local_world_size


def shapes_of_model(model: nn.Module) -> list[ParameterShape]:
    """Return the distinct parameters of `model`, in order; the model may be on the meta device."""
    called = {p for _, modules, parameters in unit_parameters(model) for p in parameters if modules}
    return [
        ParameterShape(
            name=name,
            shape=tuple(parameter.shape),
            dtype=None if parameter.is_floating_point() else dtype_name(parameter.dtype),
            is_called=parameter in called,
        )
        for name, _, parameter in named_parameters(model)
    ]


def units_of_model(model: nn.Module, live_numel: int | None = None) -> list[list[str]]:
    """Return the names of the parameters that each unit of `model` gathers, with units in module order; a block of more than
    `live_numel` elements is split into several."""
    names = {parameter: name for name, _, parameter in named_parameters(model)}
    return [[names[p] for p in parameters] for _, _, parameters in unit_parameters(model, live_numel)]


def plan_run(
    model: nn.Module,
    config: Config,
    world: World,
    slots: Mapping[str, Slots],
    budget_bytes: int | None,
    *,
    device_is_host: bool,
    device_bytes: int | None = None,
) -> Plan:
    """Return the plan of all state (all ranks); rank 0 logs it if anything is offloaded. `device_bytes` is the
    memory of a device other than the host; by default that of the CUDA device.

    `slots` has the optimizer's slots for each parameter that it updates. Raises BudgetError, on every rank, if the state
    does not fit into the host budget, the device or the host's memory.
    """
    shapes = shapes_of_model(model)
    units = units_of_model(model, config.zero.stage3_max_live_parameters)
    if device_bytes is None and world.device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(world.device)[1]
    fills_device = device_bytes is not None and config.fills_device_memory
    with world.agreeing():
        needs = find_needs(shapes, slots, config, world_size=world.world_size, rank=world.rank)
        settings = placement_settings(config, budget_bytes=budget_bytes, device_is_host=device_is_host)
        if device_bytes is not None and fills_device:
            dims = Dims.of(model)
            if dims.max_seq_length is None:
                raise UsageError('offload_optimizer.ratio "auto": the model has no sequence limit: set a number')
            activations, _ = activations_of(config, dims, dims.max_seq_length)
            settings = fill_device(needs, settings, units, without_headroom(device_bytes) - activations)
    if fills_device:
        settings = replace(settings, ratio=max(world.all_gather_object(settings.ratio)))
    with world.agreeing():
        plan = make_plan(needs, settings, units)
        if device_bytes is not None:
            check_device(plan, device_bytes)
    _check_host(plan, world, read_host_memory())
    if world.rank == 0 and plan.held_total.device < plan.held_total.total - plan.held["buffers"].total:
        _log.info("%s", describe(plan, world_size=world.world_size, local_ranks=world.local_world_size))
    return plan


def check_device(plan: Plan, device_bytes: int) -> None:
    """Raise BudgetError if the plan needs more than the device's memory."""
    # At least one unit must be gathered in addition.
    kept_bytes, transient_bytes = plan.held_total.device, max(plan.gathered_bytes, plan.update_bytes)
    if kept_bytes + transient_bytes > device_bytes:
        raise BudgetError(
            f"the device has {format_bytes(device_bytes)}, but this plan keeps {format_bytes(kept_bytes)} on it and gathers "
            f"{format_bytes(transient_bytes)} of parameters at once, not counting activations: use more ranks, a higher "
            "stage, or offload_optimizer and offload_param (`zstore plan` shows what fits)"
        )


def _check_host(plan: Plan, world: World, memory: HostMemory) -> None:
    """Raise BudgetError, on every rank, if the ranks of a machine or control group need more memory than it has (all ranks)."""
    limits = {memory.machine: memory.total_bytes}
    limits |= {f"{memory.machine} {group.key}": group.limit_bytes for group in memory.groups}
    rank_needs = world.all_gather_object([list(limits), plan.host_bytes])
    with world.agreeing():
        for name, limit_bytes in limits.items():
            needed_bytes = sum(nbytes for names, nbytes in rank_needs if name in names)
            if limit_bytes is not None and needed_bytes > limit_bytes + memory.swap_bytes:
                raise BudgetError(
                    f"the host has {format_bytes(limit_bytes + memory.swap_bytes)} of memory available (including swap), "
                    f"but the plan keeps {format_bytes(plan.host_bytes)} of this rank's state there, and "
                    f"{format_bytes(needed_bytes)} in all, not counting activations: set a smaller host_budget_bytes with "
                    'offload_optimizer and offload_param on "nvme", or use more machines (`zstore plan` shows what fits)'
                )


def check_drives(plan: Plan, store: Store, world: World) -> None:
    """Raise DiskFullError, on every rank, if a drive has no space for the plan's files that the store has not yet created
    (all ranks)."""
    options = store.options
    default_paths = () if options.run_path is None else (options.run_path, *options.other_paths)
    drives = Drives(default_paths, options.group_paths)
    existing_files = [(folder, store.local(name).nbytes) for name, folder in store.disk_folders().items()]
    for group, nbytes in plan.files:
        drives.choose(group, nbytes)
    with world.agreeing():
        for drive in {_device_id(folder) for folder in drives.assigned_bytes}:
            folders = [folder for folder in drives.assigned_bytes if _device_id(folder) == drive]
            existing = sum(nbytes for folder, nbytes in existing_files if _device_id(folder) == drive)
            needed = (sum(drives.assigned_bytes[folder] for folder in folders) - existing) * world.local_world_size
            free = shutil.disk_usage(folders[0]).free
            if needed > free:
                raise DiskFullError(
                    f"the plan's files take {format_bytes(needed)} in {', '.join(map(str, folders))}, where "
                    f"{format_bytes(free)} is free: add an `nvme_path` (each drive gets an equal share), or raise "
                    "`host_budget_bytes`"
                )


def _device_id(folder: Path) -> int:
    return folder.stat().st_dev


_MIN_TENSOR_CORE_CAPABILITY = 7
"""Lowest compute capability at which all GPUs multiply fp16 faster than fp32 (V100)."""


def native_types(device: torch.device | None = None) -> frozenset[str]:
    """Return which of "bf16" and "fp16" a device (by default the machine's first) supports with instructions that torch
    uses. A CPU without them multiplies bf16 a hundred times slower than fp32; a CPU with only fp16 also sums in fp16, so
    neither counts."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    if device.type == "cuda":
        supported = {
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "fp16": torch.cuda.get_device_capability(device)[0] >= _MIN_TENSOR_CORE_CAPABILITY,
        }
        return frozenset(name for name, is_supported in supported.items() if is_supported)
    capabilities = cpu_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # oneDNN emulates bf16 on any x86 CPU with AVX-512, but asks an Arm CPU for its instructions.
    if not (has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()) or (
        capabilities.get("architecture") == "x86_64" and not (capabilities["avx512_bf16"] or capabilities["amx_bf16"])
    ):
        return frozenset()
    has_fp16 = capabilities.get("avx512_fp16") or capabilities.get("amx_fp16")
    return frozenset({"bf16", "fp16"} if has_fp16 else {"bf16"})


def agree_on_native_types(world: World) -> frozenset[str]:
    """Return rank 0's native dtypes, which determine every rank's precision (all ranks)."""
    return frozenset(world.broadcast_object(sorted(native_types(world.device)) if world.rank == 0 else None))
