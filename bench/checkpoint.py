"""Saving, loading and converting checkpoints, next to others and to the disk's limits, in one run on one folder.

    python -m bench.checkpoint [--models 110m,1.2b] [--peer-python PYTHON] [--path FOLDER] [--out FILE]

For the first model: a save from memory and a load, by zstore's engine and by others, each in a process of its own, in turn,
for a few rounds. What counts is the whole until all is on disk. In turn with the engine, in its process, a plain program does
the same to the same files (`bench.bare_checkpoint`): what this machine does at most. DeepSpeed follows with its tools, once.
Then, for every model, a save of state that rests on disk, with `wait=False`; what another world size loads of it; and its
consolidation, once under a limit on memory.

Where there is a CUDA device engines compute there, and the tensors of torch's own peers lie there; with `--from-device` state
that rests on the device is saved and loaded besides.

Limits are measured before and after each, with the same bytes. Of saves: new files, reserved beforehand, durable
at the end; few large ones, and besides as many as the checkpoint has. Of loads: direct reads. Of conversions: reading and
writing new files at once. State is an fp32 master and Adam's two moments: 12 bytes a parameter. The run takes about 22 GB of
disk, and removes them.
"""

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.checkpoint_figures import Row, describe, goals, medians
from bench.children import Told, run_child
from bench.limits import copy_limit, disk_limit, new_files_limit
from bench.machine import bench_parser, choose_device, machine, write_figures
from bench.offload import MODELS, Shape, byte_count, some_of

_OURS, _PEERS, _TOOLS = "bench.checkpoint_engines", "bench.checkpoint_peers", "bench.checkpoint_tools"
_LIMIT_BYTES = 512 * 2**20
"""Memory of a consolidation beside the interpreter."""
_FILE_BYTES = 4 * 2**20
"""Bytes of a file of the first model's checkpoint, about."""

TENSOR_PEERS: dict[str, dict[str, Any]] = {
    "torch.save": {"peer": "torch.save"},
    "safetensors": {"peer": "safetensors"},
    "DCP 1 thread": {"peer": "dcp", "threads": 1, "asynchronous": False},
    "DCP 4 threads": {"peer": "dcp", "threads": 4, "asynchronous": False},
    "DCP async": {"peer": "dcp", "threads": 4, "asynchronous": True},
    "tensorstore": {"peer": "tensorstore"},
}


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the children and removes their files
    figures: dict[str, Any] = {"machine": machine(options.path), "versions": {}, "rows": []}
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        for row in measure(options, Path(name)):
            figures["versions"] |= row.pop("versions", {})
            figures["rows"].append(row)
            print(describe(row), flush=True)
            write_figures(options.out, figures)  # after each, for a run of all takes long
    figures["medians"] = medians(figures["rows"])
    figures["goals"] = goals(figures["medians"])
    for row in figures["medians"]:
        print(f"median  {describe(row)}")
    for goal in figures["goals"]:
        print(f"{'reached' if goal['reached'] else 'MISSED '}  {goal['what']}: {goal['text']}")
    write_figures(options.out, figures)


def _options() -> argparse.Namespace:
    parser = bench_parser(__doc__, device=True, gib=1.25, out="--out")
    parser.add_argument(
        "--models", type=some_of(*MODELS), default=["110m", "1.2b"], help="the first is compared with others"
    )
    parser.add_argument("--from-device", action="store_true", help="also save and load state on the device")
    parser.add_argument("--peers", type=some_of(*TENSOR_PEERS, "none"), default=[*TENSOR_PEERS])
    parser.add_argument(
        "--peer-python", help="python of an environment with deepspeed; without it DeepSpeed is left out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of saves from memory")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that load at another world size")
    parser.add_argument(
        "--memory",
        type=byte_count,
        default=_LIMIT_BYTES,
        help="memory limit of a consolidation, on top of the interpreter",
    )
    options = parser.parse_args()
    options.device = choose_device(options.device)
    return options


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes per second of the disk."""

    new_files: float
    many_files: float
    """Of new files as small as a checkpoint's."""
    read: float


