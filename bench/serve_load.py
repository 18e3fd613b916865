"""Many clients of one service at once, and a training run beside them, on this machine's processors."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve_clients import Connection, Count, at_once
from bench.serve_process import free_port, started
from tests.checkpoint.checkpoints import save_arrays

_MIB = 2**20
_TAG = "step-00000001"
_CONFIG = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 0},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--load", action="store_true", help="many clients at once, in place of the comparison")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--range-clients", type=int, default=200)
    parser.add_argument("--downloads", type=int, default=20)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--model", default="gpt-tiny", help="that the training run trains; none: there is no such run")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two requests of a client")


def measure(root: Path, options: argparse.Namespace, nbytes: int) -> dict[str, object]:
    """Return what the clients did, their errors, the memory of the service, and the rate of the training run."""
    save_arrays(root / "run", {f"model/layer.{i}": np.zeros(nbytes // 8 // 4, np.float32) for i in range(8)})
    with contextlib.ExitStack() as stack:
        if options.model != "none":
            stack.enter_context(_training(root, options.model))
        port = free_port()
        command = [sys.executable, "-m", "zstore", "serve", str(root), "--port", str(port)]
        service = stack.enter_context(started(command, port))
        watched = "train" if options.model != "none" else "run"
        alone = _steps(root, options.seconds / 2) if options.model != "none" else None
        counts, beside = _load(root, port, watched, options)
        memory = peak_bytes(service.pid)
        problems = [] if service.poll() is None else ["the service ended"]
    figures = {
        "seconds": options.seconds,
        "pace_s": options.pace,
        "clients": {name: {"requests": c.requests, "gb_per_s": c.nbytes / options.seconds / 1e9, "longest_s": c.longest_s}
                    for name, c in counts.items()},
        "errors": problems + [f"{name}: {error}" for name, c in counts.items() for error in c.errors],
        "service_peak_bytes": memory,
        "training_steps_per_s": {"alone": alone, "beside": beside},
    }  # fmt: skip
    for name, count in counts.items():
        print(
            f"{name:8} {count.requests:7} answers {count.nbytes / options.seconds / 1e9:6.2f} GB/s, the longest "
            f"{count.longest_s:.2f} s, {len(count.errors)} errors {count.errors[:3] or ''}"
        )
    print(f"service: at most {memory / _MIB:.0f} MiB resident")
    if alone and beside:
        print(
            f"training: {alone:.2f} steps/s alone, {beside:.2f} beside the load ({alone / beside:.2f} times as long a step)"
        )
    return figures


def _load(root: Path, port: int, watched: str, options: argparse.Namespace) -> tuple[dict[str, Count], float | None]:
    until = time.monotonic() + options.seconds
    counts = {"ranges": Count(), "weights": Count(), "pages": Count()}
    file = f"/zarr/run/{_TAG}/model/layer.0/c.0"
    file_bytes = (root / "run" / _TAG / "model" / "layer.0" / "c.0").stat().st_size

    def read_ranges(connection: Connection) -> int:
        first = int(np.random.default_rng().integers(0, max(1, file_bytes - _MIB)))
        return connection.get(file, first, min(first + _MIB, file_bytes))

    def download(connection: Connection) -> int:
        return connection.get(f"/weights/run/{_TAG}/model.safetensors?dtype=bf16")

    def watch() -> None:
        try:
            connection = Connection(port)
            counts["pages"].add(connection.events(f"/api/runs/{watched}/events", until), 0.0)
            connection.close()
        except Exception as error:
            counts["pages"].fail(error)

    works: list[Callable[[], None]] = [watch for _ in range(options.pages)]
    for name, number, ask in (("ranges", options.range_clients, read_ranges), ("weights", options.downloads, download)):
        works += [_asking(port, ask, counts[name], until, options.pace) for _ in range(number)]
    found: list[float | None] = [None]
    timer: list[Callable[[], None]] = []
    if options.model != "none":
        timer.append(lambda: found.__setitem__(0, _steps(root, options.seconds)))
    threading.stack_size(256 * 1024)
    at_once([*timer, *works])
    return counts, found[0]


def _asking(
    port: int, ask: Callable[[Connection], int], count: Count, until: float, pace_s: float
) -> Callable[[], None]:
    def work() -> None:
        try:
            connection = Connection(port)
            while time.monotonic() < until:
                asked = time.monotonic()
                nbytes = ask(connection)
                count.add(nbytes, time.monotonic() - asked)
                time.sleep(max(0.0, pace_s - (time.monotonic() - asked)))
            connection.close()
        except Exception as error:
            count.fail(error)

    return work


@contextlib.contextmanager
def _training(root: Path, model: str) -> Iterator[None]:
    """Train until the block ends; yields once steps are taken."""
    config, folder = root.parent / "config.json", root / "train"
    config.write_text(json.dumps(_CONFIG))
    text = root.parent / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 4000)
    command = [sys.executable, "-m", "zstore", "train", "--config", str(config), "--model", model, "--steps", "1000000"]
    command += ["--data", str(text), "--save", str(folder), "--seq-len", "64"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 120
            while len(_times(root)) < 5:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} takes no steps")
                time.sleep(0.1)
            yield
        finally:
            process.kill()


def _steps(root: Path, seconds: float) -> float:
    """Return the steps of the training run in each second of the next `seconds`."""
    started_at = time.time()
    time.sleep(seconds)
    until = time.time()
    return sum(started_at < at <= until for at in _times(root)) / (until - started_at)


def _times(root: Path) -> list[float]:
    """Return when the training run took its steps, by its journal."""
    found: list[float] = []
    for journal in (root / "train").glob("journal-*.jsonl"):
        for line in journal.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                note: dict[str, Any] = json.loads(line)
                if note.get("kind") == "step":
                    found.append(note["at"])
    return found


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process had resident."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
