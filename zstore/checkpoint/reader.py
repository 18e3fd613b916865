"""Reading a checkpoint: any range of any array, every chunk verified, in parallel and in bounded memory. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ..errors import CorruptionError, ZstoreError
from ..format.partition import plan_reads
from ..io.archives import open_shard_file
from ..io.queue import Priority
from ..io.shards import IoResources, ShardReader
from .catalog import Refusal, TagInfo, list_tags, read_record, resolve, scan
from .folder import Folder, FolderLike, folder_at
from .format import COMPLETE, Manifest, parse_json, sha256
from .metadata import parse_root
from .names import METADATA_FILE, RECORD_FILE, manifest_file, tag_text
from .source import NUM_REMOTE_REQUESTS, NUM_THREADS, ArraySource, ReadStatistics, StoredArray

_MOST_OPEN_SHARDS = 4096


class CheckpointReader(ArraySource):
    """An open checkpoint."""

    kind = "zstore"

    def __init__(self, info: TagInfo, resources: IoResources | None = None) -> None:
        self.documents, parsed = _read_metadata(info)
        remote = not info.folder.is_local
        num_threads = NUM_REMOTE_REQUESTS if remote else NUM_THREADS
        super().__init__(info.location, info.tag, info.record, resources, num_threads=num_threads)
        self.is_remote = remote
        self.folder: Folder = info.folder
        """The tag's folder."""
        self.asked_bytes = 0
        """Bytes of elements that `read` was asked for so far."""
        self.shard_resources: IoResources = info.folder.resources(self.resources)
        """`resources`, made to read the shard files, wherever they are."""
        self.arrays = parsed
        self._crcs: dict[int, dict[str, tuple[int, ...]]] = {}
        """By rank, the checksums of its shard of each array."""
        self._decoding = threading.Lock()
        self._shards: OrderedDict[tuple[str, int], ShardReader] = OrderedDict()
        self._lock = threading.Lock()
        self._retired_bytes = 0
        try:
            self._find_sizes()
        except BaseException:
            self.close()
            raise

    def _find_sizes(self) -> None:
        """Look up how large the files of compressed arrays are: their metadata does not tell."""
        packed = {name: array for name, array in self.arrays.items() if array.codec is not None}
        sizes: dict[str, list[int]] = {name: [0] * array.grid.num_shards for name, array in packed.items()}
        for rank in range(max(map(len, sizes.values()), default=0)):
            for entry in self.manifest(rank).shards:
                if entry.shard == rank < len(sizes.get(entry.array, ())):
                    sizes[entry.array][rank] = entry.file_bytes
        for name, array in packed.items():
            self.arrays[name] = replace(array, shard_bytes=tuple(sizes[name]))

    @property
    def path(self) -> Path:
        """The tag's folder; raises UsageError if it is behind a URL."""
        return self.folder.path

    @property
    def read_bytes(self) -> int:
        """Bytes of chunks that were read from files so far, checksums and alignment included."""
        with self._lock:
            return self._retired_bytes + sum(shard.read_bytes for shard in self._shards.values())

    def reading(self) -> ReadStatistics:
        """Return what was read: it is always counted."""
        traffic = self.folder.traffic
        return ReadStatistics(
            read_bytes=self.read_bytes if traffic is None else traffic.read_bytes,
            asked_bytes=self.asked_bytes,
            requests=0 if traffic is None else traffic.requests,
        )

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of rank `rank` of the saving run, checked against the record.

        Raises CorruptionError if it is missing or not the one that was committed.
        """
        path = self.folder.location_of(manifest_file(rank))
        try:
            data = self.folder.read_small(manifest_file(rank))
        except FileNotFoundError as error:
            raise CorruptionError(f"{path} is missing; restore it from another copy") from error
        if sha256(data) != self.record.manifest_sha256[rank]:
            raise CorruptionError(f"{path} fails the digest in {RECORD_FILE}; restore it from another copy")
        manifest = Manifest.decode(data, path)
        if (manifest.id, manifest.rank, manifest.outcome) != (self.record.id, rank, COMPLETE):
            raise CorruptionError(f"{path} is the manifest of another save or rank; restore it from another copy")
        return manifest

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any], priority: Priority = Priority.READ) -> None:
        array = self.array(name)
        itemsize = array.spec.itemsize
        target = self.room_for(name, first, stop, out)
        with self._lock:
            self.asked_bytes += out.nbytes
        try:
            for part in plan_reads(array.grid, first, stop):
                piece = target[(part.first - first) * itemsize : (part.stop - first) * itemsize]
                self.open_shard(name, part.shard).read(part.first, part.stop, piece, priority)
        except CorruptionError as error:
            if (what := self._what_became()) is not None:
                raise CorruptionError(f"{self.location} {what} while it was read: open it again") from error
            raise

    def _what_became(self) -> str | None:
        """Return what happened to the checkpoint since it was opened; None if it is still there."""
        try:
            return None if read_record(self.folder).id == self.record.id else "was replaced by another save"
        except (FileNotFoundError, NotADirectoryError):
            return "was removed"
        except (OSError, ZstoreError):
            return None

    def read_array(self, name: str) -> npt.NDArray[Any]:
        if self.folder.is_local:
            for shard in range(self.array(name).grid.num_shards):
                self.open_shard(name, shard)  # files of that size are there, before memory is taken
        return super().read_array(name)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the JSON that belongs to rank `rank` of the saving run alone."""
        return self.manifest(rank).rank_state

    def file_of(self, name: str, shard: int) -> Path | None:
        if not self.folder.is_local or self.array(name).codec is not None:
            return None
        opened = self.open_shard(name, shard)
        opened.check_index()
        return Path(opened.path)

    def open_shard(self, name: str, shard: int) -> ShardReader:
        """Return the reader of one shard file, of the right size; its index is checked with its first chunk."""
        key = (name, shard)
        with self._lock:
            if key in self._shards:
                self._shards.move_to_end(key)
                return self._shards[key]
        array = self.array(name)
        crcs = self.shard_crcs(name, shard)
        path = self.folder.location_of(array.shard_file(shard))
        try:
            self.folder.check_file(array.shard_file(shard))
        except FileNotFoundError as error:
            raise CorruptionError(
                f"array {name!r}: the shard file {path} is missing; restore it from another copy"
            ) from error
        opened = open_shard_file(self.shard_resources, path, array.cut, shard, check=False)
        if (
            self.folder.is_local
        ):  # far away, size and index would be two requests a shard, and tell nothing that chunks do not
            opened.check_size()
        opened.expect(crcs)
        with self._lock:
            kept = self._shards.setdefault(key, opened)
            if len(self._shards) > _MOST_OPEN_SHARDS:
                self._retired_bytes += self._shards.popitem(last=False)[1].read_bytes
        return kept

    def shard_crcs(self, name: str, shard: int) -> Sequence[int]:
        """Return the crc32c of each chunk of a shard that holds values, by the manifest; in an archive of its compressed
        bytes. Raises CorruptionError if it lacks them.
        """
        array = self.array(name)
        # Rank r stores shard r; arrays of one shard are rank 0's. Decoded once: all threads of a load ask first of all.
        with self._decoding:
            if shard not in self._crcs:
                entries = self.manifest(shard).shards
                self._crcs[shard] = {entry.array: entry.crcs for entry in entries if entry.shard == shard}
            crcs = self._crcs[shard].get(name, ())
        if len(crcs) != array.grid.present_chunks(shard):
            raise CorruptionError(
                f"array {name!r}: {manifest_file(shard)} has no checksums for each of the "
                f"{array.grid.present_chunks(shard)} chunks of shard {shard}; restore it from another copy"
            )
        return crcs


