"""What a checkpoint of a trillion parameters takes to plan: no data, but every other step of a save on 4,096 ranks, and of a
load on 3,072, as single ranks do them, each in a process of its own.

    python -m bench.scale [--save-ranks 4096] [--load-ranks 3072] [--out FILE]

A rank that saves: cuts every array, lists its shards with their bytes, and writes its manifest (with checksums made up).
Rank 0 besides: all metadata, the look at every rank's manifest (timed on some, which are files, and multiplied), and the
commit record. A rank that loads: reads record, metadata and the manifests that name its chunks, and plans its reads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.children import run_child
from bench.machine import machine
from bench.scale_model import Trillion, checkpoint_bytes, over_read

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-ranks", type=int, default=4096)
    parser.add_argument("--load-ranks", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=Trillion.layers)
    parser.add_argument("--hidden", type=int, default=Trillion.hidden)
    parser.add_argument("--manifests", type=int, default=32, help="that are written and looked at")
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder for them")
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    figures = {"machine": machine(options.path), **measure(options)}
    for line in describe(figures):
        print(line)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> Row:
    """Return what each kind of rank needs, and what the checkpoint is made of."""
    model = Trillion(layers=options.layers, hidden=options.hidden)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
        spec = {"folder": folder, "model": asdict(model), "save_ranks": options.save_ranks}
        spec |= {"load_ranks": options.load_ranks, "manifests": min(options.manifests, options.save_ranks)}
        loading = sorted({0, options.load_ranks // 2, options.load_ranks * 7 // 8})
        spec["loading"] = loading
        rows: list[Row] = []
        for contender, ranks in (("save", [options.save_ranks // 2]), ("lead", [0]), ("load", loading)):
            for rank in ranks:
                told = run_child("bench.scale_ranks", spec | {"contender": contender, "rank": rank})
                if told.error is not None:
                    raise RuntimeError(f"{contender} of rank {rank} failed: {told.error}")
                rows += [{"who": contender, "rank": rank, **each} for each in told.events]
    specs = model.specs()
    return {
        "parameters": model.parameters,
        "arrays": len(specs),
        "save_ranks": options.save_ranks,
        "load_ranks": options.load_ranks,
        **checkpoint_bytes(specs, options.save_ranks),
        "over_read": over_read(specs, options.save_ranks, options.load_ranks),
        "rows": rows,
    }


def describe(figures: Row) -> list[str]:
    """Return the figures for a person to read."""
    size = f"{figures['files']:,} shard files of {figures['file_bytes'] / 1e12:.2f} TB in all"
    lines = [
        f"{figures['parameters'] / 1e12:.3f} trillion parameters in {figures['arrays']} arrays",
        f"saved by {figures['save_ranks']} ranks: {size}, {figures['over_size']:.3f} of the state",
        f"largest rank: {figures['largest_share']:.3f} of the mean",
        f"loaded by {figures['load_ranks']} ranks: reads {figures['over_read']:.3f} of what is needed",
    ]
    for row in figures["rows"]:
        beside = [f"{value:,} {name.replace('_', ' ')}" for name, value in row.items() if name in _COUNTS]
        lines.append(
            f"{row['who']} of rank {row['rank']}, {row['event']}: {row['seconds']:.2f} s (processor {row['cpu_s']:.2f} s), "
            f"{(row['growth_bytes'] or 0) / 2**20:.0f} MiB" + "".join(f", {each}" for each in beside)
        )
    return lines


_COUNTS = ("shards", "manifest_bytes", "metadata_bytes", "record_bytes", "manifests_read", "chunk_ranges")


if __name__ == "__main__":
    main()
