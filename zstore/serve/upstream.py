"""Another service, whose runs are served too; files of its checkpoints that were read are kept here.

[Note: pull-through]
A file of a checkpoint does not change: it is fetched whole when somebody first reads of it, once for all who wait, checked, and
kept. Shard files are checked chunk by chunk against the manifest, manifests and metadata against the record. The record
itself, lists, and files beside checkpoints are asked for each time; if the other service does not answer, its last answer
serves, and for `_DOWN_S` it is not asked again. Answers are kept in the folder `answers`, by what was asked, and files by their
checkpoint's record and their path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import Entries
from ..checkpoint.format import MAX_RECORD_BYTES, Record
from ..checkpoint.names import RECORD_FILE
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import StoredArray
from ..errors import CorruptionError, StorageError, UsageError
from ..remote.retries import Retries
from ..remote.service import ServiceConnection
from ..remote.service_folder import ServiceFolder
from ..remote.service_url import ServiceUrl
from ..remote.url_folder import UrlFolder
from .cache import Cache
from .kept import KeptFiles, short_digest
from .verify import verify_shard

_log = logging.getLogger("zstore.serve")

TOKEN_VARIABLE = "ZSTORE_UPSTREAM_TOKEN"
_DOWN_S = 5.0
_BLOCK_BYTES = 8 * 1024 * 1024
_MOST_ANSWER_BYTES = 64 * 1024 * 1024
_MOST_OPEN, _MOST_RECORDS = 16, 4096
_FRESH_S = 2.0
"""How long a record is valid: as long as lists of checkpoints are."""
_MISSING = b"\0missing"
"""Stands for the answer that something is not there."""
Shard = tuple[StoredArray, int, Sequence[int]]
"""Array and number of a shard, and the checksums of its chunks."""


class Upstream:
    """The service at `url`, and the files of it that are `kept` (None: nothing). Usable from any thread.

    `options` are the storage options of its connection; without a token there, the variable ZSTORE_UPSTREAM_TOKEN has it.
    """

    def __init__(self, url: str, options: Mapping[str, Any], kept: KeptFiles | None) -> None:
        self.url = ServiceUrl.parse(url)
        self._address = url
        self._options = {"token": os.environ.get(TOKEN_VARIABLE, ""), **options}
        self._kept = kept
        self._lock = threading.Lock()
        self._connection: ServiceConnection | None = None
        self._down_until = 0.0
        self._records: Cache[str, tuple[float, Record | None]] = Cache(_MOST_RECORDS)
        """By URL, the record of a checkpoint, and when it is asked for again."""
        self._shards: Cache[str, dict[str, Shard]] = Cache(_MOST_OPEN)
        """By the id of a checkpoint, its shard files."""

    def root(self) -> PulledFolder:
        """Return the folder that the URL names: of one run, or one with all of its runs as folders."""
        return PulledFolder(self, self.url)

    def connection(self) -> ServiceConnection:
        """Return the connection. Raises StorageError if the service does not answer, UsageError for another server."""
        if time.monotonic() < self._down_until:
            raise StorageError("the other service does not answer", path=self.url.base)
        with self._lock:
            if self._connection is None:
                found = ServiceConnection.find(self._address, self._options, retries=Retries(attempts=2))
                if found is None:
                    raise UsageError(f"{self.url.base} is no service of zstore: only from one are runs pulled through")
                self._connection = found[0]
            return self._connection

    def answer(self, key: str, ask: Callable[[], bytes]) -> bytes:
        """Return the answer of the other service, or its last one if it does not answer now."""
        kept = self._kept
        place = None if kept is None else kept.folder / "answers" / short_digest(self.url.base, key)
        missing: Exception | None = None
        try:
            data = ask()
        except (FileNotFoundError, NotADirectoryError) as error:
            data, missing = _MISSING, error
        except StorageError:
            if time.monotonic() >= self._down_until:
                self._down_until = time.monotonic() + _DOWN_S
            if place is None or not place.exists():
                raise
            if (data := place.read_bytes()) == _MISSING:
                raise FileNotFoundError(f"{self.url.base} had nothing there when it last answered") from None
            return data
        if kept is not None and place is not None and len(data) <= _MOST_ANSWER_BYTES:
            kept.write(place, [data])
        if missing is not None:
            raise missing
        return data

    def record_of(self, folder: PulledFolder) -> Record | None:
        """Return the record of the checkpoint in a folder, None if there is none."""
        until, record = self._records.get(folder.location) or (0.0, None)
        if time.monotonic() >= until:
            try:
                record = Record.decode(folder.read_small(RECORD_FILE, MAX_RECORD_BYTES), RECORD_FILE)
            except (FileNotFoundError, NotADirectoryError):
                record = None
            self._records.put(folder.location, (time.monotonic() + _FRESH_S, record))
        return record

    def file(self, folder: PulledFolder, record: Record, file: str) -> Path | None:
        """Return the kept copy of a checkpoint's file, which is fetched if it is not there; None if nothing is kept."""
        if (kept := self._kept) is None:
            return None
        place = kept.place(f"{self.url.base}\0{record.id}", file)
        if (found := kept.get(place)) is not None:
            return found
        with kept.only_one(place):
            if not place.exists():
                there = folder.there()
                size = there.size(file)
                starts = range(0, max(size, 1), _BLOCK_BYTES)
                blocks = (there.read_range(file, start, min(start + _BLOCK_BYTES, size)) for start in starts)
                try:
                    kept.write(place, blocks, lambda part: self._check(folder, record, file, part, size))
                except CorruptionError as error:
                    raise CorruptionError(
                        f"{folder.location_of(file)} did not come whole, and is not kept: {error}"
                    ) from error
        return place

    def _check(self, folder: PulledFolder, record: Record, file: str, part: Path, size: int) -> None:
        """Raise CorruptionError for a file that did not come as the checkpoint has it."""
        if part.stat().st_size != size:
            raise CorruptionError(f"{folder.location_of(file)} has {size} bytes, {part.stat().st_size} came")
        expected = record.digests.get(file)
        if expected is not None and hashlib.sha256(part.read_bytes()).hexdigest() != expected:
            raise CorruptionError(f"{folder.location_of(file)} is not the one that the record names")
        name = file.rpartition("/")[2]
        if (name == "c" or name.startswith("c.")) and (found := self._shards_of(folder, record).get(file)) is not None:
            array, shard, crcs = found
            verify_shard(part, array, shard, crcs)

    def _shards_of(self, folder: PulledFolder, record: Record) -> dict[str, Shard]:
        found = self._shards.get(record.id)
        if found is None:
            with CheckpointReader(TagInfo(folder=folder, record=record)) as reader:
                found = {
                    array.shard_file(shard): (array, shard, reader.shard_crcs(name, shard))
                    for name, array in reader.arrays.items()
                    for shard in range(array.grid.num_shards)
                }
            self._shards.put(record.id, found)
        return found


