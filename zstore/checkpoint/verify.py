"""Verification of a whole checkpoint: every chunk of every shard, every manifest, every metadata file, no extra files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import CorruptionError, StorageError, ZstoreError
from ..io.machine import Workers, interleave
from ..io.shards import ShardReader
from .format import parse_json
from .layout import MANIFEST_FOLDER, METADATA_FILE, manifest_file
from .reader import CheckpointReader, StoredArray

Advance = Callable[[int], None]
"""Called from several threads with the bytes of shard files that were checked."""

_FILES_AT_A_TIME = 8
_MIN_THREADS = 8
_INDEX_FIRST_BYTES = 64 * 1024 * 1024
"""Larger files have their index checked before their chunks, so that a file of another kind is not read to its end."""
_Crcs = dict[tuple[str, int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class VerifyFault:
    """A difference from the committed checkpoint."""

    file: str
    """Path inside the checkpoint."""
    problem: str
    array: str | None = None
    offset: int | None = None
    """Byte in the file at which the fault begins, if known."""

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file}, offset {self.offset}"
        return f"{place}: {self.problem}" + ("" if self.array is None else f" (array {self.array})")


def verify_checkpoint(
    reader: CheckpointReader, advance: Advance | None = None, *, num_threads: int | None = None
) -> list[VerifyFault]:
    """Check everything in parallel and return the faults, sorted by file; an empty list means an intact checkpoint.

    Memory stays within the reader's pool. Files at the top of the tag's folder that are not part of the format belong to
    the user and are not faults.
    """
    faults: list[VerifyFault] = []
    crcs, unread = _read_manifests(reader, faults)
    sizes = _sizes(reader)
    num_shards = {name: array.grid.num_shards for name, array in reader.arrays.items()}
    tasks: list[Callable[[], list[VerifyFault]]] = []
    for shard in range(max(num_shards.values(), default=0)):  # by rank, in the order on the drive
        for name in (name for name, count in num_shards.items() if shard < count):
            check = _ShardCheck(reader, reader.arrays[name], shard, sizes, shard not in unread)
            tasks.append(partial(check.run, crcs.get((name, shard)), advance))
    faults += [
        VerifyFault(
            file=manifest_file(shard), problem=f"names shard {shard}, which the array does not have", array=name
        )
        for name, shard in crcs
        if shard >= num_shards.get(name, 0)
    ]
    with Workers(num_threads or max(_MIN_THREADS, reader.num_readers), "zstore-verify") as workers:
        for task_faults in workers.run(interleave(_metadata_tasks(reader), tasks)):
            faults += task_faults
    faults += _find_extra_files(reader, sizes)
    return sorted(dict.fromkeys(faults), key=lambda fault: (fault.file, fault.offset or 0))


def _metadata_tasks(reader: CheckpointReader) -> list[Callable[[], list[VerifyFault]]]:
    """Return tasks that check the metadata of all groups and arrays, to be run while the drive reads shards."""
    folders = [*reader.documents["consolidated_metadata"]["metadata"]]
    # From a URL, the files of a batch are requested concurrently.
    step = _FILES_AT_A_TIME if reader.folder.is_local else max(1, len(folders))
    batches = [folders[first : first + step] for first in range(0, len(folders), step)]
    return [partial(_check_metadata, reader, batch) for batch in batches]


def _check_metadata(reader: CheckpointReader, folders: Sequence[str]) -> list[VerifyFault]:
    """Compare the `zarr.json` of `folders` with the copies in the root's, whose digest was checked on opening."""
    faults: list[VerifyFault] = []
    documents = reader.documents["consolidated_metadata"]["metadata"]
    files = [f"{folder}/{METADATA_FILE}" for folder in folders]
    for folder, file, data in zip(folders, files, reader.folder.read_all(files), strict=True):
        expected = documents[folder]
        try:
            if isinstance(data, Exception):
                raise data
            if parse_json(data, file) != expected:
                faults.append(VerifyFault(file=file, problem=f"differs from its copy in the root's {METADATA_FILE}"))
        except FileNotFoundError:
            faults.append(VerifyFault(file=file, problem="is missing"))
        except (OSError, ZstoreError) as error:
            faults.append(VerifyFault(file=file, problem=str(error)))
    return faults


def _sizes(reader: CheckpointReader) -> dict[str, int | None]:
    """Return the bytes of all files below the folders of the format (see `Folder.sizes`)."""
    documents = reader.documents["consolidated_metadata"]["metadata"]
    sizes: dict[str, int | None] = {}
    for top in sorted({folder.split("/")[0] for folder in documents} | {MANIFEST_FOLDER}):
        sizes |= reader.folder.sizes(top)
    return sizes


