"""Versions in a bucket: what a second save of adapters on a frozen model sends, the rate of a save beside plain uploads of the
same files, and the commit of a trillion parameters by 4,096 ranks, of which everything but the data is real.

    python -m bench.versions --url s3://bucket/folder [--storage-option key=value ...] [--mib 512] [--ranks 4096] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import zstore
from bench.machine import machine
from bench.process import measured, peak_bytes
from bench.scale_model import Trillion, owned_grids, stored_grids
from zstore.checkpoint.format import Record, parse_json
from zstore.checkpoint.metadata import encode_documents, parse_root
from zstore.checkpoint.names import METADATA_FILE, manifest_file, new_save_id
from zstore.checkpoint.reader import CheckpointReader
from zstore.checkpoint.source import StoredArray
from zstore.io.pool import Workers
from zstore.remote.packs import Extent, ShardTable, plan_packs, shards_of, training
from zstore.remote.send import PART_BYTES
from zstore.remote.target import NUM_THREADS
from zstore.remote.upload import place_of, upload_checkpoint
from zstore.remote.url import parse_options
from zstore.remote.version_target import Receipt, VersionTarget
from zstore.remote.versions import VersionsFolder

_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="folder in a bucket, for what is sent")
    parser.add_argument("--storage-option", action="append", default=[])
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="local folder")
    parser.add_argument("--mib", type=int, default=512, help="bytes of a save, in MiB")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=Trillion.layers)
    parser.add_argument("--hidden", type=int, default=Trillion.hidden)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    storage = parse_options(options.storage_option)
    url = f"{options.url.rstrip('/')}/{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        folder = Path(name)
        figures = {
            "machine": machine(folder),
            "adapters": adapters(f"{url}/adapters", storage, folder, options.mib),
            "rate": rate(f"{url}/rate", storage, folder, options.mib, options.rounds),
            "plan": [
                plan(Trillion(layers=options.layers, hidden=options.hidden), options.ranks, folder, joins=joins)
                for joins in (True, False)
            ],
        }
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# -- adapters -------------------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen layer, and an adapter of rank 1 beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 1, bias=False), torch.nn.Linear(1, width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.frozen(values) + self.up(self.down(values)))


def adapters(url: str, storage: dict[str, Any], folder: Path, mib: int) -> dict[str, Any]:
    """Save a model of so many MiB, nearly all frozen, twice; return the bytes in the bucket after each."""
    width = 2048 if mib >= 64 else 256
    model = torch.nn.Sequential(*(Adapted(width) for _ in range(max(1, mib * 2**20 // (4 * width * width)))))
    own = {"storage_options": storage, "upload_folder": str(folder / "uploads"), "versions": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zstore": own,
    }
    place = place_of(url, storage, versions=True)
    total: list[int] = []
    seconds: list[float] = []
    with zstore.initialize(model=model, config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(1, width)).square().mean())
            engine.step()
            started = time.perf_counter()
            engine.save_checkpoint(url)
            seconds.append(time.perf_counter() - started)
            total.append(sum(size or 0 for size in cast(VersionsFolder, place).sizes("").values()))
    first, second = total[0], total[1] - total[0]
    return {"first_bytes": first, "second_bytes": second, "percent": 100 * second / first, "seconds": seconds}


# -- rate -----------------------------------------------------------------------------------------------------------------


def rate(url: str, storage: dict[str, Any], folder: Path, mib: int, rounds: int) -> dict[str, Any]:
    """Upload the same checkpoint as a version, and its shard files by themselves, in turn; return bytes a second."""
    with zstore.open_store() as store:
        for number in range(4):
            store.put(f"model/{number}", torch.randn(mib * 2**18 // 4))
        path = store.checkpoint(folder / "rate" / "step-1").wait().path
    files = [file for file in path.rglob("c.*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    seconds: dict[str, list[float]] = {"version": [], "plain": []}
    for number in range(rounds + 1):
        for name, work in (("version", _as_version), ("plain", _plainly)):
            started = time.perf_counter()
            work(f"{url}/{name}-{number}", storage, path, files)
            seconds[name].append(time.perf_counter() - started)
    rates = {name: nbytes / statistics.median(each[1:]) for name, each in seconds.items()}
    ratios = [plain / version for version, plain in zip(seconds["version"][1:], seconds["plain"][1:], strict=True)]
    return {"bytes": nbytes, **rates, "percent": 100 * statistics.median(ratios)}


def _as_version(url: str, storage: dict[str, Any], path: Path, files: list[Path]) -> None:
    cast(VersionsFolder, place_of(url, storage, versions=True)).repository.create()
    upload_checkpoint(path, url, storage)


def _plainly(url: str, storage: dict[str, Any], path: Path, files: list[Path]) -> None:
    """Upload by s3fs's own multipart upload in parts as large, several files at a time."""
    place = cast(Any, place_of(url, storage))
    place.write_small("begins", b"")  # which makes the folder of a file system
    with Workers(NUM_THREADS, "bench") as workers:
        workers.run(
            [
                partial(place.fs.put_file, str(file), f"{place.root}/{n}", chunksize=PART_BYTES)
                for n, file in enumerate(files)
            ]
        )


