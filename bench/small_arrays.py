"""A save of many tiny arrays beside `torch.save` and beside the least that the format takes: its folders and files alone.

    python -m bench.small_arrays --parameters 1000 --rounds 5

Each round saves the same state, a thousand parameters of three elements with Adam on disk: by `torch.save`, made durable; by a
program that makes the folders and files of the checkpoint with their bytes, and nothing else, and by one that leaves out the
arrays' documents, which are in the root's too; by the engine. The first save makes every file, later ones link the documents.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import zstore
from bench.machine import machine


class Tiny(nn.Module):
    """Many parameters of three elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * x).sum() for part in self.parts]).sum()


def timed(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def torch_saves(state: Any, path: Path) -> None:
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def copy_bare(source: Path, target: Path, *, documents: bool) -> float:
    """Return the seconds that it takes to make folders and files like those of `source`, with their bytes, durable."""
    folders = [Path(where).relative_to(source) for where, _, _ in os.walk(source)]
    files = {
        path.relative_to(source): path.read_bytes()
        for where, _, names in os.walk(source)
        for path in map(Path(where).joinpath, names)
    }

    if not documents:
        files = {name: data for name, data in files.items() if name.name != "zarr.json" or len(name.parts) == 1}

    def make() -> None:
        for folder in folders:
            os.mkdir(target / folder)
        for name, data in files.items():
            fd = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
            os.write(fd, data)
            os.close(fd)
        os.sync()

    return timed(make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to use")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path, prefix="zstore-bench-") as made:
        folder = Path(made)
        zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": zero,
            "zstore": {"keep": 1},
            "steps_per_print": 0,
        }
        plain, model = Tiny(args.parameters), Tiny(args.parameters)
        adam = torch.optim.Adam(plain.parameters())
        plain(torch.ones(3)).backward()
        adam.step()
        theirs: list[float] = []
        bare: list[float] = []
        least: list[float] = []
        ours: list[float] = []
        with zstore.initialize(model=model, config=config)[0] as engine:
            for number in range(args.rounds + 1):
                engine.backward(engine(torch.ones(3)))
                engine.step()
                state = {"model": plain.state_dict(), "optimizer": adam.state_dict()}
                theirs.append(timed(lambda number=number, state=state: torch_saves(state, folder / f"{number}.pt")))
                ours.append(timed(lambda number=number: engine.save_checkpoint(str(folder / "ckpt"), tag=f"s{number}")))
                saved = folder / "ckpt" / f"s{number}"
                num_files = sum(len(names) for _, _, names in os.walk(saved))
                for times, documents in ((bare, True), (least, False)):
                    times.append(copy_bare(saved, folder / "bare", documents=documents))
                    shutil.rmtree(folder / "bare")
        print(f"{machine(folder)}; {3 * args.parameters} arrays in {num_files} files")
        print("| save | engine | torch.save | its files alone | without documents |")
        print("|---|---|---|---|---|")
        print(f"| first | {ours[0]:.2f} | {theirs[0]:.2f} | {bare[0]:.2f} | {least[0]:.2f} |")
        found = [median(times[1:]) for times in (ours, theirs, bare, least)]
        print("| later, median of {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |".format(args.rounds, *found))
        ratios = [median(a / b for a, b in zip(ours[1:], times[1:], strict=True)) for times in (theirs, bare, least)]
        print("| ratio, pair by pair | 1 | {:.1f} | {:.2f} | {:.2f} |".format(*ratios))


if __name__ == "__main__":
    main()
