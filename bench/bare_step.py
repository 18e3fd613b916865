"""What the machine can do of an optimizer step from disk: a bare program of the same bytes, beside the disk's limit.

Files laid out as the store's hold fp32 masters and moments of a model. A few plain threads call preadv and pwritev and nothing
else; others, one by default, take what was read chunk by chunk: they verify the crc32c, cast the bf16 gradient, run torch's
fused AdamW, cast the master into bf16 rows, and seal. There is no queue by priority, no budget, no version, no pin and no
second drive.

    python -m bench.bare_step [--path FOLDER] [--model gpt-base] [--steps 6] [--threads 8] [--consumers 1] [--span-kib 2048]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.limits import disk_limit, limit_name
from zstore.format.arrays import Bytes, make_grid
from zstore.format.shardfile import ShardLayout, checksum, finish_slots, layout_of, slot_views, stored_crcs
from zstore.io.memory import make_slab
from zstore.tools.sample import build_model

_ARRAYS = 3
_SMALL_BYTES = 64 * 1024


def seal_slots(slots: Bytes, layout: ShardLayout) -> list[int]:
    """Write crc32c and zeros behind the payload of every slot, as whoever writes a file does; return the checksums."""
    payloads = slot_views(slots, layout)[:, : layout.payload_bytes]
    stored_crcs(slots, layout)[:] = [checksum(payload) for payload in payloads]
    return finish_slots(slots, layout)


@dataclass(frozen=True)
class Span:
    """Adjacent chunks of the three files of a parameter, with its gradient and rows there."""

    files: tuple[int, ...]
    layout: ShardLayout
    offset: int
    num_chunks: int
    gradient: torch.Tensor
    rows: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of one array."""
        return self.num_chunks * self.layout.slot_bytes

    def parts(self, slab: Bytes) -> list[Bytes]:
        """Return the memory of each array in a slab."""
        return [slab[number * self.nbytes : (number + 1) * self.nbytes] for number in range(_ARRAYS)]


@dataclass
class Model:
    """The spans of all parameters, and the descriptors of their files."""

    spans: list[Span] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a step reads and writes."""
        return sum(2 * _ARRAYS * span.nbytes for span in self.spans)

    def close(self) -> None:
        """Close the files."""
        for file in {file for span in self.spans for file in span.files}:
            os.close(file)


def make_model(folder: Path, name: str, span_bytes: int) -> Model:
    """Make the files of a model's state, zeros with their checksums; small arrays are left out, which rest in memory."""
    model, slab = Model(), make_slab(0)
    for number, parameter in enumerate(build_model(name, 64).parameters()):
        if 4 * parameter.numel() < _SMALL_BYTES:
            continue
        shape = (parameter.shape[0], parameter[0].numel())
        grid = make_grid(shape, 1)
        layout = layout_of(grid, 0, "float32")
        files = tuple(_make_file(folder / f"{number}.{part}", layout.file_bytes) for part in range(_ARRAYS))
        generator = torch.Generator().manual_seed(number)
        gradient = torch.randn(parameter.numel(), generator=generator).to(torch.bfloat16)
        rows = torch.zeros_like(gradient)
        model.gradients.append(gradient)
        step = layout.chunks_in(span_bytes)
        for first in range(0, layout.num_present, step):
            count = min(step, layout.num_present - first)
            part = slice(first * grid.chunk_numel, (first + count) * grid.chunk_numel)
            span = Span(files, layout, layout.slot_offset(first), count, gradient[part], rows[part])
            model.spans.append(span)
            slab = slab if slab.size >= _ARRAYS * span.nbytes else make_slab(_ARRAYS * span.nbytes)
            for data in span.parts(slab):
                data[:] = 0
                seal_slots(data, layout)
            _write(span, slab)
    return model


def _make_file(path: Path, nbytes: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o644)
    os.posix_fallocate(file, 0, nbytes)
    return file


def _checksum(slot: Bytes, layout: ShardLayout) -> int:
    return checksum(slot[: layout.payload_bytes])


def _read(span: Span, slab: Bytes) -> None:
    for file, data in zip(span.files, span.parts(slab), strict=True):
        os.preadv(file, [data.data], span.offset)


def _write(span: Span, slab: Bytes) -> None:
    for file, data in zip(span.files, span.parts(slab), strict=True):
        os.pwritev(file, [data.data], span.offset)


