"""Versions of weights on their way to whoever serves them: their files on this machine, each as it was published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
from crc32c import crc32c

from ..checkpoint.folder import Folder
from ..errors import CorruptionError
from ..format.arrays import Bytes
from ..interop.huggingface import StoredWeight, WeightsReader
from ..io.pool import Workers
from ..remote.service_folder import ServiceFolder
from ..weights.companions import companions
from ..weights.delta import Patch, fold, read_delta, spans_of
from ..weights.versions import INDEX_FILE, WEIGHTS_FOLDER, Chain, folder_name, follow, parse_index
from .room import temporary_room

_BLOCK_BYTES = 8 * 1024 * 1024
_NUM_THREADS = 4


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
    with contextlib.ExitStack() as opened:
        yield _take(source, have, opened)


def _take(source: Folder, have: str | None, opened: contextlib.ExitStack) -> Arrived | None:
    if isinstance(source, ServiceFolder) and source.url.folder == WEIGHTS_FOLDER:
        chain = _ask(source, have, opened)
    else:
        chain = follow(source, have, opened)
    if chain is None:
        return None
    return _fetch(source, chain, source.path if source.is_local else opened.enter_context(temporary_room()))


def _ask(source: ServiceFolder, have: str | None, opened: contextlib.ExitStack) -> Chain | None:
    """Return what `follow` does, as the service answers it."""
    query = urlencode({"held": 1, "since": have or ""})
    path = f"/api/runs/{quote(source.url.run, safe='')}/weights?{query}"
    found = opened.enter_context(source.connection.held("GET", path))
    full, *deltas = [one and parse_index(one.encode(), source.location) for one in (found["full"], *found["deltas"])]
    return Chain(full=full, deltas=tuple(deltas)) if full or deltas else None


def _fetch(source: Folder, chain: Chain, room: Path) -> Arrived:
    patches: dict[str, list[Patch]] = {}
    full, nbytes = None, 0
    if chain.full is not None:
        folder = source.child(folder_name(chain.full.number))
        names = (*chain.full.files.values(), INDEX_FILE, *companions(folder))
        full = _local(folder, dict.fromkeys(names), room)
        nbytes += chain.full.full_bytes
    for version in chain.deltas:
        sizes = {name: size for name, (size, _) in version.deltas.items()}
        here = _local(source.child(folder_name(version.number)), sizes, room)
        for name, (size, crc) in version.deltas.items():
            for tensor, found in read_delta(here / name, size, crc).items():
                patches.setdefault(tensor, []).extend(found)
        nbytes += version.delta_bytes
    return Arrived(chain=chain, full=full, patches=patches, nbytes=nbytes)


def _local(folder: Folder, sizes: Mapping[str, int | None], room: Path) -> Path:
    """Return the local folder that has the files, by name with their bytes if known: the folder itself, or one in `room` that
    they are copied to."""
    if folder.is_local:
        return folder.path
    target = room / folder.name
    target.mkdir(exist_ok=True)
    with Workers(_NUM_THREADS, "zstore-weights") as workers:
        workers.run([partial(_copy, folder, name, size, target / name) for name, size in sizes.items()])
    return target


def _copy(folder: Folder, name: str, size: int | None, target: Path) -> None:
    with target.open("wb") as file:
        for at in range(0, folder.size(name) if size is None else size, _BLOCK_BYTES):
            file.write(folder.read_range(name, at, at + _BLOCK_BYTES))
