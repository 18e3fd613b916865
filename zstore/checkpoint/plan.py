"""The plan of a checkpoint: its arrays, how they are cut, and whose state it is; and a save of it, as one rank sees it.

[Note: links of unchanged shards]
A shard of which no pass changed anything has the version that it had when it was saved. Its file is then linked from that
checkpoint, if it is still the very file that was written, and the checksums of the values in memory are those of the
file: any code with a parameter may have written to its memory without a pass. Otherwise the shard is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from ..errors import StorageError, UsageError
from ..format.arrays import ArraySpec, Bytes, Grid, LocalShard, make_grid, numpy_dtype
from ..format.codecs import Codec
from ..format.shardfile import layout_of
from ..io.files import Files
from ..io.queue import Priority
from ..io.shards import IoResources, ShardSummary
from .format import sha256
from .names import METADATA_FILE, array_path, check_save_id, shard_file, tag_text
from .retention import Keep

if TYPE_CHECKING:
    from .reader import CheckpointReader


# See [Note: objects of a save].
@lru_cache(maxsize=2)
def _layout_digest(specs: Sequence[ArraySpec], grids: Sequence[Grid], pieces: Sequence[Grid | None]) -> str:
    described: list[str] = []
    for spec, grid, held in zip(specs, grids, pieces, strict=True):
        cut = [grid.shard_rows, grid.chunk_rows, grid.chunk_cols, *([] if held is None else [held.shard_rows])]
        described.append(json.dumps([spec.name, spec.shape, spec.dtype, *cut], separators=(",", ":")))
    return sha256(f"[{','.join(described)}]".encode())


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """A checkpoint as every rank plans it alike. Rank r stores shard r of each array's grid."""

    tag: str
    step: int
    world_size: int
    save_id: str
    """From `new_save_id()` of rank 0, the same on every rank."""
    run_id: str = ""
    """The training run, kept across resumes: the save replaces a checkpoint of the same run and tag. Needed for `keep`."""
    specs: Mapping[str, ArraySpec]
    """All arrays of the checkpoint, on every rank alike."""
    grids: Mapping[str, Grid]
    """How each array is cut in the checkpoint; those of `small` may be left out (one shard)."""
    pieces: Mapping[str, Grid] = field(default_factory=dict)
    """How the ranks hold those arrays that `grids` has in one shard: each rank gives its rows to rank 0."""
    small: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays that rank 0 stores whole: module buffers, the client's tensors. Every rank names them, rank 0's count."""
    codec: Codec | None = None
    """The codec of the chunks of an archive, with no arrays in `small`."""

    def grid(self, name: str) -> Grid:
        """Return how the array is cut in the checkpoint."""
        return self.grids[name] if name in self.grids else make_grid(self.specs[name].stored_shape, 1)

    def file_bytes(self, name: str, shard: int) -> int:
        """Return the bytes of a shard's file, not compressed; 0 if the shard has no rows and so no file."""
        layout = layout_of(self.grid(name), shard, self.specs[name].dtype)
        return layout.file_bytes if layout.num_present else 0

    def layout_digest(self) -> str:
        """Return the SHA-256, hex, of all arrays and how they are cut: ranks with the same one agree on every shard.

        Arrays that rank 0 stores whole do not concern the others.
        """
        names = sorted(self.specs.keys() - self.small.keys())
        grids, pieces = (tuple(map(of, names)) for of in (self.grid, self.pieces.get))
        return _layout_digest(tuple(self.specs[name] for name in names), grids, pieces)

    def shard_path(self, name: str, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{array_path(name)}/{shard_file(len(self.specs[name].stored_shape), shard)}"

    def require_room(self, files: Files, folder: Path) -> None:
        """Raise DiskFullError if `folder` has no room for all shard files."""
        shards = [(name, shard) for name in self.specs for shard in range(self.grid(name).num_shards)]
        needed = sum(self.file_bytes(name, shard) for name, shard in shards)
        files.require_room(folder, needed, f"the checkpoint needs {needed} bytes")


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A shard file in a committed checkpoint."""

    version: int
    """Version of the shard that it holds; see `Tier.version`."""
    path: str
    crcs: tuple[int, ...]
    """crc32c of each present chunk."""
    device: int
    """Number of the file system."""
    identity: str
    """An identity that no other file there has, nor this one after a write."""

    @staticmethod
    def of(
        path: str | Path, *, version: int | None, crcs: tuple[int, ...], written_as: Path | None = None
    ) -> KnownFile | None:
        """Return the file that is at `written_as` now and at `path` later (None: it is there); None if there is none.

        None as well for a version that is not known.
        """
        found = _identity(written_as or path)
        if version is None or found is None:
            return None
        return KnownFile(version=version, path=str(path), crcs=crcs, device=found[0], identity=found[1])

    def is_there(self) -> bool:
        """Return whether the file is still there, unchanged."""
        return self._is(self.path)

    def _is(self, path: str | Path) -> bool:
        return _identity(path) == (self.device, self.identity)

    def link(self, files: Files, target: Path) -> bool:
        """Make the hard link `target`; false, and nothing made, if the file is another one now or cannot be linked."""
        if not self.is_there():
            return False
        try:
            files.link(self.path, target)
        except OSError:
            return False
        # It may have been replaced meanwhile.
        if self._is(target):
            return True
        with contextlib.suppress(StorageError):
            files.unlink(target)
        return False


def _identity(path: str | Path) -> tuple[int, str] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # One object, which the collector does not count: see [Note: objects of a save].
    return found.st_dev, f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


class PinnedShard(Protocol):
    """A shard's version that nobody changes until `release()`; usable from any thread but an I/O thread."""

    @property
    def local(self) -> LocalShard:
        """Which shard of which array."""

    @property
    def tier(self) -> str:
        """The tier of the pinned bytes: device, host or disk."""

    @property
    def has_file(self) -> bool:
        """Whether they are a file of the run folder, so that `publish` may link it."""

    @property
    def version(self) -> int | None:
        """None if it is not known yet, because an update is to make it."""

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Copy the elements of shard number `shard` on `grid`, without padding, into `out`. Raises UsageError if the pinned
        shard is on disk."""

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Return the crc32c of each chunk that a shard file of shard number `shard` on `grid` has."""

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Make the shard file `path` of shard number `shard` on `grid`: a hard link if the disk tier has that very file
        on the same file system, else a copy; durable when this returns, if `res.sync`."""

    def release(self) -> None:
        """Allow changes again; a second call does nothing."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest(CheckpointPlan):
    """One save, as one rank sees it. The arrays in `small` must not change until the handle is done."""

    resources: IoResources
    folder: Path
    """The folder of checkpoints; made if missing. The same for every rank."""
    rank: int
    pins: Mapping[str, PinnedShard]
    """This rank's pinned shards by array name."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """JSON of this rank alone, such as its RNG states."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the whole run; rank 0's counts."""
    keep: Keep | None = None
    """Checkpoints of this run that stay in the folder once this one is committed; None: all."""
    known: Mapping[str, KnownFile] = field(default_factory=dict)
    """By array, the file of an earlier checkpoint that may have the same content as the pinned shard."""
    overwrite: bool = False
    """Replace a committed checkpoint of the same tag, whatever run saved it."""
    disk_folder: Path | None = None
    """The disk tier's folder: if it is on another file system, room for copies is asked for beforehand."""
    disk_folders: Mapping[str, Path] = field(default_factory=dict)
    """By array, the folder of shards that are on another drive than `disk_folder`."""
    before_commit: Callable[[CheckpointReader], Iterable[str]] | None = None
    """Called on rank 0 with the checkpoint before it is committed, in the save's thread; returns messages. Files that it writes
    at the top of the folder, durably, are committed too."""
    reserve_bytes: int = 0
    """Bytes on the disk tier's file system that the next step needs for files beside those that the save keeps."""
    on_end: Callable[[SaveSummary | BaseException], None] | None = None
    """Called in the save's thread with this rank's summary, or its error, before `wait()` returns. Must not raise."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others."""
    num_threads: int = 8
    """Shards that are published at a time."""

    @property
    def written_bytes(self) -> int:
        """About how many bytes a rank writes, unless it finds them unchanged."""
        written = [name for name, pin in self.pins.items() if not pin.has_file]
        return sum(self.specs[name].nbytes for name in [*written, *self.small]) // max(1, self.world_size)

    def check(self) -> None:
        """Raise UsageError for a request that makes no sense. Not done in the constructor: the save releases the pins first."""
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
                raise UsageError(f"array {name!r} comes in pieces: expected one shard, got {num_shards}")
        for name, data in self.small.items():
            spec = self.specs[name]
            if data.shape != spec.shape or data.dtype != numpy_dtype(spec.dtype):
                raise UsageError(
                    f"array {name!r}: expected {spec.dtype} of shape {spec.shape}, got {data.dtype} of {data.shape}"
                )

    def unchanged(self, name: str) -> KnownFile | None:
        """Return the file of an earlier checkpoint that no pass made old, None if there is none."""
        known, version = self.known.get(name), self.pins[name].version
        return known if known is not None and version is not None and known.version == version else None

    def known_documents(self) -> dict[str, str]:
        """Return the `zarr.json` beside each known file, by the array's folder."""
        known = {array_path(name): os.path.dirname(file.path) for name, file in self.known.items()}
        return {folder: os.path.join(earlier, METADATA_FILE) for folder, earlier in known.items()}

    def check_room(self, path: Path, num_ranks: int) -> None:
        """Raise DiskFullError if the file system of `path` lacks room for the files of so many ranks together."""
        here = os.stat(path).st_dev
        folders = {folder for folder in (self.disk_folder, *self.disk_folders.values()) if folder is not None}
        elsewhere = {folder for folder in folders if os.stat(folder).st_dev != here}
        written = [
            name
            for name, pin in self.pins.items()
            if not pin.has_file or self.disk_folders.get(name, self.disk_folder) in elsewhere
            if (known := self.unchanged(name)) is None or known.device != here or not known.is_there()
        ]
        needed = sum(
            min(self.grid(name).num_shards, num_ranks) * self.file_bytes(name, 0)
            for name in written
            if name not in self.pieces
        )
        # For a while a piece and the whole are both there.
        needed += sum(self.file_bytes(name, 0) for name in [*self.small, *self.pieces])
        needed += sum(self.specs[name].nbytes for name in self.pieces)
        reserved = 0 if self.disk_folder is None or self.disk_folder in elsewhere else self.reserve_bytes
        beside = f", and the next step {reserved} beside it" if reserved else ""
        self.resources.files.require_room(
            path,
            needed + reserved,
            f"the checkpoint writes about {needed} bytes{beside}",
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
    """Those of them that are links: no byte of them was written."""
    linked_bytes: int
    written_bytes: int
    all_linked_bytes: int
    """Of all ranks that save to this folder, on the one that commits; else 0."""
    all_written_bytes: int
    elapsed_s: float
    """From the request to the commit."""
    known: Mapping[str, KnownFile]
    """Its shard files by array, for the next request."""
    messages: tuple[str, ...]
    """Messages for the user: copies instead of links, leftovers that could not be removed."""
    url: str | None = None
    """The URL that it was uploaded to; then `path`, the local copy, is gone unless it was to be kept."""
    uploaded_bytes: int = 0
    """Bytes that this rank uploaded."""
    all_uploaded_bytes: int = 0
    """Of all ranks, on the one that commits; else 0."""
