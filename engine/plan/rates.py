"""How fast a device multiplies matrices in each data type, and the precision that "auto" takes by it.

[Note: rates]
A CPU without 16-bit instructions multiplies in bf16 a hundred times slower than in fp32, and torch does so without a word.
So the products of a linear layer's forward and backward are timed once in a process, in all three types. Other ranks and
processes may use the same cores, so on a CPU one thread does it, by its processor time, and the best of several turns
counts. A type that turns out slow on small matrices is not tried on large ones. Rank 0's rates count for all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Literal

import torch

from zstore.ranks.world import World

from ..config.config import Config
from ..params.record import PRECISIONS
from ..runtime.device import one_thread

_log = logging.getLogger("zstore")

SLOW_RATIO = 4.0
"""A 16-bit type that fp32 outruns by more is worth a warning if a config demands it."""

_NATIVE_SHARE = 1 / 3
"""Share of fp32's rate that a type reaches at least if the device computes it natively. Emulated types reach a tenth at
most; a CPU whose only 16-bit instructions are AVX512-BF16 half."""

_SIZES = {"cpu": (64, 256), "cuda": (256, 2048)}
"""Rows and columns of the small matrices and of the large ones."""
_QUICK_S = {"cpu": 0.25e-3, "cuda": 1e-3}
"""The large ones are tried if the small ones take less."""
_TURNS = 8
_LEAST_TURNS = 2
_TURNS_S = 0.03
"""No further turn begins after that, once the minimum is reached."""
_CLOCKS = {"cpu": time.thread_time, "cuda": time.perf_counter}


@dataclass(frozen=True, kw_only=True)
class MatmulRates:
    """Rates of a device in matrix products."""

    kind: Literal["cpu", "cuda"]
    flops: Mapping[str, float]
    """Precision -> floating-point operations a second: of one core of a CPU, of a whole GPU. None for types that cannot be
    computed there."""
    emulated: tuple[str, ...] = ()
    """Precisions for which the GPU has no instructions of its own, whatever their rates."""

    def slower(self, precision: str) -> float:
        """Return how many times slower than in fp32 products are; infinite if they cannot be computed."""
        rate = self.flops.get(precision, 0.0)
        return self.flops["fp32"] / rate if rate else float("inf")

    @cached_property
    def native(self) -> frozenset[str]:
        """The 16-bit precisions that the device computes natively.

        A CPU that is fast in fp16 and not in bf16 sums up in fp16 too: there neither counts.
        """
        fast = {
            name for name in ("bf16", "fp16") if name not in self.emulated and self.slower(name) * _NATIVE_SHARE <= 1
        }
        return frozenset(fast if self.kind == "cuda" or "bf16" in fast else ())

    def of_device(self, precision: str) -> float | None:
        """Return the rate of one whole device: of a CPU, with all cores that torch uses. None: it cannot be computed."""
        flops = self.flops.get(precision)
        return flops and flops * (torch.get_num_threads() if self.kind == "cpu" else 1)

    def text(self) -> str:
        """Return the rates in words, as `GFLOP/s a core: fp32 157, bf16 80, fp16 143`."""
        unit, scale = ("GFLOP/s a core", 1e9) if self.kind == "cpu" else ("TFLOP/s", 1e12)
        rates = (f"{name} {self.flops[name] / scale:.3g}" for name in PRECISIONS if name in self.flops)
        return f"{unit}: {', '.join(rates)}"


@cache
def measure_rates(device: torch.device) -> MatmulRates:
    """Return the rates of `device`, measured at the first call in this process, which takes some 50 ms."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    with torch.no_grad(), torch.autocast(kind, enabled=False), one_thread(kind == "cpu"):
        products = {}
        for name, dtype in PRECISIONS.items():
            try:
                products[name] = _products(device, kind, dtype)
            except RuntimeError:  # torch has no such product for this device
                if name == "fp32":
                    raise
        best = dict.fromkeys(products, float("inf"))
        clock = _CLOCKS[kind]
        until = clock() + _TURNS_S
        for turn in range(_TURNS):
            if turn >= _LEAST_TURNS and clock() > until:
                break
            # In turns, so that a disturbance hits all of them.
            for name, (run, _) in products.items():
                best[name] = min(best[name], run())
    flops = {name: operations / best[name] for name, (_, operations) in products.items()}
    emulated = kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return MatmulRates(kind=kind, flops=flops, emulated=("bf16",) if emulated else ())


def _products(device: torch.device, kind: str, dtype: torch.dtype) -> tuple[Callable[[], float], int]:
    """Return a function that runs the products of a linear layer and returns the seconds, warm, and their operations."""
    small, large = _SIZES[kind]
    run = _timed(device, dtype, small)
    run()
    for _ in range(_TURNS):
        took_s = run()
        if took_s <= _QUICK_S[kind] or took_s > 4 * _QUICK_S[kind]:
            break
    if took_s > _QUICK_S[kind]:
        return run, 6 * small**3
    run = _timed(device, dtype, large)
    run()
    return run, 6 * large**3


def _timed(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[], float]:
    inputs, weight, gradient = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))

    clock = _CLOCKS[device.type]

    def run() -> float:
        started = clock()
        for left, right in ((inputs, weight.t()), (gradient, weight), (gradient.t(), inputs)):
            left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - started

    return run


def find_rates(config: Config, world: World) -> MatmulRates | None:
    """Return the rates that a run's precision is chosen by: rank 0's; None if the config leaves 16-bit types alone (all
    ranks)."""
    if not any(_switches(config).values()):
        return None
    mine = asdict(measure_rates(world.device)) if world.rank == 0 else None
    found = world.broadcast_object(mine)
    return MatmulRates(kind=found["kind"], flops=found["flops"], emulated=tuple(found["emulated"]))


def tell_choice(config: Config, chosen: str, rates: MatmulRates) -> str | None:
    """Return the line that names the precision that "auto" in `config` chose and why; None if a precision is demanded."""
    switches = _switches(config)
    if True in switches.values():
        return None
    device = "CPU" if rates.kind == "cpu" else "GPU"
    asked = " or ".join(name for name, switch in switches.items() if switch == "auto")
    reason = f"has no fast {asked}" if chosen == "fp32" else f"computes {chosen} natively"
    return f'precision: "auto" takes {chosen}, since this {device} {reason} ({rates.text()})'


def warn_of_slow(config: Config, rates: MatmulRates) -> str | None:
    """Return a warning of the 16-bit precision that `config` demands and this device is slow in, with advice."""
    for name, switch in _switches(config).items():
        if switch is True and rates.flops.get(name) and rates.slower(name) > SLOW_RATIO:
            return (
                f"config: {name}.enabled: matrix products in {name} are {rates.slower(name):.0f} times slower than in fp32 "
                f'on this {"CPU" if rates.kind == "cpu" else "GPU"} ({rates.text()}); write "{name}": {{"enabled": "auto"}}, '
                "which takes it only where it is fast, or false"
            )
    return None


def say_precision(config: Config, chosen: str, rates: MatmulRates) -> None:
    """Log the precision that "auto" resolved to, or warn of a demanded type that this device is slow in."""
    choice, warning = tell_choice(config, chosen, rates), warn_of_slow(config, rates)
    if choice is not None:
        _log.info("%s", choice)
    if warning is not None:
        _log.warning("%s", warning)


def _switches(config: Config) -> dict[str, bool | str]:
    return {"bf16": config.settings.bf16.enabled, "fp16": config.settings.fp16.enabled}
