"""Checkpoints that stay open between requests, and the threads and buffers that they share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import ExitStack

from ..checkpoint.catalog import TagInfo
from ..checkpoint.reader import CheckpointReader
from ..io.files import Files
from ..io.shards import IoResources, open_resources
from ..weights.from_checkpoint import DTYPES, list_weights
from ..weights.layout import FileLayout, plan_files

_MOST_OPEN = 8
_MOST_LAYOUTS = 8
_NUM_THREADS = 8


class Source:
    """An open checkpoint. Usable from any thread."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.refused: dict[str, str] = {}
        """By type of data, why the weights cannot be written in it; found out on the way."""
        self._layouts: OrderedDict[tuple[str, int], list[FileLayout]] = OrderedDict()
        self._lock = threading.Lock()

    def layouts(self, dtype: str, max_file_bytes: int) -> list[FileLayout]:
        """Return the files of the model, as `zstore consolidate` writes them."""
        key = (dtype, max_file_bytes)
        with self._lock:
            if key not in self._layouts:
                self._layouts[key] = plan_files(list_weights(self.reader, DTYPES[dtype]), max_file_bytes)
                while len(self._layouts) > _MOST_LAYOUTS:
                    self._layouts.popitem(last=False)
            return self._layouts[key]


class Sources:
    """The checkpoints that were asked for last, by the id of their record. Usable from any thread.

    `pool_bytes` is the memory that all of them read through.
    """

    def __init__(self, pool_bytes: int) -> None:
        self._pool_bytes = pool_bytes
        self._open: OrderedDict[tuple[str, str], Source] = OrderedDict()
        self._lock = threading.Lock()
        self._resources: IoResources | None = None
        self._ends = ExitStack()

    def get(self, info: TagInfo) -> Source:
        """Return the checkpoint, open; it stays so for whoever has it. Raises what opening it raises."""
        key = (info.location, info.record.id)
        with self._lock:
            if (found := self._open.get(key)) is not None:
                self._open.move_to_end(key)
                return found
            resources = self._shared()
        source = Source(CheckpointReader(info, resources))
        with self._lock:
            kept = self._open.setdefault(key, source)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return kept

    def _shared(self) -> IoResources:
        if self._resources is None:
            # Through the page cache: what one client downloads, others do too.
            self._resources = self._ends.enter_context(
                open_resources(pool_bytes=self._pool_bytes, num_threads=_NUM_THREADS, files=Files(direct=False))
            )
        return self._resources

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._open.clear()
            self._resources = None
        self._ends.close()