def _update(span: Span, slab: Bytes, count: torch.Tensor) -> None:
    """Verify, change and seal a span, chunk by chunk."""
    layout, parts = span.layout, span.parts(slab)
    numel = layout.payload_bytes // 4
    crcs: list[list[int]] = [[] for _ in parts]
    stored = [stored_crcs(data, layout) for data in parts]
    for number, slots in enumerate(zip(*(slot_views(data, layout) for data in parts), strict=True)):
        if [_checksum(slot, layout) for slot in slots] != [each[number] for each in stored]:
            raise RuntimeError("a chunk is not what was written")
        first = number * numel
        gradient = span.gradient[first : first + numel].float().mul_(0.5)
        tiles = [torch.from_numpy(slot[: layout.payload_bytes].view(np.float32))[: gradient.numel()] for slot in slots]
        torch._fused_adamw_(
            [tiles[0]], [gradient], [tiles[1]], [tiles[2]], [], [count],
            lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        span.rows[first : first + numel].copy_(tiles[0])
        for each, slot in zip(crcs, slots, strict=True):
            each.append(_checksum(slot, layout))
    for behind, found in zip(stored, crcs, strict=True):
        behind[:] = found


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the sum of squares, each gradient cast in pieces that stay in cache."""
    room, total = torch.empty(1 << 19), 0.0
    for gradient in gradients:
        for first in range(0, gradient.numel(), room.numel()):
            part = gradient[first : first + room.numel()]
            total += float(torch.linalg.vector_norm(room[: part.numel()].copy_(part))) ** 2
    return total


def step(model: Model, slabs: list[Bytes], num_threads: int, consumers: int, number: int) -> None:
    """Take one step: the norm, then all spans once, each in the slab of one that was written before."""
    _norm(model.gradients)
    left, count = iter(model.spans), torch.tensor(float(number))
    asked: queue.SimpleQueue[tuple[Span | None, Bytes] | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Span, Bytes] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def serve() -> None:
        while (job := asked.get()) is not None:
            span, slab = job
            if span is not None:
                _write(span, slab)
            following = next(left, None)
            if following is None:
                done.put(None)
            else:
                _read(following, slab)
                ready.put((following, slab))

    def consume() -> None:
        while (job := ready.get()) is not None:
            _update(*job, count)
            asked.put(job)

    servers = [threading.Thread(target=serve) for _ in range(num_threads)]
    updaters = [threading.Thread(target=consume) for _ in range(consumers)]
    for thread in servers + updaters:
        thread.start()
    for slab in slabs:
        asked.put((None, slab))
    for _ in slabs:
        done.get()
    for _ in servers:
        asked.put(None)
    for _ in updaters:
        ready.put(None)
    for thread in servers + updaters:
        thread.join()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of alternating steps and measurements of the limit."""
    torch.set_num_threads(1)
    nbytes = int(options.gib * 2**30)
    limit = partial(disk_limit, folder, "mixed", nbytes)
    disk_limit(folder, "write", nbytes)
    model = make_model(folder, options.model, options.span_kib * 1024)
    try:
        slab_bytes = max(_ARRAYS * span.nbytes for span in model.spans)
        slabs = [make_slab(slab_bytes) for _ in range(max(2, options.pool_mib * 2**20 // slab_bytes))]
        rows: list[tuple[float, float, float]] = []
        for number in itertools.islice(itertools.count(1), options.steps + 1):
            cores, started = time.process_time(), time.perf_counter()
            step(model, slabs, options.threads, options.consumers, number)
            rows.append((time.perf_counter() - started, time.process_time() - cores, limit()))
    finally:
        model.close()
    moved = model.moved_bytes
    return {
        "model": options.model,
        "steps": options.steps,
        "consumers": options.consumers,
        "moved_bytes": moved,
        "step_s": statistics.median(row[0] for row in rows[1:]),
        "core_s_per_gb": statistics.median(1e9 * row[1] / moved for row in rows[1:]),
        "limit_name": limit_name(),
        "limit": statistics.median(row[2] for row in rows[1:]) / 1e9,
        "percent": statistics.median(100 * moved / row[0] / row[2] for row in rows[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--model", default="gpt-base")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after a warm-up step")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--consumers", type=int, default=1, help="threads that update what was read")
    parser.add_argument("--span-kib", type=int, default=2048, help="KiB of one request, about")
    parser.add_argument("--pool-mib", type=int, default=64, help="MiB of buffers, about")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of the file that measures the limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        figures = measure(options, Path(name))
    print(
        f"bare step of {figures['model']}: {figures['step_s']:.3f} s, {figures['moved_bytes'] / 1e9:.2f} GB, "
        f"{figures['percent']:.1f} % of {figures['limit_name']} {figures['limit']:.2f} GB/s, "
        f"{figures['core_s_per_gb']:.3f} core-seconds a GB (median of {figures['steps']})"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
