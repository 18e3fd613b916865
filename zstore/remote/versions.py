"""A folder whose checkpoints are versions: read as any other folder, through the packs. See [Note: versions]."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ..checkpoint.catalog import TagInfo, scan
from ..checkpoint.folder import Entries, Folder
from ..checkpoint.format import Manifest, Record, parse_json
from ..checkpoint.metadata import parse_root
from ..checkpoint.names import METADATA_FILE, RECORD_FILE, manifest_file, tag_folder
from ..checkpoint.source import StoredArray
from ..errors import CheckpointNotFoundError, CorruptionError, StorageError, UsageError
from ..io.pool import Workers
from ..io.shards import ShardSummary
from .fsspec_folder import RemoteFolder, open_fsspec_folder
from .packs import PACKS_FOLDER, Extent, Index, Places, ShardTable, checked, shards_of, worth_keeping
from .repository import BRANCH_FILE, VERSIONS_FOLDER, Repository, StoredVersion, require_icechunk
from .retries import Retries
from .url_folder import NUM_THREADS, UrlFolder

PROTOCOLS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "abfs",
    "az": "abfs",
    "file": "file",
    "local": "file",
}
"""File systems of fsspec whose folders can have versions, and the names that this module gives them."""
LEFTOVER_S = 24 * 3600.0
"""Age from which on a pack that no version refers to is no save's any more."""
_PIECES = "pieces-"
_PACK = re.compile(r"\A[0-9a-f]{64}-[0-9a-f]{32}\Z")


class NewestVersionError(UsageError):
    """The newest version is not removed before there is another."""


def protocol_of(folder: RemoteFolder) -> str | None:
    """Return the file system of a folder that can have versions; None for all others."""
    own = folder.fs.protocol
    return next((PROTOCOLS[name] for name in ([own] if isinstance(own, str) else own) if name in PROTOCOLS), None)


def has_versions(folder: RemoteFolder) -> bool:
    """Return whether there is a repository of versions in a folder; one request."""
    return _is_there(folder, BRANCH_FILE)


def _is_there(folder: RemoteFolder, file: str) -> bool:
    """Return whether a file is there, by one request that lists nothing, which `has` may."""
    try:
        # No range: the file may be empty.
        folder.retries.run(lambda: folder.fs.cat_file(f"{folder.root}/{file}"), "read", folder.location_of(file))
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except StorageError as error:
        # For a missing object, if the caller may not list the bucket.
        if isinstance(error.__cause__, PermissionError):
            return False
        raise


def is_empty(folder: RemoteFolder) -> bool:
    """Return whether there is no checkpoint in a folder; one listing, and a request for each folder in it."""
    try:
        return not scan(folder).tags
    except CheckpointNotFoundError:
        return True


def with_versions(folder: RemoteFolder, options: Mapping[str, Any]) -> UrlFolder:
    """Return `folder` as a folder of versions, or one version, if it is that; itself if not. One request or two."""
    if protocol_of(folder) is None:
        return folder
    if has_versions(folder):
        return VersionsFolder(folder, options)
    if "/" in folder.root.strip("/") and has_versions(folder.parent):
        return VersionsFolder(folder.parent, options).child(folder.name)
    return folder


