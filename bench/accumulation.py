"""A step of several micro-batches in the usual order and block by block, with parameters and optimizer state on disk.

    python -m bench.accumulation [--model 1.2b] [--micro-batches 8] [--drive-rate 0.5] [--path FOLDER] [--json FILE]

The drive may be throttled to a rate in each direction, by the kernel's blkio controller (cgroup v1, as root): then the ratio
is that of a drive, and not of the machine's. The bits are compared: losses of each step, and the norms of its gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import zstore
from bench.machine import machine
from bench.process import kernel_moved
from zstore.tools.sample.models import Gpt, GptConfig

MODELS = {
    "tiny": GptConfig(hidden=256, num_layers=4, num_heads=4),
    "110m": GptConfig(hidden=1024, num_layers=8, num_heads=16, vocab_size=8192),
    "1.2b": GptConfig(hidden=2048, num_layers=24, num_heads=16, vocab_size=8192),
}
_BLKIO = Path("/sys/fs/cgroup/blkio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.2b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after two that warm up")
    parser.add_argument("--drive-rate", type=float, help="GB/s to which the drive is throttled, in each direction")
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": machine(options.path),
        "arguments": {**vars(options), "path": None, "json": None},
    }
    with _throttled(options.path, options.drive_rate):
        for order in ("micro_batch", "block"):
            figures[order] = measure(order, options)
            print(describe(order, figures[order]), flush=True)
    first, second = figures["micro_batch"], figures["block"]
    figures["same_bits"] = first["losses"] == second["losses"] and first["norms"] == second["norms"]
    figures["times"] = first["step_s"] / second["step_s"]
    print(
        f"block by block {figures['times']:.2f} times as fast; {'the same bits' if figures['same_bits'] else 'OTHER BITS'}"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def describe(order: str, found: dict[str, Any]) -> str:
    return (
        f"{order}: {found['step_s']:.2f} s a step; a parameter and step: parameters {found['parameter_bytes']:.1f} bytes read, "
        f"all {found['disk_bytes']:.1f} bytes of traffic"
    )


def measure(order: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step, the median, and its traffic for each parameter."""
    torch.manual_seed(0)
    shape = MODELS[options.model]
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as folder:
        tier = {"device": "nvme", "nvme_path": folder}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": tier, "offload_param": tier},
            "zstore": {"accumulation_order": order, "gradient_checkpointing": True, "journal": False},
            "steps_per_print": 0,
        }
        with zstore.Init(config=config):
            model = Gpt(shape)
        with zstore.initialize(model=model, config=config)[0] as engine:
            generator = torch.Generator().manual_seed(1)
            seconds, losses, norms = [], [], []
            before, moved_before = engine.statistics(), 0
            for step in range(2 + options.steps):
                if step == 2:
                    engine.training_state.pending.complete()
                    before, moved_before = engine.statistics(), sum(kernel_moved())
                batches = [
                    torch.randint(shape.vocab_size, (1, options.tokens), generator=generator)
                    for _ in range(options.micro_batches)
                ]
                start = time.perf_counter()
                losses.append(float(engine.train_batch({"input_ids": ids, "labels": ids} for ids in batches)))
                engine.training_state.pending.complete()
                seconds.append(time.perf_counter() - start)
                norms.append(engine.get_global_grad_norm())
            after = engine.statistics()
            numel = sum(record.numel for record in engine.training_state.state.records)
        read = after.units.read_bytes - before.units.read_bytes if after.units and before.units else 0
        moved = sum(kernel_moved()) - moved_before
        return {
            "parameters": numel,
            "step_s": statistics.median(seconds[2:]),
            "seconds": seconds,
            "losses": losses,
            "norms": norms,
            "parameter_bytes": read / options.steps / numel,
            "disk_bytes": moved / options.steps / numel,
        }


@contextmanager
def _throttled(folder: Path, rate: float | None) -> Iterator[None]:
    """Let this process read and write direct I/O at no more than `rate` GB/s each on the drive of `folder`."""
    if rate is None:
        yield
        return
    group, home = _BLKIO / "zstore-bench", _BLKIO / "cgroup.procs"
    device = os.stat(folder).st_dev
    # The whole drive: limits of a partition are refused.
    number = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    whole = number.resolve().parent if (number / "partition").exists() else number.resolve()
    limit = f"{(whole / 'dev').read_text().strip()} {int(rate * 1e9)}"
    group.mkdir(exist_ok=True)
    try:
        for direction in ("read", "write"):
            (group / f"blkio.throttle.{direction}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):
            home.write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()


if __name__ == "__main__":
    main()
