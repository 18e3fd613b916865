"""`zstore serve` beside nginx, if it is installed: the same files, over loopback, interleaved in one run.

python -m bench.serve [--path FOLDER] [--gib 1] [--rounds 5] [--json FILE]

Rates are medians over the rounds; ratios are of pairs in one round.
"""

import contextlib
import http.client
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.machine import bench_parser, write_figures
from bench.process import free_port
from tests.checkpoint.checkpoints import save_arrays
from tests.waiting import until

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
    port: int
    prefix: str
    """Of the paths of the run's files."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What clients ask for."""

    name: str
    connections: int
    range_bytes: int | None = None
    """None: whole files."""
    small: bool = False


PATTERNS = (
    Pattern(name="whole files, 1 connection", connections=1),
    Pattern(name="whole files, 4 connections", connections=4),
    Pattern(name="ranges of 8 MiB, 4 connections", connections=4, range_bytes=8 * _MIB),
    Pattern(name="ranges of 256 KiB, 4 connections", connections=4, range_bytes=_MIB // 4),
    Pattern(name="files of 1 KB, 4 connections", connections=4, small=True),
)


@contextlib.contextmanager
def _started(command: list[str], port: int) -> Iterator[None]:
    """Start a server; yield once it listens, end it after."""

    def listens() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return process.poll() is not None

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(listens)
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def servers(root: Path, scratch: Path) -> Iterator[list[Server]]:
    """Yield servers of the runs in `root`: ours, and nginx."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        stack.enter_context(_started([sys.executable, "-m", "zstore", "serve", str(root), "--port", str(port)], port))
        found = [Server(name="zstore", port=port, prefix="/zarr/run/step-00000001/")]
        if (nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is not None:
            port, config = free_port(), scratch / "nginx.conf"
            user = "user root;\n" if os.geteuid() == 0 else ""
            config.write_text(user + _NGINX.format(folder=scratch, port=port, root=root))
            stack.enter_context(_started([nginx, "-c", str(config), "-p", str(scratch)], port))
            found.append(Server(name="nginx", port=port, prefix="/run/step-00000001/"))
        yield found


def _fetch(server: Server, pattern: Pattern, nbytes: int, index: int) -> list[int]:
    """Return the bytes of each answer to one of the clients of a pattern."""
    connection, buffer = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), bytearray(_MIB)

    def get(path: str, headers: dict[str, str]) -> int:
        connection.request("GET", server.prefix + path, headers=headers)
        answer = connection.getresponse()
        if answer.status != (206 if headers else 200):
            raise http.client.HTTPException(f"{server.name} answers {answer.status} for {path}")
        return sum(iter(lambda: answer.readinto(buffer), 0))

    with contextlib.closing(connection):
        if pattern.small:
            return [get("zstore.json", {}) for _ in range(max(2, nbytes // _MIB))]
        if pattern.range_bytes is None:
            return [get(_BIG, {})]
        firsts = itertools.islice(range(0, nbytes, pattern.range_bytes), index, None, pattern.connections)
        lasts = ((first, min(first + pattern.range_bytes, nbytes) - 1) for first in firsts)
        return [get(_BIG, {"Range": f"bytes={first}-{last}"}) for first, last in lasts]


def measure(server: Server, pattern: Pattern, nbytes: int) -> dict[str, float]:
    """Return bytes and requests per second."""
    with ThreadPoolExecutor(pattern.connections) as clients:
        started = time.perf_counter()
        fetched = [clients.submit(_fetch, server, pattern, nbytes, index) for index in range(pattern.connections)]
        moved = [size for each in fetched for size in each.result()]
        seconds = time.perf_counter() - started
    return {"gb_per_s": sum(moved) / seconds / 1e9, "requests_per_s": len(moved) / seconds}


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
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with servers(root, scratch) as found:
        for pattern in PATTERNS:
            taken = [[measure(server, pattern, nbytes) for server in found] for _ in range(rounds + 1)][1:]
            figures[pattern.name] = {
                server.name: {
                    **{key: statistics.median(one[index][key] for one in taken) for key in taken[0][index]},
                    "ratio": statistics.median(one[0]["gb_per_s"] / one[index]["gb_per_s"] for one in taken),
                }
                for index, server in enumerate(found)
            }
    return figures


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of the large file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes = max(1, int(options.gib * 1024)) * _MIB
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        root, scratch = Path(name) / "root", Path(name) / "scratch"
        scratch.mkdir()
        make_run(root, nbytes)
        figures = compare(root, scratch, nbytes, options.rounds)
    for pattern, rows in figures.items():
        for server, row in rows.items():
            beside = "" if server == "zstore" else f"   zstore is {row['ratio']:.2f} of it"
            print(
                f"{pattern:34} {server:8} {row['gb_per_s']:6.2f} GB/s {row['requests_per_s']:8.0f} requests/s{beside}"
            )
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
