"""Opens the checkpoint that a path or URL names, zstore's or other software's; and a store that loads them.

[Note: read ahead]
A coroutine opens a checkpoint with the same code in a thread. The files that it will most likely read are read before that,
concurrently through aiofiles, since latency dominates on a network drive. If a file is missing, damaged, too large or of
another kind, or is replaced by a concurrent save, the code in the thread reads it again, so that errors are the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..checkpoint.catalog import MAX_LATEST_BYTES, may_be_checkpoint
from ..checkpoint.folder import Folder, LocalFolder
from ..checkpoint.format import MAX_JSON_BYTES, MAX_RECORD_BYTES
from ..checkpoint.layout import LATEST_FILE, METADATA_FILE, RECORD_FILE, tag_folder, tag_text
from ..checkpoint.reader import ArraySource, open_checkpoint
from ..errors import CheckpointNotFoundError, UsageError, ZstoreError
from ..io.closing import Closing
from ..io.files import Files, UserPath, is_url, user_location, user_path
from ..io.machine import run_in_thread
from ..io.shards import IoResources

if TYPE_CHECKING:
    from ..store import Store

_URL_WITH_PATH = re.compile(r".+://[^/]+/.")
"""An `@` before the path is part of the address."""
_NUM_READS = 16
"""Small files read concurrently."""
_MAX_BYTES = {RECORD_FILE: MAX_RECORD_BYTES, METADATA_FILE: MAX_JSON_BYTES, LATEST_FILE: MAX_LATEST_BYTES}

T = TypeVar("T", bound=Closing)


def open_source(
    location: UserPath,
    tag: str | float | None = None,
    *,
    resources: IoResources | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ArraySource:
    """Open the checkpoint `tag` at `location` (the newest committed one by default), or a tag's own folder; see
    `split_location`. A URL `FOLDER@TAG` without a checkpoint means `tag` in `FOLDER`.

    `storage_options` are options of a URL's fsspec file system. Raises CheckpointNotFoundError, CorruptionError if it
    is damaged, CheckpointMismatchError if it is of a kind or version that is not read, UsageError for a URL that nothing
    opens. The caller closes `resources`.
    """
    place, text = split_location(location, None if tag is None else tag_text(tag))
    folder = folder_of(place, storage_options)
    try:
        return open_checkpoint(folder, text, resources=resources)
    except CheckpointNotFoundError:
        # Only without a checkpoint of zstore: a run that moved to zstore may continue in the same folder.
        if folder.is_local and (source := _open_foreign(place, text, resources)) is not None:
            return source
        above, _, name = place.rpartition("@")
        if text is not None or not name or "/" in name or not _URL_WITH_PATH.match(above):
            raise
    return open_source(above, name, resources=resources, storage_options=storage_options)


def split_location(location: UserPath, tag: str | None = None) -> tuple[str, str | None]:
    """Return path or URL, and the tag, of `FOLDER`, `FOLDER@TAG`, or `FOLDER` and a separate `tag` (None: not named).

    An `@` in the path of an existing local folder is part of its name, and `open_source` handles it in a URL. Raises UsageError
    if there are two tags.
    """
    place = user_location(location)
    folder, _, name = place.rpartition("@")
    if is_url(place) or not name or "/" in name or not Path(folder).is_dir() or Path(place).is_dir():
        return place, tag
    if tag is not None:
        raise UsageError(f"{place} names the tag {name!r}, and the tag {tag!r} was given: name one of them")
    return folder, name


def _open_foreign(location: str, tag: str | None, resources: IoResources | None) -> ArraySource | None:
    """Open a checkpoint of other software; None if it is of no known kind."""
    folder = Path(location) if tag is None else Path(location) / tag
    if (folder / ".metadata").is_file():
        from ..interop.torch_dcp import TorchDcpSource

        return TorchDcpSource(folder, resources)
    from ..interop.deepspeed.source import open_deepspeed

    if (deepspeed := open_deepspeed(location, tag, resources=resources)) is not None:
        return deepspeed
    if any(folder.glob("*.safetensors")):
        from ..interop.huggingface import HuggingFaceSource

        return HuggingFaceSource(folder, resources)
    return None


def folder_of(location: UserPath, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder, which need not exist, of a path or URL. Raises UsageError for a URL that nothing opens."""
    if is_url(location):
        from ..remote.service import open_folder

        return open_folder(os.fspath(location), storage_options)
    return LocalFolder(user_path(location))


