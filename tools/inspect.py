"""`zstore inspect`: shows step, world size, sizes and arrays of a checkpoint. No torch."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zstore.checkpoint import ArraySource, CheckpointReader, StoredArray, natural_key, stored_files
from zstore.errors import format_bytes, format_count

from .options import DEFAULTS, Common, Location, Tag, array_bytes, open_location
from .printing import cell, make_console, make_table, print_json, printable

if TYPE_CHECKING:
    from rich.table import Table


def inspect_command(ckpt: Location, common: Common = DEFAULTS, *, tag: Tag = None) -> int:
    """Print step, world size, sizes and arrays of a checkpoint, or one JSON object with `json` (see `describe`). Return the
    exit code."""
    with open_location(ckpt, common, tag) as source:
        if common.json:
            print_json(describe(source))
            return 0
        console = make_console()
        for line in _summary(source):
            console.print(printable(line), soft_wrap=True)
        console.print(_arrays_table(source))
    return 0


def describe(source: ArraySource) -> dict[str, Any]:
    """Return the document for `--json`: `checkpoint` (with totals in bytes) and `arrays`.

    Values that a checkpoint of other software does not have are null.
    """
    record, files = source.record, None
    if isinstance(source, CheckpointReader):
        files = stored_files(source.folder)
    committed = datetime.datetime.fromtimestamp(record.committed_ns / 1e9, tz=datetime.UTC)
    arrays = [source.arrays[name] for name in sorted(source.arrays, key=natural_key)]
    return {
        "checkpoint": {
            "tag": source.tag,
            "path": source.location,
            "kind": source.kind,
            "step": record.step,
            "world_size": record.world_size,
            "training_world_size": record.training_world_size,
            "committed": committed.isoformat(timespec="seconds") if record.committed_ns else None,
            "id": record.id,
            "run": record.run,
            "num_arrays": len(arrays),
            "parameters_left_out": record.absent_parameters,
            "array_bytes": array_bytes(source),
            "num_shard_files": None if files is None else sum(array.grid.num_shards for array in arrays),
            "file_bytes": None if files is None else sum(array.file_bytes for array in arrays),
            "num_files": None if files is None else files.num_files,
            "size_bytes": None if files is None else files.size_bytes,
        },
        "arrays": [_describe_array(source, array) for array in arrays],
    }


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


def _summary(source: ArraySource) -> Iterator[str]:
    facts = describe(source)["checkpoint"]
    trained = facts["training_world_size"]
    resharded = f" (trained on {trained})" if trained != facts["world_size"] else ""
    software = "" if source.kind == "zstore" else f"{source.kind}, "
    absent = len(facts["parameters_left_out"])
    yield (
        f"{facts['path']}: {software}step {facts['step']}, {format_count(facts['world_size'], 'rank')}{resharded}, "
        + format_count(facts["num_arrays"], "array")
        + (f", without {absent} frozen parameters" if absent else "")
    )
    yield f"  array data   {format_bytes(facts['array_bytes'])}"
    if facts["num_files"] is not None:
        shards, files = format_count(facts["num_shard_files"], "file"), format_count(facts["num_files"], "file")
        suffix = f", with checksums and padding{_compression(source, facts)}"
        yield f"  shard files  {format_bytes(facts['file_bytes'])} in {shards}{suffix}"
        yield f"  on disk      {format_bytes(facts['size_bytes'])} in {files}, metadata included"


def _compression(source: ArraySource, facts: Mapping[str, Any]) -> str:
    codecs = sorted({array.codec.name for array in source.arrays.values() if array.codec is not None})
    if not codecs or not facts["file_bytes"]:
        return ""
    return f", compressed with {', '.join(codecs)} ({facts['array_bytes'] / facts['file_bytes']:.2f} times)"


def _arrays_table(source: ArraySource) -> Table:
    table = make_table(("array", "shape", "type"), ("array data", "shards"))
    for name in sorted(source.arrays, key=natural_key):
        array = source.arrays[name]
        spec = array.spec
        tied = f" = {', '.join(spec.aliases)}" if spec.aliases else ""
        facts = (cell(list(spec.shape)), spec.dtype, format_bytes(spec.nbytes), str(array.grid.num_shards))
        table.add_row(cell(name + tied), *facts)
    return table
