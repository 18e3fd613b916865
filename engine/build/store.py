"""Opens the store of a run, or takes over the store (and rows) of a model built in shards; and creates the records of the
model's parameters, each with its dtype, storage and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import make_grid, stored_shape
from zstore.io import Files, map_large_blocks, return_free_memory
from zstore.io.memory import plain_memory
from zstore.ranks.world import World
from zstore.store import Store, StoreOptions, TierName

from ..config.config import Config
from ..params.record import PRECISIONS, ParameterRecord, RowsInStore
from ..params.sharding import Sharding
from ..plan.plan import Places, Plan, Slots, store_options
from ..plan.run import budget_of_rank, check_drives, plan_run
from ..runtime.process import warn_once
from .builder import Builder, BuiltParameter, find_built, find_open_builder, model_deleted_error
from .model import own_memory

_THRESHOLD_NUMEL = 100_000
"""Minimum size of sharded parameters if the config does not set it."""
_TRIM_BYTES = 64 * 1024 * 1024
"""How many bytes of parameters to lay out before freed memory is returned to the system."""
_TIERS: dict[str, TierName] = {"none": "device", "cpu": "host", "nvme": "disk"}


StoreKey = tuple[StoreOptions, tuple[Path, ...], int | Literal["auto"] | None]
"""The settings of a store: its options without the budget, the folders of optimizer state, and the host budget."""


def store_key(config: Config) -> StoreKey:
    """Return the settings of a config's store, which do not depend on `frozen`."""
    config = replace(config, frozen=False)
    return store_options(config, None), config.offload_optimizer.nvme_paths, config.zstore.host_budget_bytes


def open_store(
    config: Config, world: World, budget_bytes: int | None, *, pins: bool, files: Files | None = None, cuda: Any = None
) -> Store:
    """Open the store of a config (all ranks). `budget_bytes` is this rank's share of the host budget; `pins` registers its
    buffers with CUDA; `files` and `cuda` replace the access to disks and torch's CUDA runtime."""
    options = replace(store_options(config, budget_bytes), device=str(world.device), pin_buffers=pins)
    with ExitStack() as opened:
        with world.agreeing():
            store = opened.enter_context(Store(options, rank=world.rank, files=files, cuda=cuda))
        opened.pop_all()
    return store


def builder_for(config: Config | None, world: World) -> tuple[Builder | None, bool]:
    """Return the builder for a config, which need not be resolved, and whether it is new; the builder is None if parameters
    stay whole in memory (all ranks). Models built with the same config share a store."""
    if config is None:
        if world.world_size == 1:
            return None, True
        store = Store(StoreOptions(), rank=world.rank)
        return Builder(store, world, key=None, tier="host", threshold_numel=_THRESHOLD_NUMEL), True
    tier = _tier(config, world)
    if tier is None:
        return None, True
    key = store_key(config)
    existing = find_open_builder(key)
    if existing is not None:
        return existing, False
    threshold = config.zero.stage3_param_persistence_threshold
    if config.stage < 3 or not isinstance(threshold, int):
        threshold = _THRESHOLD_NUMEL
    store = open_store(config, world, budget_of_rank(config, world), pins=world.device.type == "cuda")
    return Builder(store, world, key=key, tier=tier, threshold_numel=threshold), True


def _tier(config: Config, world: World) -> TierName | None:
    """Return the tier of parameters until training: that of their eventual fp32 values, which then need no copy."""
    state_tier, parameter_tier = _TIERS[config.offload_optimizer.device], _TIERS[config.offload_param.device]
    if parameter_tier == state_tier == "device" and (config.stage < 3 or world.world_size == 1):
        return None
    # Rows that the engine keeps as the parameter's are copied to the device.
    own_rows_tier: TierName = "pinned" if parameter_tier == "host" else parameter_tier
    is_16bit = config.settings.bf16.enabled is not False or config.settings.fp16.enabled is not False
    order = (state_tier, parameter_tier) if is_16bit else (own_rows_tier, state_tier)
    return next((tier for tier in order if tier != "device"), "host")


