"""How a store is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BudgetError, UsageError
from ..io.files import Files, UserPath, user_path
from ..store import StoreOptions, TensorStore
from .ranks import Ranks
from .store import Store

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def open_store(  # noqa: PLR0913 - options of one thing, all but the first by name
    path: UserPath | None = None,
    *,
    host_budget_bytes: float | None = None,
    buffer_count: int | None = None,
    buffer_size: int | None = None,
    pin_memory: bool = False,
    num_threads: int = 8,
    verify: bool = True,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Store:
    """Open a store that keeps its arrays in a folder of its own below `path`, on a fast drive, or without a path in memory.

    Arrays live as long as the store is open; `Store.checkpoint` saves them, and `Store.load` brings them back, both by links
    if drive and layout allow. All memory that the store takes is counted against `host_budget_bytes`: transfer buffers,
    arrays in host memory, data read ahead; None: buffers of 128 MiB, else no bound. Transfers go through
    `buffer_count` buffers of `buffer_size` bytes, in place of that. `pin_memory` registers them with CUDA. `num_threads`
    read and write; `verify` checks the crc32c of all that is read from the drive; tier "device" is on `device`.

    With `mesh`, a DeviceMesh of one dimension, or `rank` and `world_size`, several processes share the arrays, each with a
    store of its own and a budget of its own: see `Store.put` and `Store.checkpoint`, which all of them call.

    Raises UsageError for arguments that make no sense, StorageError for a folder that cannot be written, BudgetError if the
    budget has no room for the buffers.
    """
    numbers = {"host_budget_bytes": host_budget_bytes, "buffer_count": buffer_count, "buffer_size": buffer_size}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(f"open_store({name}={number!r}): expected a number of at least 1")
    run_path = None if path is None else user_path(path)
    if run_path is not None:
        Files().make_folder(run_path)
    options = StoreOptions(
        run_path=run_path,
        host_budget_bytes=None if host_budget_bytes is None else int(host_budget_bytes),
        buffer_count=buffer_count,
        buffer_size=buffer_size,
        shares_folders=True,
        reserves=False,
        num_threads=num_threads,
        verify=verify,
        device=device,
        pin_buffers=pin_memory,
    )
    if options.host_budget_bytes is not None and options.pool_bytes > options.host_budget_bytes:
        raise BudgetError(
            f"open_store(): buffers of {options.pool_bytes} bytes do not fit into "
            f"host_budget_bytes={options.host_budget_bytes}: raise it, or take fewer or smaller buffers"
        )
    ranks = Ranks.of(rank, world_size, mesh, run_path)
    return Store(TensorStore(options, rank=ranks.rank), ranks)
