"""The step of `zstore.optim.Offloaded` beside `torch.optim.AdamW(fused=True)` in memory, and from disk beside the disk.

Linear layers in fp32 with gradients that are there: only the optimizer's step is timed, in turn with the others. The limit
on disk is the bytes that the step moves, over the disk's rate for the same mix of reads and writes. Then the kernel of state in
host memory beside AdamW alone.

    python -m bench.optimizer [--path FOLDER] [--layers 24] [--width 1024] [--steps 6] [--json FILE]
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.limits import disk_limit, limit_name
from bench.machine import bench_parser, machine, write_figures
from bench.process import forget_peak, peak_bytes, resident_bytes
from zstore.engine.runtime.native import StepTensors, host_kernel
from zstore.optim import Offloaded

_WARM_UP = 2


def main() -> None:
    parser = bench_parser(__doc__, gib=2.0)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two warm-up steps")
    parser.add_argument("--peer-python", help="python of an environment with deepspeed, whose CPUAdam is measured too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        figures = measure(options, Path(name))
    print(describe(figures))
    write_figures(options.json, figures)


def describe(figures: dict[str, Any]) -> str:
    """Return the figures for a person to read."""
    seconds = figures["step_s"]
    kernels = "\n".join(
        f"host kernel, {threads} threads: {each['rate']:.1f} GB/s, {each['of_adamw']:.2f} of AdamW's rate and "
        f"{each['core_s_of_adamw']:.2f} of its core-seconds"
        for threads, each in figures["kernels"].items()
    )
    return (
        f"{figures['parameters'] / 1e6:.0f} M parameters in fp32, AdamW; median of {figures['steps']} steps\n"
        f'torch.optim.AdamW(fused=True) {seconds["torch"]:.4f} s; Offloaded, device="cpu" {seconds["cpu"]:.4f} s '
        f"({seconds['cpu'] / seconds['torch']:.2f} times)\n"
        f'Offloaded, device="nvme" {seconds["nvme"]:.4f} s: {figures["bytes_per_parameter"]:.2f} bytes of disk traffic a '
        f"parameter, {figures['rate']:.2f} GB/s; {figures['limit_name']} {figures['limit']:.2f} GB/s: "
        f"{figures['percent']:.1f} % of the limit\n"
        f"state on disk {figures['disk_bytes'] / 1e6:.0f} MB; peak of memory in steps from disk "
        f"{figures['step_more_bytes'] / 1e6:.0f} MB over weights and gradients\n{kernels}"
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of alternating steps, of the limit, and of the kernels."""
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
        "kernels": _kernels(options.layers * options.width**2, options.steps),
        "machine": machine(options.path),
        "update": _update(options),
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


def _kernels(numel: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by threads, the rate of the host kernel over that of torch's AdamW, its core-seconds over AdamW's, and both
    rates: from bf16 gradients to bf16 weights, and of fp32 gradients. Both move 28 bytes an element, and run in turn."""
    kernel, sizes = host_kernel(), [numel // 16] * 16
    if kernel is None:
        return {}
    rows = torch.rand(5, 16 * sizes[0]) / 100
    masters, averages, squares, gradients, _ = ([*row.split(sizes)] for row in rows)
    halves, weights = ([*row.bfloat16().split(sizes)] for row in rows[3:])
    tensors = StepTensors(masters, [*zip(averages, squares, strict=True)], halves, weights)
    settings = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    counts, form = [torch.tensor(3.0)] * 16, {"amsgrad": False, "maximize": False}
    given = settings | {"step": 3.0, "factor": 0.5, "decoupled": True}
    ours, before = partial(kernel.update, given, tensors), torch.get_num_threads()
    theirs = partial(torch._fused_adamw_, masters, gradients, averages, squares, [], counts, **settings, **form)
    figures = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pairs = [(_cost(theirs), _cost(partial(ours, threads))) for _ in range(rounds + _WARM_UP)][_WARM_UP:]
        rates = [statistics.median(28e-9 * numel / pair[who][0] for pair in pairs) for who in (0, 1)]
        figures[str(threads)] = {
            "of_adamw": statistics.median(theirs_cost[0] / cost[0] for theirs_cost, cost in pairs),
            "core_s_of_adamw": statistics.median(cost[1] / theirs_cost[1] for theirs_cost, cost in pairs),
            "adamw_rate": rates[0],
            "rate": rates[1],
        }
    torch.set_num_threads(before)
    return figures


_PEER = """
import sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
numel, rounds = map(int, sys.argv[1:])
parameters = [torch.nn.Parameter(torch.rand(numel // 16)) for _ in range(16)]
for parameter in parameters:
    parameter.grad = torch.rand_like(parameter) / 100
optimizer, seconds = DeepSpeedCPUAdam(parameters, lr=1e-4), []
for _ in range(rounds + 2):
    started = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - started)
print(sorted(seconds[2:])[rounds // 2])
"""


def _update(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of an update of 4.4 times the model's elements, by the host kernel from bf16 gradients to bf16 weights
    with two threads, and by DeepSpeed's CPUAdam in fp32: 28 bytes an element each."""
    kernel, numel = host_kernel(), 16 * (options.layers * options.width**2 * 11 // 40)
    if kernel is None:
        return {}
    masters, averages, squares, gradients = ([*row.split(numel // 16)] for row in torch.rand(4, numel) / 100)
    halves, weights = ([one.bfloat16() for one in gradients] for _ in range(2))
    tensors = StepTensors(masters, [*zip(averages, squares, strict=True)], halves, weights)
    given = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "step": 3.0, "factor": 0.5}
    seconds = [
        _cost(partial(kernel.update, given | {"decoupled": True}, tensors, 2))[0] for _ in range(options.steps + 2)
    ]
    found = {"parameters": numel, "zstore_s": statistics.median(seconds[2:])}
    if options.peer_python:
        command = [options.peer_python, "-c", _PEER, str(numel), str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found["deepspeed_s"] = float(done.stdout.split()[-1])
    return found


def _cost(work: Callable[[], Any]) -> tuple[float, float]:
    """Return seconds, and core-seconds, once the threads of torch's call before sleep: idle ones spin for milliseconds."""
    time.sleep(0.02)
    cores = time.process_time()
    return _seconds(work), time.process_time() - cores


if __name__ == "__main__":
    main()
