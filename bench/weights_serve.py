"""Weights made on the way by `zstore serve`, beside nginx and Python's server that give the file consolidated before.

python -m bench.weights_serve [--path FOLDER] [--gib 1] [--rounds 5] [--dtypes fp32,bf16,fp16] [--json FILE]

`zstore --cache` casts once for all clients: "first" while it does, "kept" from then on. Rates are of bytes of the file, medians
over the rounds, interleaved in one run; processor time is the server's alone. What
`zstore consolidate` takes is told too: the others can begin only after it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.serve import Server, servers
from bench.serve_clients import Connection, at_once
from bench.serve_process import free_port, started
from tests.checkpoint.checkpoints import save_arrays

_WIDTH = 2048
_FILE = "model.safetensors"
_OWN, _FIRST, _KEPT = "zstore", "zstore --cache, first", "zstore --cache, kept"


def measure(server: Server, path: str, num_clients: int) -> dict[str, float]:
    """Return bytes per second over all clients, and the server's processor seconds for each GB."""
    connections = [Connection(server.port) for _ in range(num_clients)]
    moved: list[int] = []
    before = server.cpu_s()
    seconds = at_once([lambda one=one: moved.append(one.get(path)) for one in connections])  # type: ignore[misc]
    cpu_s = server.cpu_s() - before
    for each in connections:
        each.close()
    return {"gb_per_s": sum(moved) / seconds / 1e9, "cpu_s_per_gb": cpu_s / sum(moved) * 1e9}


def consolidate(root: Path, dtype: str) -> float:
    """Write the file that the others give; return the seconds."""
    command = [sys.executable, "-m", "zstore", "consolidate", str(root / "run"), str(root / dtype), "--dtype", dtype]
    started = time.perf_counter()
    subprocess.run([*command, "--max-shard-size", "1TB"], check=True, capture_output=True)
    return time.perf_counter() - started


def compare(root: Path, scratch: Path, dtypes: list[str], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians by case and server; of `consolidate` its seconds."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    port, cache = free_port(), scratch / "cache"
    command = [sys.executable, "-m", "zstore", "serve", str(root), "--port", str(port), "--cache", str(cache)]
    with servers(root, scratch) as others, started(command, port) as process:
        keeping = [Server(name=name, pids=(process.pid,), port=port, prefix="") for name in (_FIRST, _KEPT)]
        found = [others[0], *keeping, *others[1:]]
        for dtype in dtypes:
            seconds = consolidate(root, dtype)
            for clients in (1, 4):
                made = f"/weights/run/latest/{_FILE}?dtype={dtype}&max_shard_size=1TB"
                paths = {server.name: f"/{dtype}/{_FILE}" for server in found} | dict.fromkeys(
                    (_OWN, _FIRST, _KEPT), made
                )
                taken = []
                for _ in range(rounds + 1):
                    shutil.rmtree(cache / "files", ignore_errors=True)
                    taken.append([measure(server, paths[server.name], clients) for server in found])
                rows = {
                    server.name: {
                        key: statistics.median(one[index][key] for one in taken[1:]) for key in taken[0][index]
                    }
                    for index, server in enumerate(found)
                }
                figures[f"{dtype}, {clients} client{'s' * (clients > 1)}"] = rows
            figures[f"zstore consolidate --dtype {dtype}"] = {"zstore": {"seconds": seconds}}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of weights in fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="types of data to write the weights in")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    count = max(1, round(options.gib * 2**30 / (4 * _WIDTH * _WIDTH)))
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        root, scratch = Path(name) / "root", Path(name) / "scratch"
        root.mkdir()
        scratch.mkdir()
        rng = np.random.default_rng(0)
        save_arrays(
            root / "run",
            {f"model/h.{i}.weight": rng.standard_normal((_WIDTH, _WIDTH), np.float32) for i in range(count)},
        )
        figures = compare(root, scratch, options.dtypes.split(","), options.rounds)
    for case, rows in figures.items():
        for server, row in rows.items():
            told = "   ".join(f"{key} {value:.3g}" for key, value in row.items())
            print(f"{case:32} {server:22} {told}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
