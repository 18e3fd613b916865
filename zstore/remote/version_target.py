"""The target of an upload whose checkpoints are versions: packs of what changed, then one commit of all references."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import TagInfo, noting, replaced_text, require_free
from ..checkpoint.format import MACHINES_KEY, Record
from ..checkpoint.names import METADATA_FILE, manifest_file, tag_folder
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.retention import Keep, retire
from ..checkpoint.source import StoredArray
from ..errors import CheckpointMismatchError
from ..io.pool import Workers
from ..io.shards import ShardSummary
from .packs import (
    LARGE_BYTES,
    PACKS_FOLDER,
    Extent,
    Index,
    Places,
    ShardTable,
    is_of,
    pack_name,
    plan_packs,
    shards_of,
    training,
)
from .repository import References
from .send import Source
from .target import Advance, UploadTarget, files_at_a_time
from .uploaded import extra_files
from .versions import Version, VersionsFolder, icechunk_name

_TABLE = "table"
_INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What rank 0 has to know of what a rank sent."""

    table: ShardTable
    place: Extent
    sha256: str
    """Of the table's document, which is at `place`."""
    files: Mapping[str, Extent]
    packs: Mapping[str, int]
    """Packs that were written, and their bytes."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "table": replace(self.table, sha256=()).document()}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Receipt:
        """Return what `document` made."""
        files = {path: Extent(*place) for path, place in document["files"].items()}
        table, place = ShardTable.parse(document["table"]), Extent(*document["place"])
        return cls(**{**document, "files": files, "table": table, "place": place})


class VersionTarget(UploadTarget):
    """A version on its way into `folder`. See [Note: packs] and [Note: versions]."""

    waits_for_ranks = False

    def __init__(self, folder: VersionsFolder, tag: str, save_id: str, run_id: str) -> None:
        super().__init__(folder.location_of(tag_folder(tag)), tag, save_id)
        self._versions = folder
        self._run_id = run_id
        self._keep: Keep | None = None
        self._base: Version | None = None
        self._session: Any = None
        self._sent: dict[int, Receipt] = {}

    @property
    def _folder(self) -> VersionsFolder:
        return self._versions

    # -- rank 0, before -----------------------------------------------------------------------------------------------

    def begin(self, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None) -> list[str]:
        """Makes the repository if there is none."""
        folder, self._keep = self._versions, keep
        folder.repository.create()
        self._session = folder.repository.begin()
        self._base = folder.version(self._session.snapshot_id)
        if self._base is not None and not self._is_tagged(self._base):
            # The save that made it was killed before it could.
            self._tag_snapshot(self._base.name, self._base.snapshot.id, self._base.record.id)
        found = folder.find(tag_folder(self._tag))
        if found is None:
            return []
        existing = TagInfo(folder=folder.child(found.name), record=found.record)
        require_free(existing, overwrite=overwrite, run=self._run_id if replaces_own else "")
        return [] if overwrite else [replaced_text(existing)]

    def offer(self, reader: CheckpointReader) -> None:
        """Do nothing: the bytes to send depend on the version before, which every rank reads."""

    def ticket(self) -> Mapping[str, Any]:
        return {"base": None if self._base is None else self._base.snapshot.id}

    # -- the other ranks ------------------------------------------------------------------------------------------------

    def join(self, ticket: Mapping[str, Any]) -> None:
        base = ticket["base"]
        self._base = None if base is None else self._versions.version(base)

    def receipt(self) -> Mapping[str, Any]:
        return {str(rank): sent.document() for rank, sent in self._sent.items()}

    # -- each rank ------------------------------------------------------------------------------------------------------

    def send(self, workers: Workers, reader: CheckpointReader, ranks: Sequence[int], advance: Advance) -> int:
        """Shard files of the version before are not sent again."""
        return sum(self._send_rank(workers, reader, rank, advance) for rank in ranks)

    def _send_rank(self, workers: Workers, reader: CheckpointReader, rank: int, advance: Advance) -> int:
        shards = [(reader.array(entry.array), entry) for entry in reader.manifest(rank).shards if entry.shard == rank]
        beside = [] if rank else list(extra_files(reader))
        places, packs = self._pack(workers, reader.path, shards, beside, advance, tail_of=f"rank {rank}")
        tables = _tables(reader, [rank], places)
        documents = _documents(reader, tables)
        if (first := next(iter(packs), None)) is None:
            found = self._send_documents(documents)
        else:
            found = _places(first, _facts_of(documents), self._written(places)[first])
            packs[first].append(b"".join(documents.values()))
        self._send_packs(workers, packs, advance)
        self._note(reader, tables, places, found)
        return sum(self._sent[rank].packs.values())

    def send_files(
        self, workers: Workers, top: Path, shards: Sequence[tuple[StoredArray, ShardSummary]], advance: Advance
    ) -> Places:
        """Send shard files in the folder `top`; return the places of all. Those that the version before has are not sent."""
        places, packs = self._pack(workers, top, shards, (), advance)
        self._send_packs(workers, packs, advance)
        return places

    def describe(self, reader: CheckpointReader, ranks: Sequence[int], places: Places) -> None:
        """Send the manifests and tables of `ranks`, whose files are at `places`, as one pack."""
        tables = _tables(reader, ranks, places)
        self._note(reader, tables, places, self._send_documents(_documents(reader, tables)))

    def _pack(
        self,
        workers: Workers,
        top: Path,
        shards: Sequence[tuple[StoredArray, ShardSummary]],
        beside: Sequence[str],
        advance: Advance,
        tail_of: str = "",
    ) -> tuple[Places, dict[str, list[Source]]]:
        """Return the places of shard files and of others `beside` them, and the files of each pack that is to be sent, first
        those of arrays that train. The first one is named for the tail that it gets, too."""
        places = self._unchanged(workers, top, shards)
        for place, _ in places.values():
            advance(place.nbytes)
        trained = training(entry.array for _, entry in shards)
        paths = {array.shard_file(entry.shard): entry.array in trained for array, entry in shards}
        new = [path for path in (*paths, *beside) if path not in places]
        if lost := self.known.keys() & new:
            raise CheckpointMismatchError(
                f"the newest version has {len(lost)} files no more, as {min(lost)}: send them, then commit again"
            )
        digests = workers.run([partial(_sha256, top / path) for path in new])
        facts = {path: ((top / path).stat().st_size, digest) for path, digest in zip(new, digests, strict=True)}
        packs: dict[str, list[Source]] = {}
        for alike in ([path for path in new if paths.get(path)], [path for path in new if not paths.get(path)]):
            for numbers in plan_packs([facts[path][0] for path in alike]):
                inside = {alike[number]: facts[alike[number]] for number in numbers}
                own = [] if packs else [tail_of]
                name = pack_name([*(digest for _, digest in inside.values()), *own], self._save_id)
                packs[name] = [top / path for path in inside]
                places |= _places(name, inside)
        return places, packs

    def _send_packs(self, workers: Workers, packs: Mapping[str, Sequence[Source]], advance: Advance) -> None:
        send = self._versions.send
        workers.run([partial(send, sources, f"{PACKS_FOLDER}/{name}", advance) for name, sources in packs.items()])

    def _note(self, reader: CheckpointReader, tables: Mapping[int, ShardTable], places: Places, found: Places) -> None:
        """Note for rank 0 that the documents of the ranks with these tables are where they were `found`."""
        packs = self._written(places | found)
        for rank, table in tables.items():
            own = [manifest_file(rank)]
            if rank == 0:
                own += [METADATA_FILE, *extra_files(reader)]
            place, digest = found[f"{_TABLE}-{rank}"]
            self._sent[rank] = Receipt(
                table=table,
                place=place,
                sha256=digest,
                files={path: (places | found)[path][0] for path in own},
                packs=packs,
            )

    def _written(self, places: Places) -> dict[str, int]:
        """Return the packs of this save among the places, and their bytes."""
        packs: dict[str, int] = {}
        for place, _ in places.values():
            if is_of(place.pack, self._save_id):
                packs[place.pack] = packs.get(place.pack, 0) + place.nbytes
        return packs

    def _unchanged(self, workers: Workers, top: Path, shards: Sequence[tuple[StoredArray, ShardSummary]]) -> Places:
        """Return the places of those shard files that the version before has."""
        if self._base is None:
            return {}
        alike = self._base.alike(shards)
        digests = workers.run([partial(self._digest, top, path) for path in alike])
        return {path: each for (path, each), digest in zip(alike.items(), digests, strict=True) if each[1] == digest}

    def _digest(self, top: Path, path: str) -> str:
        return self.known.get(path) or _sha256(top / path)

    def _send_documents(self, documents: Mapping[str, bytes]) -> Places:
        """Send some small files as one pack."""
        facts = _facts_of(documents)
        name = pack_name([digest for _, digest in facts.values()], self._save_id)
        self._versions.write_small(f"{PACKS_FOLDER}/{name}", b"".join(documents.values()))
        return _places(name, facts)

    # -- rank 0, after ------------------------------------------------------------------------------------------------

    def accept(self, receipt: Mapping[str, Any]) -> None:
        self._sent |= {int(rank): Receipt.parse(document) for rank, document in receipt.items()}

    def commit(self, reader: CheckpointReader) -> list[str]:
        base, repository, record = self._base, self._versions.repository, self._record(reader.record)
        found = self._send_documents({_INDEX: self._index(record).encode()})
        place, digest = found[_INDEX]
        # Then most references are those of the version before, which the session has.
        alike = base is not None and base.record.metadata_sha256 == record.metadata_sha256
        attributes = {"record": json.loads(record.encode()), "index": [*place, digest]}
        documents = None if alike else reader.documents["consolidated_metadata"]["metadata"]
        repository.write(self._session, attributes, documents, self._references(reader, only_new=alike))
        facts = {"tag": record.tag, "step": record.step, "run": record.run}
        snapshot_id = repository.commit(self._session, f"{record.tag}, step {record.step}", facts)
        messages: list[str] = []
        with noting(messages, "the version is committed, but has no tag: the next save gives it one"):
            self._tag_snapshot(tag_folder(record.tag), snapshot_id, record.id)
        return messages

    def _record(self, record: Record) -> Record:
        """Return the record as the version has it: later than all others, and in one place."""
        newest = 0 if self._base is None else self._base.record.committed_ns
        state = {key: value for key, value in record.state.items() if key != MACHINES_KEY}
        return replace(record, state=state, committed_ns=max(time.time_ns(), newest + 1))

    def _index(self, record: Record) -> Index:
        sent = [self._sent[rank] for rank in range(record.world_size)]
        known = {} if self._base is None else self._base.index.packs
        packs = {pack: nbytes for each in sent for pack, nbytes in each.packs.items()}
        packs |= {pack: known[pack] for each in sent for pack in each.table.packs if pack not in packs}
        files = {path: place for each in sent for path, place in each.files.items()}
        return Index(packs=packs, files=files, tables=[(each.place, each.sha256) for each in sent])

    def _references(self, reader: CheckpointReader, *, only_new: bool) -> Iterator[References]:
        """Yield the places of each array's shards, or only of those that were sent."""
        tables = [self._sent[rank].table for rank in range(reader.record.world_size)]
        new = [[is_of(pack, self._save_id) or not only_new for pack in table.packs] for table in tables]
        numbers = [0] * len(tables)
        """For each rank, of its next array in its table: see `shards_of`."""
        for name in sorted(reader.arrays):
            array = reader.array(name)
            chunks: list[tuple[int, Extent]] = []
            for rank in range(array.grid.num_shards if array.spec.numel else 0):
                table, number = tables[rank], numbers[rank]
                numbers[rank] += 1
                if new[rank][table.pack[number]]:
                    chunks.append((rank, table.extent(number)))
            yield array.folder, chunks, len(array.spec.stored_shape)

    def _is_tagged(self, version: Version) -> bool:
        tag = icechunk_name(version.name)
        names = (tag, f"{tag}:{version.record.id}")
        return version.snapshot.id in map(self._versions.repository.id_of, names)

    def _tag_snapshot(self, name: str, snapshot_id: str, save_id: str) -> None:
        """Give a version its tag, in place of another one that has it."""
        repository, tag = self._versions.repository, icechunk_name(name)
        was_given = repository.id_of(tag) is not None
        if was_given:
            repository.untag(tag)
        elif self._versions.was_given(name):
            was_given = True
            for former in repository.names():
                if former.startswith(f"{tag}:"):
                    repository.untag(former)
        repository.tag(f"{tag}:{save_id}" if was_given else tag, snapshot_id)

    def retire(self) -> list[str]:
        """Packs of a removed version go with it, unless another one refers to them."""
        if self._keep is None:
            return []
        removed: list[TagInfo] = []

        def remove(info: TagInfo) -> None:
            self._versions.remove_version(info)
            removed.append(info)

        messages = retire(self._versions, keep=self._keep, run=self._run_id, remove=remove)
        with noting(messages, "what icechunk has of removed versions could not be removed"):
            if removed:
                self._versions.repository.tidy()
        return messages

    def abort(self, *, ended: bool = True, cancelled: bool = False) -> None:
        """`zstore prune` removes the packs that were sent once they are a day old."""

    def files_at_a_time(self, largest_bytes: int, memory_bytes: int | None) -> int:
        return files_at_a_time(max(largest_bytes, LARGE_BYTES), memory_bytes)


