"""The store of a run: its settings, and opening it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zstore.io import Files
from zstore.ranks.world import World
from zstore.store import StoreOptions, TensorStore

from ..config.config import Config, IoConfig


@dataclass(frozen=True)
class StoreKey:
    """The settings of a store."""

    paths: tuple[tuple[Path, ...], ...]
    """Folders for the optimizer's state, for parameters, and for activations."""
    io: IoConfig
    host_budget_bytes: int | Literal["auto"] | None
    verify: bool
    pin_memory: bool


def store_key(config: Config) -> StoreKey:
    """Return the settings of a config's store, whether or not there will be an optimizer."""
    written = replace(config, frozen=False)
    paths = (written.offload_optimizer.nvme_paths, written.offload_param.nvme_paths, written.activations_paths)
    return StoreKey(paths, config.io, config.own.host_budget_bytes, config.own.verify_reads, written.pin_memory)


def open_store(
    config: Config, world: World, budget_bytes: int | None, *, pins: bool, files: Files | None = None, cuda: Any = None
) -> TensorStore:
    """Return the store that a config asks for (all ranks); `budget_bytes` is this rank's share of the host budget;
    `pins` registers its buffers with CUDA; `files` is its access to disks, `cuda` the runtime that registers them, if not
    torch's."""
    io = config.io
    optimizer, parameters = config.offload_optimizer.nvme_paths, config.offload_param.nvme_paths
    activations = config.activations_paths
    usual = optimizer or parameters or activations
    groups = {"parameter": parameters, "activation": activations}
    options = StoreOptions(
        run_path=usual[0] if usual else None,
        other_paths=usual[1:],
        shares_folders=True,
        group_paths={group: paths for group, paths in groups.items() if paths},
        host_budget_bytes=budget_bytes,
        num_threads=io.num_threads,
        queue_depth=io.queue_depth,
        block_bytes=io.block_bytes,
        most_pool_bytes=io.pool_bytes,
        verify=config.own.verify_reads,
        device=str(world.device),
        pin_buffers=pins,
        pin_state=config.pin_memory,
    )
    with ExitStack() as opened:
        with world.agreeing():
            store = opened.enter_context(TensorStore(options, rank=world.rank, files=files, cuda=cuda))
        opened.pop_all()
    return store
