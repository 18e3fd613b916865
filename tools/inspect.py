"""`zstore inspect`: the contents of a folder of checkpoints, or of one of them. No torch."""

from __future__ import annotations

import datetime
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zstore.checkpoint import (
    METADATA_FILE,
    RECORD_FILE,
    ArraySource,
    CheckpointReader,
    Refusal,
    StoredArray,
    TagInfo,
    list_tags,
    natural_key,
    stored_files,
)
from zstore.errors import CheckpointNotFoundError
from zstore.open.sources import folder_of, split_location
from zstore.remote.url import shown
from zstore.sizes import format_bytes, format_count

from .listing import describe_refusals, print_refusals
from .opening import DEFAULTS, Common, array_bytes, open_location, read_of, reporting
from .options import Location, Tag
from .printing import cell, make_console, make_table, printable

if TYPE_CHECKING:
    from rich.table import Table

_LAYER = re.compile(r"([^.]+\.)*?\d+(?=\.)")


def inspect_command(ckpt: Location, common: Common = DEFAULTS, *, tag: Tag = None) -> int:
    """Print tags and, of the newest checkpoint or `tag`, step, world size and arrays; return the exit code.

    With `json`, one JSON object (see `describe`), and the bytes read.
    """
    title = f"inspect {shown(os.fspath(ckpt))}"
    with reporting(title, common) as progress, open_location(ckpt, common, tag) as source:
        infos, refusals = _neighbours(ckpt, source, common)
        progress.advance(_opened_bytes(source))
        read = read_of(progress, source)
        progress.document |= (describe(source, infos, refusals) | read) if common.json else {}
    if not common.json:
        console = make_console()
        if infos:
            console.print(_tags_table(infos, source))
        for line in _summary(source):
            console.print(printable(line), soft_wrap=True)
        console.print(_arrays_table(source))
        print_refusals(refusals)
    return 0


def _opened_bytes(source: ArraySource) -> int:
    """Return the bytes that were read to open it; 0 for other software's, which are not counted."""
    if not isinstance(source, CheckpointReader):
        return source.read_bytes
    if not source.folder.is_local:
        return source.reading().read_bytes
    return sum(os.stat(source.path / file).st_size for file in (METADATA_FILE, RECORD_FILE))


def _neighbours(
    ckpt: str | os.PathLike[str], source: ArraySource, common: Common
) -> tuple[list[TagInfo], list[Refusal]]:
    """Return the checkpoints in the folder, and those that only look like one; nothing for other software's."""
    if not isinstance(source, CheckpointReader):
        return [], []
    folder = folder_of(split_location(ckpt)[0], common.storage_options)
    try:
        found = list_tags(folder)
    except CheckpointNotFoundError:  # `DIR/TAG` and `DIR@TAG` name a tag whose folder has another name
        found = list_tags(source.folder)
    return list(found.tags), list(found.refusals)


def describe(source: ArraySource, infos: list[TagInfo], refusals: list[Refusal]) -> dict[str, Any]:
    """Return the document of `--json`: `tags`, `refused`, `checkpoint` (with totals in bytes), `arrays`.

    Facts that another software's checkpoint does not tell are null.
    """
    record = source.record
    return {
        "tags": [
            {
                "tag": info.tag,
                "path": info.location,
                "step": info.record.step,
                "world_size": info.record.world_size,
                "committed": _time(info.record.committed_ns),
            }
            for info in infos
        ],
        "refused": describe_refusals(refusals),
        "checkpoint": {
            "tag": source.tag,
            "path": source.location,
            "kind": source.kind,
            "step": record.step,
            "world_size": record.world_size,
            "training_world_size": record.training_world_size,
            "committed": _time(record.committed_ns),
            "id": record.id,
            "run": record.run,
            "num_arrays": len(source.arrays),
            "parameters_left_out": record.absent_parameters,
            "array_bytes": array_bytes(source),
            **_describe_files(source),
        },
        "arrays": [_describe_array(source, array) for array in sorted_arrays(source.arrays)],
    }


def sorted_arrays(arrays: Mapping[str, StoredArray]) -> list[StoredArray]:
    """Return the arrays by name, `h.2` before `h.10`."""
    return [arrays[name] for name in sorted(arrays, key=natural_key)]


def _describe_array(source: ArraySource, array: StoredArray) -> dict[str, Any]:
    spec, grid = array.spec, array.grid
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "bytes": spec.nbytes,
        "file_bytes": array.file_bytes if source.record.id else None,
        "shards": grid.num_shards,
        "shard_rows": grid.shard_rows,
        "chunk": [grid.chunk_rows, grid.chunk_cols],
        "aliases": list(spec.aliases),
        "folder": array.folder,
        "codec": "none" if array.codec is None else array.codec.name,
    }