class VersionsFolder(RemoteFolder):
    """A folder of checkpoints that are versions. What is beside them, as journals, are plain files."""

    def __init__(self, folder: RemoteFolder, options: Mapping[str, Any]) -> None:
        super().__init__(folder.fs, folder.root, folder.location, folder.retries, folder.traffic)
        self._options = options
        self.repository = Repository(protocol_of(folder) or "", self.root, self.location, options)
        self._versions: dict[str, Version | None] = {}
        """By the snapshot's id."""
        self._counted: tuple[object, Counter[str]] = (None, Counter())
        self._lock = threading.Lock()

    def with_retries(self, retries: Retries) -> VersionsFolder:
        return VersionsFolder(super().with_retries(retries), self._options)

    def version(self, snapshot_id: str) -> Version | None:
        """Return the version that a snapshot is; None if it is none."""
        with self._lock:
            if snapshot_id in self._versions:
                return self._versions[snapshot_id]
        found = self.repository.read(snapshot_id)
        with self._lock:
            made = None if found is None else Version(self, found)
            return self._versions.setdefault(snapshot_id, made)

    def newest(self) -> Version | None:
        """Return the version that was committed last; None if there is none."""
        return self.version(self.repository.newest_id)

    def find(self, name: str) -> Version | None:
        """Return the version whose tag has the folder `name`; None if there is none. Lists nothing but names given twice."""
        newest = self.newest()
        if newest is not None and newest.name == name:
            return newest
        if (snapshot_id := self.repository.id_of(icechunk_name(name))) is not None:
            return self.version(snapshot_id)
        return self.all().get(name) if self.was_given(name) else None

    def was_given(self, name: str) -> bool:
        """Return whether the tag of a folder's name was given once, and removed."""
        return _is_there(self, f"{VERSIONS_FOLDER}/refs/tag.{icechunk_name(name)}/ref.json.deleted")

    def all(self) -> dict[str, Version]:
        """Return all versions by the names of their folders; one listing, and some requests for each."""
        with Workers(NUM_THREADS, "zstore-versions") as workers:
            ids = workers.run([partial(self.repository.id_of, tag) for tag in sorted(self.repository.names())])
            found = workers.run([partial(self.version, one) for one in [*ids, *self.repository.branch_ids()] if one])
        versions = sorted((one for one in found if one is not None), key=lambda one: one.record.committed_ns)
        with self._lock:  # a folder that is kept need not keep what was removed
            self._versions = {one.snapshot.id: one for one in versions}
        return {one.name: one for one in versions}

    def holders(self) -> Mapping[str, int]:
        """Return how many versions refer to each pack."""
        state = (self.repository.newest_id, frozenset(self.repository.names()))
        if self._counted[0] != state:
            self._counted = state, Counter(pack for version in self.all().values() for pack in version.packs)
        return self._counted[1]

    def child(self, name: str) -> UrlFolder:  # type: ignore[override]
        return VersionFolder(self, name)

    def entries(self) -> Entries:
        beside = super().entries().files
        return Entries(tuple(self.all()), beside)

    def read_records(self, names: Sequence[str]) -> list[bytes | Exception]:
        with Workers(min(NUM_THREADS, len(names)), "zstore-remote") as workers:
            return workers.run([partial(self.child(name).try_read, RECORD_FILE) for name in names])

    # -- removing ---------------------------------------------------------------------------------------------------

    def remove_version(self, info: TagInfo) -> None:
        """Remove a version, and the packs that no other one refers to. See [Note: packs]."""
        doomed = self.find(info.folder.name)
        if doomed is None or doomed is self.newest():
            raise NewestVersionError(
                f"{info.location} is the newest version, which the next save is based on: save another first"
            )
        packs = set(doomed.packs)
        for tag in self.repository.names():
            if self.repository.id_of(tag) == doomed.snapshot.id:
                self.repository.untag(tag)
        for version in self.all().values():
            packs.difference_update(version.packs)
        self._remove_packs(packs)

    def pieces(self, save_id: str) -> RemoteFolder:
        """Return the folder for files of a save that are removed before its commit."""
        return self._at(*(f"{each}/{PACKS_FOLDER}/{_PIECES}{save_id}" for each in (self.root, self.location)))

    def _remove_packs(self, packs: set[str]) -> None:
        with Workers(NUM_THREADS, "zstore-versions") as workers:
            workers.run([partial(self.remove, f"{PACKS_FOLDER}/{pack}") for pack in sorted(packs)])

    def tidy(self, leftover_s: float = LEFTOVER_S) -> int:
        """Remove the packs that no version refers to, and that were written so many seconds ago; return how many.

        Everything that icechunk has of removed versions goes, too, if it is a day old.
        """
        listing = f"{self.root}/{PACKS_FOLDER}"
        # Before the versions: a pack that is listed and then committed is one of theirs.
        found = self._run(lambda: self.fs.find(listing), "list the packs", listing=listing)
        self.repository.tidy()
        used = {pack for version in self.all().values() for pack in version.packs}
        names = {path[len(listing) + 1 :]: path for path in found}
        left = {
            name: path
            for name, path in names.items()
            if name.startswith(_PIECES) or (_PACK.match(name) and name not in used)
        }
        latest = time.time() - leftover_s
        old = {name for name, path in left.items() if self.fs.modified(path).timestamp() <= latest}
        self._remove_packs(old)
        return len(old)


def icechunk_name(name: str) -> str:
    """Return the tag of icechunk for a tag's folder: it does not list names with `%` and `~`."""
    return name.replace("~", "%7E").replace("%", "!")


