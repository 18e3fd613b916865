"""What single ranks of a huge world do to plan a save or a load; `bench.scale` starts them."""

from __future__ import annotations

import os
from pathlib import Path

from bench.process import Spec, Tell, measured, serve
from bench.scale_model import Trillion, needed_of, owned_grids, stored_grids
from zstore.checkpoint.build import CheckpointBuilder
from zstore.checkpoint.catalog import TagInfo
from zstore.checkpoint.folder import LocalFolder
from zstore.checkpoint.format import COMPLETE, Record, sha256
from zstore.checkpoint.lookahead import cut_spans
from zstore.checkpoint.metadata import encode_documents
from zstore.checkpoint.names import MANIFEST_FOLDER, METADATA_FILE, RECORD_FILE, manifest_file
from zstore.checkpoint.plan import CheckpointPlan
from zstore.checkpoint.reader import CheckpointReader
from zstore.format.partition import make_grid
from zstore.format.shardfile import layout_of
from zstore.io.files import Files
from zstore.io.shards import ShardSummary, open_resources

_SAVE_ID = "0" * 32
_SPAN_BYTES = 8 * 2**20


def run() -> None:
    """Do what the first argument says."""
    serve(CONTENDERS)


def _plan_of(spec: Spec) -> CheckpointPlan:
    specs = Trillion(**spec["model"]).specs()
    owned, stored = owned_grids(specs, spec["save_ranks"]), stored_grids(specs, spec["save_ranks"])
    return CheckpointPlan(
        tag="step",
        step=1,
        world_size=spec["save_ranks"],
        save_id=_SAVE_ID,
        specs=specs,
        grids=stored,
        pieces={name: grid for name, grid in owned.items() if grid != stored[name]},
    )


def _summaries(plan: CheckpointPlan, rank: int) -> list[ShardSummary]:
    """Return what the rank would have written, with checksums made up."""
    found: list[ShardSummary] = []
    for name, spec in plan.specs.items():
        nbytes = plan.file_bytes(name, rank)
        if nbytes:
            chunks = layout_of(plan.grid(name), rank, spec.dtype).num_present
            crcs = tuple(range(2**31, 2**31 + chunks))
            found.append(ShardSummary(name, rank, nbytes, crcs, linked=True))
    return found


def _save(spec: Spec, tell: Tell) -> None:
    """Plan a rank's part of a save and write its manifest."""

    def prepare() -> tuple[CheckpointPlan, list[ShardSummary]]:
        plan = _plan_of(spec)
        return plan, _summaries(plan, spec["rank"])

    (plan, summaries), figures = measured(prepare)
    tell("plan", **figures, shards=len(summaries))
    size, figures = measured(lambda: _write_manifest(plan, spec["rank"], summaries, Path(spec["folder"])))
    tell("manifest", **figures, manifest_bytes=size)


def _write_manifest(plan: CheckpointPlan, rank: int, summaries: list[ShardSummary], folder: Path) -> int:
    (folder / MANIFEST_FOLDER).mkdir(exist_ok=True)
    CheckpointBuilder(plan, folder, Files()).write_manifest(rank, COMPLETE, summaries, {})
    return os.path.getsize(folder / manifest_file(rank))


def _lead(spec: Spec, tell: Tell) -> None:
    """Do what rank 0 does besides; leave a checkpoint without shards for `_load`."""
    folder, world_size = Path(spec["folder"]), spec["save_ranks"]
    ranks, plan = _sampled(spec), _plan_of(spec)
    for rank in ranks:
        _write_manifest(plan, rank, _summaries(plan, rank), folder)
    builder = CheckpointBuilder(plan, folder, Files())
    _, figures = measured(lambda: builder.metadata_sha256)
    document = encode_documents(plan.specs, plan.grids)[""]
    (folder / METADATA_FILE).write_bytes(document)
    tell("metadata", **figures, metadata_bytes=len(document))
    _, figures = measured(builder.collect)
    for name in ("seconds", "cpu_s"):
        figures[name] *= world_size / len(ranks)
    tell(f"look at {world_size} manifests, from {len(ranks)}", **figures)
    _, figures = measured(builder.check_complete)
    tell("check", **figures)
    record, figures = measured(lambda: _record(spec, folder))
    (folder / RECORD_FILE).write_bytes(record)
    tell("record", **figures, record_bytes=len(record))


def _sampled(spec: Spec) -> list[int]:
    """Return ranks whose manifests are written: some, and those that the ranks which load will ask for."""
    wanted = set(range(min(spec["manifests"], spec["save_ranks"])))
    specs = Trillion(**spec["model"]).specs()
    stored, owned = stored_grids(specs, spec["save_ranks"]), owned_grids(specs, spec["load_ranks"])
    for old, new in {(stored[name], owned[name]) for name in specs}:
        for rank in spec["loading"]:
            wanted |= {each.shard for each in needed_of(old, new, rank)}
    return sorted(wanted)


def _record(spec: Spec, folder: Path) -> bytes:
    manifests = [folder / manifest_file(rank) for rank in range(spec["save_ranks"])]
    return Record(
        id=_SAVE_ID,
        tag="step",
        step=1,
        world_size=spec["save_ranks"],
        training_world_size=spec["save_ranks"],
        metadata_sha256=sha256((folder / METADATA_FILE).read_bytes()),
        manifest_sha256=tuple(sha256(path.read_bytes()) if path.exists() else "0" * 64 for path in manifests),
    ).encode()


def _load(spec: Spec, tell: Tell) -> None:
    """Open the checkpoint and plan what a rank of another world reads."""
    folder = Path(spec["folder"])
    with open_resources(pool_bytes=2**20) as resources:

        def begin() -> CheckpointReader:
            record = Record.decode((folder / RECORD_FILE).read_bytes(), RECORD_FILE)
            return CheckpointReader(TagInfo(folder=LocalFolder(folder), record=record), resources)

        reader, figures = measured(begin)
        tell("open", **figures)
        (ranges, shards), figures = measured(lambda: _plan(reader, spec["load_ranks"], spec["rank"]))
        tell("plan", **figures, chunk_ranges=ranges)
        _, figures = measured(lambda: [reader.shard_crcs(name, shard) for name, shard in shards])
        tell("manifests", **figures, manifests_read=len({shard for _, shard in shards}))
        reader.close()


def _plan(reader: CheckpointReader, num_ranks: int, rank: int) -> tuple[int, list[tuple[str, int]]]:
    """Return how many requests the rank's rows take, and the shards that they are in."""
    spans, shards = 0, []
    for name, array in reader.arrays.items():
        grid = make_grid(array.spec.stored_shape, num_ranks)
        first = rank * grid.shard_numel
        numel = grid.shard_valid_numel(rank)
        for span in cut_spans(array, first, first + numel, _SPAN_BYTES):
            spans += 1
            shards.append((name, span.first // array.grid.shard_numel))
    return spans, shards


CONTENDERS = {"save": _save, "lead": _lead, "load": _load}
"""What a process may be asked for."""
