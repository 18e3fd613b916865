"""`zstore inspect`: what a folder of checkpoints, or one of them, holds. Reads metadata only; no torch."""

from __future__ import annotations

import datetime
import json as json_module
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zstore.checkpoint import CheckpointReader, StoredArray, TagInfo, open_checkpoint, refused, tags
from zstore.sizes import format_bytes
from zstore.weights import natural_key

_PLAIN_COLUMNS = 200
"""Width where stdout is no terminal: names are not cut for a pipe."""


def inspect_command(ckpt: Path, json: bool) -> int:
    """Print tags and, of the newest or named checkpoint, step, world size and arrays; return the exit code.

    With `json`, one JSON object (see `describe`).
    """
    with open_checkpoint(ckpt) as reader:
        if json:
            print(json_module.dumps(describe(ckpt, reader), indent=2))
            return 0
        console = Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS, highlight=False)
        _print_tags(console, tags(ckpt), reader)
        _print_summary(console, reader)
        console.print(_arrays_table(reader))
    for refusal in refused(ckpt):
        print(f"{refusal.path} is no checkpoint: {refusal.reason}", file=sys.stderr)
    return 0


def describe(ckpt: Path, reader: CheckpointReader) -> dict[str, Any]:
    """Return what `--json` prints: `tags`, `refused`, `checkpoint` (with totals in bytes), `arrays`."""
    record = reader.record
    return {
        "tags": [_describe_tag(info) for info in tags(ckpt)],
        "refused": [{"path": str(refusal.path), "reason": refusal.reason} for refusal in refused(ckpt)],
        "checkpoint": {
            "tag": reader.tag,
            "path": str(reader.path),
            "step": record.step,
            "world_size": record.world_size,
            "training_world_size": record.training_world_size,
            "committed": _time(record.committed_ns),
            "id": record.id,
            "run": record.run,
            "num_arrays": len(reader.arrays),
            "num_shard_files": sum(array.grid.num_shards for array in reader.arrays.values()),
            "num_files": _num_files(reader),
            "array_bytes": sum(array.spec.nbytes for array in reader.arrays.values()),
            "file_bytes": sum(array.file_bytes for array in reader.arrays.values()),
        },
        "arrays": [_describe_array(array) for _, array in sorted_arrays(reader.arrays)],
    }


def sorted_arrays(arrays: Mapping[str, StoredArray]) -> list[tuple[str, StoredArray]]:
    """Return names and arrays, `h.2` before `h.10`."""
    return sorted(arrays.items(), key=lambda item: natural_key(item[0]))


def _describe_tag(info: TagInfo) -> dict[str, Any]:
    record = info.record
    return {
        "tag": info.tag,
        "path": str(info.path),
        "step": record.step,
        "world_size": record.world_size,
        "committed": _time(record.committed_ns),
    }


def _describe_array(array: StoredArray) -> dict[str, Any]:
    spec, grid = array.spec, array.grid
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "bytes": spec.nbytes,
        "file_bytes": array.file_bytes,
        "shards": grid.num_shards,
        "shard_rows": grid.shard_rows,
        "chunk": [grid.chunk_rows, grid.chunk_cols],
        "aliases": list(spec.aliases),
        "folder": array.folder,
    }


def _num_files(reader: CheckpointReader) -> int:
    shards = sum(array.grid.num_shards for array in reader.arrays.values())
    # A zarr.json for each level below the root and one for the root, a manifest a rank, the record.
    levels = len(reader.documents["consolidated_metadata"]["metadata"]) + 1
    return shards + levels + reader.record.world_size + 1


def _time(committed_ns: int) -> str:
    return datetime.datetime.fromtimestamp(committed_ns / 1e9, tz=datetime.UTC).isoformat(timespec="seconds")


def _print_tags(console: Console, infos: list[TagInfo], reader: CheckpointReader) -> None:
    table = Table(title=f"{len(infos)} checkpoint(s)", title_justify="left")
    for column in ("tag", "step", "world size", "committed"):
        table.add_column(column, justify="left" if column in ("tag", "committed") else "right", overflow="fold")
    for info in infos:
        shown = escape(info.tag) + (" <-" if info.path == reader.path and len(infos) > 1 else "")
        record = info.record
        table.add_row(shown, str(record.step), str(record.world_size), _time(record.committed_ns))
    console.print(table)


def _print_summary(console: Console, reader: CheckpointReader) -> None:
    facts = describe(reader.path, reader)["checkpoint"]
    trained = facts["training_world_size"]
    resharded = f" (resharded, trained on {trained})" if trained != facts["world_size"] else ""
    console.print(
        f"{facts['path']}: step {facts['step']}, {facts['world_size']} rank(s){resharded}, {facts['num_arrays']} arrays of "
        f"{format_bytes(facts['array_bytes'])}, {facts['num_shard_files']} shard files of "
        f"{format_bytes(facts['file_bytes'])} (arrays x ranks that hold rows), {facts['num_files']} files in all",
        markup=False,
        soft_wrap=True,
    )


def _arrays_table(reader: CheckpointReader) -> Table:
    table = Table()
    table.add_column("array", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("type")
    table.add_column("bytes", justify="right")
    table.add_column("shards", justify="right")
    groups: dict[str, list[StoredArray]] = {}
    for name, array in sorted_arrays(reader.arrays):
        group = name.rpartition("/")[0] if name.startswith("optimizer/") else name.partition("/")[0]
        groups.setdefault(group, []).append(array)
    for group, arrays in groups.items():
        total = sum(array.spec.nbytes for array in arrays)
        table.add_row(f"[bold]{escape(group)}[/]", f"{len(arrays)} arrays", "", format_bytes(total), "", style="cyan")
        for array in arrays:
            spec = array.spec
            tied = f" = {', '.join(spec.aliases)}" if spec.aliases else ""
            table.add_row(
                f"  {escape(spec.name[len(group) + 1 :] + tied)}",
                escape(str(list(spec.shape))),
                spec.dtype,
                format_bytes(spec.nbytes),
                str(array.grid.num_shards),
            )
    return table