def _describe_files(source: ArraySource) -> dict[str, int | None]:
    """Return how many files of how many bytes there are (see [Note: sizes]); null if other software laid them out."""
    if not isinstance(source, CheckpointReader):
        return {"num_shard_files": None, "file_bytes": None, "num_files": None, "size_bytes": None}
    files = stored_files(source.folder)
    return {
        "num_shard_files": sum(array.grid.num_shards for array in source.arrays.values()),
        "file_bytes": sum(array.file_bytes for array in source.arrays.values()),
        "num_files": files.num_files,
        "size_bytes": files.size_bytes,
    }


def _time(committed_ns: int) -> str | None:
    if not committed_ns:
        return None
    return datetime.datetime.fromtimestamp(committed_ns / 1e9, tz=datetime.UTC).isoformat(timespec="seconds")


def _tags_table(infos: list[TagInfo], source: ArraySource) -> Table:
    table = make_table(("tag",), ("step", "world size", "committed"), format_count(len(infos), "checkpoint"))
    for info in infos:
        mark = " <-" if info.location == source.location and len(infos) > 1 else ""
        record = info.record
        table.add_row(cell(info.tag) + mark, str(record.step), str(record.world_size), _time(record.committed_ns))
    return table


def _summary(source: ArraySource) -> Iterator[str]:
    facts = describe(source, [], [])["checkpoint"]
    trained = facts["training_world_size"]
    resharded = f" (trained on {trained})" if trained != facts["world_size"] else ""
    whose = "" if source.kind == "zstore" else f"{source.kind}, "
    absent = len(facts["parameters_left_out"])
    yield (
        f"{facts['path']}: {whose}step {facts['step']}, {format_count(facts['world_size'], 'rank')}{resharded}, "
        + format_count(facts["num_arrays"], "array")
        + (f", without {absent} frozen parameters" if absent else "")
    )
    yield f"  array data   {format_bytes(facts['array_bytes'])}"
    if facts["num_files"] is not None:
        shards, files = format_count(facts["num_shard_files"], "file"), format_count(facts["num_files"], "file")
        also = f", with checksums and padding{_archive(source, facts)}"
        yield f"  shard files  {format_bytes(facts['file_bytes'])} in {shards}{also}"
        yield f"  on disk      {format_bytes(facts['size_bytes'])} in {files}, metadata included"


def _archive(source: ArraySource, facts: Mapping[str, Any]) -> str:
    codecs = sorted({array.codec.name for array in source.arrays.values() if array.codec is not None})
    if not codecs or not facts["file_bytes"]:
        return ""
    return f", compressed with {', '.join(codecs)} ({facts['array_bytes'] / facts['file_bytes']:.2f} times)"


def _arrays_table(source: ArraySource) -> Table:
    from rich.text import Text

    table = make_table(("array", "shape", "type"), ("array data", "shards"))
    for group, members in _grouped(sorted_arrays(source.arrays), lambda array: _group(array.spec.name)):
        table.add_row(Text(cell(group), "bold"), *_totals(members), style="cyan")
        for layer, parts in _grouped(members, _layer):
            indent = "  "
            if layer and len(parts) > 1:
                table.add_row(f"  {cell(layer)}", *_totals(parts), style="dim")
                indent = "    "
            for array in parts:
                spec = array.spec
                cells = [cell(list(spec.shape)), spec.dtype, format_bytes(spec.nbytes), str(array.grid.num_shards)]
                table.add_row(indent + cell(_inside(array)), *cells)
    return table


def _grouped(arrays: Sequence[StoredArray], key: Callable[[StoredArray], str]) -> list[tuple[str, list[StoredArray]]]:
    """Return neighbours with the same key together."""
    return [(name, list(members)) for name, members in itertools.groupby(arrays, key)]


def _group(name: str) -> str:
    """Return the group of an array's name, with the slot in `optimizer`."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "optimizer" and len(parts) > 2 else parts[0]


def _inside(array: StoredArray) -> str:
    """Return the array's name inside its group, with the names that are tied to it."""
    spec = array.spec
    tied = f" = {', '.join(spec.aliases)}" if spec.aliases else ""
    return (spec.name[len(_group(spec.name)) + 1 :] or spec.name) + tied


def _layer(array: StoredArray) -> str:
    """Return the part of an array's name up to its first number, like `transformer.h.0`; empty if there is none."""
    match = _LAYER.match(_inside(array))
    return match.group() if match else ""


def _totals(arrays: Sequence[StoredArray]) -> tuple[str, str, str, str]:
    return f"{len(arrays)} arrays", "", format_bytes(sum(array.spec.nbytes for array in arrays)), ""
