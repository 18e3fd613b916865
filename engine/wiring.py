"""Laying a model out over ranks and tiers: stores, records, units, gradients."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World
from zstore.store import TensorStore

from .build.takeover import BuiltModel
from .config import Config
from .device.copies import Transfers
from .device.streams import lane_for
from .loader import TrainingLoader
from .optim.client_step import ClientStep, WholeKernel, check_client
from .optim.kernel import ELEMENT_WISE, Kernel, kernel_for
from .optim.loss_scale import LossScaler
from .optim.optimizer import ZeroOptimizer, group_of_parameters
from .optim.schedules import Schedule
from .optim.state import OptimizerState, RowsInStore
from .optim.store import open_store, store_key
from .optim.updater import StepMode, Updater
from .params.gradient_types import GradientTypes
from .params.model import check_model, own_memory, place_buffers, place_parameter
from .params.record import ParameterRecord, make_record, named_parameters
from .params.sharding import Sharding
from .params.tensors import PRECISIONS, map_large_blocks, return_free_memory
from .params.units import Unit, find_units
from .plan.needs import spill_pool_bytes
from .plan.plan import Plan
from .plan.run import budget_of_rank, check_drives, plan_run
from .training import Training
from .zero.gradients import Gradients, ReduceRules, WholeGradients
from .zero.hooks import UnitHooks
from .zero.spill import GradientSpill
from .zero.unit_gradients import GradientRules, UnitGradients
from .zero.unshard import make_residence

_TRIM_BYTES = 64 * 1024 * 1024
"""Bytes of parameters laid out between two calls that give freed memory back to the system."""

_log = logging.getLogger("zstore")


def wire(
    model: nn.Module,
    config: Config,
    world: World,
    optimizer: ZeroOptimizer,
    *,
    schedule: Schedule,
    loader: TrainingLoader | None,
) -> Training:
    """Return the run of `model` as the config says (all ranks); the model is changed in place."""
    offloads_parameters = config.offload_param.device != "none"
    sharding = Sharding.of_stage(config.stage, world.world_size, offloads_parameters=offloads_parameters)
    groups = group_of_parameters(optimizer, model)
    kernels = _kernels(optimizer, config)
    names = list(named_parameters(model))
    check_model(model, world, gathers=sharding.parameters)
    # Before anything is changed: a folder that cannot be used leaves the model as it is.
    built = BuiltModel(model, world)
    # A store that is taken over has its budget already; "auto" would be another by now.
    former = built.store_of(store_key(config))
    budget_bytes = budget_of_rank(config, world) if former is None else former.options.host_budget_bytes
    lane = lane_for(world.device)
    slots = {name: kernels[groups[p]].slots for name, _, p in names if p in groups}
    plan = plan_run(model, config, world, slots, budget_bytes, device_is_host=lane.device_is_host)
    pins = not lane.device_is_host
    store = built.take_over(store_key(config)) or open_store(config, world, budget_bytes, pins=pins)
    transfers = Transfers(lane, store.links)
    if config.offload_optimizer.nvme_paths or config.offload_param.nvme_paths:
        map_large_blocks()
    try:
        check_drives(plan, config, world, _present_bytes(store))
        place_buffers(model, world, PRECISIONS[config.precision])
        whole = any(isinstance(kernel, WholeKernel) for kernel in kernels)
        types = GradientTypes.of(config, world.world_size)
        splits = config.own.split_master
        state = OptimizerState(store, kernels, transfers, splits=splits, keeps_whole=whole, types=types)
        layout = _Layout(config, sharding, built, plan)
        records = layout.lay_out_all([(*name, groups.get(name[2])) for name in names], state)
        built.end()
        _warn_of_fallbacks(store, world)
        live_numel = config.zero.stage3_max_live_parameters if sharding.parameters else None
        units = find_units(model, {record.parameter: record for record in records}, live_numel)
        updater, mode = Updater(store, transfers), StepMode(config.step_overlap)
        hooks = None
        if sharding.parameters:
            hooks = UnitHooks(model, units, make_residence(units, config, store, world, transfers))
            hooks.residence.on_ready(updater.wait_for)
        return Training(
            world=world,
            config=config,
            batch=config.batch,
            sharding=sharding,
            model=model,
            device=world.device,
            plan=plan,
            state=state,
            updater=updater,
            step_mode=mode,
            gradients=_gradients(state, units, hooks, config, sharding, world),
            hooks=hooks,
            optimizer=optimizer,
            schedule=schedule,
            scaler=LossScaler(settings=config.loss_scaling, skips=config.skips_overflow),
            loader=loader,
            run_id=world.broadcast_object(uuid.uuid4().hex),
            client_step=ClientStep(optimizer.client, state) if whole else None,
        )
    except BaseException:
        store.close()
        raise


def _kernels(optimizer: ZeroOptimizer, config: Config) -> list[Kernel]:
    """Return the kernel of each parameter group. Raises UsageError where the config does not let the optimizer do what it
    does."""
    whole = config.stage == 0 and config.offload_optimizer.device == "none"
    if optimizer.kind in ELEMENT_WISE or not whole:
        return [kernel_for(optimizer.kind, group) for group in optimizer.param_groups]
    check_client(optimizer.client)
    for key, unfit in (("step_overlap", config.step_overlap == "backward"), ("split_master", config.own.split_master)):
        if unfit:
            raise UsageError(
                f"optimizer {optimizer.kind.__name__} is not known to update each element by itself, and steps whole fp32 "
                f'tensors, all at once: take {key} out of the config\'s "zstore" section'
            )
    return [WholeKernel() for _ in optimizer.param_groups]


class _Layout:
    """Gives each parameter its type, its memory and its state."""

    def __init__(self, config: Config, sharding: Sharding, built: BuiltModel, plan: Plan) -> None:
        self._plan = plan
        self._dtype = PRECISIONS[config.precision]
        self._sharding = sharding
        self._built = built
        self._world = built.world

    def lay_out_all(
        self, parameters: Sequence[tuple[str, tuple[str, ...], nn.Parameter, int | None]], state: OptimizerState
    ) -> list[ParameterRecord]:
        """Return the records of all parameters, in order (all ranks). One at a time is whole in memory."""
        records: list[ParameterRecord] = []
        error: BaseException | None = None
        freed_bytes = 0
        for name, aliases, parameter, group in parameters:
            try:
                # After an error too: the other ranks are in this, one after the other.
                rows = self._place(name, parameter)
                if error is None:
                    records.append(self._lay_out((name, aliases, parameter, group), rows, state))
            except Exception as raised:
                error = error or raised
            freed_bytes += parameter.nbytes
            if freed_bytes >= _TRIM_BYTES:
                freed_bytes = 0
                return_free_memory()
        self._world.raise_together(error)
        return records

    def _is_released(self, name: str) -> bool:
        """Return whether a parameter is gathered only where it is used."""
        return self._sharding.parameters and name not in self._plan.stay_gathered

    def _place(self, name: str, parameter: nn.Parameter) -> torch.Tensor | RowsInStore | None:
        """Bring a parameter to its device, or return this rank's rows of one that is in shards and stays so (all ranks)."""
        if self._is_released(name):
            offloaded = self._plan.placements[name].parameter != "device"
            rows = self._built.rows(parameter, in_memory=not offloaded)
            if rows is not None:
                return rows
        if not self._built.restore(parameter):
            place_parameter(parameter, self._world)
        return None

    def _lay_out(
        self,
        parameter: tuple[str, tuple[str, ...], nn.Parameter, int | None],
        rows: torch.Tensor | RowsInStore | None,
        state: OptimizerState,
    ) -> ParameterRecord:
        """Return the record of a parameter; its arrays are in the store and its memory is as it will rest.

        `rows`: this rank's rows of a parameter that has no values in memory; 1-D tensors where it is not offloaded.
        """
        name, aliases, tensor, group = parameter
        given = tensor.data
        tensor.data = own_memory(given, self._dtype) if rows is None else self._no_values(tensor)
        record = make_record(name, aliases, tensor, group=group, sharding=self._sharding, rank=self._world.rank)
        placement = self._plan.placements[name]
        offloaded = placement.parameter != "device"
        if not offloaded and self._is_released(name):
            record.shard_memory(rows if isinstance(rows, torch.Tensor) else None)
        elif rows is not None:
            record.release()
        if rows is None:
            first, stop = record.owned_range
            # Of the same type, the parameter's memory may be the given one, which may be released by now.
            rows = record.owned() if given.dtype == record.dtype else given.reshape(-1)[first:stop]
        state.add(record, rows, placement)
        if offloaded:
            record.release()
        self._built.drop(tensor)
        return record

    def _no_values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return memory that nobody writes to, of the parameter's shape, as it is trained."""
        dtype = self._dtype if parameter.is_floating_point() else parameter.dtype
        parameter.grad = None
        return torch.empty(parameter.shape, dtype=dtype, device=self._world.device)


