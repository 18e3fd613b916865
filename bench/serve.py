"""`zstore serve` beside nginx and Python's own server: the same files, over loopback, interleaved in one run.

python -m bench.serve [--path FOLDER] [--gib 1] [--rounds 5] [--json FILE]

Rates are medians over the rounds; ratios are of pairs in one round. Processor time is the server's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.serve_clients import Connection, at_once, ranges
from bench.serve_process import free_port, started
from tests.checkpoint.checkpoints import save_arrays

_MIB = 2**20
_BIG = "model/big/c.0"
_NGINX = """
daemon off; worker_processes auto; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs."""

    name: str
    pids: tuple[int, ...]
    port: int
    prefix: str
    """Of the paths of the run's files."""
    has_ranges: bool = True

    def cpu_s(self) -> float:
        """Return the processor seconds that it took so far."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def servers(root: Path, scratch: Path) -> Iterator[list[Server]]:
    """Yield servers of the runs in `root`: ours, nginx if it is installed, and Python's."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        ours = [sys.executable, "-m", "zstore", "serve", str(root), "--port", str(port)]
        process = stack.enter_context(started(ours, port))
        found = [Server(name="zstore", pids=(process.pid,), port=port, prefix="/zarr/run/step-00000001/")]
        if (nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is not None:
            port = free_port()
            config = scratch / "nginx.conf"
            user = "user root;\n" if os.geteuid() == 0 else ""
            config.write_text(user + _NGINX.format(folder=scratch, port=port, root=root))
            process = stack.enter_context(started([nginx, "-c", str(config), "-p", str(scratch)], port))
            pids = (process.pid, *children(process.pid))
            found.append(Server(name="nginx", pids=pids, port=port, prefix="/run/step-00000001/"))
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "http.server",
            str(port),
            "--bind",
            "127.0.0.1",
            "-d",
            str(root),
            "-p",
            "HTTP/1.1",
        ]
        process = stack.enter_context(started(command, port))
        prefix = "/run/step-00000001/"
        found.append(Server(name="http.server", pids=(process.pid,), port=port, prefix=prefix, has_ranges=False))
        yield found


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What clients ask for."""

    name: str
    connections: int
    range_bytes: int | None
    """None: whole files."""
    small: bool = False


PATTERNS = (
    Pattern(name="whole files, 1 connection", connections=1, range_bytes=None),
    Pattern(name="whole files, 4 connections", connections=4, range_bytes=None),
    Pattern(name="ranges of 8 MiB, 4 connections", connections=4, range_bytes=8 * _MIB),
    Pattern(name="ranges of 256 KiB, 4 connections", connections=4, range_bytes=_MIB // 4),
    Pattern(name="files of 1 KB, 4 connections", connections=4, range_bytes=None, small=True),
)


def measure(server: Server, pattern: Pattern, nbytes: int) -> dict[str, float]:
    """Return bytes and requests per second, and the server's processor seconds for each GB and each thousand requests."""
    connections = [Connection(server.port) for _ in range(pattern.connections)]
    moved: list[int] = []

    def fetch(index: int) -> None:
        mine = connections[index]
        if pattern.small:
            moved.extend(mine.get(f"{server.prefix}zstore.json") for _ in range(max(2, nbytes // _MIB)))
        elif pattern.range_bytes is None:
            moved.append(mine.get(server.prefix + _BIG))
        else:
            parts = itertools.islice(ranges(nbytes, pattern.range_bytes), index, None, pattern.connections)
            moved.extend(mine.get(server.prefix + _BIG, first, stop) for first, stop in parts)

    before = server.cpu_s()
    seconds = at_once([lambda index=index: fetch(index) for index in range(pattern.connections)])  # type: ignore[misc]
    cpu_s = server.cpu_s() - before
    for each in connections:
        each.close()
    return {
        "gb_per_s": sum(moved) / seconds / 1e9,
        "requests_per_s": len(moved) / seconds,
        "cpu_s_per_gb": cpu_s / sum(moved) * 1e9,
        "cpu_ms_per_request": 1e3 * cpu_s / len(moved),
    }


def make_run(root: Path, nbytes: int) -> None:
    """Make a run with a checkpoint of a small array and one file of `nbytes`."""
    tag = save_arrays(root / "run", {"model/small": np.zeros(16, np.float32)})
    (tag / _BIG).parent.mkdir()
    block = np.random.default_rng(0).bytes(_MIB)
    with (tag / _BIG).open("wb") as file:
        for _ in range(nbytes // _MIB):
            file.write(block)


def compare(root: Path, scratch: Path, nbytes: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians of each pattern and server; `ratio` is ours to the other's rate, of pairs in one round."""
    with servers(root, scratch) as found:
        figures: dict[str, dict[str, dict[str, float]]] = {}
        for pattern in PATTERNS:
            able = [server for server in found if pattern.range_bytes is None or server.has_ranges]
            taken = [[measure(server, pattern, nbytes) for server in able] for _ in range(rounds + 1)][1:]
            rate = "requests_per_s" if pattern.small else "gb_per_s"
            figures[pattern.name] = {}
            for index, server in enumerate(able):
                mine = [one[index] for one in taken]
                row = {key: statistics.median(one[key] for one in mine) for key in mine[0]}
                row["ratio"] = statistics.median(one[0][rate] / one[index][rate] for one in taken)
                figures[pattern.name][server.name] = row
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of the large file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    nbytes = max(1, int(options.gib * 1024)) * _MIB
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        root, scratch = Path(name) / "root", Path(name) / "scratch"
        scratch.mkdir()
        make_run(root, nbytes)
        figures = compare(root, scratch, nbytes, options.rounds)
    for pattern, rows in figures.items():
        for server, row in rows.items():
            print(
                f"{pattern:34} {server:12} {row['gb_per_s']:6.2f} GB/s {row['requests_per_s']:8.0f} requests/s "
                f"{row['cpu_s_per_gb']:6.2f} s of CPU a GB {row['cpu_ms_per_request']:7.2f} ms a request"
                + ("" if server == "zstore" else f"   zstore is {row['ratio']:.2f} of it")
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
