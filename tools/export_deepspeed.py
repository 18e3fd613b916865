"""A checkpoint as a universal folder of DeepSpeed, written in bounded memory without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from zstore.checkpoint import ArraySource, ReadAhead
from zstore.errors import CheckpointError
from zstore.format import Bytes
from zstore.interop.deepspeed.universal import HINT, ArchiveStorage, Document, UniversalFolder, folder_of
from zstore.interop.torch_archive import write_archive
from zstore.io import Files, NewFile
from zstore.ranks.division import items_of
from zstore.ranks.team import ALONE, Team

from .export import Advance, values_of


def arrays_read(universal: UniversalFolder) -> list[str]:
    """Return the arrays that are read for a universal folder; those that two files contain come twice."""
    return [stored.array for _, document in _files(universal) for stored in document.storages if stored.array]


def write_universal(
    source: ArraySource, universal: UniversalFolder, root: Path, advance: Advance, team: Team = ALONE
) -> None:
    """Write all files of the tag `source.tag` and the hint into `root`, durably (all ranks).

    The ranks of `team` write files each, with about the same bytes.
    """
    files, folder, everything = Files(), root / source.tag, list(_files(universal))
    with team.agreeing():
        if team.rank == 0:
            nbytes = sum(_nbytes(document) for _, document in everything)
            files.require_room(root, nbytes, f"the checkpoint needs {nbytes} bytes")
            for name in universal.trained:
                files.make_folder(folder / folder_of(name))
    with team.agreeing():
        own = items_of((_nbytes(document) for _, document in everything), team.rank, team.world_size)
        _write(source, files, [(folder / everything[n][0], everything[n][1]) for n in own], advance)
    with team.agreeing():
        if team.rank == 0:
            files.write_small(root / HINT, source.tag.encode())
            for name in universal.trained:
                files.sync_folder(folder / folder_of(name))
            for path in (folder / "zero", folder):
                files.sync_folder(path)


def _files(universal: UniversalFolder) -> Iterator[tuple[str, Document]]:
    for name in universal.trained:
        yield from universal.parameter_files(name).items()
    yield from universal.documents.items()


def _nbytes(document: Document) -> int:
    return sum(stored.nbytes for stored in document.storages)


def _write(source: ArraySource, files: Files, documents: list[tuple[Path, Document]], advance: Advance) -> None:
    """Write files one after the other; their contents are read ahead."""
    stored = [each for _, document in documents for each in document.storages if each.array]
    ranges = [(each.array, 0, source.array(each.array).spec.numel) for each in stored]
    with ReadAhead(source, ranges) as ahead:
        for path, document in documents:
            with ExitStack() as opened:
                sink = NewFile(files, path, opened)
                parts = ((each.nbytes, _parts(source, ahead, each, advance)) for each in document.storages)
                write_archive(sink, document.value, parts)
                sink.finish()


def _parts(source: ArraySource, ahead: ReadAhead, stored: ArchiveStorage, advance: Advance) -> Iterator[Bytes]:
    if not stored.array:
        yield np.frombuffer(stored.data, np.uint8)
        return
    numel = source.array(stored.array).spec.numel
    for data, lost in values_of(source, ahead, stored.array, numel, stored.dtype, advance):
        if lost:
            raise CheckpointError(
                f"array {stored.array!r} has {lost} values that {stored.dtype}, in which the model computes, cannot hold: "
                "the run diverged; convert an earlier checkpoint"
            )
        yield data
