"""Opens the store of a run, or takes over the store (and rows) of a model built in shards; and creates the records of the
model's parameters, each with its type, its memory and its state."""

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
from .builder import Builder, Built, find_built, model_deleted_error, open_builder
from .model import own_memory

_THRESHOLD_NUMEL = 100_000
"""Minimum size of sharded parameters if the config does not set it."""
_TRIM_BYTES = 64 * 1024 * 1024
"""Bytes of parameters laid out between two calls that return freed memory to the system."""
_TIERS: dict[str, TierName] = {"none": "device", "cpu": "host", "nvme": "disk"}


StoreKey = tuple[StoreOptions, tuple[Path, ...], int | Literal["auto"] | None]
"""The settings of a store: its options without the budget, folders of the optimizer's state, and the host budget."""


def store_key(config: Config) -> StoreKey:
    """Return the settings of a config's store, which do not depend on `frozen`."""
    config = replace(config, frozen=False)
    return store_options(config, None), config.offload_optimizer.nvme_paths, config.zstore.host_budget_bytes


def open_store(
    config: Config, world: World, budget_bytes: int | None, *, pins: bool, files: Files | None = None, cuda: Any = None
) -> Store:
    """Open the store of a config (all ranks). `budget_bytes` is this rank's share of the host budget, `pins` registers its
    buffers with CUDA; `files` and `cuda` replace its access to disks, and torch's CUDA runtime."""
    options = replace(store_options(config, budget_bytes), device=str(world.device), pin_buffers=pins)
    with ExitStack() as opened:
        with world.agreeing():
            store = opened.enter_context(Store(options, rank=world.rank, files=files, cuda=cuda))
        opened.pop_all()
    return store


def builder_for(config: Config | None, world: World) -> tuple[Builder | None, bool]:
    """Return the builder for a config, which need not be resolved, and whether it is new; None if parameters stay whole in
    memory (all ranks). Models built under one config share a store."""
    if config is None:
        if world.world_size == 1:
            return None, True
        store = Store(StoreOptions(), rank=world.rank)
        return Builder(store, world, key=None, tier="host", threshold_numel=_THRESHOLD_NUMEL), True
    tier = _tier(config, world)
    if tier is None:
        return None, True
    key = store_key(config)
    former = open_builder(key)
    if former is not None:
        return former, False
    threshold = config.zero.stage3_param_persistence_threshold
    if config.stage < 3 or not isinstance(threshold, int):
        threshold = _THRESHOLD_NUMEL
    store = open_store(config, world, budget_of_rank(config, world), pins=world.device.type == "cuda")
    return Builder(store, world, key=key, tier=tier, threshold_numel=threshold), True


def _tier(config: Config, world: World) -> TierName | None:
    """Return the tier of parameters until they are trained: the tier of their later fp32 values, which then need no copy."""
    state, own = _TIERS[config.offload_optimizer.device], _TIERS[config.offload_param.device]
    if own == state == "device" and (config.stage < 3 or world.world_size == 1):
        return None
    # Rows that the engine keeps as the parameter's are copied to the device.
    fetched: TierName = "pinned" if own == "host" else own
    is_16bit = config.settings.bf16.enabled is not False or config.settings.fp16.enabled is not False
    order = (state, own) if is_16bit else (fetched, state)
    return next((tier for tier in order if tier != "device"), "host")


