"""What is done to a checkpoint without an engine or torch, each in a process of its own: `bench.checkpoint` starts them."""

import importlib
from pathlib import Path

import numpy as np

from bench.process import Spec, Tell, drop_page_cache, measured, resident_bytes, serve, versions
from zstore.checkpoint.lookahead import Range, read_into
from zstore.checkpoint.reader import ArraySource, open_checkpoint
from zstore.format.arrays import make_grid
from zstore.io.memory import make_slab
from zstore.io.shards import open_resources
from zstore.tools.cli import app

_STATE = ("model/", "optimizer/")


def run() -> None:
    """Do what the first argument says."""
    serve(CONTENDERS)


def _rows(spec: Spec, tell: Tell) -> None:
    """Read the rows that rank `rank` of `ranks` owns into memory, each chunk verified: a load without an engine."""
    folder = Path(spec["folder"])
    drop_page_cache(folder)
    with open_resources(num_threads=8) as resources, open_checkpoint(folder, resources=resources) as reader:
        ranges = owned_ranges(reader, spec["ranks"], spec["rank"])
        sizes = [(stop - first) * reader.arrays[name].spec.itemsize for name, first, stop in ranges]
        slab = make_slab(sum(sizes))
        slab[:] = 1  # a rank has its state's memory before it loads
        ends = np.cumsum(sizes).tolist()
        targets = [slab[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        before = reader.read_bytes
        _, figures = measured(lambda: read_into(reader, list(zip(ranges, targets, strict=True))))
        needed = sum(target.nbytes for target in targets)
        tell("load", **figures, needed_bytes=needed, over_read=(reader.read_bytes - before) / needed)
    tell("end", versions=versions())


def owned_ranges(reader: ArraySource, num_ranks: int, rank: int) -> list[Range]:
    """Return the elements of the training state that a rank of another world size owns."""
    ranges: list[Range] = []
    for name, array in reader.arrays.items():
        grid = make_grid(array.spec.stored_shape, num_ranks)
        numel = grid.shard_valid_numel(rank)
        if name.startswith(_STATE) and numel:
            ranges.append((name, rank * grid.shard_numel, rank * grid.shard_numel + numel))
    return ranges


def _command(spec: Spec, tell: Tell) -> None:
    """Run a `zstore` command, `arguments`, with what it imports loaded before."""
    importlib.import_module(f"zstore.tools.{spec['arguments'][0]}")
    drop_page_cache(Path(spec["folder"]))
    before = resident_bytes()
    tell("begin", before_bytes=before)
    _, figures = measured(lambda: app(spec["arguments"], standalone_mode=False))
    tell("convert", **figures, before_bytes=before)
    tell("end", versions=versions())


CONTENDERS = {"rows": _rows, "command": _command}
"""What a process may be asked for, by `contender`."""