class BuiltModel:
    """The part of a model built in shards that `initialize` takes over.

    With `may_copy`, rows are copied to a new store if the config uses the same folders with different settings, such as
    a reference model's without the training keys; otherwise that is an error. Raises UsageError, on all ranks, for
    parameters that were changed after their release (all ranks).
    """

    def __init__(self, model: nn.Module, world: World, *, may_copy: bool = False) -> None:
        self.world = world
        self._may_copy = may_copy
        self._model = model
        sharded = {p: built for p in model.parameters() if (built := find_built(p)) is not None}
        self.sharded: dict[nn.Parameter, tuple[Builder, BuiltParameter]] = sharded
        """Sharded parameters that have not been taken over yet."""
        self._builders = list(dict.fromkeys(builder for builder, _ in sharded.values()))
        self.taken_over: Builder | None = None
        """The builder whose store the run took over."""
        world.raise_on_all_ranks(self._change_error())

    def _change_error(self) -> UsageError | None:
        if any(builder.is_closed for builder in self._builders):
            return model_deleted_error()
        for name, parameter in self._model.named_parameters():
            if parameter in self.sharded and not self.sharded[parameter][1].is_intact(parameter):
                return UsageError(
                    f"parameter {name!r} was built within zstore.Init and was changed after the block, when it had no values: "
                    "change it within the block. Leave casts and moves (.half(), .to(), .cuda()) to initialize()"
                )
        return None

    def reusable_builder(self, key: StoreKey) -> Builder | None:
        """Return the builder that has only this model in a store with the settings `key`, if any (all ranks). Raises
        UsageError for a store in the same run folder with different settings."""
        for builder in self._builders:
            if builder.is_handed_over or builder.key is None:
                continue
            if builder.key == key:
                # The end of the run closes its store. Garbage collectors of ranks may have freed different parameters.
                has_others = builder.has_other_parameters(self.sharded)
                return None if any(self.world.all_gather_object(has_others)) else builder
            shared = {*builder.key[0].all_paths} & {*key[0].all_paths}
            if shared and not self._may_copy:
                raise UsageError(
                    f"zstore.Init() and initialize() got configs that use {min(shared)} in different ways: {builder.key} "
                    f"and {key}. Pass the same config to both"
                )
        return None

    def unwatch(self) -> None:
        """Allow calls to the modules: every parameter has been taken over."""
        for builder in self._builders:
            builder.guard.unwatch(self._model)


def open_run_store(
    model: nn.Module,
    config: Config,
    built: BuiltModel,
    slots: Mapping[str, Slots],
    *,
    device_is_host: bool,
    files: Files | None,
    cuda: Any,
) -> tuple[Plan, Store]:
    """Return the placement of all arrays, and their store: the store that the model was built in, if any, or a new one (all
    ranks). `files` and `cuda` are those of `open_store`."""
    world, key = built.world, store_key(config)
    # A store that is taken over keeps its budget: "auto" could now yield a different one.
    builder = built.reusable_builder(key)
    budget_bytes = budget_of_rank(config, world) if builder is None else builder.store.options.host_budget_bytes
    plan = plan_run(model, config, world, slots, budget_bytes, device_is_host=device_is_host)
    if builder is not None:
        built.taken_over, store = builder, builder.hand_over_store()
    else:
        store = open_store(config, world, budget_bytes, pins=not device_is_host, files=files, cuda=cuda)
    try:
        check_drives(plan, store, world)
    except BaseException:
        store.close()
        raise
    store.expect_shared_bytes(plan.shared_bytes)
    if store.options.all_paths:
        map_large_blocks()
    return plan, store


def warn_of_fallbacks(store: Store, world: World) -> None:
    """Log the requests that the operating system refused, once each, with their ranks (all ranks)."""
    ranks: dict[str, list[int]] = {}
    for rank, messages in enumerate(world.all_gather_object(store.fallbacks)):
        for message in messages:
            ranks.setdefault(message, []).append(rank)
    for message, affected in ranks.items():
        who = "every rank" if len(affected) == world.world_size else f"rank {', '.join(map(str, affected))}"
        warn_once("%s: %s", who, message)


NamedParameter = tuple[str, tuple[str, ...], nn.Parameter, int | None]
"""Name, aliases, the parameter, and its group; None: not trained."""
StoreRows = Callable[[ParameterRecord, torch.Tensor | RowsInStore, Places], None]