# -- plan -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A checkpoint of which there is no data, as `VersionTarget.commit` reads one."""

    arrays: dict[str, StoredArray]
    record: Record
    documents: dict[str, Any]

    def array(self, name: str) -> StoredArray:
        return self.arrays[name]


def plan(model: Trillion, ranks: int, folder: Path, *, joins: bool) -> dict[str, Any]:
    """Plan the packs of so many ranks and commit them, without their data; with `joins`, in fewer files."""
    specs = model.specs()
    grids = (stored_grids if joins else owned_grids)(specs, ranks)
    metadata = encode_documents(specs, grids)[""]
    documents = parse_json(metadata, METADATA_FILE)
    arrays = {
        name: StoredArray(spec=spec, grid=grid, folder=place, codec=codec)
        for name, (place, spec, grid, codec) in parse_root(documents, METADATA_FILE).items()
    }
    record = Record(
        id=new_save_id(), tag="0", step=1, world_size=ranks, training_world_size=ranks,
        metadata_sha256=hashlib.sha256(metadata).hexdigest(), manifest_sha256=("0" * 64,) * ranks,
    )  # fmt: skip
    url = folder / record.id
    rank_s: list[float] = []
    commit_s: list[float] = []
    objects = sent_bytes = 0
    for number in range(2):
        record = replace(record, id=new_save_id(), tag=str(number))
        place = cast(VersionsFolder, place_of(f"file://{url}", versions=True))
        target = VersionTarget(place, record.tag, record.id, "")
        target.begin(overwrite=False)
        for rank in range(ranks):
            started = time.perf_counter()
            receipt = _receipt(arrays, rank, record.id)
            text = json.dumps({str(rank): receipt.document()})
            rank_s.append(time.perf_counter() - started)
            if not number:
                objects += len(receipt.packs)
                sent_bytes += sum(receipt.packs.values())
            target.accept(json.loads(text))
        planned = cast(CheckpointReader, _Planned(arrays, record, documents))
        commit_s.append(measured(lambda target=target, planned=planned: target.commit(planned))[1]["seconds"])  # type: ignore[misc]
    own = [path.stat().st_size for path in (url / "versions/manifests").rglob("*") if path.is_file()]
    return {
        "parameters": model.parameters,
        "ranks": ranks,
        "references": sum(array.grid.num_shards for array in arrays.values()),
        "packs": objects + 1,
        "bytes": sent_bytes,
        "icechunk_manifests": len(own) // 2,
        "icechunk_bytes": sum(own) // 2,
        "longest_rank_s": max(rank_s),
        "median_rank_s": statistics.median(rank_s),
        "first_commit_s": commit_s[0],
        "next_commit_s": commit_s[1],
        "peak_bytes": peak_bytes(),
    }


def _receipt(arrays: dict[str, StoredArray], rank: int, save_id: str) -> Receipt:
    """Return what a rank tells of packs that nobody made."""
    names = shards_of(arrays, rank)
    changing = training(arrays)
    places: dict[str, tuple[Extent, str]] = {}
    packs: dict[str, int] = {}

    def name_of(number: int) -> str:
        return f"{hashlib.sha256(f'{rank} {number}'.encode()).hexdigest()}-{save_id}"

    for chosen in ([n for n in names if n in changing], [n for n in names if n not in changing]):
        sizes = [arrays[name].shard_file_bytes(rank) for name in chosen]
        for numbers in plan_packs(sizes):
            pack = name_of(len(packs))
            inside, offset = sizes[numbers.start : numbers.stop], 0
            packs[pack] = sum(inside)
            for name, size in zip(chosen[numbers.start : numbers.stop], inside, strict=True):
                places[name] = Extent(pack, offset, size), ""
                offset += size
    tail = next(iter(packs), name_of(0))
    end = packs.get(tail, 0)
    packs[tail] = end + 800_000
    return Receipt(
        table=ShardTable.of([places[name] for name in names]),
        place=Extent(tail, end + 500_000, 300_000),
        sha256="0" * 64,
        files={
            manifest_file(rank): Extent(tail, end, 500_000),
            **({METADATA_FILE: Extent(tail, end, 1)} if not rank else {}),
        },
        packs=packs,
    )


if __name__ == "__main__":
    main()