def _read_manifests(reader: CheckpointReader, faults: list[VerifyFault]) -> tuple[_Crcs, Collection[int]]:
    """Return the checksums of the manifests, and the ranks whose manifests cannot be read."""
    crcs: _Crcs = {}
    unread: list[int] = []
    for rank in range(reader.record.world_size):
        try:
            crcs.update({(entry.array, entry.shard): entry.crcs for entry in reader.manifest(rank).shards})
        except (OSError, ZstoreError) as error:
            faults.append(VerifyFault(file=manifest_file(rank), problem=str(error)))
            unread.append(rank)
    return crcs, unread


@dataclass(frozen=True, eq=False)
class _ShardCheck:
    """The check of one shard file."""

    reader: CheckpointReader
    array: StoredArray
    shard: int
    sizes: Mapping[str, int | None]
    has_manifest: bool
    """Whether its manifest could be read; if not, a separate fault says so."""

    @property
    def _file(self) -> str:
        return self.array.shard_file(self.shard)

    def run(self, expected: Sequence[int] | None, advance: Advance | None) -> list[VerifyFault]:
        """Return the faults of the file and its chunks. `expected` are the checksums in the manifest, None if it has none."""
        file_bytes, actual_bytes = self.array.shard_file_bytes(self.shard), self.sizes.get(self._file)
        if self._file not in self.sizes:
            faults = [self._fault("is missing")]
        elif actual_bytes is None:
            faults = [self._fault("is a symbolic link or of another kind, expected a file")]
        elif actual_bytes != file_bytes:
            faults = [self._fault(f"has {actual_bytes} bytes, expected {file_bytes}", min(actual_bytes, file_bytes))]
        else:
            faults = self._check_chunks(expected)
        if advance is not None:
            advance(file_bytes)
        return faults

    def _fault(self, problem: str, offset: int | None = None) -> VerifyFault:
        return VerifyFault(file=self._file, problem=problem, array=self.array.spec.name, offset=offset)

    def _check_chunks(self, expected: Sequence[int] | None) -> list[VerifyFault]:
        resources, path = replace(self.reader.shard_resources, verify=True), self.reader.folder.location_of(self._file)
        shard = self.array.open_shard(resources, path, self.shard)
        try:
            if shard.layout.num_present and shard.layout.file_bytes < _INDEX_FIRST_BYTES:
                shard.check_index_with_chunks()
            else:
                shard.check_index()
            crcs = shard.verify()
        except (CorruptionError, StorageError):
            return self._find_damage(shard)
        if not self.has_manifest:
            return []
        if expected is None or len(expected) != shard.layout.num_present:
            return [self._fault(f"{manifest_file(self.shard)} has no checksums for it")]
        return [
            self._fault(
                f"chunk {chunk} is intact, but not the one that the manifest names", shard.chunk_location(chunk)[0]
            )
            for chunk, (actual, committed) in enumerate(zip(crcs, expected, strict=True))
            if actual != committed
        ]

    def _find_damage(self, shard: ShardReader) -> list[VerifyFault]:
        """Read a damaged file again, chunk by chunk, to report each damaged chunk."""
        try:
            shard.check_index()
        except CorruptionError as error:
            return [self._fault(str(error), 0)]
        except StorageError as error:
            return [self._fault(str(error), error.offset)]
        faults: list[VerifyFault] = []
        grid = self.array.grid
        base = self.shard * grid.shard_numel
        for chunk in range(shard.layout.num_present):
            offset, nbytes = shard.chunk_location(chunk)
            # Reading one element checks its whole chunk.
            first = base + chunk * grid.chunk_numel
            try:
                shard.read(first, first + 1, np.empty(self.array.spec.itemsize, np.uint8))
            except CorruptionError:
                problem = f"chunk {chunk} ({nbytes} bytes) fails its crc32c check" + (
                    "" if self.array.codec is None else ", or does not decode"
                )
                faults.append(self._fault(problem, offset))
            except StorageError as error:
                faults.append(self._fault(str(error), offset))
        return faults


def _find_extra_files(reader: CheckpointReader, sizes: Mapping[str, int | None]) -> list[VerifyFault]:
    known = {f"{folder}/{METADATA_FILE}" for folder in reader.documents["consolidated_metadata"]["metadata"]}
    known |= {manifest_file(rank) for rank in range(reader.record.world_size)}
    for array in reader.arrays.values():
        known |= {array.shard_file(shard) for shard in range(array.grid.num_shards)}
    return [VerifyFault(file=file, problem="is not part of the checkpoint") for file in sizes if file not in known]
