"""One rank's part of a save: the request, its shard files, and its pieces of arrays that rank 0 stores.

[Note: links of unchanged shards]
A shard that no pass has changed since a save still has the version of that save. Its file is then linked from that
checkpoint, if the file is unchanged and the values in memory have its checksums: code that holds a parameter may have
written to its memory outside of a pass. Otherwise the shard is written.

[Note: pieces]
An array under 64 KiB does not get a shard file per rank: a shard file of a few rows takes 8 KiB, and a model has hundreds
of such arrays. Instead, each rank writes its rows of all these arrays, one array after another, into a few files next to
its manifest. Rank 0 reads the files of all ranks, stores each array as one shard, and removes the files. This needs no
collectives, and other ranks do not wait for it: pins are released as soon as their rows are copied.

    manifest/rank-<rank>.pieces-<group>     rows of the group's arrays, in order, without padding; their crc32c (u32)

A group has 8 MiB of arrays, which bounds the memory that a rank needs for it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from crc32c import crc32c

from ..errors import CorruptionError, StorageError, UsageError
from ..format.arrays import Bytes, Grid, LocalShard, numpy_dtype
from ..io.files import Files
from ..io.queue import Priority
from ..io.shards import FillRuns, IoResources, ShardSummary, write_shard
from .build import CheckpointBuilder, CheckpointPlan
from .layout import METADATA_FILE, array_path, check_save_id, manifest_file, tag_folder, tag_text
from .retention import Keep

if TYPE_CHECKING:
    from .reader import CheckpointReader

_GROUP_BYTES = 8 * 1024 * 1024
_CRC = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A shard file in a committed checkpoint."""

    version: int
    """Version of the shard in the file; see `Tier.version`."""
    path: str
    crcs: tuple[int, ...]
    """crc32c of each present chunk."""
    device: int
    """Device number of the file system."""
    identity: str
    """Inode, size and modification time: it identifies the file on its device, and changes with a write."""

    @staticmethod
    def of(
        path: str | Path, *, version: int | None, crcs: tuple[int, ...], written_as: Path | None = None
    ) -> KnownFile | None:
        """Return the file that will be at `path` and is now at `written_as` (by default also `path`). Returns None if it is
        missing or its version is unknown."""
        identity = _identity(written_as or path)
        if version is None or identity is None:
            return None
        return KnownFile(version=version, path=str(path), crcs=crcs, device=identity[0], identity=identity[1])

    def is_unchanged(self) -> bool:
        """Return whether the file still exists and is unchanged."""
        return self._matches(self.path)

    def _matches(self, path: str | Path) -> bool:
        return _identity(path) == (self.device, self.identity)

    def link(self, files: Files, target: Path) -> bool:
        """Create the hard link `target`; return False, without a link, if the file was changed or cannot be linked."""
        if not self.is_unchanged():
            return False
        try:
            files.link(self.path, target)
        except OSError:
            return False
        # It may have been replaced since the check.
        if self._matches(target):
            return True
        with contextlib.suppress(StorageError):
            files.unlink(target)
        return False


def _identity(path: str | Path) -> tuple[int, str] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # A string, which the garbage collector does not track: see [Note: objects of a save].
    return status.st_dev, f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


