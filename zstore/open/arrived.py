"""Versions of weights on their way to whoever serves them: their files on this machine, each as it was published."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ..checkpoint.folder import Folder
from ..errors import CheckpointNotFoundError, CorruptionError
from ..format.arrays import Bytes
from ..interop.huggingface import StoredWeight, WeightsReader
from ..io.pool import Workers
from ..weights.companions import companions
from ..weights.delta import Patch, fold, read_delta, spans_of
from ..weights.versions import INDEX_FILE, Chain, chain_from, folder_name

_BLOCK_BYTES = 8 * 1024 * 1024
_NUM_THREADS = 4
_TRIES = 5
"""The next versions are looked for if some are removed while they are taken."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The versions of a chain, on this machine."""

    chain: Chain
    full: Path | None
    """The folder of the full version."""
    patches: Mapping[str, list[Patch]]
    """The changes of each tensor since then, in order."""
    nbytes: int
    """Bytes of weights and changes that were taken."""

    def blocks(self, reader: WeightsReader, weight: StoredWeight) -> Iterator[tuple[int, int, Bytes]]:
        """Yield `(first, stop, bytes)` of a weight that `reader` has, with the changes since then.

        Raises CorruptionError for content that differs from what was published.
        """
        crc, version = 0, self.chain.full
        for first, stop, patches in _cut(weight, self.patches.get(weight.name, [])):
            values = np.empty(min(stop, weight.numel) - first, f"u{weight.itemsize}")
            reader.read_into(weight, first, values)
            data = values.view(np.uint8)
            crc = crc32c(data.data, crc)
            if patches:
                fold(weight.name, first, data.view(np.uint16), patches)
            yield first, stop, data
        if version is not None and crc != version.weights.get(weight.name):
            raise CorruptionError(f"{weight.name!r} in {weight.path} differs from what was published: take it again")


def _cut(weight: StoredWeight, patches: list[Patch]) -> Iterator[tuple[int, int, list[Patch]]]:
    """Yield the ranges of elements of a weight, each with the patches that change it; blocks if there are none."""
    step, at = max(1, _BLOCK_BYTES // weight.itemsize), 0
    for first, stop, changes in [*spans_of(patches), (weight.numel, weight.numel, [])]:
        yield from ((begin, min(begin + step, first), []) for begin in range(at, first, step))
        if changes:
            yield first, stop, changes
        at = stop


@contextlib.contextmanager
def arrived(source: Folder, have: str | None) -> Iterator[Arrived | None]:
    """Give the versions that follow the one of id `have`, for the length of a `with` block; None if that is the newest.

    Raises as `chain_from` does, and CorruptionError for a file that differs from its checksum.
    """
    with tempfile.TemporaryDirectory(prefix="zstore-weights-") as room:
        yield _take(source, have, Path(room))


def _take(source: Folder, have: str | None, room: Path) -> Arrived | None:
    for left in reversed(range(_TRIES)):
        try:
            chain = chain_from(source, have)
            return None if chain is None else _fetch(source, chain, room)
        except CheckpointNotFoundError:
            raise
        except FileNotFoundError:
            if not left:
                raise
    return None


def _fetch(source: Folder, chain: Chain, room: Path) -> Arrived:
    patches: dict[str, list[Patch]] = {}
    full, nbytes = None, 0
    if chain.full is not None:
        folder = source.child(folder_name(chain.full.number))
        full = _local(folder, {*chain.full.files.values(), INDEX_FILE, *companions(folder)}, room)
        nbytes += chain.full.full_bytes
    for version in chain.deltas:
        here = _local(source.child(folder_name(version.number)), version.deltas, room)
        for name, (size, crc) in version.deltas.items():
            for tensor, found in read_delta(here / name, size, crc).items():
                patches.setdefault(tensor, []).extend(found)
        nbytes += version.delta_bytes
    return Arrived(chain=chain, full=full, patches=patches, nbytes=nbytes)


def _local(folder: Folder, names: Iterable[str], room: Path) -> Path:
    """Return the local folder that has the files: the folder itself, or one in `room` that they are copied to."""
    if folder.is_local:
        return folder.path
    target = room / folder.name
    target.mkdir(exist_ok=True)
    with Workers(_NUM_THREADS, "zstore-weights") as workers:
        workers.run([partial(_copy, folder, name, target / name) for name in names])
    return target


def _copy(folder: Folder, name: str, target: Path) -> None:
    with target.open("wb") as file:
        for at in range(0, folder.size(name), _BLOCK_BYTES):
            file.write(folder.read_range(name, at, at + _BLOCK_BYTES))
