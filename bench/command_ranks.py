"""Commands that go over all bytes of a checkpoint, on several processes: what 64 would each do, by their plans, and what 1
and 2 take here.

    python -m bench.command_ranks [--path FOLDER] [--mib 2048] [--processes 64] [--out FILE]

The plans are of a GPT of 6.6 billion parameters, saved by 64 ranks and by 1. What is measured is the time that a command says
of itself, without the start of the interpreter; every file is dropped from the page cache before. A process alone uses all
cores by its threads, so it is also measured with each process kept to one core: what a second machine brings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import machine
from bench.process import drop_page_cache
from bench.scale_model import Trillion, stored_grids
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.source import StoredArray
from zstore.checkpoint.verify import shares_of_shards
from zstore.format.partition import make_grid
from zstore.io.shards import open_resources
from zstore.open.sources import open_source
from zstore.ranks.division import items_of
from zstore.weights.file import BLOCK_BYTES
from zstore.weights.layout import MAX_FILE_BYTES, Weight, parts_of, plan_files

Row = dict[str, Any]

_LAUNCH = """
import sys
from zstore.tools.train.command import launch
launch([sys.executable, "-c", *sys.argv[2:]], int(sys.argv[1]))
"""
_PROGRAM = """
import os, sys
cores = sorted(os.sched_getaffinity(0))
if sys.argv.pop(1) == "one core":
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
from zstore.tools.cli import main
sys.argv[0] = "zstore"
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder for the checkpoint")
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint that is gone over")
    parser.add_argument("--processes", type=int, default=64, help="to plan for")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="+", default=["verify", "consolidate", "reshard"], help="to measure")
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    model = Trillion(layers=options.layers, hidden=options.hidden)
    planned = [row for ranks in (64, 1) for row in plan(model, ranks, options.processes)]
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
        measured = measure(Path(folder), options.mib, options.rounds, options.commands)
    figures = {"machine": machine(options.path), "parameters": model.parameters, "planned": planned}
    figures["measured"] = measured
    for line in describe(figures):
        print(line)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def plan(model: Trillion, saved_by: int, processes: int) -> list[Row]:
    """Return what each of so many processes does of a checkpoint."""
    specs = model.specs()
    grids = stored_grids(specs, saved_by)
    arrays = {name: StoredArray(spec=specs[name], grid=grids[name], folder=name) for name in specs}
    weights = [
        Weight(name=name.partition("/")[2], array=name, shape=spec.shape, dtype="bfloat16")
        for name, spec in specs.items()
        if name.startswith("model/")
    ]
    layouts = plan_files(weights, MAX_FILE_BYTES)
    new = {name: make_grid(spec.stored_shape, 48) for name, spec in specs.items()}
    shards = [grid.shard_valid_numel(rank) * 4 for rank in range(48) for grid in new.values()]

    def verified(rank: int) -> int:
        shares = shares_of_shards(arrays, rank, processes)
        return sum((stop - first) * arrays[name].grid.chunk_numel * 4 for name, _, first, stop in shares)

    def written(rank: int) -> int:
        return sum(part.stop - part.start for part in parts_of(layouts, BLOCK_BYTES, rank, processes))

    def resharded(rank: int) -> int:
        return sum(shards[number] for number in items_of(shards, rank, processes))

    kinds = {"verify": verified, "consolidate": written, "reshard to 48 ranks": resharded}
    rows = []
    for kind, bytes_of in kinds.items():
        each = [bytes_of(rank) for rank in range(processes)]
        row = {"command": kind, "saved_by": saved_by, "processes": processes, "bytes": sum(each)}
        rows.append(row | {"most": max(each), "over_mean": max(each) / (sum(each) / processes)})
    return rows


def measure(folder: Path, mib: int, rounds: int, kinds: list[str]) -> list[Row]:
    """Return the seconds of each command by 1 and 2 processes, of all cores and of one core each; the median."""
    run = make_checkpoint(folder, mib)
    out = folder / "out"
    commands = {
        "verify": ["verify", str(run)],
        "consolidate": ["consolidate", str(run), str(out), "--dtype", "bf16"],
        "reshard": ["reshard", str(run), str(out), "--world-size", "3"],
    }
    rows: list[Row] = []
    for kind in kinds:
        words = commands[kind]
        for cores in ("all cores", "one core"):
            seconds: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(rounds):
                for processes, times in seconds.items():
                    drop_page_cache(run)
                    done = _launched(processes, cores, [*words, "--json"])
                    times.append(done["seconds"])
                    shutil.rmtree(out, ignore_errors=True)
            one, two = (statistics.median(seconds[processes]) for processes in (1, 2))
            rows.append({"command": kind, "cores": cores, "one_s": one, "two_s": two, "bytes": done["bytes"]})
    return rows


def make_checkpoint(folder: Path, mib: int) -> Path:
    """Write safetensors of so many MiB and make a checkpoint of two ranks of them."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    rows = max(8, mib * 2**20 // (8 * 4 * 1024))
    tensors = {f"h.{number}.w": rng.standard_normal((rows, 1024), dtype=np.float32) * 0.02 for number in range(8)}
    weights = folder / "weights"
    weights.mkdir()
    save_file(tensors, weights / "model.safetensors")
    with open_resources() as resources, open_source(weights, resources=resources) as source:
        path = reshard_checkpoint(source, folder / "run", 2)
    shutil.rmtree(weights)
    return path


def _launched(processes: int, cores: str, words: list[str]) -> Row:
    command = [sys.executable, "-c", _LAUNCH, str(processes), _PROGRAM, cores, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: Row = json.loads(done.stdout)
    return found


def describe(figures: Row) -> list[str]:
    """Return the figures for a person to read."""
    planned = [
        f"  {row['command']}, saved by {row['saved_by']}: {row['bytes'] / 1e9:.1f} GB, at most "
        f"{row['most'] / 1e9:.3f} GB a process of {row['processes']}, {row['over_mean']:.3f} of the mean"
        for row in figures["planned"]
    ]
    measured = [
        f"  {row['command']}, {row['cores']}: 1 process {row['one_s']:.2f} s, 2 processes {row['two_s']:.2f} s, "
        f"{row['one_s'] / row['two_s']:.2f} times as fast; {row['bytes'] / row['two_s'] / 1e9:.2f} GB/s"
        for row in figures["measured"]
    ]
    return [f"{figures['parameters'] / 1e9:.1f} billion parameters", *planned, *measured]


if __name__ == "__main__":
    main()
