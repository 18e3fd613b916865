"""What a machine with a CUDA device allows: its links, pinning, memory, the fused update on the host, and the drive.

Every other figure is set beside these. Without a device what needs one is left out.

    python -m bench.links [--path FOLDER] [--gib 1] [--json FILE]
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.limits import disk_limit, limit_name
from bench.machine import bench_parser, machine, write_figures
from bench.process import synchronize
from zstore.engine.params.record import PRECISIONS
from zstore.io.memory import PinnedSlabs

_MIB = 2**20
_ROUNDS = 5
ADAMW, HOST, WITHIN = "AdamW on the host", "host memory, read and written", "within the device, read and written"
PRODUCTS = "matrix products in "
Rates = dict[str, float]
"""Bytes a second, by what moves them; of products, followed by their precision, operations."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="GiB that each measurement moves")
    options = parser.parse_args()
    nbytes = max(1, round(options.gib * 16)) * 64 * _MIB
    rates = link_rates(nbytes) | (_pinning(nbytes) if torch.cuda.is_available() else {})
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        disk_limit(Path(name), "write", nbytes)
        for pattern in ("read", "write", "mixed"):
            rates[f"disk {pattern}"] = disk_limit(Path(name), pattern, nbytes)
    figures = {"machine": machine(options.path), "limit_name": limit_name(), "rates": rates}
    print("\n".join(describe(figures)))
    write_figures(options.json, figures)


def describe(figures: dict[str, Any]) -> list[str]:
    """Return the figures for a person to read, a line each."""
    units = {True: "billion operations a second", False: "GB/s"}
    return [f"{name}: {rate / 1e9:.2f} {units[PRODUCTS in name]}" for name, rate in figures["rates"].items()]


def link_rates(nbytes: int) -> Rates:
    """Return what the links to the device, if there is one, and the host's memory move, measured with so many bytes, and
    how fast what computes multiplies matrices."""
    return (_links(nbytes) if torch.cuda.is_available() else {}) | _memory(nbytes) | _products()


def least_seconds(rates: Rates, parameters: int, compute_s: float, *, overlaps: bool) -> float:
    """Return the least time of an iteration with all state in host memory: bf16 parameters come twice, gradients leave once,
    and the update reads and writes 28 bytes a parameter there; within the computation if it `overlaps`, else behind it."""
    down_s = 2 * parameters / rates.get("device to host, 64 MiB", math.inf)  # without a device nothing crosses
    up_s = 4 * parameters / rates.get("host to device, 64 MiB", math.inf)
    update_s = 28 * parameters / rates[ADAMW]
    around_s = max(compute_s, up_s, down_s)
    return max(around_s, update_s) if overlaps else around_s + update_s


def least_phases(rates: Rates, parameters: int, tokens: int, precision: str = "bf16") -> dict[str, float]:
    """Return the least seconds of a forward, a backward and an update of AdamW, all state with what computes: two and four
    operations a parameter and token, attention left out, or reading parameters, and writing gradients, if that takes longer."""
    memory = rates.get(WITHIN, rates[HOST])
    products_s = 2 * parameters * tokens / rates[f"{PRODUCTS}{precision}"]
    parameters_s = parameters * (4 if precision == "fp32" else 2) / memory
    return {
        "forward": max(products_s, parameters_s),
        "backward": max(2 * products_s, 2 * parameters_s),
        "update": 28 * parameters / rates.get(WITHIN, rates[ADAMW]),
    }


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return bytes a second, the median of some rounds after one to warm up."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return nbytes / statistics.median(seconds[1:])


def _products() -> Rates:
    device, size = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 512)
    matrices = {name: torch.ones(size, size, dtype=dtype, device=device) for name, dtype in PRECISIONS.items()}
    return {f"{PRODUCTS}{name}": _rate(2 * size**3, partial(torch.matmul, one, one)) for name, one in matrices.items()}


def _links(nbytes: int) -> Rates:
    rates: Rates = {}
    for block in (_MIB, 64 * _MIB):
        host, back = (torch.split(torch.ones(nbytes, dtype=torch.uint8).pin_memory(), block) for _ in range(2))
        there, other = (torch.split(torch.ones(nbytes, dtype=torch.uint8, device="cuda"), block) for _ in range(2))
        up, down = partial(_copy, torch.cuda.Stream(), there, host), partial(_copy, torch.cuda.Stream(), back, other)  # type: ignore[no-untyped-call]
        size = f"{block // _MIB} MiB"
        rates[f"host to device, {size}"] = _rate(nbytes, up)
        rates[f"device to host, {size}"] = _rate(nbytes, down)
        rates[f"both directions, {size}"] = _rate(2 * nbytes, partial(_both, up, down))
    one = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rates[WITHIN] = _rate(2 * nbytes, lambda: torch.empty_like(one).copy_(one))
    return rates


def _copy(stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()


def _pinning(nbytes: int) -> Rates:
    def register() -> None:
        slabs = PinnedSlabs()
        slabs.make(nbytes)
        slabs.close()

    def allocate() -> None:
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        torch._C._host_emptyCache()

    return {"registered as pinned": _rate(nbytes, register), "allocated as pinned": _rate(nbytes, allocate)}


def _memory(nbytes: int) -> Rates:
    """A copy, and torch's fused AdamW of fp32 state, which reads 16 bytes an element and writes 12, by all threads."""
    source, target = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    rates = {HOST: _rate(2 * nbytes, lambda: target.copy_(source))}
    parameter = torch.nn.Parameter(source)
    parameter.grad = target
    update = torch.optim.AdamW([parameter], fused=True)
    rates[ADAMW] = _rate(nbytes // 4 * 28, update.step)
    return rates


if __name__ == "__main__":
    main()
