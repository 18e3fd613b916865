"""Training from disk: GPT-Neo shapes, optimizer state and parameters on disk, next to DeepSpeed and to the machine's limits.

    python -m bench.offload [--models 110m,1.2b] [--peer-python PYTHON] [--path FOLDER] [--out FILE]

Every contender runs in a process of its own, the disk's limit is measured before and after each (not between steps: what
works behind them would gain by the pause). Rows are: the computation (forward and backward of the same model in memory, no
optimizer), the peer, and zstore for each step mode with and without clipping, first with nothing but buffers in memory, then
with the host budget that makes its whole process as large as the peer's.

With `--device` it computes on a CUDA device where there is one, and state rests in host memory too with `--tiers cpu,nvme`.
There the clock is stopped once the device is done, and rows have the peak of the device's memory.

I/O time is the bytes that were counted at the measured limit: what is both read and written at the rate for halves of both,
the rest at its own. Overlap is the iteration over the larger of computation and I/O; in mode `forward`, where updates run in
the next forward, over the sum of that maximum for the forward and for the backward (with the step).

DeepSpeed compiles its operators for about four minutes at its first run.
"""

import argparse
import importlib.util
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.children import Told, run_child
from bench.contenders import batch_shape
from bench.limits import disk_limit
from bench.links import least_phases, least_seconds, link_rates
from bench.machine import bench_parser, choose_device, machine, write_figures

WARM_UP = 2
"""Steps that do not count: in the first the order is recorded, and the slots of the optimizer are read from the third on."""
OVERLAP_GOAL = 1.1

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT-Neo."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    tokens: int
    peer_memory_bytes: int | None
    """Peak that DeepSpeed had on a 24-GiB machine, for runs without it."""