class Disk:
    """Measures the disk in `folder`, with files of `nbytes`, which are gone afterwards."""

    def __init__(self, folder: Path, gib: float) -> None:
        self._folder = folder
        self._nbytes = max(1, round(gib * 32)) * 2**25  # whole blocks for every job

    def limits(self) -> Limits:
        """Return what it does now."""
        try:
            new_files = new_files_limit(self._folder, self._nbytes)
            many_files = new_files_limit(self._folder, self._nbytes, file_bytes=_FILE_BYTES)
            disk_limit(self._folder, "write", self._nbytes)  # what is read
            return Limits(
                new_files=new_files, many_files=many_files, read=disk_limit(self._folder, "read", self._nbytes)
            )
        finally:
            (self._folder / "limit.bin").unlink(missing_ok=True)

    def copy_s(self, read_bytes: int, written_bytes: int) -> float:
        """Return the seconds that reading and writing so much at once takes, by a measurement of less."""
        part = self._nbytes
        written = max(2**25, round(part * written_bytes / read_bytes / 2**25) * 2**25)
        try:
            return copy_limit(self._folder, part, written) * read_bytes / part
        finally:
            (self._folder / "limit.bin").unlink(missing_ok=True)


def _mean(one: Limits, other: Limits) -> Limits:
    """Return the rates that take the mean of the times that both take."""
    return Limits(**{n: statistics.harmonic_mean([getattr(one, n), getattr(other, n)]) for n in asdict(one)})


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row for each thing that was done, as it was done; see the module's text."""
    first = options.models[0]
    arrays = state_shapes(MODELS[first])
    run = _Run(folder, Disk(folder, options.gib), options)
    for _ in range(options.rounds):
        yield from run.in_memory(first, "from memory", {"device": "cpu"})
        if options.from_device:
            yield from run.in_memory(first, "from the device", None)
        for who in options.peers:
            if who != "none":
                yield from run.tensors(first, who, arrays)
    if options.peer_python:
        yield from run.deepspeed(first)
    for name in options.models:
        yield from run.on_disk(name)


def state_shapes(shape: Shape) -> dict[str, list[int]]:
    """Return names and shapes of a model's training state: three arrays for each parameter."""
    import torch

    from bench.contenders import build_model

    with torch.device("meta"):
        model = build_model(asdict(shape))
    groups = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {f"{group}/{name}": list(p.shape) for group in groups for name, p in model.named_parameters()}