class PulledFolder(UrlFolder):
    """A folder of another service. See [Note: pull-through]."""

    def __init__(self, upstream: Upstream, url: ServiceUrl) -> None:
        super().__init__(url.text, (url.folder or url.run).rpartition("/")[2], None)
        self.upstream, self.url = upstream, url
        self.lists_runs = not url.run
        """Whether its folders are runs."""

    def there(self) -> ServiceFolder:
        """Return the folder there. Raises StorageError if the service does not answer."""
        return ServiceFolder(self.upstream.connection(), self.url)

    @property
    def parent(self) -> PulledFolder:
        return PulledFolder(self.upstream, self.url.above)

    def child(self, name: str) -> PulledFolder:
        return PulledFolder(self.upstream, self.url.child(name))

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        kept = None if file == RECORD_FILE else self._kept(file)
        if kept is not None:
            with kept.open("rb") as opened:
                return os.pread(opened.fileno(), max(0, stop - start), start)
        if start:
            return self.there().read_range(file, start, stop)
        return self.upstream.answer(f"{self.url.text}\0{file}", lambda: self.there().read_range(file, 0, stop))[:stop]

    def _kept(self, file: str) -> Path | None:
        """Return the kept copy of a file of a checkpoint; None for one beside checkpoints."""
        record = self.upstream.record_of(self) if self.url.folder else None
        return None if record is None else self.upstream.file(self, record, file)

    def size(self, file: str) -> int:
        if file != RECORD_FILE and (kept := self._kept(file)) is not None:
            return kept.stat().st_size
        return int(self._ask(f"size {self.url.text}\0{file}", lambda: self.there().size(file)))

    def _ask(self, key: str, ask: Callable[[], Any]) -> Any:
        """Return what `ask` returns, as JSON has it; see `Upstream.answer`."""
        return json.loads(self.upstream.answer(key, lambda: json.dumps(ask()).encode()))

    def entries(self) -> Entries:
        """Of the service itself, return its runs."""
        if self.lists_runs:
            return Entries(tuple(self._ask("runs", self._runs)), ())
        folders, files = self._ask(f"list {self.url.text}", lambda: astuple(self.there().entries()))
        return Entries(tuple(folders), tuple(files))

    def _runs(self) -> list[str]:
        return [str(run["name"]) for run in self.upstream.connection().ask("GET", "/api/runs")["runs"]]

    def sizes(self, top: str) -> dict[str, int | None]:
        found: dict[str, int | None] = self._ask(f"sizes {self.url.text}\0{top}", lambda: self.there().sizes(top))
        return found

    def write_small(self, file: str, data: bytes) -> None:
        """Raise UsageError: a service that pulls from another one changes nothing there."""
        raise UsageError(f"{self.location_of(file)} is another service's: change it there")