MODELS = {
    "tiny": Shape(hidden=256, layers=2, heads=4, vocab=512, tokens=16, peer_memory_bytes=None),
    "110m": Shape(hidden=1024, layers=8, heads=16, vocab=8192, tokens=64, peer_memory_bytes=4_700_000_000),
    "1.2b": Shape(hidden=2048, layers=24, heads=16, vocab=8192, tokens=128, peer_memory_bytes=13_000_000_000),
    "2.7b": Shape(hidden=2560, layers=32, heads=20, vocab=50257, tokens=128, peer_memory_bytes=None),
    "7b": Shape(hidden=4096, layers=32, heads=32, vocab=50257, tokens=128, peer_memory_bytes=None),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes per second of the disk, by pattern; "mixed" counts both directions."""

    read: float
    write: float
    mixed: float

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Return the least time in which the disk moves these."""
        both = min(read_bytes, write_bytes)
        return 2 * both / self.mixed + (read_bytes - both) / self.read + (write_bytes - both) / self.write


UNLIMITED = Limits(read=math.inf, write=math.inf, mixed=math.inf)
"""Of a run that moves nothing to or from the disk."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the contender and removes its files
    figures: dict[str, Any] = {
        "machine": machine(options.path),
        "models": [],
    }
    for name in options.models:
        shape = MODELS[name] if options.tokens is None else replace(MODELS[name], tokens=options.tokens)
        entry: dict[str, Any] = {"model": name, **asdict(shape), "device": options.device, "rows": []}
        figures["models"].append(entry)
        for row in measure(shape, options):
            entry["rows"].append(row)
            print(f"{name}: {describe(row)}", flush=True)
            write_figures(options.out, figures)  # after each, for a run of all takes long


def _options() -> argparse.Namespace:
    parser = bench_parser(__doc__, device=True, gib=2.0, out="--out")
    parser.add_argument(
        "--models", type=some_of(*MODELS), default=["110m", "1.2b"], help="2.7b takes 40 GB of disk, 7b 100 GB"
    )
    parser.add_argument(
        "--tiers", type=some_of("cpu", "nvme"), default=["nvme"], help="where state and parameters are stored"
    )
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch (default: the model's)")
    parser.add_argument(
        "--peer", action=argparse.BooleanOptionalAction, help="run DeepSpeed (default: where it is, up to 1.2b)"
    )
    parser.add_argument(
        "--compute",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the computation alone (needs its memory)",
    )
    parser.add_argument("--fsdp2", action="store_true", help="run torch's FSDP2 with CPU offload beside --tiers cpu")
    parser.add_argument("--device-memory", type=byte_count, help="bytes, or 8GiB: most memory of the device")
    parser.add_argument("--peer-python", help="python of an environment with deepspeed; default: this one")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two warm-up steps")
    parser.add_argument(
        "--overlap", type=some_of("none", "backward", "forward"), default=["none", "backward", "forward"]
    )
    parser.add_argument("--clip", type=some_of("off", "on"), default=["off", "on"])
    parser.add_argument(
        "--budget", type=_budgets, default=["none", "peer"], help="host budgets: none, peer, or as 2.5GB"
    )
    parser.add_argument(
        "--peer-memory", type=byte_count, help="bytes, or 13GB, for `--budget peer` (default: as measured)"
    )
    parser.add_argument(
        "--memory-limit",
        type=byte_count,
        help="bytes, or 4GiB: limit zstore's processes, page cache included (not those with `--budget peer`)",
    )
    parser.add_argument("--limit-s", type=float, help="seconds after which a contender is ended")
    options = parser.parse_args()
    options.device = choose_device(options.device)
    return options


def some_of(*known: str) -> Any:
    """Return a parser of words out of `known`, with commas between."""

    def words(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        return found

    return words


def _budgets(text: str) -> list[str | int]:
    return [word if word in ("none", "peer") else byte_count(word) for word in text.split(",")]


def byte_count(text: str) -> int:
    """Return the bytes in a text like 13GB, 4GiB or 1000000."""
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * units.get(unit, 1))


def measure(shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every contender; `compute` and the peer come first, for the others are compared with them."""
    compute = None
    options.rates = link_rates(2**28)
    if options.compute:
        compute = _row(shape, options, {"contender": "compute", "tier": "none"}, {}, None)
        yield compute
    for tier in options.tiers:
        yield from _measure_tier(shape, options, tier, compute)


def _runs_peer(shape: Shape, options: argparse.Namespace) -> bool:
    if options.peer is not None:
        return bool(options.peer)
    installed = options.peer_python is not None or importlib.util.find_spec("deepspeed") is not None
    return installed and shape.peer_memory_bytes is not None


def _measure_tier(shape: Shape, options: argparse.Namespace, tier: str, compute: Row | None) -> Iterator[Row]:
    """Yield a row for the peer and for each of our modes, with state and parameters on `tier`."""
    peer = None
    if options.fsdp2 and tier == "cpu":
        yield _row(shape, options, {"contender": "FSDP2", "tier": tier, "clip": 0.0}, {}, compute)
    if _runs_peer(shape, options):
        peer = _row(shape, options, {"contender": "deepspeed", "tier": tier, "clip": 0.0}, {}, compute)
        yield peer
    peaks: dict[tuple[str, float], int] = {}
    for budget in options.budget:
        for overlap, clip in _modes(options):
            settings: Row = {"contender": "zstore", "tier": tier, "overlap": overlap, "clip": clip}
            settings["host_budget_bytes"] = None
            settings["memory_limit_bytes"] = None if budget == "peer" else options.memory_limit
            if budget == "peer":
                settings["host_budget_bytes"] = _budget(shape, peer, peaks.get((overlap, clip)), options.peer_memory)
                if settings["host_budget_bytes"] is None:
                    continue
            elif budget != "none":
                settings["host_budget_bytes"] = budget
            row = _row(shape, options, settings, {} if peer is None else peer, compute)
            if budget == "none" and row.get("steps_peak_bytes"):
                peaks[overlap, clip] = row["steps_peak_bytes"]
            yield row


def _modes(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Return step modes and clipping; mode `backward` cannot wait for a norm: with clipping it is `forward`."""
    pairs = [(overlap, {"off": 0.0, "on": 1.0}[clip]) for overlap in options.overlap for clip in options.clip]
    return [(overlap, clip) for overlap, clip in pairs if overlap != "backward" or not clip]


def _budget(shape: Shape, peer: Row | None, own_peak_bytes: int | None, memory_bytes: int | None) -> int | None:
    """Return the host budget with which zstore's process is as large as the peer's: what it needs anyhow goes off.

    `memory_bytes` replaces the peak of the peer.
    """
    measured = shape.peer_memory_bytes if peer is None else peer.get("peak_bytes") or shape.peer_memory_bytes
    target = memory_bytes or measured
    if target is None:
        return None
    beside = own_peak_bytes or 2_000_000_000
    return max(128 * 2**20, target - beside)


def _row(shape: Shape, options: argparse.Namespace, settings: Row, peer: Row, compute: Row | None) -> Row:
    """Run one contender between two measurements of the disk, and return its figures."""
    theirs = settings["contender"] == "deepspeed"
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        folder = Path(name)
        on_disk = options.device == "cpu" or settings["tier"] == "nvme"
        limits = [_limits(folder, options.gib)] if on_disk else [UNLIMITED]
        (folder / "state").mkdir()
        spec = {
            "contender": settings["contender"],
            "device": options.device,
            "limit_s": options.limit_s,
            "device_memory_bytes": options.device_memory,
            "model": asdict(shape),
            "config": (_peer_config if theirs else _config)(folder / "state", {**settings, "shape": shape}, options),
            "folder": str(folder / "state"),
            "steps": WARM_UP + options.steps,
            "seed": 0,
        }
        python, limited = options.peer_python if theirs else None, settings.get("memory_limit_bytes")
        told = run_child("bench.contenders", spec, python=python, memory_limit_bytes=limited)
        limits.append(_limits(folder, options.gib) if on_disk else UNLIMITED)
    row = settings | figures_of(told, mean_limits(limits), settings, compute) | _compared(told, peer)
    if settings["tier"] == "cpu" and "iteration_s" in row:
        compute_s = 0.0 if compute is None or "iteration_s" not in compute else compute["iteration_s"]
        overlaps = settings.get("overlap", "none") != "none"
        row["least_s"] = least_seconds(options.rates, row["parameters"], compute_s, overlaps=overlaps)
    elif settings["contender"] == "compute" and "iteration_s" in row:
        least = least_phases(options.rates, row["parameters"], shape.tokens)
        row["least_s"] = least["forward"] + least["backward"]
    return row


def _config(folder: Path, settings: Row, options: argparse.Namespace) -> dict[str, Any]:
    if settings["contender"] in ("compute", "FSDP2"):
        return {}
    own: dict[str, Any] = {"step_overlap": settings["overlap"]}
    if settings["host_budget_bytes"] is not None:
        own["host_budget_bytes"] = settings["host_budget_bytes"]
    offload = _offload(folder, settings["tier"]) | ({"pin_memory": True} if options.device == "cuda" else {})
    return {**_common(settings), "zero_optimization": _zero(offload, offload), "zstore": own}


def _offload(folder: Path, tier: str) -> dict[str, Any]:
    return {"device": tier} | ({"nvme_path": str(folder)} if tier == "nvme" else {})


def _peer_config(folder: Path, settings: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Return a config with which the peer runs.

    By default it keeps 1e9 parameters in memory (`max_in_cpu`), and with parameters on disk its read-ahead fails in the
    second step ("already assigned swap buffer"), so that it is off; it needs a buffer for every parameter that is live.
    With updates of at most 1e8 elements at once 1.2 B parameters take 10.6 GB of memory, over 17 with the 1e9 of its default.
    """
    shape: Shape = settings["shape"]
    offload = {**_offload(folder, settings["tier"]), "pin_memory": options.device == "cuda"}
    if settings["tier"] == "cpu":
        return {**_common(settings), "zero_optimization": _zero(offload, offload)}
    largest = shape.hidden * max(4 * shape.hidden, shape.vocab)
    parameters = {**offload, "buffer_size": largest, "buffer_count": 32, "max_in_cpu": 0}
    zero = _zero({**offload, "buffer_count": 4}, parameters)
    zero |= {"stage3_max_live_parameters": 100_000_000, "stage3_max_reuse_distance": 100_000_000}
    zero |= {"stage3_prefetch_bucket_size": 0, "sub_group_size": 100_000_000}
    aio = {"block_size": 2**20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    return {**_common(settings), "zero_optimization": zero, "aio": aio}


def _common(settings: Row) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch_shape(settings["shape"].tokens)[0],
        "gradient_clipping": settings["clip"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
    }


def _zero(optimizer: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameters}


def _limits(folder: Path, gib: float) -> Limits:
    """Measure the disk anew; its file goes afterwards, for it would take room and be cached."""
    nbytes = max(1, round(gib * 64)) * 2**24  # whole blocks for every job
    try:
        disk_limit(folder, "write", nbytes)  # make every extent real
        return Limits(**{pattern: disk_limit(folder, pattern, nbytes) for pattern in ("read", "write", "mixed")})
    finally:
        (folder / "limit.bin").unlink(missing_ok=True)


def mean_limits(limits: Sequence[Limits]) -> Limits:
    """Return the rates that take the mean of the times that these take."""
    if UNLIMITED in limits:
        return UNLIMITED
    means = {name: statistics.harmonic_mean([getattr(each, name) for each in limits]) for name in asdict(limits[0])}
    return Limits(**means)


def figures_of(told: Told, limits: Limits, settings: Mapping[str, Any], compute: Row | None) -> Row:
    """Return the figures of a run: medians over the steps after the first two, bytes per parameter and step."""
    row: Row = {"error": told.error, "memory_limit": told.memory_limit}
    row["limit_gb_per_s"] = {n: None if math.isinf(rate) else rate / 1e9 for n, rate in asdict(limits).items()}
    built, all_steps = told.last("built"), told.all("step")
    if built is None or len(all_steps) <= WARM_UP:
        return row
    steps, parameters = all_steps[WARM_UP:], built["parameters"]
    seconds = {phase: statistics.median(_spans(steps, i)) for i, phase in enumerate(_PHASES)}
    moved = {phase: (_moved(steps, i, 0), _moved(steps, i, 1)) for i, phase in enumerate(_PHASES)}
    io_s = {phase: limits.seconds(*nbytes) for phase, nbytes in moved.items()}
    read_bytes, write_bytes = (sum(nbytes[i] for nbytes in moved.values()) for i in (0, 1))
    iteration_s = statistics.median(step["times"][-1] - step["times"][0] for step in steps)
    end = told.last("end") or {}
    peaks = {"build_peak_bytes": built["peak_bytes"], "steps_peak_bytes": end.get("peak_bytes")}
    row |= {
        "parameters": parameters,
        "versions": built["versions"],
        "build_s": built["seconds"],
        "iteration_s": iteration_s,
        "iterations_s": [step["times"][-1] - step["times"][0] for step in steps],
        **{f"{phase}_s": each for phase, each in seconds.items()},
        "read_bytes_per_parameter": read_bytes / parameters,
        "write_bytes_per_parameter": write_bytes / parameters,
        "phases_bytes_per_parameter": {phase: [each / parameters for each in pair] for phase, pair in moved.items()},
        "kernel_bytes_per_parameter": _kernel(steps) / parameters,
        "io_s": limits.seconds(read_bytes, write_bytes),
        "percent_of_limit": 100 * limits.seconds(read_bytes, write_bytes) / iteration_s,
        "losses": [step["loss"] for step in all_steps],
        "peak_bytes": max(filter(None, peaks.values())),
        "device_peak_bytes": end.get("device_peak_bytes"),
        **peaks,
        "page_cache_bytes": end.get("page_cache_bytes"),
        "limited_peak_bytes": told.limited_peak_bytes,
    }
    if io_s["step"] and (settings.get("overlap") == "none" or settings["contender"] == "deepspeed"):
        row["step_percent_of_limit"] = 100 * io_s["step"] / seconds["step"]
    if row["io_s"] and compute is not None and "forward_s" in compute and settings["contender"] != "compute":
        row["overlap_reached"] = _overlap(row, io_s, settings, compute)
    return row


_PHASES = ("forward", "backward", "step")


def _spans(steps: Sequence[Mapping[str, Any]], phase: int) -> list[float]:
    return [step["times"][phase + 1] - step["times"][phase] for step in steps]


def _moved(steps: Sequence[Mapping[str, Any]], phase: int, direction: int) -> float:
    """Return the mean bytes: what works behind the steps moves a step's bytes now in one, now in another."""
    return statistics.fmean(step["moved"][phase + 1][direction] - step["moved"][phase][direction] for step in steps)


def _kernel(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean bytes of a step as the kernel counts them, both directions."""
    return statistics.fmean(sum(step["kernel"][1]) - sum(step["kernel"][0]) for step in steps)


def _overlap(row: Row, io_s: Mapping[str, float], settings: Mapping[str, Any], compute: Row) -> Row:
    """Return how far time is from the least that it could be: 1 is all of the shorter hidden behind the longer."""
    forward_s = max(compute["forward_s"], io_s["forward"])
    backward_s = max(compute["backward_s"], io_s["backward"] + io_s["step"])
    whole_s = max(compute["forward_s"] + compute["backward_s"], row["io_s"])
    reached = {
        "forward": row["forward_s"] / forward_s,
        "backward_and_step": (row["backward_s"] + row["step_s"]) / backward_s,
        "iteration": row["iteration_s"] / whole_s,
        "iteration_by_phase": row["iteration_s"] / (forward_s + backward_s),
    }
    by = "iteration_by_phase" if settings.get("overlap") == "forward" else "iteration"
    return {**reached, "judged_by": by, "goal": OVERLAP_GOAL}


def _compared(told: Told, peer: Row) -> Row:
    """Return the peer's time and memory over those of a run, where both ran."""
    built, steps, end = told.last("built"), told.all("step")[WARM_UP:], told.last("end")
    if not peer.get("iteration_s") or not steps or end is None or built is None:
        return {}
    iteration_s = statistics.median(step["times"][-1] - step["times"][0] for step in steps)
    peak = max(built["peak_bytes"], end["peak_bytes"] or 0)
    return {"times_faster_than_peer": peer["iteration_s"] / iteration_s, "memory_of_peer": peak / peer["peak_bytes"]}


def describe(row: Row) -> str:
    """Return a row for a person to read."""
    name = row["contender"]
    if name in ("deepspeed", "FSDP2"):
        name += f" {row['tier']}"
    if name == "zstore":
        budget = row["host_budget_bytes"]
        name += f" {row['tier']}, {row['overlap']}, clip {'on' if row['clip'] else 'off'}"
        name += f", budget {budget / 1e9:.1f} GB" if budget else ""
    if "iteration_s" not in row:
        return f"{name}: FAILED: {row['error']}"
    parts = [
        f"{row['iteration_s']:.2f} s ({row['forward_s']:.2f} + {row['backward_s']:.2f} + {row['step_s']:.2f})",
    ]
    if row["io_s"]:
        parts.append(
            f"{row['read_bytes_per_parameter']:.2f} + {row['write_bytes_per_parameter']:.2f} bytes a parameter, "
            f"{row['percent_of_limit']:.0f} % of the limit"
        )
    if "least_s" in row:
        parts.append(f"the machine allows {row['least_s']:.2f} s")
    if "step_percent_of_limit" in row:
        parts.append(f"step {row['step_percent_of_limit']:.0f} %")
    if reached := row.get("overlap_reached"):
        parts.append(f"overlap {reached[reached['judged_by']]:.2f}")
    parts.append(f"peak {_gib(row['build_peak_bytes'])} building, {_gib(row['steps_peak_bytes'])} in steps")
    if row["device_peak_bytes"] is not None:
        parts.append(f"{_gib(row['device_peak_bytes'])} of the device")
    if row["limited_peak_bytes"] is not None:
        parts.append(f"{_gib(row['limited_peak_bytes'])} charged to the {row['memory_limit']}")
    if "times_faster_than_peer" in row:
        parts.append(f"{row['times_faster_than_peer']:.1f} x the peer in {row['memory_of_peer']:.2f} of its memory")
    if row["error"]:
        parts.append(f"then FAILED: {row['error']}")
    return f"{name}: {'; '.join(parts)}"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