class _Run:
    """What is measured, one after another, in `folder`."""

    def __init__(self, folder: Path, disk: Disk, options: argparse.Namespace) -> None:
        self._folder = folder
        self._disk = disk
        self._options = options
        self._sizes: dict[str, int] = {}

    def _state_bytes(self, model: str) -> int:
        if model not in self._sizes:
            shapes = state_shapes(MODELS[model]).values()
            self._sizes[model] = sum(4 * math.prod(shape) for shape in shapes)
        return self._sizes[model]

    @contextmanager
    def _place(self) -> Iterator[Path]:
        """Yield a folder for what is saved; its files are empty afterwards, and go with `folder`: a file system without a
        journal makes files slowly while it minds those that were removed in the last minutes."""
        place = Path(tempfile.mkdtemp(dir=self._folder, prefix="saved-"))
        try:
            yield place
        finally:
            for path in [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]:
                path.chmod(0o600)
                os.truncate(path, 0)

    def _between_limits(self, child: Callable[[], Told], row: Row, model: str) -> tuple[Told, list[Row]]:
        """Run a child between two measurements of the disk; return a row for its save and for its load."""
        before = self._disk.limits()
        told = child()
        limits = _mean(before, self._disk.limits())
        rows: list[Row] = []
        rates = {"save": limits.new_files, "load": limits.read, "verify": limits.read}
        bare = {what: told.last(f"bare {'load' if what == 'verify' else what}") for what in rates}
        for what, rate in rates.items():
            for who, found in (row["who"], told.last(what)), ("the plain program", bare[what]):
                if found is None or (what == "verify" and found is bare[what]):
                    continue
                rows.append(row | {"who": who} | _figures(found, self._state_bytes(model), rate) | {"what": what})
                if what == "save":
                    rows[-1]["percent_of_many_files"] = 1e11 * rows[-1]["gb_per_s"] / limits.many_files
                if (beside := bare[what]) is not None and found is not beside:
                    rows[-1]["percent_of_bare"] = 100 * beside["seconds"] / found["seconds"]
        return told, _with_end(rows, told, row)

    def in_memory(self, model: str, where: str, offload: Row | None) -> list[Row]:
        """Save from memory and load, by an engine; `offload` None: its state is on the device."""
        with self._place() as place, self._place() as bare:
            spec = self._engine_spec(model, place, offload) | {"load": True, "bare": str(bare)}
            row = {"model": model, "who": f"zstore, {where}"}
            return self._between_limits(lambda: run_child(_OURS, spec), row, model)[1]

    def tensors(self, model: str, who: str, arrays: dict[str, list[int]]) -> list[Row]:
        """Save tensors and load them, by a peer."""
        with self._place() as place:
            spec = {"contender": "tensors", "folder": str(place), "arrays": arrays, **TENSOR_PEERS[who]}
            spec["device"] = "cpu" if who == "tensorstore" else self._options.device
            return self._between_limits(lambda: run_child(_PEERS, spec), {"model": model, "who": who}, model)[1]

    def deepspeed(self, model: str) -> Iterator[Row]:
        """Save by DeepSpeed, from memory, and convert what it saved by its tools."""
        python = self._options.peer_python
        with self._place() as place, self._place() as out:
            spec = {"contender": "deepspeed", "folder": str(place), "model": asdict(MODELS[model])}
            spec["device"] = self._options.device
            row = {"model": model, "who": "DeepSpeed, from memory"}
            told, rows = self._between_limits(lambda: run_child(_PEERS, spec, python=python), row, model)
            yield from rows
            if told.last("save") is None:
                return
            state = self._state_bytes(model)
            for what, tool, sizes in (
                ("consolidate to fp32", "zero_to_fp32", (state // 3, state // 3)),
                ("convert", "ds_to_universal", (state, state)),
            ):
                spec = {"contender": tool, "folder": str(place), "out_folder": str(out / tool)}
                child = self._conversion(_PEERS, spec, sizes, python=python)
                yield from _with_end([{"model": model, "who": tool, "what": what, **child[1]}], child[0], {})

    def on_disk(self, model: str) -> Iterator[Row]:
        """Save what rests on disk, and do to that checkpoint what can be done to one."""
        with self._place() as place:
            with self._place() as drive:
                offload = {"device": "nvme", "nvme_path": str(drive)}
                spec = self._engine_spec(model, place, offload, parameters=True)
                spec |= {"load": model == self._options.models[0]}
                row = {"model": model, "who": "zstore, from disk"}
                told, rows = self._between_limits(lambda: run_child(_OURS, spec), row, model)
                yield from rows
            if told.last("save") is None:
                return
            yield from self._loads(model, place)
            yield from self._conversions(model, place)

    def _loads(self, model: str, place: Path) -> Iterator[Row]:
        ranks = self._options.ranks
        if model == self._options.models[0]:
            spec = self._engine_spec(model, place, {"device": "cpu"}, ranks=ranks) | {
                "contender": "ranks",
                "ranks": ranks,
            }
            row = {"model": model, "who": f"zstore, engines of {ranks} ranks, saved by 1"}
            yield from self._between_limits(lambda: run_child(_OURS, spec), row, model)[1]
        ranks += 1
        spec = {"contender": "rows", "folder": str(place), "ranks": ranks, "rank": ranks // 2}
        before = self._disk.limits()
        told = run_child(_TOOLS, spec)
        limits = _mean(before, self._disk.limits())
        row = {"model": model, "who": f"zstore, the rows of one rank of {ranks}, saved by 1", "what": "load"}
        found = told.last("load")
        rows = [] if found is None else [row | _figures(found, found["needed_bytes"], limits.read)]
        yield from _with_end(rows, told, row)

    def _conversions(self, model: str, place: Path) -> Iterator[Row]:
        state = self._state_bytes(model)
        wanted: list[tuple[str, list[str], tuple[int, int]]] = [
            ("consolidate to fp16", ["consolidate", "--dtype", "fp16"], (state // 3, state // 6)),
        ]
        if model == self._options.models[0]:
            wanted += [
                ("consolidate to fp32", ["consolidate", "--dtype", "fp32"], (state // 3, state // 3)),
                ("reshard to 2 ranks", ["reshard", "--world-size", "2"], (state, state)),
            ]
        interpreter = 0
        for what, (command, *options), sizes in wanted:
            with self._place() as out:
                arguments = [command, str(place), str(out / "out"), *options]
                spec = {"contender": "command", "folder": str(place), "arguments": arguments}
                told, found = self._conversion(_TOOLS, spec, sizes)
                interpreter = max(interpreter, (told.last("begin") or {}).get("before_bytes", 0))
                row = {"model": model, "who": "zstore", "what": what}
                yield from _with_end([row | found], told, row)
        with self._place() as out:
            arguments = ["consolidate", str(place), str(out / "out"), "--dtype", "fp16"]
            spec = {"contender": "command", "folder": str(place), "arguments": arguments}
            limit = self._options.memory + interpreter
            told, found = self._conversion(_TOOLS, spec, wanted[0][2], memory_limit_bytes=limit)
            row = {"model": model, "who": f"zstore, in {self._options.memory >> 20} MiB", "what": wanted[0][0]}
            limited = {"memory_limit": told.memory_limit, "limited_peak_bytes": told.limited_peak_bytes}
            yield from _with_end([row | found | limited], told, row)

    def _conversion(self, module: str, spec: Row, sizes: tuple[int, int], **how: Any) -> tuple[Told, Row]:
        """Run a child between two measurements of the disk; return what it told, and its figures."""
        before = self._disk.copy_s(*sizes)
        told = run_child(module, spec, **how)
        limit_s = (before + self._disk.copy_s(*sizes)) / 2
        found = told.last("convert")
        return told, {} if found is None else _figures(found, sum(sizes), sum(sizes) / limit_s)

    def _engine_spec(
        self, model: str, place: Path, offload: Row | None, *, parameters: bool = False, ranks: int = 1
    ) -> Row:
        zero: Row = {"stage": 3} if offload is None else {"stage": 3, "offload_optimizer": offload}
        if parameters:
            zero["offload_param"] = offload
        config = {
            # One global batch at every world size.
            "train_batch_size": self._options.ranks,
            "train_micro_batch_size_per_gpu": self._options.ranks // ranks,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
            # A step that runs behind would be a part of the save's time.
            "zstore": {"step_overlap": "none"},
        }
        names = {"contender": "engine", "folder": str(place), "drive": str(self._folder)}
        names["device"] = self._options.device if ranks == 1 else "cpu"  # several talk over gloo
        return {**names, "model": asdict(MODELS[model]), "config": config, "samples": self._options.ranks // ranks}


def _figures(found: Row, nbytes: int, limit: float) -> Row:
    """Return an event's figures with its rate, and what part of the disk's limit that is."""
    row = {name: value for name, value in found.items() if name != "event"}
    rate = nbytes / row["seconds"]
    return {
        **row,
        "bytes": nbytes,
        "gb_per_s": rate / 1e9,
        "limit_gb_per_s": limit / 1e9,
        "percent_of_limit": 100 * rate / limit,
    }


def _with_end(rows: list[Row], told: Told, row: Row) -> list[Row]:
    """Add the versions that were in use, and what went wrong, if anything did."""
    rows = rows or [{"what": "all", **row}]
    rows[-1] |= {"error": told.error, "versions": (told.last("end") or {}).get("versions", {})}
    return rows


if __name__ == "__main__":
    main()