class Layout:
    """Creates the record of each parameter, with its dtype, storage and state."""

    def __init__(self, config: Config, sharding: Sharding, built: BuiltModel, plan: Plan) -> None:
        self._plan = plan
        self._dtype = PRECISIONS[config.precision]
        self._sharding = sharding
        self._built = built
        self._world = built.world

    def lay_out_all(self, parameters: Sequence[NamedParameter], store_rows: StoreRows) -> list[ParameterRecord]:
        """Return the records of all parameters, in order (all ranks). `store_rows` stores a parameter's rows."""
        records: list[ParameterRecord] = []
        error: BaseException | None = None
        freed_bytes = 0
        for name, aliases, parameter, group in parameters:
            try:
                # Even after an error, since it is a collective.
                rows = self._place(name, parameter)
                if error is None:
                    records.append(self._lay_out((name, aliases, parameter, group), rows, store_rows))
            except Exception as raised:
                error = error or raised
            freed_bytes += parameter.nbytes
            if freed_bytes >= _TRIM_BYTES:
                freed_bytes = 0
                return_free_memory()
        self._world.raise_on_all_ranks(error)
        return records

    def _is_released(self, name: str) -> bool:
        """Return whether a parameter is gathered only while it is used."""
        return self._sharding.parameters and name not in self._plan.stay_gathered

    def _place(self, name: str, parameter: nn.Parameter) -> torch.Tensor | RowsInStore | None:
        """Move a parameter to its device, with rank 0's values, or return this rank's rows if it stays sharded (all ranks)."""
        is_identical = False  # whether all ranks have the same values
        if (found := self._built.sharded.get(parameter)) is not None:
            builder, built = found
            is_identical = builder.world.world_size == self._world.world_size
            if is_identical and self._is_released(name):
                in_memory = self._plan.placements[name].parameter == "device"
                if in_memory or builder is not self._built.taken_over or built.rows is None:
                    return builder.own_rows(built)
                return RowsInStore(built.rows.spec.name)
            parameter.data = builder.full_values(built)
        parameter.data = plain_memory(parameter.data.to(self._world.device))
        parameter.grad = None
        if not is_identical:
            self._world.broadcast(parameter.data)
        return None

    def _lay_out(
        self, parameter: NamedParameter, rows: torch.Tensor | RowsInStore | None, store_rows: StoreRows
    ) -> ParameterRecord:
        """Return the record of a parameter; store its arrays, and gather or release its values, as between steps.

        `rows` are this rank's rows of a parameter whose values are not in memory, a 1-D tensor unless it is offloaded.
        """
        name, aliases, tensor, group = parameter
        original = tensor.data
        if rows is None:
            tensor.data = own_memory(original, self._dtype)
        else:  # a tensor that is never written, of the trained dtype
            tensor.grad, dtype = None, self._dtype if tensor.is_floating_point() else tensor.dtype
            tensor.data = torch.empty(tensor.shape, dtype=dtype, device=self._world.device)
        shape, sharding = stored_shape(tuple(tensor.shape)), self._sharding
        record = ParameterRecord(
            name=name,
            aliases=aliases,
            parameter=tensor,
            grid=make_grid(shape, sharding.world_size),
            state_grid=sharding.state_grid(shape),
            state_shard=sharding.state_shard(self._world.rank),
            world_size=sharding.world_size,
            group=group,
            full=tensor.data.view(-1),
        )
        placement = self._plan.placements[name]
        offloaded = placement.parameter != "device"
        if not offloaded and self._is_released(name):
            record.keep_shard(rows if isinstance(rows, torch.Tensor) else None)
        elif rows is not None:
            record.release()
        if rows is None:
            first, stop = record.owned_range
            # If the dtype is unchanged, the parameter may still use the original storage, which may have been released.
            rows = record.owned() if original.dtype == record.dtype else original.reshape(-1)[first:stop]
        store_rows(record, rows, placement)
        if (found := self._built.sharded.pop(tensor, None)) is not None:
            builder, built = found
            builder.forget(built, keep_rows=isinstance(rows, RowsInStore) and rows.is_adopted)
        return record
