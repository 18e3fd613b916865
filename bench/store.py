"""An async put and get of many arrays through `open_store` beside other stores: durable writes, cold reads, interleaved.

python -m bench.store [--path FOLDER] [--cases 1000x64,1000x1024,100x65536] [--rounds 5] [--json FILE]

Each contender has an event loop to itself, keeps at most 16 operations under way, and is asked to have all on disk at the
end of its writes: ours by a checkpoint, the others by their own flushes or by an fsync of each file in its put. The page cache
is dropped before reads. Contenders that are not installed are left out.
"""

import asyncio
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.limits import disk_limit, limit_name, new_files_limit
from bench.machine import bench_parser, machine, write_figures
from bench.process import drop_page_cache, forget_peak, make_durable, opened, peak_bytes, resident_bytes

Arrays = Mapping[str, Any]
Contender = Callable[[Path, Arrays], AsyncGenerator[Any, None]]
"""Yields what puts and what gets an array by name in a folder, and again once all that was put is durable."""
WIDTH = 16
"""Operations under way at a time."""
BUDGET_BYTES = 256 * 1024 * 1024
"""Of our store."""
_FEW_FILES = 200
"""More files than these are removed when all was measured: ext4 passes over inodes that were freed in the last minutes, one
by one, whenever it makes a file near them."""


async def _each(arrays: Arrays, work: Callable[[str], Awaitable[Any]], *, read: bool = False) -> None:
    """Do `work` for every array, `WIDTH` at a time; of what it read the ends are compared."""
    names = iter(arrays)

    async def serve() -> None:
        for name in names:
            found = await work(name)
            if read:
                got, put = np.asarray(found).reshape(-1), arrays[name].numpy()
                if (got[0], got[-1], got.size) != (put[0], put[-1], put.size):
                    raise ValueError(f"{name}: what was read is not what was written")

    await asyncio.gather(*(serve() for _ in range(WIDTH)))


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    for fd in opened([folder]):
        os.fsync(fd)


async def _ours(folder: Path, arrays: Arrays) -> AsyncGenerator[Any, None]:
    import zstore

    async with zstore.open_store(folder / "run", host_budget_bytes=BUDGET_BYTES) as store:

        async def put(name: str) -> None:
            await store.put(name, arrays[name])

        async def get(name: str) -> Any:
            return await store.get(name)

        yield put, get
        await store.checkpoint(folder / "saved")
        yield


async def _tensorstore(folder: Path, arrays: Arrays) -> AsyncGenerator[Any, None]:
    import tensorstore

    opened: dict[str, Any] = {}

    async def put(name: str) -> None:
        value = arrays[name].numpy()
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
        layout = tensorstore.ChunkLayout(chunk_shape=value.shape)
        opened[name] = await tensorstore.open(
            spec, create=True, dtype=value.dtype, shape=value.shape, chunk_layout=layout
        )
        await opened[name].write(value)  # flushes each file, and the names

    async def get(name: str) -> Any:
        return await opened[name].read()

    yield put, get
    yield


async def _zarr(folder: Path, arrays: Arrays) -> AsyncGenerator[Any, None]:
    import obstore.store
    import zarr
    from zarr.api import asynchronous

    group = await asynchronous.open_group(
        zarr.storage.ObjectStore(obstore.store.LocalStore(prefix=folder, mkdir=True)), mode="w"
    )
    opened: dict[str, Any] = {}

    async def put(name: str) -> None:
        value = arrays[name].numpy()
        made: Any = await group.create_array(
            name, shape=value.shape, chunks=value.shape, dtype=value.dtype, compressors=None
        )
        opened[name] = made
        await made.setitem(slice(None), value)
        await asyncio.to_thread(make_durable, folder / name)

    async def get(name: str) -> Any:
        return await opened[name].getitem(slice(None))

    yield put, get
    _sync_folder(folder)
    yield


async def _torch(folder: Path, arrays: Arrays) -> AsyncGenerator[Any, None]:
    import torch

    def save(path: Path, value: Any) -> None:
        with path.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())

    async def put(name: str) -> None:
        await asyncio.to_thread(save, folder / name, arrays[name])

    async def get(name: str) -> Any:
        return await asyncio.to_thread(torch.load, folder / name)

    yield put, get
    _sync_folder(folder)
    yield


async def _aiofiles(folder: Path, arrays: Arrays) -> AsyncGenerator[Any, None]:
    import aiofiles

    async def put(name: str) -> None:
        async with aiofiles.open(folder / name, "wb") as file:
            await file.write(memoryview(arrays[name].numpy()).cast("B"))
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())

    async def get(name: str) -> Any:
        async with aiofiles.open(folder / name, "rb") as file:
            return np.frombuffer(await file.read(), np.float32)

    yield put, get
    _sync_folder(folder)
    yield