class Version:
    """The files of one version: where they are in packs, and those that are in the snapshot itself."""

    def __init__(self, folder: VersionsFolder, snapshot: StoredVersion) -> None:
        self.snapshot = snapshot
        self._folder = folder
        self._lock = threading.RLock()
        self._tables: dict[int, ShardTable] = {}
        self._numbers: dict[int, dict[str, int]] = {}
        self.record = Record.decode(snapshot.record, f"the record of snapshot {snapshot.id}")

    @property
    def name(self) -> str:
        """The name of its folder."""
        return tag_folder(self.record.tag)

    @cached_property
    def index(self) -> Index:
        """Where everything is."""
        pack, location = self.snapshot.index, self._folder.location_of(f"{PACKS_FOLDER}/{self.snapshot.index.pack}")
        return Index.decode(self.read(pack), self.snapshot.index_sha256, location)

    @property
    def packs(self) -> dict[str, int]:
        """All its packs, and their bytes."""
        return {**self.index.packs, self.snapshot.index.pack: self.snapshot.index.nbytes}

    def read(self, place: Extent, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `[start, stop)` of a place."""
        if not _PACK.match(place.pack):
            raise CorruptionError(
                f"snapshot {self.snapshot.id} of {self._folder} refers to {place.pack!r:.100}, not to a pack"
            )
        stop = place.nbytes if stop is None else min(stop, place.nbytes)
        if start >= stop:
            return b""
        return self._folder.read_range(f"{PACKS_FOLDER}/{place.pack}", place.offset + start, place.offset + stop)

    def manifest(self, rank: int) -> bytes:
        """Return the bytes of a rank's manifest."""
        return self.read(self.index.files[manifest_file(rank)])

    def alike(self, shards: Iterable[tuple[StoredArray, ShardSummary]]) -> Places:
        """Return the places of those shard files that it seems to have: as large, cut alike, and with the same checksums. Those
        in packs of which too little would be used are left out."""
        found: Places = {}
        entries: dict[int, dict[str, ShardSummary]] = {}
        for array, entry in shards:
            rank = entry.shard
            if rank >= self.record.world_size:
                continue
            if rank not in entries:
                manifest = Manifest.decode(self.manifest(rank), self.index.files[manifest_file(rank)].pack)
                entries[rank] = {each.array: each for each in manifest.shards if each.shard == rank}
            former = entries[rank].get(entry.array)
            if (
                former is not None
                and (former.crcs, former.file_bytes) == (entry.crcs, entry.file_bytes)
                and self.arrays[entry.array].cut == array.cut
            ):
                path, table = array.shard_file(rank), self.table(rank)
                number = self._shards(rank)[path]
                found[path] = table.extent(number), table.sha256[number]
        kept = worth_keeping((place for place, _ in found.values()), self.index.packs)
        return {path: each for path, each in found.items() if each[0].pack in kept}

    @cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """Its arrays by name."""
        root = parse_root(self._root, METADATA_FILE)
        return {
            name: StoredArray(spec=spec, grid=grid, folder=folder, codec=codec)
            for name, (folder, spec, grid, codec) in root.items()
        }

    @cached_property
    def _root(self) -> dict[str, Any]:
        return parse_json(self.read(self.index.files[METADATA_FILE]), METADATA_FILE)

    @cached_property
    def _documents(self) -> dict[str, bytes]:
        """The files of metadata, by path, as the snapshot has them."""
        folders = self._root["consolidated_metadata"]["metadata"]
        found = self._folder.repository.documents(self.snapshot.id, folders)
        return {f"{folder}/{METADATA_FILE}": data for folder, data in found.items()}

    def _shards(self, rank: int) -> dict[str, int]:
        """Return the number of each of a rank's shard files in its table, by path."""
        if rank not in self._numbers:
            names = shards_of(self.arrays, rank)
            self._numbers[rank] = {self.arrays[name].shard_file(rank): number for number, name in enumerate(names)}
        return self._numbers[rank]

    def table(self, rank: int) -> ShardTable:
        """Return the table of a rank. Raises CorruptionError if it is damaged."""
        with self._lock:
            if rank not in self._tables:
                place, digest = self.index.tables[rank]
                location = self._folder.location_of(f"{PACKS_FOLDER}/{place.pack}")
                self._tables[rank] = ShardTable.parse(checked(self.read(place), digest, location))
            return self._tables[rank]

    def find(self, path: str) -> Extent | bytes:
        """Return the place of a file, or its bytes if the snapshot has them. Raises FileNotFoundError if there is none."""
        if path == RECORD_FILE:
            return self.snapshot.record
        if path in self.index.files:
            return self.index.files[path]
        name = path.rpartition("/")[2]
        with self._lock:
            if name == METADATA_FILE and path in self._documents:
                return self._documents[path]
            if name == "c" or re.fullmatch(r"c\.\d+(\.0)*", name):
                rank = int(name.split(".")[1]) if "." in name else 0
                number = self._shards(rank).get(path) if rank < self.record.world_size else None
                if number is not None:
                    return self.table(rank).extent(number)
        raise FileNotFoundError(f"{self._folder.location_of(self.name)} has no file {path!r}")

    def sizes(self) -> dict[str, int | None]:
        """Return the bytes of all files by path."""
        found: dict[str, int | None] = {RECORD_FILE: len(self.snapshot.record)}
        found |= {path: place.nbytes for path, place in self.index.files.items()}
        with self._lock:
            found |= {path: len(data) for path, data in self._documents.items()}
            for rank in range(self.record.world_size):
                found |= {path: self.table(rank).nbytes[number] for path, number in self._shards(rank).items()}
        return found


class VersionFolder(UrlFolder):
    """The folder of a tag among versions, or one below it; it need not be there."""

    def __init__(self, above: VersionsFolder, name: str, inside: str = "") -> None:
        location = above.location_of(f"{name}/{inside}" if inside else name)
        super().__init__(location, location.rpartition("/")[2], above.traffic)
        self._above = above
        self._tag_folder = name
        self._inside = f"{inside}/" if inside else ""

    @cached_property
    def _version(self) -> Version:
        found = self._above.find(self._tag_folder)
        if found is None:
            raise FileNotFoundError(f"{self.location} is not there")
        return found

    @property
    def parent(self) -> Folder:
        inside = self._inside.rstrip("/")
        return VersionFolder(self._above, self._tag_folder, inside.rpartition("/")[0]) if inside else self._above

    def child(self, name: str) -> VersionFolder:
        return VersionFolder(self._above, self._tag_folder, f"{self._inside}{name}")

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        found = self._version.find(f"{self._inside}{file}")
        return found[start:stop] if isinstance(found, bytes) else self._version.read(found, start, stop)

    def size(self, file: str) -> int:
        path = f"{self._inside}{file}"
        try:
            found = self._version.find(path)
        except FileNotFoundError:
            if any(name.startswith(f"{path}/") for name in self._version.sizes()):
                raise IsADirectoryError(f"{self.location_of(file)} is a folder") from None
            raise
        return len(found) if isinstance(found, bytes) else found.nbytes

    def entries(self) -> Entries:
        names = [path[len(self._inside) :] for path in self._version.sizes() if path.startswith(self._inside)]
        if not names:
            raise FileNotFoundError(f"{self.location} is not there")
        folders = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
        return Entries(tuple(folders), tuple(name for name in names if "/" not in name))

    def sizes(self, top: str) -> dict[str, int | None]:
        start = f"{self._inside}{top}/" if top else self._inside
        try:
            found = self._version.sizes()
        except FileNotFoundError:
            return {}
        return {path[len(self._inside) :]: size for path, size in found.items() if path.startswith(start)}

    def packs(self) -> Mapping[str, tuple[int, int]]:
        holders = self._above.holders()
        return {pack: (nbytes, holders[pack]) for pack, nbytes in self._version.packs.items()}

    def write_small(self, file: str, data: bytes) -> None:
        """Refuse: a version never changes."""
        raise UsageError(f"{self.location_of(file)}: a version is never written to; save another one")


def folder_for(url: str, storage_options: Mapping[str, Any] | None = None, *, versions: bool = False) -> RemoteFolder:
    """Return the folder at a URL that is not a service's: one of versions if it has some, or if with `versions` it has no
    checkpoint yet and can have them. Raises UsageError for a URL that nothing opens."""
    folder = open_fsspec_folder(url, storage_options)
    if protocol_of(folder) is None or not (has_versions(folder) or (versions and is_empty(folder))):
        return folder
    require_icechunk(folder.location)
    return VersionsFolder(folder, storage_options or {})