def _read_metadata(info: TagInfo) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    path = info.folder.location_of(METADATA_FILE)
    try:
        data = info.folder.read_small(METADATA_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptionError(f"{path} is missing; restore it from another copy") from error
    if sha256(data) != info.record.metadata_sha256:
        raise CorruptionError(f"{path} fails the digest in {RECORD_FILE}; restore it from another copy")
    document = parse_json(data, path)
    arrays = {
        name: StoredArray(spec=spec, grid=grid, folder=folder, codec=codec)
        for name, (folder, spec, grid, codec) in parse_root(document, path).items()
    }
    for name, array in arrays.items():
        if array.grid.num_shards > info.record.world_size:
            raise CorruptionError(
                f"array {name!r} has {array.grid.num_shards} shards, but {info.record.world_size} rank(s) saved: {path} was "
                "changed"
            )
    return document, arrays


def open_checkpoint(
    place: FolderLike, tag: str | float | None = None, *, resources: IoResources | None = None
) -> CheckpointReader:
    """Open the checkpoint `tag` in the folder `place` (the newest committed one by default), or the tag's folder `place`.

    Raises CheckpointNotFoundError, CorruptionError if its record or metadata is damaged, CheckpointMismatchError
    if a newer version wrote it. `resources` stays the caller's.
    """
    return CheckpointReader(resolve(place, None if tag is None else tag_text(tag)), resources)


def tags(place: FolderLike) -> list[TagInfo]:
    """Return the committed checkpoints in the folder `place`, the oldest first; of a tag's folder, that one."""
    return list(list_tags(place).tags)


def refused(place: FolderLike) -> list[Refusal]:
    """Return the folders in `place` that look like checkpoints and are not, with the reason; none of a tag's folder."""
    folder = folder_at(place)
    return [] if folder.has(RECORD_FILE) else list(scan(folder).refusals)
