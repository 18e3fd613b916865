"""The step of `zstore.optim.Offloaded` beside `torch.optim.AdamW(fused=True)` in memory, and from disk beside the disk.

Linear layers in fp32 with gradients that are there: only the optimizer's step is timed, in turn with the others. The limit
on disk is the bytes that the step moves, over the disk's rate for the same mix of reads and writes. Then the state on disk
is saved through torch.distributed.checkpoint, by torch's writer and by zstore's, and loaded: the memory that this takes.

    python -m bench.optimizer [--path FOLDER] [--layers 24] [--width 1024] [--steps 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import zstore.dcp
from bench.limits import disk_limit, limit_name
from bench.process import disk_bytes, forget_peak, peak_bytes, resident_bytes
from zstore.optim import Offloaded

_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two warm-up steps")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of the file that measures the limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is")  # of a save by one process
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        figures = measure(options, Path(name))
    print(describe(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def describe(figures: dict[str, Any]) -> str:
    """Return the figures for a person to read."""
    seconds = figures["step_s"]
    saves = "\n".join(
        f"{name}: {each['s']:.2f} s, {each['more_bytes'] / 1e6:.0f} MB more memory at its peak"
        + (f", {each['new_blocks_bytes'] / 1e6:.0f} MB of new disk blocks" if "new_blocks_bytes" in each else "")
        for name, each in figures["checkpoints"].items()
    )
    return (
        f"{figures['parameters'] / 1e6:.0f} M parameters in fp32, AdamW; median of {figures['steps']} steps\n"
        f'torch.optim.AdamW(fused=True) {seconds["torch"]:.4f} s; Offloaded, device="cpu" {seconds["cpu"]:.4f} s '
        f"({seconds['cpu'] / seconds['torch']:.2f} times)\n"
        f'Offloaded, device="nvme" {seconds["nvme"]:.4f} s: {figures["bytes_per_parameter"]:.2f} bytes of disk traffic a '
        f"parameter, {figures['rate']:.2f} GB/s; {figures['limit_name']} {figures['limit']:.2f} GB/s: "
        f"{figures['percent']:.1f} % of the limit\n"
        f"state on disk {figures['disk_bytes'] / 1e6:.0f} MB; peak of memory in steps from disk "
        f"{figures['step_more_bytes'] / 1e6:.0f} MB over weights and gradients\n{saves}"
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of alternating steps, of the limit, and of saves and a load."""
    nbytes = int(options.gib * 2**30)
    disk_limit(folder, "write", nbytes)
    limit = partial(disk_limit, folder, "mixed", nbytes)
    model = _model(options)
    before_bytes = resident_bytes()
    with Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-4, path=folder) as disk:
        forget_peak()
        rows = [_row(disk, limit) for _ in range(options.steps + _WARM_UP)][_WARM_UP:]
        step_more_bytes = peak_bytes() - before_bytes
        held = disk.statistics().disk_bytes
        checkpoints = _checkpoints(model, disk, folder)
    memory = Offloaded(torch.optim.AdamW, model.parameters(), lr=1e-4, device="cpu")
    torchs = torch.optim.AdamW(_model(options).parameters(), lr=1e-4, fused=True)
    pairs = [(_seconds(torchs.step), _seconds(memory.step)) for _ in range(options.steps + _WARM_UP)][_WARM_UP:]
    memory.close()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "steps": options.steps,
        "step_s": {
            "torch": statistics.median(pair[0] for pair in pairs),
            "cpu": statistics.median(pair[1] for pair in pairs),
            "nvme": statistics.median(row[0] for row in rows),
        },
        "bytes_per_parameter": rows[-1][1] / parameters,
        "limit_name": limit_name(),
        "rate": statistics.median(row[1] / row[0] for row in rows) / 1e9,
        "limit": statistics.median(row[2] for row in rows) / 1e9,
        "percent": statistics.median(100 * row[1] / row[0] / row[2] for row in rows),
        "disk_bytes": held,
        "step_more_bytes": step_more_bytes,
        "checkpoints": checkpoints,
    }


def _model(options: argparse.Namespace) -> nn.Module:
    """Return layers whose gradients are there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(options.width, options.width) for _ in range(options.layers)])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) / 100
    return model


def _row(optimizer: Offloaded, limit: Callable[[], float]) -> tuple[float, int, float]:
    """Return the seconds of a step, the bytes that it moved, and the disk's rate right after."""
    before = optimizer.statistics()
    seconds = _seconds(optimizer.step)
    after = optimizer.statistics()
    moved = after.disk_read_bytes + after.disk_write_bytes - before.disk_read_bytes - before.disk_write_bytes
    return seconds, moved, limit()


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _checkpoints(model: nn.Module, optimizer: Offloaded, folder: Path) -> dict[str, dict[str, float]]:
    """Save and load the optimizer's state, by torch's writer and by zstore's."""
    theirs, ours = folder / "theirs", folder / "ours"
    works: dict[str, Callable[[], Any]] = {
        "save by torch's writer": lambda: save(_state(optimizer), checkpoint_id=theirs),
        "save by zstore.dcp.Writer": lambda: save(_state(optimizer), storage_writer=zstore.dcp.Writer(ours)),
        "load by torch's reader": lambda: load(_state(optimizer), checkpoint_id=theirs),
        "load by zstore.dcp.Reader": lambda: load(_state(optimizer), storage_reader=zstore.dcp.Reader(ours)),
    }
    figures: dict[str, dict[str, float]] = {}
    for name, work in works.items():
        blocks = disk_bytes(folder)
        forget_peak()
        before = resident_bytes()
        seconds = _seconds(work)
        figures[name] = {"s": seconds, "more_bytes": max(0, peak_bytes() - before)}
        if name.startswith("save"):
            figures[name]["new_blocks_bytes"] = disk_bytes(folder) - blocks
    shutil.rmtree(theirs)
    return figures


def _state(optimizer: Offloaded) -> dict[str, Any]:
    return {"optim": {str(key): entry for key, entry in optimizer.state_dict()["state"].items()}}


if __name__ == "__main__":
    main()
