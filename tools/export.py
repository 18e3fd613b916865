"""The weights of a checkpoint as a plain torch state dict, and all of it as a universal folder of DeepSpeed: written in
bounded memory without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from zstore.checkpoint import ArraySource, ReadAhead
from zstore.errors import CheckpointError
from zstore.format import Bytes, numpy_dtype
from zstore.interop.deepspeed.universal import HINT, ArchiveStorage, Document, UniversalFolder, folder_of
from zstore.interop.torch_archive import Tensor, write_archive
from zstore.io import Files, NewFile
from zstore.ranks.division import items_of
from zstore.ranks.team import ALONE, Team
from zstore.weights.cast import cast_into
from zstore.weights.from_checkpoint import list_weights, whole_values
from zstore.weights.layout import Weight
from zstore.weights.writer import Lost

Advance = Callable[[int], None]


def values_of(
    source: ArraySource, ahead: ReadAhead, array: str, numel: int, dtype: str, advance: Advance
) -> Iterator[tuple[Bytes, int]]:
    """Yield the next `numel` elements that are read ahead, all of `array`, as bytes of `dtype`.

    With them comes the number of values that the cast made infinite. The bytes are valid until the next are requested.
    """
    left = numel
    while left and (span := ahead.take()) is not None:
        stored = span.data.view(numpy_dtype(source.arrays[array].spec.dtype))
        for _, values in whole_values(source, array, span.first, stored, dtype):
            cast, lost = values, 0
            if values.dtype != numpy_dtype(dtype):
                cast = np.empty(values.size, numpy_dtype(dtype))
                lost = cast_into(values, cast, dtype, "error")
            yield cast.view(np.uint8), lost
        left -= span.stop - span.first
        advance(span.nbytes)
        ahead.release(span)


def write_state_dict(source: ArraySource, path: Path, dtype: str | None, advance: Advance) -> list[Lost]:
    """Write the new file `path`, of which `torch.load(path, weights_only=True)` gives the weights by name.

    Tied parameters are stored under all their names, and share their memory once loaded. Returns the
    values that `dtype` cannot hold. The file is durable when this returns.
    """
    weights = list_weights(source, dtype)
    tensors = {w.name: Tensor(number, w.shape, w.dtype) for number, w in enumerate(weights)}
    state = dict(tensors)
    for weight in weights:
        for alias in source.arrays[weight.array].spec.aliases:
            state.setdefault(alias, tensors[weight.name])
    files, nbytes = Files(), sum(tensor.nbytes for tensor in tensors.values())
    files.require_room(path.parent, nbytes, f"the weights need {nbytes} bytes")
    lost: dict[str, int] = {}
    with ExitStack() as opened:
        sink = NewFile(files, path, opened)
        ranges = [(weight.array, 0, weight.numel) for weight in weights if weight.numel]
        ahead = opened.enter_context(ReadAhead(source, ranges))

        def parts(weight: Weight) -> Iterator[Bytes]:
            for data, count in values_of(source, ahead, weight.array, weight.numel, weight.dtype, advance):
                if count:
                    lost[weight.name] = lost.get(weight.name, 0) + count
                yield data

        write_archive(sink, state, ((weight.nbytes, parts(weight)) for weight in weights))
        sink.finish()
    return [Lost(name=name, count=count) for name, count in lost.items()]


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
