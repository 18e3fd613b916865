"""Packs: the objects that hold the files of versions, and the documents that say which file is in which. Pure.

[Note: packs]
Beside the icechunk repository `versions/` of a folder, `packs/` has objects that are never written again:

    <digest>-<save>     some files, one behind the other; the digest is the SHA-256 of theirs, the name's end the save's id

A save refers to packs of the version that it was based on, and to its own. So a pack that no version refers to now is not
referred to later, except by the save that wrote it, and may be removed once that save must be over.

A rank sends its shard files in few packs, those of arrays that train apart from others, so that packs become useless as a
whole. One of which less than a quarter would still be referred to is not referred to at all: its unchanged files are sent
again. At the end of the first, or in one of their own if none is new, are the rank's manifest and its table: the place and
digest of each shard file, in the order of the arrays' names. That pack's name has the rank in its digest in their place, for
the table has the name. Rank 0 writes the index: the place of every rank's table, of every other file, and all packs of the
version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checkpoint.format import parse_json
from ..checkpoint.names import check_save_id
from ..checkpoint.source import StoredArray
from ..errors import CorruptionError

PACKS_FOLDER = "packs"
LEAST_BYTES = 64 * 1000**2
"""Bytes of a pack, if a rank has as many."""
LARGE_BYTES = 1000**3
"""About the bytes of a pack, if a rank has several times as many."""
_ENOUGH_PACKS = 3
_LEAST_USED = 0.25


class Extent(NamedTuple):
    """Bytes of a pack."""

    pack: str
    offset: int
    nbytes: int


Places = dict[str, tuple[Extent, str]]
"""Place and SHA-256, hex, of files by path."""


def plan_packs(sizes: Sequence[int]) -> list[range]:
    """Return which of a rank's files of these bytes go into each of its packs, by their number and in this order.

    Packs are about equal, and four at least if they are large enough for that: they are sent at the same time.
    """
    total = sum(sizes)
    count = round(total / LARGE_BYTES)
    if count < _ENOUGH_PACKS:
        count = max(1, count, min(_ENOUGH_PACKS + 1, total // LEAST_BYTES))
    packs: dict[int, range] = {}
    end = 0
    for number, size in enumerate(sizes):
        end += size
        pack = min(count - 1, (2 * end - size) * count // max(1, 2 * total))  # that the file's middle is in
        packs[pack] = range(packs[pack].start if pack in packs else number, number + 1)
    return list(packs.values())


def training(arrays: Iterable[str]) -> set[str]:
    """Return those of the arrays that the optimizer has state of, and that state: they change with every step."""
    names = set(arrays)
    trained = {name.split("/", 2)[2] for name in names if name.count("/") > 1 and name.startswith("optimizer/")}
    return {name for name in names if name.startswith("optimizer/") or name.partition("/")[2] in trained}


def worth_keeping(places: Iterable[Extent], packs: Mapping[str, int]) -> set[str]:
    """Return the packs, of which `packs` has the bytes, that are used well enough by `places`. See [Note: packs]."""
    used: dict[str, int] = {}
    for pack, _, nbytes in places:
        used[pack] = used.get(pack, 0) + nbytes
    return {pack for pack, nbytes in used.items() if nbytes >= packs[pack] * _LEAST_USED}


def pack_name(digests: Iterable[str], save_id: str) -> str:
    """Return the name of the pack of files with these SHA-256, hex, that save `save_id` writes. See [Note: packs]."""
    return f"{hashlib.sha256(''.join(digests).encode()).hexdigest()}-{check_save_id(save_id)}"


def is_of(pack: str, save_id: str) -> bool:
    """Return whether save `save_id` wrote a pack."""
    return pack.endswith(f"-{save_id}")


def shards_of(arrays: Mapping[str, StoredArray], rank: int) -> list[str]:
    """Return the names of the arrays of which a rank stores a shard file, in the order of its table."""
    return sorted(name for name, array in arrays.items() if array.grid.shard_valid_numel(rank))


@dataclass(frozen=True, kw_only=True)
class ShardTable:
    """The shard files of one rank, as columns, in the order of `shards_of`."""

    packs: tuple[str, ...]
    pack: tuple[int, ...]
    """For each file the number of its pack in `packs`."""
    offset: tuple[int, ...]
    nbytes: tuple[int, ...]
    sha256: tuple[str, ...]

    @classmethod
    def of(cls, places: Sequence[tuple[Extent, str]]) -> ShardTable:
        """Return the table whose files have these places and digests."""
        numbers = {pack: number for number, pack in enumerate(dict.fromkeys(place.pack for place, _ in places))}
        return cls(
            packs=tuple(numbers),
            pack=tuple(numbers[place.pack] for place, _ in places),
            offset=tuple(place.offset for place, _ in places),
            nbytes=tuple(place.nbytes for place, _ in places),
            sha256=tuple(digest for _, digest in places),
        )

    def extent(self, number: int) -> Extent:
        """Return the place of one file."""
        return Extent(self.packs[self.pack[number]], self.offset[number], self.nbytes[number])

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return dict(vars(self))

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ShardTable:
        """Return the table in a document; raises KeyError or TypeError for any other."""
        return cls(**{key: tuple(document[key]) for key in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Index:
    """The files of a version."""

    packs: Mapping[str, int]
    """Every pack that a file of the version is in, and its bytes."""
    files: Mapping[str, Extent]
    """All files but shard files and the groups' and arrays' metadata, by path."""
    tables: Sequence[tuple[Extent, str]]
    """Place and SHA-256 of each rank's table."""

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        numbers = {pack: number for number, pack in enumerate(self.packs)}
        files = {path: (numbers[place.pack], *place[1:]) for path, place in self.files.items()}
        tables = [(numbers[place.pack], *place[1:], digest) for place, digest in self.tables]
        return json.dumps({"packs": list(self.packs.items()), "files": files, "tables": tables}).encode()

    @classmethod
    def decode(cls, data: bytes, digest: str, location: str) -> Index:
        """Return the index in a file. Raises CorruptionError unless it has that digest."""
        document = checked(data, digest, location)
        packs = [pack for pack, _ in document["packs"]]
        return cls(
            packs=dict(document["packs"]),
            files={path: Extent(packs[pack], *rest) for path, (pack, *rest) in document["files"].items()},
            tables=[(Extent(packs[pack], *rest), digest) for pack, *rest, digest in document["tables"]],
        )


def checked(data: bytes, digest: str, location: str) -> dict[str, Any]:
    """Return the JSON document `data`. Raises CorruptionError unless it has the SHA-256 `digest`, hex."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptionError(f"{location} fails its digest in the version; restore the pack from another copy")
    return parse_json(data, location)