class BuiltModel:
    """The part of a model built in shards that `initialize` takes over.

    With `copies`, rows are copied to a new store if the config uses the same folders in another way, as that of a reference
    model without the keys about training; else that is an error. Raises UsageError, on all ranks, for parameters that were
    changed after they were released (all ranks).
    """

    def __init__(self, model: nn.Module, world: World, *, copies: bool = False) -> None:
        self.world = world
        self._copies = copies
        self._model = model
        found = {p: built for p in model.parameters() if (built := find_built(p)) is not None}
        self.found: dict[nn.Parameter, tuple[Builder, Built]] = found
        """The parameters in shards, until they are taken over."""
        self._builders = list(dict.fromkeys(builder for builder, _ in found.values()))
        self.taken_over: Builder | None = None
        """The builder whose store the run uses."""
        world.raise_together(self._changed())

    def _changed(self) -> UsageError | None:
        if any(builder.is_closed for builder in self._builders):
            return model_deleted_error()
        for name, parameter in self._model.named_parameters():
            if parameter in self.found and not self.found[parameter][1].is_intact(parameter):
                return UsageError(
                    f"parameter {name!r} was built within zstore.Init and changed after the block, where it had no values: "
                    "do it within the block. Leave casts and moves (.half(), .to(), .cuda()) to initialize()"
                )
        return None

    def builder_of(self, key: StoreKey) -> Builder | None:
        """Return the builder that has the model, and no other one, in a store with the settings `key`, if any (all ranks).

        Raises UsageError for a store in the same run folder with other settings.
        """
        for builder in self._builders:
            if builder.is_handed_over or builder.key is None:
                continue
            if builder.key == key:
                # The end of the run closes its store. Ranks may differ in what their collectors have found.
                return None if any(self.world.all_gather_object(builder.has_others(self.found))) else builder
            shared = {*builder.key[0].all_paths} & {*key[0].all_paths}
            if shared and not self._copies:
                raise UsageError(
                    f"zstore.Init() and initialize() got configs that use {min(shared)} in different ways: {builder.key} "
                    f"and {key}. Give both the same config"
                )
        return None

    def end(self) -> None:
        """Allow calls of the modules: every parameter has been taken over."""
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
    """Return the placement of all arrays, and their store: the model's, if it was built in a store, or a new one (all
    ranks). `files` and `cuda` as in `open_store`."""
    world, key = built.world, store_key(config)
    # The budget of a store that is taken over is fixed: "auto" could now yield a different one.
    former = built.builder_of(key)
    budget_bytes = budget_of_rank(config, world) if former is None else former.store.options.host_budget_bytes
    plan = plan_run(model, config, world, slots, budget_bytes, device_is_host=device_is_host)
    if former is not None:
        built.taken_over, store = former, former.hand_over_store()
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
    """Log the requests that the system refused, once, with their ranks (all ranks)."""
    ranks: dict[str, list[int]] = {}
    for rank, messages in enumerate(world.all_gather_object(store.fallbacks)):
        for message in messages:
            ranks.setdefault(message, []).append(rank)
    for message, which in ranks.items():
        where = "every rank" if len(which) == world.world_size else f"rank {', '.join(map(str, which))}"
        warn_once("%s: %s", where, message)


NamedParameter = tuple[str, tuple[str, ...], nn.Parameter, int | None]
"""Name, aliases, the parameter, and its group; None: not trained."""
Keep = Callable[[ParameterRecord, torch.Tensor | RowsInStore, Places], None]


class Layout:
    """Gives each parameter its type, its memory and its state."""

    def __init__(self, config: Config, sharding: Sharding, built: BuiltModel, plan: Plan) -> None:
        self._plan = plan
        self._dtype = PRECISIONS[config.precision]
        self._sharding = sharding
        self._built = built
        self._world = built.world

    def lay_out_all(self, parameters: Sequence[NamedParameter], keep: Keep) -> list[ParameterRecord]:
        """Return the records of all parameters, in order (all ranks). `keep` stores the rows of one."""
        records: list[ParameterRecord] = []
        error: BaseException | None = None
        freed_bytes = 0
        for name, aliases, parameter, group in parameters:
            try:
                # After an error too: it is a collective of all ranks.
                rows = self._place(name, parameter)
                if error is None:
                    records.append(self._lay_out((name, aliases, parameter, group), rows, keep))
            except Exception as raised:
                error = error or raised
            freed_bytes += parameter.nbytes
            if freed_bytes >= _TRIM_BYTES:
                freed_bytes = 0
                return_free_memory()
        self._world.raise_together(error)
        return records

    def _is_released(self, name: str) -> bool:
        """Return whether a parameter is gathered only while it is used."""
        return self._sharding.parameters and name not in self._plan.stay_gathered

    def _place(self, name: str, parameter: nn.Parameter) -> torch.Tensor | RowsInStore | None:
        """Move a parameter to its device, with rank 0's values, or return this rank's rows of one that stays sharded (all
        ranks)."""
        is_same = False  # on every rank
        if (found := self._built.found.get(parameter)) is not None:
            builder, built = found
            is_same = builder.world.world_size == self._world.world_size
            if is_same and self._is_released(name):
                in_memory = self._plan.placements[name].parameter == "device"
                if in_memory or builder is not self._built.taken_over or built.rows is None:
                    return builder.own_rows(built)
                return RowsInStore(built.rows.spec.name)
            parameter.data = builder.whole(built)
        parameter.data = plain_memory(parameter.data.to(self._world.device))
        parameter.grad = None
        if not is_same:
            self._world.broadcast(parameter.data)
        return None

    def _lay_out(
        self, parameter: NamedParameter, rows: torch.Tensor | RowsInStore | None, keep: Keep
    ) -> ParameterRecord:
        """Return the record of a parameter; store its arrays, and gather or release its values as between steps.

        `rows`: this rank's rows of a parameter that has no values in memory; a 1-D tensor if it is not offloaded.
        """
        name, aliases, tensor, group = parameter
        given = tensor.data
        if rows is None:
            tensor.data = own_memory(given, self._dtype)
        else:  # memory that is never written, of the trained type
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
            # If the type is the same, the parameter may still use the given memory, which may have been released.
            rows = record.owned() if given.dtype == record.dtype else given.reshape(-1)[first:stop]
        keep(record, rows, placement)
        if (found := self._built.found.pop(tensor, None)) is not None:
            builder, built = found
            builder.give(built, keep_rows=isinstance(rows, RowsInStore) and rows.is_adopted)
        return record
