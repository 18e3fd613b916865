"""An iteration with all state in host memory on a device that is a clock, in each step mode.

Links and computation take the time of an H200's, in proportion to this machine's memory, and no core; nothing crosses, so that
values mean nothing. The update in host memory, Python and all threads are real. The least is the longest of three: the update
at AdamW's rate, the links, the computation. The sources of another tree: `PYTHONPATH=TREE python -P bench/clocked.py`.

    python -m bench.clocked [--layers 8] [--width 1024] [--steps 8] [--rate GB/S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from bisect import bisect, insort
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import zstore
from bench.links import ADAMW, link_rates
from zstore.engine.runtime.device import Streams
from zstore.engine.zero import norm
from zstore.store.tiers import HostTier

_UP, _DOWN, _ADAMW, _PASS_S = 54.1e9, 54.9e9, 121e9, 0.03 / 1.229e9
"""Bytes a second of an H200's links and of its host's AdamW, and its seconds of a parameter's forward, or backward."""
_CALL_S, _LAUNCH_S = 12e-6, 400e-6
"""Python of a copy, and of a layer that launches its kernels."""
_WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", type=float, help="GB/s of AdamW in this machine's memory, if it is known")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    options.rate = options.rate or link_rates(2**27)[ADAMW] / 1e9
    figures = {mode: measure(options, mode) for mode in ("none", "forward", "backward")}
    print(f"AdamW {options.rate:.1f} GB/s; load {os.getloadavg()[0]:.1f}")
    for name, row in figures.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, mode: str) -> dict[str, float]:
    """Return the median seconds of an iteration, over the least, and its core-seconds."""
    slow = _ADAMW / (1e9 * options.rate)
    device = ClockedStreams(slow)
    model = nn.Sequential(*[_Layer(options.width, device) for _ in range(options.layers)])
    numel = sum(parameter.numel() for parameter in model.parameters())
    device.layer_s = _PASS_S * slow * numel / options.layers
    host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,  # else "backward" is treated as "forward"
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "zstore": {"step_overlap": mode, "journal": False},
        "steps_per_print": 10**9,
    }

    def registered(tier: HostTier, local: Any, allocate: Any = HostTier._allocate) -> Any:
        view = allocate(tier, local)
        device.register(view.ctypes.data, view.nbytes)
        return view

    seconds, cores = [], [0.0]
    with (
        patch.object(HostTier, "_allocate", registered),
        patch.object(norm.SumOfSquares, "__init__", lambda *_, **__: None),  # norms are the device's
        patch.object(norm.SumOfSquares, "value", lambda *_: 1.0),
        patch.object(norm, "_sums_on_host", lambda shards: [1.0] * len(shards)),
        zstore.initialize(model=model, config=config, _streams=device)[0] as engine,
    ):
        for _ in range(_WARM_UP + options.steps):
            started = time.perf_counter()
            engine.backward(engine(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).sum())
            engine.step()
            device.wait(max(device.compute.free, device.down.free))
            seconds.append(time.perf_counter() - started)
            cores.append(time.process_time())
    least = max(28e-9 * numel / options.rate, 4 * numel / _UP * slow, 2 * numel * _PASS_S * slow)
    median = statistics.median(seconds[_WARM_UP:])
    cores_s = (cores[-1] - cores[_WARM_UP]) / options.steps
    return {"seconds": median, "of the least": median / least, "core-seconds": cores_s}


class _Link:
    """Does one thing after another, which takes time and no core."""

    def __init__(self) -> None:
        self.free, self._lock = 0.0, threading.Lock()

    def give(self, seconds: float, after: float) -> float:
        """Return when it will have done what takes `seconds`, and begins `after`."""
        with self._lock:
            self.free = max(self.free, after, time.perf_counter()) + seconds
            return self.free


class ClockedStreams(Streams):
    """Streams of a device that is a clock: an event is the time of its end. Memory is the device's if it is not registered."""

    device_is_host = False

    def __init__(self, slow: float) -> None:
        self._slow, self.layer_s = slow, 0.0
        self.up, self.down, self.compute = _Link(), _Link(), _Link()
        self.cuda_runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=lambda address: 0)
        self._host: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []

    def register(self, address: int, nbytes: int, flags: int = 0) -> int:
        """Make memory the host's; it is not to be freed before the end."""
        insort(self._host, (address, address + nbytes))
        return 0

    def is_host(self, tensor: torch.Tensor) -> bool:
        place = bisect(self._host, (tensor.data_ptr(), sys.maxsize))
        return place > 0 and tensor.data_ptr() < self._host[place - 1][1]

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._kept.append(torch.zeros(numel, dtype=dtype))
        self.register(self._kept[-1].data_ptr(), self._kept[-1].nbytes)
        return self._kept[-1]

    def record(self) -> float:
        return max(self.compute.free, time.perf_counter())

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: float) -> float:
        _hold_the_lock(_CALL_S)
        link, rate = (self.down, _DOWN) if self.is_host(targets[0]) else (self.up, _UP)
        return link.give(sum(target.nbytes for target in targets) / rate * self._slow, after)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.wait(self.copy([target], [source], self.compute.free))

    def wait(self, event: float) -> None:
        time.sleep(max(0.0, event - time.perf_counter()))

    def follow(self, event: float) -> None:
        self.compute.give(0.0, event)

    def query(self, event: float) -> bool:
        return time.perf_counter() >= event


class _Kernels(torch.autograd.Function):
    """Those of a layer: Python that launches them, and time of the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: ClockedStreams, *parameters: torch.Tensor) -> torch.Tensor:
        _hold_the_lock(_LAUNCH_S)
        device.compute.give(device.layer_s, 0.0)
        ctx.device = device
        ctx.save_for_backward(*parameters)
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _hold_the_lock(1.5 * _LAUNCH_S)
        ctx.device.compute.give(ctx.device.layer_s, 0.0)
        return gradient, None, *(torch.empty_like(parameter) for parameter in ctx.saved_tensors)


class _Layer(nn.Module):
    """The parameters of a block of a transformer."""

    def __init__(self, width: int, device: ClockedStreams) -> None:
        super().__init__()
        shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width), (4 * width,)] + [(width,)] * 4
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.device = device

    def forward(self, x: torch.Tensor) -> Any:
        return _Kernels.apply(x, self.device, *self.weights)  # type: ignore[no-untyped-call]


def _hold_the_lock(seconds: float) -> None:
    """Keep a core and Python's lock, as a launch does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    main()
