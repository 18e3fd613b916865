"""The disk tier against the disk: passes of the store, and of the front door, next to the limit, interleaved in one run.

python -m bench.disk [--path FOLDER] [--gib 2] [--rounds 5] [--json FILE]
"""

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

import zstore
from bench.limits import disk_limit, limit_name
from bench.machine import bench_parser, write_figures
from zstore.format import Array, ArraySpec, make_grid
from zstore.store import Store, StoreOptions


def store_rate(store: Store, groups: list[list[str]], pattern: str) -> float:
    """Return bytes per second of one pass; "mixed" reads and writes every byte and counts both."""
    mode = {"read": "read", "write": "fill", "mixed": "update"}[pattern]
    return _rate(store, lambda: deque(store.tiles(groups, mode), 0))  # type: ignore[arg-type]


def front_rate(store: Store, value: Array, count: int, pattern: str) -> float:
    """Return bytes per second of whole arrays through `open_store`: puts of `value`, `count` times, or a pass over them."""
    if pattern == "write":
        return _rate(store, lambda: [store.put(f"{i}", value) for i in range(count)] and store.flush().wait())
    return _rate(store, lambda: deque(store.stream(mode="read" if pattern == "read" else "update"), 0))


def _rate(store: Store, work: Callable[[], object]) -> float:
    before = store.statistics()
    started = time.perf_counter()
    work()
    elapsed = time.perf_counter() - started
    after = store.statistics()
    moved = after.disk_read_bytes - before.disk_read_bytes + after.disk_write_bytes - before.disk_write_bytes
    return moved / elapsed


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB that each pass covers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=StoreOptions.num_threads)
    parser.add_argument("--block-mib", type=float, default=StoreOptions.block_bytes / 2**20)
    options = parser.parse_args()
    nbytes = int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        folder = Path(name)
        store_options = StoreOptions(
            run_path=folder, num_threads=options.threads, block_bytes=int(options.block_mib * 2**20)
        )
        with Store(store_options) as store:
            groups = _make_arrays(store, nbytes)
            with zstore.open_store(folder / "front", num_threads=options.threads) as front:
                figures = _measure(store, groups, front, folder, nbytes, options.rounds)
    for pattern, row in figures.items():
        print(
            f"{pattern:6} store {row['store']:5.2f} GB/s   "
            f"front door {row['front']:5.2f} GB/s ({row['front_percent']:5.1f} %)   "
            f"{limit_name()} {row['limit']:5.2f} GB/s   "
            f"{row['percent']:5.1f} % of the limit (median of {options.rounds} pairs)"
        )
    write_figures(options.json, figures)


def _make_arrays(store: Store, nbytes: int) -> list[list[str]]:
    """Make matrices of 2048 columns, three to a group as Adam's state is; returns the groups."""
    rows = max(16, min(8192, nbytes // (3 * 4 * 2048)))
    count = max(1, nbytes // (3 * 4 * 2048 * rows))
    groups: list[list[str]] = []
    for i in range(count):
        group = [f"{slot}/{i}" for slot in ("model", "exp_avg", "exp_avg_sq")]
        for array in group:
            spec = ArraySpec(name=array, shape=(rows, 2048), dtype="float32")
            store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        groups.append(group)
    return groups


def _measure(
    store: Store, groups: list[list[str]], front: Store, folder: Path, nbytes: int, rounds: int
) -> dict[str, dict[str, float]]:
    local = store.local(groups[0][0])
    value, count = np.ones((local.valid_numel // 2048, 2048), np.float32), 3 * len(groups)
    for pattern in ("write", "read"):  # make every extent real, and warm up
        store_rate(store, groups, pattern)
        front_rate(front, value, count, pattern)
        disk_limit(folder, pattern, nbytes)
    figures: dict[str, dict[str, float]] = {}
    for pattern in ("write", "read", "mixed"):
        found = [
            (
                store_rate(store, groups, pattern),
                front_rate(front, value, count, pattern),
                disk_limit(folder, pattern, nbytes),
            )
            for _ in range(rounds)
        ]
        figures[pattern] = {
            "store": statistics.median(a for a, _, _ in found) / 1e9,
            "front": statistics.median(b for _, b, _ in found) / 1e9,
            "limit": statistics.median(c for _, _, c in found) / 1e9,
            "percent": statistics.median(100 * a / c for a, _, c in found),
            "front_percent": statistics.median(100 * b / a for a, b, _ in found),
        }
    return figures


if __name__ == "__main__":
    main()
