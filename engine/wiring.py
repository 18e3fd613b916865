"""Laying a model out over ranks and tiers: stores, records, units, gradients."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from zstore.dist import World
from zstore.errors import UsageError
from zstore.store import StoreOptions, TensorStore

from .collectives import all_gather_rows
from .config import Config
from .gradients import Gradients, ShardedGradients, WholeGradients
from .hooks import UnitHooks
from .kernel import kernel_for
from .loader import TrainingLoader
from .loss_scale import LossScaler
from .model import check_model, own_memory, place_model
from .optimizer import ZeroOptimizer, group_of_parameters
from .parameters import ParameterRecord, make_record, named_parameters
from .schedules import Schedule
from .sharding import Sharding
from .state import OptimizerState, TierName
from .tensors import PRECISIONS
from .training import Training
from .units import Unit, called_parameters, find_units

_TIERS: Mapping[str, TierName] = {"none": "device", "cpu": "host", "nvme": "disk"}
_AUTO_PERCENT = 60

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
    sharding = Sharding.of_stage(config.stage, world.world_size)
    groups = group_of_parameters(optimizer, model)
    kernels = [kernel_for(optimizer.kind, group) for group in optimizer.param_groups]
    names = list(named_parameters(model))
    check_model(model, world)
    # Before anything is changed: a folder that cannot be used leaves the model as it is.
    store = _open_store(config, world)
    try:
        place_model(model, world, PRECISIONS[config.precision])
        state = OptimizerState(store, _TIERS[config.offload_optimizer.device], kernels)
        layout = _Layout(model, config, sharding, world)
        error: BaseException | None = None
        try:
            records = [layout.lay_out(*name, groups.get(name[2]), state) for name in names]
        except Exception as raised:
            error = raised
        world.raise_together(error)
        for message in store.resources.files.fallbacks:
            _log.warning("rank %d: %s", world.rank, message)
        units = find_units(model, {record.parameter: record for record in records})
        hooks = _hooks(model, units, config, sharding, world)
        return Training(
            world=world,
            config=config,
            batch=config.batch,
            sharding=sharding,
            model=model,
            device=world.device,
            state=state,
            gradients=_gradients(records, units, hooks, config, sharding, world),
            hooks=hooks,
            optimizer=optimizer,
            schedule=schedule,
            scaler=LossScaler(settings=config.loss_scaling),
            loader=loader,
            run_id=world.broadcast_object(uuid.uuid4().hex),
        )
    except BaseException:
        store.close()
        raise


class _Layout:
    """Gives each parameter its type, its memory and its state."""

    def __init__(self, model: nn.Module, config: Config, sharding: Sharding, world: World) -> None:
        self._called = called_parameters(model)
        self._dtype = PRECISIONS[config.precision]
        self._threshold_numel = config.persistence_threshold_numel
        self._sharding = sharding
        self._rank = world.rank

    def lay_out(
        self, name: str, aliases: tuple[str, ...], parameter: nn.Parameter, group: int | None, state: OptimizerState
    ) -> ParameterRecord:
        """Return the record of a parameter; its arrays are in the store and its memory is as it will rest."""
        given = parameter.data
        parameter.data = own_memory(given, self._dtype)
        record = make_record(name, aliases, parameter, group=group, sharding=self._sharding, rank=self._rank)
        if self._sharding.parameters and record.numel >= self._threshold_numel and parameter in self._called:
            record.shard_memory()
        first, stop = record.owned_range
        # Of the same type, the parameter's memory may be the given one, which may be released by now.
        same = given.dtype == record.dtype
        state.add(record, record.owned() if same else given.reshape(-1)[first:stop])
        return record


def _open_store(config: Config, world: World) -> TensorStore:
    offload, io = config.offload_optimizer, config.io
    budget = config.host_budget_bytes
    if budget == "auto":
        budget = _available_bytes() * _AUTO_PERCENT // 100
    options = StoreOptions(
        run_path=offload.nvme_path if offload.device == "nvme" else None,
        host_budget_bytes=None if budget is None else budget // world.local_world_size,
        num_threads=io.num_threads,
        queue_depth=io.queue_depth,
        block_bytes=io.block_bytes,
        verify=config.verify_reads,
        device=str(world.device),
    )
    error: BaseException | None = None
    store: TensorStore | None = None
    try:
        store = TensorStore(options, rank=world.rank)
    except Exception as raised:
        error = raised
    try:
        world.raise_together(error)
    except BaseException:
        if store is not None:
            store.close()
        raise
    if store is None:
        raise UsageError("the store did not open")
    return store


def _available_bytes() -> int:
    """Return the bytes of host memory that are available on this machine."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UsageError(
        'host_budget_bytes "auto": this system does not tell its available memory; write a number of bytes'
    )


def _hooks(model: nn.Module, units: list[Unit], config: Config, sharding: Sharding, world: World) -> UnitHooks | None:
    if not sharding.parameters:
        return None

    def full(record: ParameterRecord) -> torch.Tensor:
        return record.full

    limit = config.allgather_bucket_numel
    return UnitHooks(model, units, lambda records: all_gather_rows(world, records, limit, full))


def _gradients(
    records: list[ParameterRecord],
    units: list[Unit],
    hooks: UnitHooks | None,
    config: Config,
    sharding: Sharding,
    world: World,
) -> Gradients:
    trained = [record for record in records if record.group is not None]
    # These get gradients that nobody asked for.
    others = [record.parameter for record in records if record.group is None]
    limit = config.reduce_bucket_numel
    if not sharding.gradients:
        return WholeGradients(trained, others, world, sharding, limit)
    return ShardedGradients(units, others, world, limit, hooks.arrived if hooks is not None else _nothing)


def _nothing(record: ParameterRecord) -> None:
    """Take no note of a gradient: parameters are not sharded."""
