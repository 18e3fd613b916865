"""Checkpoints that somebody changed, with digests and checksums that fit again: what a forger would hand over."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crc32c import crc32c
from hypothesis import strategies as st


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record_digest(document: dict[str, Any]) -> str:
    """The digest of a commit record, as docs/format.md says."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return "sha256:" + sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


class Forge:
    """The checkpoint in `path`, to be changed and brought back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.originals = {
            str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
        }
        self._changed: set[str] = set()
        for file in self.originals:
            (path / file).chmod(0o644)

    def put(self, file: str, data: bytes) -> None:
        self._changed.add(file)
        path = self.path / file
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def remove(self, file: str) -> None:
        self._changed.add(file)
        (self.path / file).unlink()

    def read(self, file: str) -> bytes:
        return (self.path / file).read_bytes()

    def edit(self, file: str, change: Callable[[Any], Any]) -> None:
        """Change a JSON document in place, and seal all."""
        document = json.loads(self.read(file))
        change(document)
        self.put(file, json.dumps(document).encode())
        self.seal()

    def edit_array(self, folder: str, change: Callable[[Any], Any]) -> None:
        self.edit("zarr.json", lambda root: change(root["consolidated_metadata"]["metadata"][folder]))

    def seal(self) -> None:
        """Let all digests fit the files that are there."""
        record = json.loads(self.read("zstore.json"))
        record["metadata_sha256"] = sha256(self.read("zarr.json"))
        ranks = range(len(record["manifest_sha256"]))
        record["manifest_sha256"] = [sha256(self.read(f"manifest/rank-{rank:05d}.json")) for rank in ranks]
        record["digest"] = record_digest(record)
        self.put("zstore.json", json.dumps(record).encode())

    def forge_shard(self, file: str, change: Callable[[bytearray], Any], rank: int = 0) -> None:
        """Change a shard file, and let the checksums of index and chunks, the manifest and the digests fit again.

        Chunks are where the index of the unchanged file says.
        """
        data = bytearray(self.read(file))
        entries, start = index_of(data), data_start(data)
        change(data)
        crcs = []
        for offset, nbytes in entries:
            body = bytes(data[offset : offset + nbytes - 4])
            crcs.append(crc32c(body))
            struct.pack_into("<I", data, offset + nbytes - 4, crcs[-1])
        struct.pack_into("<I", data, start - 4, crc32c(bytes(data[: start - 4])))
        self.put(file, bytes(data))
        self.name_crcs(file, crcs, rank)

    def name_crcs(self, file: str, crcs: list[int], rank: int) -> None:
        name = self.name_of(file)

        def change(manifest: Any) -> None:
            for entry in manifest["shards"]:
                if entry["array"] == name:
                    entry["crc32c"] = "".join(f"{crc:08x}" for crc in crcs)

        self.edit(f"manifest/rank-{rank:05d}.json", change)

    def name_of(self, file: str) -> str:
        metadata = json.loads(self.read("zarr.json"))["consolidated_metadata"]["metadata"]
        name: str = metadata[file.rpartition("/")[0]]["attributes"]["zstore"]["name"]
        return name

    def restore(self) -> None:
        for file in self._changed:
            path = self.path / file
            if path.is_symlink() or path.exists():
                path.unlink() if not path.is_dir() else os.rmdir(path)
            if file in self.originals:
                path.write_bytes(self.originals[file])
        self._changed.clear()


def data_start(shard: bytes | bytearray) -> int:
    """Where the index of a shard file ends, its checksum included: found by that checksum."""
    for stop in range(16, len(shard), 16):
        if crc32c(bytes(shard[:stop])) == struct.unpack_from("<I", shard, stop)[0]:
            return stop + 4
    raise ValueError("the file has no index")


def index_of(shard: bytes | bytearray) -> list[tuple[int, int]]:
    """Offset and bytes of each chunk that is present."""
    stop = data_start(shard) - 4
    entries = [struct.unpack_from("<QQ", shard, at) for at in range(0, stop, 16)]
    return [(offset, nbytes) for offset, nbytes in entries if nbytes != 2**64 - 1]


def tree_of(folder: Path) -> dict[str, Any]:
    """Every file below `folder` with its bytes, every link with where it leads, all else by its kind."""
    found: dict[str, Any] = {}
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root, name)
            if path.is_symlink():
                found[str(path)] = os.readlink(path)
            elif path.is_file():
                found[str(path)] = path.read_bytes() if path.stat().st_size < 2**24 else path.stat().st_size
            else:
                found[str(path)] = "folder or pipe"
    return found


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 70).map(lambda n: 2**n)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def mutate(document: Any, data: st.DataObject) -> None:
    place = document
    while True:
        keys: list[Any] = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.integers(0, 5)):
            place = inner
            continue
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "add", "near"]))
        if kind == "remove":
            del place[key]
        elif kind == "near" and type(inner) is int:
            place[key] = inner + data.draw(st.integers(-3, 3))
        elif kind == "near" and isinstance(inner, str):
            place[key] = inner[: data.draw(st.integers(0, len(inner)))] + data.draw(st.text(max_size=3))
        elif kind == "add" and isinstance(place, dict):
            place[data.draw(st.text(max_size=5))] = data.draw(JSON)
        else:
            place[key] = data.draw(JSON)
        return