async def open_source_async(
    location: str, tag: str | None, storage_options: Mapping[str, Any], use: Callable[[ArraySource], T]
) -> T:
    """Open a checkpoint as `open_source` does, and return `use` of it. See [Note: read ahead]."""
    place, text = await run_in_thread(partial(split_location, location, tag), "zstore-open")
    documents = {} if is_url(place) else await _read_ahead(LocalFolder(Path(place)), text)

    def opened() -> T:
        if documents:
            with contextlib.suppress(OSError, ZstoreError):
                return use(open_checkpoint(LocalFolder(Path(place), documents), text))
        return use(open_source(location, tag, storage_options=storage_options))

    def close_unused(future: Future[T]) -> None:
        if future.exception() is None:
            future.result().close()

    ticket = run_in_thread(opened, "zstore-open")
    try:
        return await ticket
    except BaseException:
        ticket.future.add_done_callback(close_unused)  # the task was cancelled
        raise
    finally:
        documents.clear()  # later reads use the files


async def _read_ahead(folder: LocalFolder, tag: str | None) -> dict[str, bytes]:
    """Return by path the small files that opening the checkpoint `tag` in `folder`, or its own folder, most likely reads."""
    import asyncio

    import aiofiles.os

    found: dict[str, bytes] = {}
    limit = asyncio.Semaphore(_NUM_READS)

    async def read(folder: LocalFolder, file: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            async with limit:  # one call in a thread for each file, so that a cancelled task leaves none open
                found[folder.location_of(file)] = await aiofiles.os.wrap(folder.read_small)(file, _MAX_BYTES[file])

    await asyncio.gather(*(read(folder, file) for file in _MAX_BYTES))
    tag = None if tag == LATEST_FILE else tag
    if folder.location_of(RECORD_FILE) not in found:
        with contextlib.suppress(OSError, ValueError, UsageError):
            names = [tag_folder(tag)] if tag else (await aiofiles.os.wrap(folder.entries)()).folders
            await asyncio.gather(*(read(folder.child(name), RECORD_FILE) for name in names if may_be_checkpoint(name)))
            meant = tag or found.get(folder.location_of(LATEST_FILE), b"").decode().strip()
            await read(folder.child(tag_folder(meant)), METADATA_FILE)
    return found


def open_store(
    path: UserPath | None = None,
    *,
    host_budget_bytes: float | None = None,
    pin_memory: bool = False,
    num_threads: int = 8,
    verify: bool = True,
    device: str = "cpu",
) -> Store:
    """Open a store that keeps its arrays in a new folder below `path`, on a fast drive, or in memory if there is no path.

    Arrays live as long as the store is open; `Store.checkpoint` saves and `Store.load` restores them, both by links if drive
    and layout allow. `host_budget_bytes` bounds all memory of the store: transfer buffers, arrays in host memory, data read
    ahead; None: buffers of 128 MiB, and no bound. `pin_memory` registers the buffers with CUDA. `num_threads` read and write;
    `verify` checks the crc32c of all data read from the drive; tier "device" is on `device`.

    Raises UsageError for invalid arguments, StorageError for a folder that cannot be written.
    """
    from ..store import Store, StoreOptions

    is_number = isinstance(host_budget_bytes, Real)  # untyped callers may pass anything
    if host_budget_bytes is not None and not (is_number and 1 <= host_budget_bytes < math.inf):
        raise UsageError(f"open_store: expected a number of bytes as host_budget_bytes, got {host_budget_bytes!r}")
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