CONTENDERS: dict[str, tuple[str, Contender]] = {
    "zstore": ("zstore", _ours),
    "tensorstore": ("tensorstore", _tensorstore),
    "zarr with obstore": ("obstore", _zarr),
    "torch.save": ("torch", _torch),
    "aiofiles": ("aiofiles", _aiofiles),
}
"""Name -> the package that it needs, and what it does."""


async def _measure(contender: Contender, folder: Path, arrays: Arrays) -> dict[str, float]:
    """Return the seconds of writing and of reading, and by how much memory grew meanwhile at most."""
    found: dict[str, float] = {}
    steps = contender(folder, arrays)
    async with contextlib.aclosing(steps):
        for pattern in ("write", "read"):
            drop_page_cache(folder)
            gc.collect()
            forget_peak()
            before, started = resident_bytes(), time.perf_counter()
            if pattern == "write":
                put, get = await anext(steps)
                await _each(arrays, put)
                await anext(steps)
            else:
                await _each(arrays, get, read=True)
            found[pattern] = time.perf_counter() - started
            found[f"{pattern}_growth_bytes"] = peak_bytes() - before
    return found


def _run(contender: Contender, folder: Path, arrays: Arrays) -> dict[str, float]:
    return asyncio.run(_measure(contender, folder, arrays))


def _limits(folder: Path, nbytes: int, each_bytes: int) -> dict[str, float]:
    """Return the seconds of it for the disk: new files, durable, then a read past the page cache."""
    read = disk_limit(folder, "read", nbytes)
    seconds = {"write": nbytes / new_files_limit(folder, nbytes, file_bytes=each_bytes), "read": nbytes / read}
    (folder / "limit.bin").unlink(missing_ok=True)
    return seconds


def run_case(path: Path, count: int, each_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return by contender the medians of MB/s, of how many times the time it takes that ours does, and of memory."""
    import torch

    # A few arrays under many names: what is measured is what becomes of them.
    values = [torch.randn(each_bytes // 4) for _ in range(min(count, 4))]
    arrays = {f"array{i:04}": values[i % len(values)] for i in range(count)}
    chosen = {name: one for name, (package, one) in CONTENDERS.items() if find_spec(package) is not None}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    large = each_bytes >= 2**20
    with contextlib.ExitStack() as at_end:

        def in_folder(measure: Callable[[Path], dict[str, float]]) -> dict[str, float]:
            temporary = tempfile.TemporaryDirectory(dir=path, prefix="zstore-bench-")
            if count > _FEW_FILES:
                return measure(Path(at_end.enter_context(temporary)))
            with temporary as folder:
                return measure(Path(folder))

        for number in range(rounds):
            order = list(chosen)[number % len(chosen) :] + list(chosen)[: number % len(chosen)]
            for name in order:
                found[name].append(in_folder(partial(_run, chosen[name], arrays=arrays)))
            if large:
                limits = partial(_limits, nbytes=count * each_bytes, each_bytes=each_bytes)
                found.setdefault(limit_name(), []).append(in_folder(limits))
    return {name: _medians(rows, found["zstore"], count * each_bytes) for name, rows in found.items()}


def _medians(rows: list[dict[str, float]], ours: list[dict[str, float]], nbytes: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for pattern in ("write", "read"):
        figures[f"{pattern}_bytes_per_s"] = nbytes / statistics.median(row[pattern] for row in rows)
        pairs = zip(rows, ours, strict=True)
        figures[f"{pattern}_ratio"] = statistics.median(row[pattern] / our[pattern] for row, our in pairs)
        if (key := f"{pattern}_growth_bytes") in rows[0]:
            figures[key] = max(row[key] for row in rows)
    return figures


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--cases", default="1000x64,1000x1024,100x65536", help="arrays x KiB of each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(options.path), "cases": {}}
    for case in options.cases.split(","):
        count, _, kib = case.partition("x")
        rows = run_case(options.path, int(count), int(kib) * 1024, options.rounds)
        figures["cases"][case] = rows
        print(f"{count} arrays of {kib} KiB: MB/s, (the time beside ours), memory; medians of {options.rounds} rounds")
        for name, row in rows.items():
            cells = [
                f"{pattern} {row[f'{pattern}_bytes_per_s'] / 1e6:6.0f} ({row[f'{pattern}_ratio']:5.2f})"
                f" +{row.get(f'{pattern}_growth_bytes', 0) / 2**20:5.0f} MiB"
                for pattern in ("write", "read")
            ]
            print(f"  {name:20}", *cells, sep="   ")
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
