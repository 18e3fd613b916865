"""Saves through torch.distributed.checkpoint: zstore's writer beside torch's own.

    python -m bench.dcp [--path FOLDER] [--sizes 1 11 64 264 1024] [--ranks 1 2 4] [--rounds 10] [--seconds 20]

How long saves of 50 tensors of so many MB in all take at so many ranks, as a share of what torch's writer takes with its own
fsync. The two run in turn, each save to a new folder; the ratio is the median of those of the pairs.
Where a size's pairs take longer than `--seconds`, those count that were run by then, at least three.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zstore.dcp

_FEW_MB = 64
"""What smaller saves wrote is removed at the end: ext4 passes over inodes that were freed in the last minutes, one by one,
whenever it makes a file near them."""
_LEAST_ROUNDS = 3
_NUM_TENSORS = 50
_COLUMNS = 512


@dataclass(frozen=True)
class Pairs:
    """What saves are compared: of `megabytes` by `world_size` ranks, `rounds` times or for so many seconds."""

    folder: Path
    megabytes: int
    world_size: int
    rounds: int
    seconds: float


def measure_pairs(pairs: Pairs) -> None:
    """Print what saves of both writers take in turn, each rank a process."""
    if pairs.world_size == 1:
        _save_in_turn(0, pairs)
    else:
        mp.spawn(_save_in_turn, (pairs,), nprocs=pairs.world_size)  # type: ignore[attr-defined, no-untyped-call]


def _save_in_turn(rank: int, pairs: Pairs) -> None:
    folder, megabytes, world_size = pairs.folder, pairs.megabytes, pairs.world_size
    name = f"{megabytes}-{world_size}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks-{name}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    rows = max(1, megabytes * 10**6 // (4 * _COLUMNS * _NUM_TENSORS))
    whole = (torch.randn(rows, _COLUMNS) for _ in range(_NUM_TENSORS))
    tensors = [distribute_tensor(each, mesh, [Shard(0)]) for each in whole]
    state: dict[str, Any] = {"model": {f"w{i}": each for i, each in enumerate(tensors)}}
    seconds: list[tuple[float, float]] = []
    begun = time.monotonic()
    for number in range(pairs.rounds + 1):
        # All ranks go on or none.
        late = torch.tensor(float(number > _LEAST_ROUNDS and time.monotonic() - begun > pairs.seconds))
        dist.all_reduce(late)
        if late:
            break
        path = folder / f"{name}-{number}"
        ours = _timed_save(state, zstore.dcp.Writer(path / "step-1"))
        theirs = _timed_save(state, FileSystemWriter(path / "torch", sync_files=True))
        seconds.append((ours, theirs))
        if rank == 0 and megabytes > _FEW_MB:
            shutil.rmtree(path)
    dist.destroy_process_group()
    if rank == 0:
        ratios = [ours / theirs for ours, theirs in seconds[1:]]
        ours, theirs = (1000 * statistics.median(times) for times in zip(*seconds[1:], strict=True))
        print(
            f"{megabytes} MB, {world_size} ranks: zstore {ours:.0f} ms, torch {theirs:.0f} ms, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)",
            flush=True,
        )


def _timed_save(state: dict[str, Any], writer: Any) -> float:
    """Return the seconds until all ranks have saved."""
    dist.barrier()
    started = time.perf_counter()
    save(state, storage_writer=writer)
    dist.barrier()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 11, 64, 264, 1024], help="MB of the pairs' saves")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=10, help="pairs that count, after one that does not")
    parser.add_argument("--seconds", type=float, default=20.0, help="after which no more pairs of a size begin")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for megabytes, world_size in product(options.sizes, options.ranks):
            measure_pairs(Pairs(Path(folder), megabytes, world_size, options.rounds, options.seconds))


if __name__ == "__main__":
    main()
