"""The store of a run: that of a model built in shards, whose rows its engine takes over, or a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.io import Files, map_large_blocks
from zstore.ranks.world import World
from zstore.store import TensorStore

from ..config.config import Config
from ..params.record import RowsInStore
from ..plan.plan import Plan, Slots
from ..plan.run import budget_of_rank, check_drives, plan_run
from ..runtime.process import warn_once
from .builder import Builder, Built, find_built, gone
from .store import StoreKey, open_store, store_key


class BuiltModel:
    """The part of a model built in shards that `initialize` takes over.

    With `copies`, a config that uses the same folders in another way is no error, as that of a reference model without the
    keys about training: its rows are copied to a store of its own. Raises UsageError, on all ranks, for parameters that
    were changed after they were released (all ranks).
    """

    def __init__(self, model: nn.Module, world: World, *, copies: bool = False) -> None:
        self.world = world
        self._copies = copies
        self._model = model
        found = {p: built for p in model.parameters() if (built := find_built(p)) is not None}
        self._found: dict[nn.Parameter, tuple[Builder, Built]] = found
        self._builders = list(dict.fromkeys(builder for builder, _ in found.values()))
        self._taken_over: Builder | None = None
        self._in_store: dict[nn.Parameter, RowsInStore] = {}
        world.raise_together(self._changed())

    def _changed(self) -> UsageError | None:
        if any(builder.is_closed for builder in self._builders):
            return gone()
        for name, parameter in self._model.named_parameters():
            if parameter in self._found and not self._found[parameter][1].is_intact(parameter):
                return UsageError(
                    f"parameter {name!r} was built within zstore.Init and changed after the block, where it had no values: "
                    "do it within the block. Leave casts and moves (.half(), .to(), .cuda()) to initialize()"
                )
        return None

    def store_of(self, key: StoreKey) -> TensorStore | None:
        """Return the store that the model was built in, if it has the settings `key`; it stays the builder's.

        Raises UsageError if it has the same run folder with other settings.
        """
        builder = self._builder_of(key)
        return None if builder is None else builder.store

    def take_over(self, key: StoreKey) -> TensorStore | None:
        """As `store_of`; the store is the caller's to close from now on."""
        self._taken_over = self._builder_of(key)
        return None if self._taken_over is None else self._taken_over.hand_over_store()

    def _builder_of(self, key: StoreKey) -> Builder | None:
        for builder in self._builders:
            if builder.is_handed_over or not isinstance(builder.key, StoreKey):
                continue
            if builder.key == key:
                return builder
            shared = _folders(builder.key) & _folders(key)
            if shared and not self._copies:
                raise UsageError(
                    f"zstore.Init() and initialize() got configs that use {min(shared)} in different ways: {builder.key} "
                    f"and {key}. Give both the same config"
                )
        return None

    def rows(self, parameter: nn.Parameter, *, in_memory: bool) -> torch.Tensor | RowsInStore | None:
        """Return this rank's rows of a parameter in shards: `in_memory` or from another store 1-D on the CPU, else a
        reference to them; None if they are not those it needs."""
        builder, built = self._found.get(parameter, (None, None))
        if builder is None or built is None or builder.world.world_size != self.world.world_size:
            return None
        if in_memory or builder is not self._taken_over or built.rows is None:
            return builder.own_rows(built)
        rows = self._in_store[parameter] = RowsInStore(built.rows.spec.name)
        return rows

    def restore(self, parameter: nn.Parameter) -> bool:
        """Give a parameter in shards all its values on its device; false if it is not, or not of these ranks (all
        ranks)."""
        builder, built = self._found.get(parameter, (None, None))
        if builder is None or built is None:
            return False
        parameter.data = builder.whole(built).to(self.world.device)
        parameter.grad = None
        return builder.world.world_size == self.world.world_size

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget the rows of a parameter: they have been taken over."""
        builder, built = self._found.pop(parameter, (None, None))
        if builder is not None and built is not None:
            rows = self._in_store.pop(parameter, None)
            builder.give(built, keep_rows=rows is not None and rows.is_taken)

    def end(self) -> None:
        """Let the modules be called: every parameter was taken over."""
        for builder in self._builders:
            builder.guard.let_go(self._model)


def _folders(key: StoreKey) -> set[Path]:
    return {path for paths in key.paths for path in paths}


def open_run_store(
    model: nn.Module,
    config: Config,
    built: BuiltModel,
    slots: Mapping[str, Slots],
    *,
    device_is_host: bool,
    files: Files | None,
    cuda: Any,
) -> tuple[Plan, TensorStore]:
    """Return the placement of everything, and the store that holds it: the one in which the model was built, or a new one
    (all ranks). `files` and `cuda` as in `open_store`."""
    world, key = built.world, store_key(config)
    # An adopted store has its budget already; "auto" would be another by now.
    former = built.store_of(key)
    budget_bytes = budget_of_rank(config, world) if former is None else former.options.host_budget_bytes
    plan = plan_run(model, config, world, slots, budget_bytes, device_is_host=device_is_host)
    store = built.take_over(key)
    store = store or open_store(config, world, budget_bytes, pins=not device_is_host, files=files, cuda=cuda)
    store.expect(plan.shared_bytes)
    if config.offload_optimizer.nvme_paths or config.offload_param.nvme_paths or config.activations_paths:
        map_large_blocks()
    return plan, store


def check_store(store: TensorStore, plan: Plan, config: Config, world: World) -> None:
    """Raise DiskFullError, on every rank, if a drive has no room for the plan's files (all ranks)."""
    present: Counter[Path] = Counter()
    for name, folder in store.disk_folders().items():
        present[folder] += store.local(name).nbytes
    check_drives(plan, config, world, present)


def warn_of_fallbacks(store: TensorStore, world: World) -> None:
    """Log once the requests that the system refused, and on which ranks (all ranks)."""
    ranks: dict[str, list[int]] = {}
    for rank, messages in enumerate(world.all_gather_object(store.fallbacks)):
        for message in messages:
            ranks.setdefault(message, []).append(rank)
    for message, which in ranks.items():
        where = "every rank" if len(which) == world.world_size else f"rank {', '.join(map(str, which))}"
        warn_once("%s: %s", where, message)
