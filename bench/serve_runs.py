"""`zstore serve` over many runs: how long others wait while pages are open and weights are sent, and the first view of a run.

python -m bench.serve_runs [--path FOLDER] [--runs 1000] [--checkpoints 10] [--steps 500000] [--json FILE]

Clients run in processes of their own on the same cores, so times are those of a full machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.serve_clients import Connection, at_once
from bench.serve_load import peak_bytes
from bench.serve_process import free_port, started
from tests.checkpoint.checkpoints import save_arrays
from tests.serve.sample import JournalWriter

_SHORT_STEPS = 200
_LONG = "long"


def make_runs(root: Path, options: argparse.Namespace) -> None:
    """Make runs, of which one is long, each with as many checkpoints."""
    save_arrays(root / _LONG, {"model/weight": np.zeros(options.mib * 2**18, np.float32)})
    template = root.parent / "template"
    save_arrays(template, {"model/weight": np.zeros(64, np.float32)})
    (tag,) = template.glob("step-*")
    for number in range(options.runs):
        run = root / f"run-{number:04}"
        for step in range(1, options.checkpoints + 1):
            shutil.copytree(tag, run / f"step-{step:08}")
        journal = JournalWriter(run / f"journal-{number:032x}.jsonl", time.time())
        journal.start(f"{number:032x}")
        journal.steps(_SHORT_STEPS)
    journal = JournalWriter(root / _LONG / f"journal-{'f' * 32}.jsonl", time.time())
    journal.start("f" * 32)
    for _ in range(0, options.steps, 10_000):
        journal.steps(min(10_000, options.steps))


def _watch(port: int, runs: list[str], until_s: float) -> int:
    """Keep the pages of runs open; return the events that came."""
    found: list[int] = []
    until = time.monotonic() + until_s

    def work(run: str) -> None:
        with contextlib.closing(Connection(port)) as connection:
            found.append(connection.events(f"/api/runs/{run}/events", until))

    at_once([partial(work, run) for run in runs])
    return sum(found)


def _download(port: int, clients: int, until_s: float) -> int:
    """Fetch weights again and again; return the bytes."""
    found: list[int] = []
    until = time.monotonic() + until_s

    def work() -> None:
        with contextlib.closing(Connection(port)) as connection:
            while time.monotonic() < until:
                found.append(connection.get(f"/weights/{_LONG}/latest/model.safetensors?dtype=bf16"))

    at_once([work] * clients)
    return sum(found)


def _ask(port: int, num_runs: int, until_s: float) -> dict[str, list[float]]:
    """Ask for one thing after the other; return the seconds of each kind."""
    chance = random.Random(0)
    paths: dict[str, Callable[[str], str]] = {
        "healthz": lambda run: "/healthz",
        "asset": lambda run: "/assets/main.js",
        "run": lambda run: f"/api/runs/{run}",
        "steps": lambda run: f"/api/runs/{run}/steps?points=1000",
        "checkpoints": lambda run: f"/api/runs/{run}/checkpoints",
        "zarr": lambda run: f"/zarr/{run}/latest/zarr.json",
        "runs": lambda run: "/api/runs",
    }
    found: dict[str, list[float]] = {kind: [] for kind in paths}
    connection, until = Connection(port), time.monotonic() + until_s
    while time.monotonic() < until:
        for kind, path in paths.items():
            asked = time.monotonic()
            connection.get(path(f"run-{chance.randrange(num_runs):04}"))
            found[kind].append(time.monotonic() - asked)
            time.sleep(0.02)
    connection.close()
    return found


def _first_view(url: str) -> tuple[float, float]:
    """Return the seconds until the long run is shown, and until all of its steps are."""
    asked, first = time.monotonic(), 0.0
    while True:
        with urllib.request.urlopen(f"{url}/api/runs/{_LONG}/steps?points=1000") as answer:
            is_whole = json.load(answer)["is_whole"]
        first = first or time.monotonic() - asked
        if is_whole:
            return first, time.monotonic() - asked
        time.sleep(0.5)


def measure(root: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return times by kind of request, those of the first view, and the service's memory."""
    port = free_port()
    command = [sys.executable, "-m", "zstore", "serve", str(root), "--port", str(port)]
    names = [f"run-{number:04}" for number in range(options.runs)]
    views: list[tuple[float, float]] = []
    with started(command, port) as service, ProcessPoolExecutor(3, get_context("spawn")) as clients:
        _ask(port, options.runs, 1.0)  # the list of runs is read for the first time
        watched = clients.submit(_watch, port, names[: options.pages], options.seconds)
        sent = clients.submit(_download, port, options.downloads, options.seconds)
        viewer = threading.Thread(target=lambda: views.append(_first_view(f"http://127.0.0.1:{port}")))
        asked = clients.submit(_ask, port, options.runs, options.seconds)
        time.sleep(options.seconds / 4)
        viewer.start()
        times, events, nbytes = asked.result(), watched.result(), sent.result()
        viewer.join()
        memory = peak_bytes(service.pid)
    everything = [seconds for kind in times.values() for seconds in kind]
    rows = {"all": everything, **times}
    for kind, values in rows.items():
        shown = " ".join(f"p{share * 100:g} {np.quantile(values, share) * 1e3:.1f} ms" for share in (0.5, 0.99))
        print(f"{kind:12} {len(values):6} requests, {shown}, longest {max(values) * 1e3:.0f} ms")
    ((first, whole),) = views
    print(f"first view of {options.steps:,} steps {first:.2f} s, all of them {whole:.1f} s")
    print(
        f"{events} events, {nbytes / options.seconds / 1e9:.2f} GB/s of weights, peak memory {memory / 2**20:.0f} MiB"
    )
    return {
        "runs": options.runs, "checkpoints": options.runs * options.checkpoints, "steps": options.steps,
        "p99_s": {kind: float(np.quantile(values, 0.99)) for kind, values in rows.items()},
        "p50_s": {kind: float(np.quantile(values, 0.5)) for kind, values in rows.items()},
        "first_view_s": first, "whole_view_s": whole, "peak_bytes": memory,
    }  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="folder on the drive (default: the system's temporary one)")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=10, help="of each run")
    parser.add_argument("--steps", type=int, default=500_000, help="of the long run")
    parser.add_argument("--mib", type=int, default=64, help="of the weights that are sent, in fp32")
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--downloads", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as scratch:
        root = Path(scratch) / "runs"
        root.mkdir()
        make_runs(root, options)
        found = measure(root, options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