class PinnedShard(Protocol):
    """A version of a shard that does not change until `release()`; usable from any thread except an I/O thread."""

    @property
    def local(self) -> LocalShard:
        """Which shard of which array."""

    @property
    def tier(self) -> str:
        """The tier of the pinned bytes: device, host or disk."""

    @property
    def has_file(self) -> bool:
        """Whether the bytes are in a separate file of the run folder, which `publish` may link."""

    @property
    def version(self) -> int | None:
        """The pinned version; None if it is not known yet, because a pending update will create it."""

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Copy a shard's elements on `grid`, unpadded, into `out`. Raises UsageError if the pinned shard is on disk."""

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Return the crc32c of each chunk that a shard file of shard number `shard` on `grid` has."""

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Create the shard file `path` of shard number `shard` on `grid`: a hard link if the disk tier has this file on the
        same file system, else a copy. It is durable when this returns, if `res.sync`."""

    def release(self) -> None:
        """Allow changes again; a second call does nothing."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest(CheckpointPlan):
    """The request for one rank's part of a save. The arrays in `small` must not change until the save is done."""

    resources: IoResources
    folder: Path
    """The folder of checkpoints, the same on every rank; created if missing."""
    rank: int
    pins: Mapping[str, PinnedShard]
    """This rank's pinned shards by array name."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """JSON state of this rank, such as its RNG states."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """JSON state of the whole run; only rank 0's is stored."""
    keep: Keep | None = None
    """Which checkpoints of this run are kept once this one is committed; None: all."""
    known: Mapping[str, KnownFile] = field(default_factory=dict)
    """Files of earlier checkpoints that may equal the pinned shard, by array."""
    overwrite: bool = False
    """Replace a committed checkpoint of the same tag, even one of another run."""
    disk_folder: Path | None = None
    """The disk tier's folder; if it is on another file system, the check of free space counts its shards as copies."""
    disk_folders: Mapping[str, Path] = field(default_factory=dict)
    """The folder of shards that are on another drive than `disk_folder`, by array."""
    before_commit: Callable[[CheckpointReader], Iterable[str]] | None = None
    """Called on rank 0, in the save's thread, with the checkpoint before it is committed; returns messages. Files that it
    writes durably at the top of the folder are committed too."""
    reserve_bytes: int = 0
    """Bytes on the disk tier's file system that the next step needs in addition to the files of the save."""
    on_end: Callable[[SaveSummary | BaseException], None] | None = None
    """Called in the save's thread with this rank's summary, or its error, before `wait()` returns. Must not raise."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others."""
    num_threads: int = 8
    """Shards published concurrently."""

    @property
    def written_bytes(self) -> int:
        """Approximate bytes that a rank writes if no shard is unchanged."""
        written = [name for name, pin in self.pins.items() if not pin.has_file]
        return sum(self.specs[name].nbytes for name in [*written, *self.small]) // max(1, self.world_size)

    def check(self) -> None:
        """Raise UsageError for an invalid request. The constructor does not check, so that the save can release the pins."""
        tag_text(self.tag)
        check_save_id(self.save_id)
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is not in a world of {self.world_size}")
        if self.step < 0:
            raise UsageError(f"step {self.step}: expected a count of steps")
        if self.keep is not None and not self.run_id:
            raise UsageError(f"{self.keep}: expected a run_id to know the run's own checkpoints by")
        for name in [*self.pins, *self.small, *self.grids]:
            if name not in self.specs:
                raise UsageError(f"array {name!r} has no spec in the save request")
        for name in self.pieces:
            if (num_shards := self.grid(name).num_shards) > 1:
                raise UsageError(f"array {name!r} is gathered from pieces: expected one shard, got {num_shards}")
        for name, data in self.small.items():
            spec = self.specs[name]
            if data.shape != spec.shape or data.dtype != numpy_dtype(spec.dtype):
                raise UsageError(
                    f"array {name!r}: expected {spec.dtype} of shape {spec.shape}, got {data.dtype} of {data.shape}"
                )

    def unchanged(self, name: str) -> KnownFile | None:
        """Return the file of an earlier checkpoint with the same version as the pinned shard, or None."""
        known, version = self.known.get(name), self.pins[name].version
        return known if known is not None and version is not None and known.version == version else None

    def check_room(self, path: Path, num_ranks: int) -> None:
        """Raise DiskFullError if the file system of `path` lacks room for the files of `num_ranks` ranks."""
        device = os.stat(path).st_dev
        folders = {folder for folder in (self.disk_folder, *self.disk_folders.values()) if folder is not None}
        on_other_devices = {folder for folder in folders if os.stat(folder).st_dev != device}
        written_names = [
            name
            for name, pin in self.pins.items()
            if not pin.has_file or self.disk_folders.get(name, self.disk_folder) in on_other_devices
            if (known := self.unchanged(name)) is None or known.device != device or not known.is_unchanged()
        ]
        needed = sum(
            min(self.grid(name).num_shards, num_ranks) * self.file_bytes(name, 0)
            for name in written_names
            if name not in self.pieces
        )
        # The pieces and the whole array exist at the same time.
        needed += sum(self.file_bytes(name, 0) for name in [*self.small, *self.pieces])
        needed += sum(self.specs[name].nbytes for name in self.pieces)
        reserved = 0 if self.disk_folder is None or self.disk_folder in on_other_devices else self.reserve_bytes
        step_text = f", and the next step {reserved} too" if reserved else ""
        self.resources.files.require_room(
            path,
            needed + reserved,
            f"the checkpoint writes about {needed} bytes{step_text}",
            "make room, or save elsewhere",
        )


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """One rank's part in a committed checkpoint."""

    path: Path
    """The tag's folder."""
    num_files: int
    """Shard files of this rank."""
    num_linked: int
    """Shard files of this rank that are links, so no data was written for them."""
    linked_bytes: int
    written_bytes: int
    all_linked_bytes: int
    """Total over all ranks that save to this folder, on the rank that commits; else 0. So is `all_written_bytes`."""
    all_written_bytes: int
    elapsed_s: float
    """From the request to the commit."""
    known: Mapping[str, KnownFile] = field(repr=False)
    """This rank's shard files by array, for the next request."""
    messages: tuple[str, ...]
    """Messages for the user, for example about copies instead of links or leftovers that could not be removed."""
    url: str | None = None
    """The URL that it was uploaded to; `path`, the local folder, is then removed."""
    uploaded_bytes: int = 0
    """Bytes that this rank uploaded."""
    all_uploaded_bytes: int = 0
    """Total over all ranks, on the rank that commits; else 0."""


