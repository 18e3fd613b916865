"""Versions of a model's weights in a folder: which there are, and how to get from one to the newest.

[Note: a version]
    weight_v000123/model.safetensors.index.json     its record, by which it exists: the folder is moved there with it inside
    weight_v000123/delta-00000.bin                  (each rank) what changed since its base version; see `delta`
    weight_v000123/*.safetensors, config.json       all weights, if it is a full version
A full version is a model in the Hugging Face layout. One with changes beside that is both: whoever is at its base takes the
changes. The record is the index of that layout, with the entry `zstore` in its metadata. `delta_encoding` tells other software
that reads such folders to refuse one that has only changes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from ..checkpoint.folder import Folder
from ..checkpoint.lock import share
from ..errors import CheckpointNotFoundError, CorruptionError

WEIGHTS_FOLDER = "weights"
"""Folder of a run's versions, beside its checkpoints."""
INDEX_FILE = "model.safetensors.index.json"
KEY = "zstore"
"""Entry of an index's metadata."""
PREFIX = "weight_v"
"""With which the name of a version's folder begins."""
_NAME = re.compile(rf"{PREFIX}(\d{{6,18}})")
_TRIES = 5
"""The next versions are looked for if some are removed meanwhile."""
_MOST_INDEX_BYTES = 256 * 1000 * 1000


def folder_name(number: int) -> str:
    """Return the name of a version's folder."""
    return f"{PREFIX}{number:06d}"


def number_of(name: str) -> int | None:
    """Return the version that a folder of that name has; None: it is of something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found is not None and folder_name(int(found[1])) == name else None


@dataclass(frozen=True, kw_only=True)
class WeightsVersion:
    """A version's record. Of versions of one number, of runs that began anew, the ids differ."""

    number: int
    id: str
    base_id: str | None = None
    """The version that the changes are since; None: it has none."""
    base: int | None = None
    """Its number."""
    step: int
    """The optimizer steps that the weights have had."""
    run: str
    deltas: Mapping[str, list[int]] = field(default_factory=dict)
    """Bytes and crc32c of each file of changes."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The crc32c of each tensor of a full version; empty: it has only changes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The file of each tensor of a full version."""
    full_bytes: int = 0
    """Of all weights."""

    @property
    def delta_bytes(self) -> int:
        """Of all changes."""
        return sum(nbytes for nbytes, _ in self.deltas.values())

    def index(self) -> bytes:
        """Return the index file that describes it."""
        record = {key: value for key, value in asdict(self).items() if key not in ("files", "full_bytes")}
        metadata: dict[str, Any] = {"total_size": self.full_bytes, "version": f"{self.number:06d}", KEY: record}
        if not self.weights:
            metadata |= {"base_version": f"{self.base:06d}", "delta_encoding": "zstore", "compression_format": "none"}
        return json.dumps({"metadata": metadata, "weight_map": dict(self.files)}, indent=1).encode()


def parse_index(data: bytes, what: str) -> WeightsVersion:
    """Return the version that an index file describes; `what` is its place. Raises CorruptionError if it describes none."""
    try:
        document = json.loads(data)
        metadata = document["metadata"]
        found = WeightsVersion(
            **metadata[KEY], files=dict(document["weight_map"]), full_bytes=int(metadata["total_size"])
        )
        plain = all("/" not in name and not name.startswith(".") for name in (*found.deltas, *found.files.values()))
        sizes = [(int(size), int(crc)) for size, crc in found.deltas.values()]
        if not plain or found.files.keys() != found.weights.keys() or (found.base_id is None) != (not sizes):
            raise ValueError("its parts contradict each other")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{what} describes no version of weights: {error!s:.200}") from error
    return found


def numbers_in(folder: Folder) -> list[int]:
    """Return the numbers of the versions in a folder, rising; none if it is not there."""
    try:
        return sorted(found for name in folder.entries().folders if (found := number_of(name)) is not None)
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_version(folder: Folder, number: int) -> WeightsVersion:
    """Return the record of a version. Raises FileNotFoundError if it is gone, CorruptionError if it is damaged."""
    child = folder.child(folder_name(number))
    found = parse_index(child.read_small(INDEX_FILE, _MOST_INDEX_BYTES), child.location)
    if found.number != number:
        raise CorruptionError(f"{child} has the record of version {found.number}: it was renamed")
    return found


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The versions that lead to the newest one."""

    full: WeightsVersion | None
    """The one to begin with; None: with the weights that are there."""
    deltas: tuple[WeightsVersion, ...]
    """Those whose changes follow, the oldest first."""

    @property
    def newest(self) -> WeightsVersion:
        """The version that it leads to."""
        last = self.deltas[-1] if self.deltas else self.full
        if last is None:
            raise AssertionError("a chain has a version")
        return last


def follow(folder: Folder, have: str | None, opened: ExitStack) -> Chain | None:
    """Return what `chain_from` does; until `opened` is closed, a local folder's versions of the chain are not removed."""
    for left in reversed(range(_TRIES)):
        try:
            with ExitStack() as tried:
                chain = chain_from(folder, have)
                if chain is not None and folder.is_local:
                    for version in (*chain.deltas, chain.full or chain.newest):
                        path = folder.path / folder_name(version.number) / INDEX_FILE
                        tried.callback(os.close, share(path))
                opened.push(tried.pop_all())
                return chain
        except CheckpointNotFoundError:
            raise
        except FileNotFoundError:
            if not left:
                raise
    return None


def chain_from(folder: Folder, have: str | None) -> Chain | None:
    """Return how to get from the version of id `have` (None: nothing) to the newest one, in as few bytes as possible; None if
    that is it.

    Raises CheckpointNotFoundError if there is no version, or none to begin with, FileNotFoundError if one is removed
    meanwhile, CorruptionError for a damaged record.
    """
    numbers = numbers_in(folder)
    if not numbers:
        raise CheckpointNotFoundError(
            f"{folder} has no version of weights: expected folders like {folder_name(1)}, which training publishes"
        )
    newest = at = read_version(folder, numbers[-1])
    if newest.id == have:
        return None
    deltas: list[WeightsVersion] = []
    best: Chain | None = None
    best_bytes = 0
    nbytes = 0
    while True:
        if at.weights and (best is None or nbytes + at.full_bytes < best_bytes):
            best, best_bytes = Chain(full=at, deltas=tuple(reversed(deltas))), nbytes + at.full_bytes
        if at.base is None or at.base not in numbers or (have is None and best is not None):
            break
        deltas.append(at)
        nbytes += at.delta_bytes
        if at.base_id == have and (best is None or nbytes < best_bytes):
            return Chain(full=None, deltas=tuple(reversed(deltas)))
        at = read_version(folder, at.base)
        if at.id != deltas[-1].base_id:
            break
    if best is None:
        raise CheckpointNotFoundError(
            f"{folder} has versions up to {newest.number}, of which none is a full one or follows the one that is here: wait "
            "for the next full version"
        )
    return best
