"""What a save is asked to do, and what it did."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ..errors import DiskFullError, UsageError
from ..format.arrays import ArraySpec, numpy_dtype
from ..format.codecs import Codec
from ..format.partition import Grid, make_grid
from ..format.shardfile import layout_of
from ..io.files import Files
from ..io.shards import IoResources
from ..store.tiers import PinnedShard
from .format import sha256
from .keep import Keep
from .lock import SaveLock
from .names import array_path, check_save_id, shard_file, tag_text
from .reuse import KnownFile

if TYPE_CHECKING:
    from .reader import CheckpointReader


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save, as one rank sees it. The arrays in `small` must not change until the handle is done."""

    resources: IoResources
    folder: Path
    """Where checkpoints are kept; made where it is missing. The same folder for every rank."""
    tag: str
    step: int
    rank: int
    world_size: int
    save_id: str
    """From `new_save_id()` of rank 0, the same on every rank."""
    specs: Mapping[str, ArraySpec]
    """All arrays of the checkpoint, on every rank alike."""
    grids: Mapping[str, Grid]
    """How each array is cut in the checkpoint; those of `small` may be left out (one shard)."""
    pins: Mapping[str, PinnedShard]
    """This rank's pinned shards by array name. Rank r stores shard r of the array's grid."""
    pieces: Mapping[str, Grid] = field(default_factory=dict)
    """How `pins` cut those arrays that `grids` has in one shard: each rank gives rank 0 its rows, which stores them whole."""
    codec: Codec | None = None
    """What the pins' publishing compresses chunks with, for the metadata: an archive, with no arrays in `small`."""
    small: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays that rank 0 stores whole: module buffers, the client's tensors. Every rank names them, rank 0's count."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """JSON of this rank alone, as its RNG states."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the whole run; rank 0's counts."""
    run_id: str = ""
    """The training run, kept across resumes: the save replaces a checkpoint of the same run and tag. Needed for `keep`."""
    keep: Keep | None = None
    """Checkpoints of this run that stay in the folder once this one is committed; None: all."""
    known: Mapping[str, KnownFile] = field(default_factory=dict)
    """By array, the file of an earlier checkpoint that may hold what the pinned shard holds."""
    spares: bool = False
    """Make a spare folder of the checkpoint of this run that goes; only the newest one stays then, whatever `keep` says."""
    spare: Spare | None = None
    """On rank 0: a folder to use again, which belongs to the save from now on."""
    overwrite: bool = False
    """Replace a committed checkpoint of the same tag, whatever run saved it."""
    disk_folder: Path | None = None
    """The disk tier's folder: where it is on another file system, room for copies is asked for beforehand."""
    disk_folders: Mapping[str, Path] = field(default_factory=dict)
    """By array, the folder of shards that are on another drive than `disk_folder`."""
    before_commit: Callable[[CheckpointReader], Iterable[str]] | None = None
    """On rank 0: called with the whole checkpoint before it is committed, in the save's thread. What it writes at the top
    of the folder, durably, is committed too; it returns what the user should know."""
    reserve_bytes: int = 0
    """Bytes on the disk tier's file system that the next step needs for files beside those that the save keeps."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others."""
    most_pause_s: float = 0.1
    """Longest pause between two looks at what the other ranks did."""
    num_threads: int = 8
    """Shards that are published at a time."""

    def check(self) -> None:
        """Raise UsageError for what makes no sense. Not done when it is made: the save releases the pins first."""
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
            if self.grid(name).num_shards > 1:
                raise UsageError(
                    f"array {name!r}: expected one shard, which its pieces make, got {self.grid(name).num_shards}"
                )
        for name, data in self.small.items():
            spec = self.specs[name]
            if data.shape != spec.shape or data.dtype != numpy_dtype(spec.dtype):
                raise UsageError(
                    f"array {name!r}: expected {spec.dtype} of shape {spec.shape}, got {data.dtype} of {data.shape}"
                )

    def grid(self, name: str) -> Grid:
        """Return how the array is cut in the checkpoint."""
        return self.grids[name] if name in self.grids else make_grid(self.specs[name].stored_shape, 1)

    def file_bytes(self, name: str, shard: int) -> int:
        """Return the bytes of a shard's file, not compressed; 0 where the shard has no rows and so no file."""
        grid = self.grid(name)
        if grid.shard_valid_numel(shard) == 0:
            return 0
        return layout_of(grid, shard, self.specs[name].dtype).file_bytes

    def layout_digest(self) -> str:
        """Return the SHA-256, hex, of all arrays and how they are cut: ranks with the same one agree on every shard.

        What rank 0 stores whole is no concern of the others.
        """
        described = []
        for name in sorted(self.specs.keys() - self.small.keys()):
            spec, grid = self.specs[name], self.grid(name)
            described.append([name, spec.shape, spec.dtype, grid.shard_rows, grid.chunk_rows, grid.chunk_cols])
            if name in self.pieces:
                described[-1].append(self.pieces[name].shard_rows)
        return sha256(json.dumps(described, separators=(",", ":")).encode())

    def unchanged(self, name: str) -> KnownFile | None:
        """Return the file of an earlier checkpoint that no pass made old, None where there is none."""
        known, version = self.known.get(name), self.pins[name].version
        return known if known is not None and version is not None and known.version == version else None

    def shard_path(self, name: str, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{array_path(name)}/{shard_file(len(self.specs[name].stored_shape), shard)}"

    def check_room(self, path: Path) -> None:
        """Raise DiskFullError where the file system of `path` lacks room for what all ranks together will write."""
        here = os.stat(path).st_dev
        folders = {folder for folder in (self.disk_folder, *self.disk_folders.values()) if folder is not None}
        elsewhere = {folder for folder in folders if os.stat(folder).st_dev != here}
        written = [
            name
            for name, pin in self.pins.items()
            if pin.tier != "disk" or self.disk_folders.get(name, self.disk_folder) in elsewhere
            if (known := self.unchanged(name)) is None or known.identity[0] != here or not known.is_there()
        ]
        needed = self.world_size * sum(self.file_bytes(n, self.rank) for n in written if n not in self.pieces)
        # For a while a piece and the whole are both there.
        needed += sum(self.file_bytes(name, 0) for name in self.small)
        needed += sum(self.file_bytes(name, 0) + self.specs[name].nbytes for name in self.pieces)
        reserved = 0 if self.disk_folder is None or self.disk_folder in elsewhere else self.reserve_bytes
        free = self.resources.files.free_bytes(path)
        if needed + reserved > free:
            beside = f", and the next step {reserved} beside it," if reserved else ","
            raise DiskFullError(
                f"the checkpoint writes about {needed} bytes{beside} but only {free} are free: make room, or save elsewhere",
                path=str(self.folder),
                nbytes=needed,
            )


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """What one rank did for a committed checkpoint."""

    path: Path
    """The tag's folder."""
    num_files: int
    """Shard files of this rank."""
    num_linked: int
    """Those of them that are links: no byte of them was written."""
    linked_bytes: int
    written_bytes: int
    elapsed_s: float
    """From the request to the commit."""
    known: Mapping[str, KnownFile]
    """Its shard files by array, for the next request."""
    spare: Spare | None = None
    """A folder for the next save of the run to use again."""
    messages: tuple[str, ...]
    """What the user should know: copies in place of links, leavings that could not be removed."""
    url: str | None = None
    """Where it was uploaded to; then `path`, where it was committed first, is gone unless it was to be kept."""
    uploaded_bytes: int = 0
    """Bytes that this rank uploaded."""


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A spare folder. Give it to the next request of the same run, or `remove` it. See [Note: spare folders]."""

    path: Path
    metadata_sha256: str
    """Of its root's metadata, which names all arrays."""
    lock: SaveLock

    def take(self, files: Files, path: Path) -> None:
        """Let the folder be `path` from now on. Raises StorageError where it is gone."""
        files.rename(self.path, path)
        self.lock.release()

    def remove(self, files: Files) -> None:
        """Remove the folder."""
        try:
            files.remove_tree(self.path)
        finally:
            self.lock.release()