class RankPart(CheckpointBuilder):
    """One rank's part of the save `request` in the temporary folder: shards, and pieces of small arrays. `check_alive` is
    called before each shard; if it raises, the save stops."""

    def __init__(self, request: SaveRequest, folder: Path, check_alive: Callable[[], None]) -> None:
        earlier = {
            name: os.path.join(os.path.dirname(file.path), METADATA_FILE) for name, file in request.known.items()
        }
        documents = {array_path(name): path for name, path in earlier.items()}
        super().__init__(request, folder, request.resources.files, documents)
        self._request = request
        self._check_alive = check_alive
        self._resources = replace(request.resources, sync=False)
        self._target = request.folder / tag_folder(request.tag)
        self.known: dict[str, KnownFile] = {}
        """Files that the next save may link, once this one is committed."""
        self._groups: list[list[str]] = []
        """Names of arrays whose pieces share a file."""
        nbytes = _GROUP_BYTES
        for name in sorted(request.pieces):
            size = request.specs[name].nbytes
            if nbytes + size > _GROUP_BYTES:
                self._groups.append([])
                nbytes = 0
            self._groups[-1].append(name)
            nbytes += size

    def tasks(self) -> Iterator[Callable[[], ShardSummary | None]]:
        """Yield a task for each group of pieces and each shard, first those in memory, which updates wait for."""
        request = self._request
        yield from (partial(self._write_rows, group) for group in self._own_groups())
        own_names = [
            name for name in request.pins if name not in request.pieces and request.file_bytes(name, request.rank)
        ]
        own_names.sort(key=lambda name: request.pins[name].tier == "disk")
        yield from (partial(self._publish, name, request.pins[name]) for name in own_names)
        if request.rank == 0:
            yield from (partial(self._write_small, name) for name in request.small if request.file_bytes(name, 0))

    def _publish(self, name: str, pin: PinnedShard) -> ShardSummary:
        request = self._request
        self._check_alive()
        path = self.new_path(name, request.rank)
        version = pin.version
        summary = self._link_known(name, pin, path)
        if summary is None:
            summary = pin.publish(self._resources, path, request.grid(name), request.rank, Priority.CHECKPOINT)
        # Released immediately: an update of this shard may be waiting.
        pin.release()
        self._finish_file(path)
        committed = self._target / request.shard_path(name, request.rank)
        if known := KnownFile.of(committed, version=version, crcs=summary.crcs, written_as=path):
            self.known[name] = known
        return summary

    def _link_known(self, name: str, pin: PinnedShard, path: Path) -> ShardSummary | None:
        """Link an equal file of an earlier checkpoint; None if there is none. See [Note: links of unchanged shards]."""
        request = self._request
        known = request.unchanged(name)
        if known is None or not known.link(self._files, path):
            return None
        if pin.checksums(request.resources, request.grid(name), request.rank) != known.crcs:
            self._files.unlink(path)
            return None
        file_bytes = request.file_bytes(name, request.rank)
        return ShardSummary(name, request.rank, file_bytes, known.crcs, linked=True)

    def _write_small(self, name: str) -> ShardSummary:
        return self._store_whole(name, np.ascontiguousarray(self._request.small[name]).reshape(-1).view(np.uint8))

    def _store_whole(self, name: str, data: Bytes) -> ShardSummary:
        """Store an array as one shard, on rank 0."""
        self._check_alive()
        path, spec = self.new_path(name, 0), self._request.specs[name]
        fill = FillRuns.of(data, spec.itemsize)
        summary = write_shard(self._resources, path, spec, self._request.grid(name), 0, fill)
        self._finish_file(path)
        return summary

    def pieces_of_rank(self) -> list[Path]:
        """Return this rank's piece files."""
        return [self._pieces_file(group, self._request.rank) for group in self._own_groups()]

    def all_pieces(self) -> list[Path]:
        """Return the piece files of all ranks."""
        return [path for group in range(len(self._groups)) for path in self._pieces_files(group)]

    def assembly_tasks(self) -> list[Callable[[], list[ShardSummary]]]:
        """Return a task for each group that stores its arrays, each as one shard, and removes the piece files."""
        return [partial(self._assemble, group) for group in range(len(self._groups))]

    def _own_groups(self) -> list[int]:
        return [group for group in range(len(self._groups)) if self._num_bytes(group, self._request.rank)]

    def _sources(self, group: int) -> range:
        # Only the first ranks have rows of a small array.
        return range(max(self._request.pieces[name].num_shards for name in self._groups[group]))

    def _pieces_files(self, group: int) -> list[Path]:
        return [self._pieces_file(group, rank) for rank in self._sources(group)]

    def _pieces_file(self, group: int, rank: int) -> Path:
        return (self.folder / manifest_file(rank)).with_suffix(f".pieces-{group}")

    def _span(self, name: str, rank: int) -> tuple[int, int]:
        """Return the range of bytes `[first, stop)` of the array that rank `rank` has."""
        grid, itemsize = self._request.pieces[name], self._request.specs[name].itemsize
        first = min(rank * grid.shard_numel, grid.rows * grid.row_numel)
        return first * itemsize, (first + grid.shard_valid_numel(rank)) * itemsize

    def _num_bytes(self, group: int, rank: int) -> int:
        return sum(stop - first for first, stop in (self._span(name, rank) for name in self._groups[group]))

    def _write_rows(self, group: int) -> None:
        request = self._request
        data: Bytes = np.empty(self._num_bytes(group, request.rank), np.uint8)
        offset = 0
        for name in self._groups[group]:
            first, stop = self._span(name, request.rank)
            if first < stop:
                request.pins[name].copy_into(data[offset : offset + stop - first], request.pieces[name], request.rank)
                offset += stop - first
                # Released immediately: an update of this shard may be waiting.
                request.pins[name].release()
        # It need not be durable: it is removed before the commit.
        content = data.tobytes()
        content += _CRC.pack(crc32c(content))
        self._files.write_small(self._pieces_file(group, request.rank), content, sync=False)

    def _assemble(self, group: int) -> list[ShardSummary]:
        request, names = self._request, self._groups[group]
        shards: dict[str, Bytes] = {name: np.empty(request.specs[name].nbytes, np.uint8) for name in names}
        for rank in self._sources(group):
            data = self._read_rows(group, rank)
            offset = 0
            for name in names:
                first, stop = self._span(name, rank)
                if first < stop:
                    shards[name][first:stop] = data[offset : offset + stop - first]
                    offset += stop - first
        summaries = [self._store_whole(name, values) for name, values in shards.items()]
        for path in self._pieces_files(group):
            self._files.unlink(path)
        return summaries

    def _read_rows(self, group: int, rank: int) -> Bytes:
        path, nbytes = self._pieces_file(group, rank), self._num_bytes(group, rank)
        data = path.read_bytes()
        if len(data) != nbytes + _CRC.size or _CRC.unpack(data[nbytes:])[0] != crc32c(data[:nbytes]):
            raise CorruptionError(
                f"{path} is not what rank {rank} wrote ({len(data)} bytes, expected {nbytes + _CRC.size}): the folder "
                "is damaged, or another program writes there; save again"
            )
        return np.frombuffer(data, np.uint8)[:nbytes]
