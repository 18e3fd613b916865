"""A store opened for a program: its options, and checkpoints of any software to load."""

from __future__ import annotations

from ..errors import UsageError
from ..io.files import Files, UserPath, user_path
from ..store import Store, StoreOptions
from .sources import open_source


def open_store(
    path: UserPath | None = None,
    *,
    host_budget_bytes: float | None = None,
    pin_memory: bool = False,
    num_threads: int = 8,
    verify: bool = True,
    device: str = "cpu",
) -> Store:
    """Open a store that keeps its arrays in a folder of its own below `path`, on a fast drive, or without a path in memory.

    Arrays live as long as the store is open; `Store.checkpoint` saves them, and `Store.load` brings them back, both by links
    if drive and layout allow. All memory that the store takes is counted against `host_budget_bytes`: transfer buffers,
    arrays in host memory, data read ahead; None: buffers of 128 MiB, else no bound. `pin_memory` registers the buffers with
    CUDA. `num_threads` read and write; `verify` checks the crc32c of all that is read from the drive; tier "device" is on
    `device`.

    Raises UsageError for arguments that make no sense, StorageError for a folder that cannot be written.
    """
    if host_budget_bytes is not None and host_budget_bytes < 1:
        raise UsageError(f"open_store(host_budget_bytes={host_budget_bytes!r}): expected a number of at least 1")
    run_path = None if path is None else user_path(path)
    if run_path is not None:
        Files().make_folder(run_path)
    options = StoreOptions(
        run_path=run_path,
        host_budget_bytes=None if host_budget_bytes is None else int(host_budget_bytes),
        shares_folders=True,
        reserves=False,
        num_threads=num_threads,
        verify=verify,
        device=device,
        pin_buffers=pin_memory,
    )
    return Store(options, open_source=open_source)