def _warn_of_fallbacks(store: TensorStore, world: World) -> None:
    """Say once what could not be had, and on which ranks (all ranks)."""
    ranks: dict[str, list[int]] = {}
    for rank, messages in enumerate(world.all_gather_object(store.fallbacks)):
        for message in messages:
            ranks.setdefault(message, []).append(rank)
    for message, which in ranks.items() if world.rank == 0 else ():
        where = "every rank" if len(which) == world.world_size else f"rank {', '.join(map(str, which))}"
        _log.warning("%s: %s", where, message)


def _present_bytes(store: TensorStore) -> Counter[Path]:
    """Return the bytes of the files that a store has already, by folder."""
    present: Counter[Path] = Counter()
    for name, folder in store.disk_folders().items():
        present[folder] += store.local(name).nbytes
    return present


def _gradients(
    state: OptimizerState,
    units: list[Unit],
    hooks: UnitHooks | None,
    config: Config,
    sharding: Sharding,
    world: World,
) -> Gradients:
    trained = [record for record in state.records if record.group is not None]
    # These get gradients that nobody asked for.
    others = [record.parameter for record in state.records if record.group is None]
    within = config.step_overlap == "backward"
    reduce = ReduceRules(
        bucket_numel=config.reduce_bucket_numel,
        scatter=config.zero.reduce_scatter,
        overlap=config.zero.overlap_comm,
        types=GradientTypes.of(config, world.world_size),
    )
    # Alone, they are taken off the device as they come where they wait in host memory.
    leaves = bool(state.spilled) or (bool(state.gradients_on_host) and not state.transfers.lane.device_is_host)
    by_unit = sharding.gradients or (world.world_size == 1 and (within or sharding.parameters or leaves))
    if not by_unit:
        return WholeGradients(trained, others, world, sharding, reduce)
    spill = None
    if state.spilled:
        budget_bytes = state.store.options.host_budget_bytes
        spill = GradientSpill(state.store, state.spilled, state.transfers, spill_pool_bytes(budget_bytes or 0))
    rules = GradientRules(
        reduce=replace(reduce, scatter=True, overlap=True) if sharding.parameters else reduce,
        # Those of the disk by way of host memory: sums of squares have the same bits then, wherever gradients wait.
        to_host=frozenset(state.gradients_on_host.union(state.spilled)),
        spill=spill,
        keeps_rows=config.offload_optimizer.device == "none",
        squares_at_once=within,
    )
    return UnitGradients(units, others, world, rules, state.transfers, None if hooks is None else hooks.arrived)
