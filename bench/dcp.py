"""Saves through torch.distributed.checkpoint: zstore's writer beside torch's own, in one process.

    python -m bench.dcp [--path FOLDER] [--mib 512]
    python -m bench.dcp --pairs [--path FOLDER] [--sizes 1 11 64 264 1024] [--ranks 1 2 4] [--rounds 10]
        [--seconds 20] [--disk]

Prints how long asynchronous saves hold the caller up, by a thread and by a process.

With `--pairs`: how long saves of 50 tensors of so many MB in all take at so many ranks, as a share of what torch's writer
takes with its own fsync. The two run in turn, each save to a new folder; the ratio is the median of those of the pairs.
Where a size's pairs take longer than `--seconds`, those count that were run by then, at least three. `--disk` also saves
an optimizer's state that rests on disk, which torch's writer reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zstore.dcp
from zstore.optim import Offloaded

_ROUNDS = 5
_FEW_MB = 64
"""What smaller saves wrote is removed at the end: ext4 passes over inodes that were freed in the last minutes, one by one,
whenever it makes a file near them."""
_LEAST_ROUNDS = 3
_NUM_TENSORS = 50
_COLUMNS = 512


def stalls(
    state: dict[str, Any], folder: Path, make: Callable[[Path], Any], stager: Any, kind: Any
) -> tuple[float, float]:
    """Return the median seconds until `async_save` returns with the state copied, and until the save is done."""
    group = dist.new_group(backend="gloo")
    held, done = [], []
    for number in range(_ROUNDS + 1):
        state["model"]["w0"] += 1
        started = time.perf_counter()
        result: Any = async_save(
            state,
            storage_writer=make(folder / f"step-{number}"),
            process_group=group,
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        held.append(time.perf_counter() - started)
        (getattr(result, "upload_completion", None) or result).result()
        done.append(time.perf_counter() - started)
        shutil.rmtree(folder / f"step-{number}")
    return statistics.median(held[1:]), statistics.median(done[1:])


@dataclass(frozen=True)
class Pairs:
    """What saves are compared: of `megabytes` by `world_size` ranks, `rounds` times or for so many seconds."""

    folder: Path
    megabytes: int
    world_size: int
    rounds: int
    seconds: float
    rests: bool

    @property
    def name(self) -> str:
        return f"{self.megabytes}-{self.world_size}-{self.rests}"


def measure_pairs(pairs: Pairs) -> None:
    """Print what saves of both writers take in turn, each rank a process."""
    given, world_size = (pairs,), pairs.world_size
    if world_size == 1:
        _save_in_turn(0, *given)
    else:
        mp.spawn(_save_in_turn, given, nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]


def _save_in_turn(rank: int, pairs: Pairs) -> None:
    folder, megabytes, world_size = pairs.folder, pairs.megabytes, pairs.world_size
    meeting = folder / f"ranks-{pairs.name}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    rows = max(1, megabytes * 10**6 // (4 * _COLUMNS * _NUM_TENSORS))
    whole = (torch.randn(rows, _COLUMNS) for _ in range(_NUM_TENSORS))
    tensors = [distribute_tensor(each, mesh, [Shard(0)]) for each in whole]
    state: dict[str, Any] = {"model": {f"w{i}": each for i, each in enumerate(tensors)}}
    optimizer = _resting(tensors[::2], folder / f"state-{pairs.name}") if pairs.rests else None
    if optimizer is not None:
        state = {"optim": optimizer.state_dict()}
    seconds: list[tuple[float, float]] = []
    begun = time.monotonic()
    for number in range(pairs.rounds + 1):
        # All ranks go on or none.
        late = torch.tensor(float(number > _LEAST_ROUNDS and time.monotonic() - begun > pairs.seconds))
        dist.all_reduce(late)
        if late:
            break
        path = folder / f"{pairs.name}-{number}"
        ours = _timed_save(state, zstore.dcp.Writer(path / "step-1"))
        theirs = _timed_save(state, FileSystemWriter(path / "torch", sync_files=True))
        seconds.append((ours, theirs))
        if rank == 0 and megabytes > _FEW_MB:
            shutil.rmtree(path)
    if optimizer is not None:
        optimizer.close()
    dist.destroy_process_group()
    if rank == 0:
        ratios = [ours / theirs for ours, theirs in seconds[1:]]
        ours, theirs = (1000 * statistics.median(times) for times in zip(*seconds[1:], strict=True))
        where = ", from disk" if pairs.rests else ""
        print(
            f"{megabytes} MB{where}, {world_size} ranks: zstore {ours:.0f} ms, torch {theirs:.0f} ms, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)",
            flush=True,
        )


def _resting(tensors: list[DTensor], folder: Path) -> Offloaded:
    """Return an optimizer whose state rests on disk: two tensors for each of `tensors`."""
    folder.mkdir(exist_ok=True)
    parameters = [torch.nn.Parameter(each) for each in tensors]
    optimizer = Offloaded(torch.optim.AdamW, parameters, lr=1e-3, device="nvme", path=folder)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


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
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--pairs", action="store_true", help="compare with torch's writer, in turn")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 11, 64, 264, 1024], help="MB of the pairs' saves")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=10, help="pairs that count, after one that does not")
    parser.add_argument("--seconds", type=float, default=20.0, help="after which no more pairs of a size begin")
    parser.add_argument("--disk", action="store_true", help="also save state that rests on disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        if not options.pairs:
            measure(Path(folder), options.mib)
            return
        for rests in (False, True)[: 1 + options.disk]:
            for megabytes in options.sizes:
                for world_size in options.ranks:
                    given = (megabytes, world_size, options.rounds, options.seconds, rests)
                    measure_pairs(Pairs(Path(folder), *given))


def measure(folder: Path, mib: int) -> None:
    """Measure with a state dict of `mib` MiB, and print what was found."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    rows = mib * 2**20 // 10 // 4096 // 4
    state = {"model": {f"w{i}": torch.randn(rows, 4096) for i in range(10)}}
    writers: dict[str, Callable[[Path], Any]] = {
        "torch": FileSystemWriter,
        "zstore": zstore.dcp.Writer,
    }
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        shared = kind is AsyncCheckpointerType.PROCESS
        for name, make in writers.items():
            # By a thread, what `async_save` makes by itself; by a process, one whose memory is shared and kept.
            stager = DefaultStager(StagingOptions(False, True, False, False)) if shared else None
            held, done = stalls(state, folder / name, make, stager, kind)
            print(f"{name}, by a {kind.value}: {1000 * held:.0f} ms until training goes on, {done:.2f} s until saved")
            if stager is not None:
                stager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