def _tables(reader: CheckpointReader, ranks: Sequence[int], places: Places) -> dict[int, ShardTable]:
    """Return the tables of `ranks`, whose files are at `places`."""
    names = {rank: shards_of(reader.arrays, rank) for rank in ranks}
    return {
        rank: ShardTable.of([places[reader.array(name).shard_file(rank)] for name in own])
        for rank, own in names.items()
    }


def _documents(reader: CheckpointReader, tables: Mapping[int, ShardTable]) -> dict[str, bytes]:
    """Return the manifests of ranks and their tables, and with those of rank 0 the metadata."""
    files = [*map(manifest_file, tables), *[METADATA_FILE] * (0 in tables)]
    documents = {path: reader.folder.read_small(path) for path in files}
    return documents | {f"{_TABLE}-{rank}": json.dumps(table.document()).encode() for rank, table in tables.items()}


def _facts_of(documents: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    """Return the length and the SHA-256, hex, of documents."""
    return {path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in documents.items()}


def _places(pack: str, files: Mapping[str, tuple[int, str]], start: int = 0) -> Places:
    """Return the places of files of these lengths and digests, one behind the other from byte `start` of a pack on."""
    offsets = accumulate((nbytes for nbytes, _ in files.values()), initial=start)
    return {
        path: (Extent(pack, offset, nbytes), digest)
        for offset, (path, (nbytes, digest)) in zip(offsets, files.items(), strict=False)
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
