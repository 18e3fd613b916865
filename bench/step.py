"""The optimizer step on disk against the disk: `gpt-base`, AdamW, bf16, its state on the disk tier, one process.

The limit is the bytes that the step moves, over the disk's rate for the same mix of reads and writes, measured in turn with it.

    python -m bench.step [--path FOLDER] [--model gpt-base] [--steps 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import zstore
from bench.limits import disk_limit, limit_name
from bench.process import disk_bytes
from zstore.tools.models import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--model", default="gpt-base")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after two that are not")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of the file that measures the limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
        figures = measure(options, Path(name))
    print(
        f"{options.model}: {figures['parameters'] / 1e6:.0f} M parameters, {figures['bytes_per_parameter']:.2f} bytes of "
        f"disk traffic a parameter and step\n"
        f"optimizer step {figures['step_s']:.3f} s, {figures['rate']:.2f} GB/s; {limit_name()} {figures['limit']:.2f} GB/s: "
        f"{figures['percent']:.1f} % of the limit (median of {options.steps})\n"
        f"forward {figures['forward_s']:.3f} s, backward {figures['backward_s']:.3f} s\n"
        f"save (wait=False): stall {figures['save_stall_ms']:.1f} ms, new disk blocks "
        f"{figures['save_new_blocks_percent']:.2f} % of the checkpoint"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures of alternating steps and measurements of the limit."""
    torch.manual_seed(0)
    model = build_model(options.model, options.tokens)
    num_parameters = sum(p.numel() for p in model.parameters())
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
    }
    engine, *_ = zstore.initialize(model=model, config=config)
    rows: list[tuple[float, float, float, int, float]] = []
    nbytes = int(options.gib * 2**30)
    disk_limit(folder, "write", nbytes)
    with engine:
        for step in range(options.steps + 2):
            ids = torch.randint(0, 256, (1, options.tokens), generator=torch.Generator().manual_seed(step))
            times = [time.perf_counter()]
            loss = engine(ids, labels=ids)
            times.append(time.perf_counter())
            engine.backward(loss)
            times.append(time.perf_counter())
            before = engine.statistics().store
            engine.step()
            times.append(time.perf_counter())
            after = engine.statistics().store
            moved = after.disk_read_bytes + after.disk_write_bytes - before.disk_read_bytes - before.disk_write_bytes
            if step >= 2:
                forward_s, backward_s, step_s = (after - before for before, after in itertools.pairwise(times))
                rows.append((forward_s, backward_s, step_s, moved, disk_limit(folder, "mixed", nbytes)))
        stall_s, written_percent = _save(engine, folder)
    return {
        "parameters": num_parameters,
        "bytes_per_parameter": rows[-1][3] / num_parameters,
        "forward_s": statistics.median(row[0] for row in rows),
        "backward_s": statistics.median(row[1] for row in rows),
        "step_s": statistics.median(row[2] for row in rows),
        "rate": statistics.median(row[3] / row[2] for row in rows) / 1e9,
        "limit": statistics.median(row[4] for row in rows) / 1e9,
        "percent": statistics.median(100 * row[3] / row[2] / row[4] for row in rows),
        "save_stall_ms": 1000 * stall_s,
        "save_new_blocks_percent": written_percent,
    }


def _save(engine: zstore.engine.Engine, folder: Path) -> tuple[float, float]:
    """Save behind training; return the stall in seconds, and the percent of the checkpoint that takes disk blocks anew."""
    before = disk_bytes(folder)
    handle = engine.save_checkpoint(str(folder / "ckpt"), wait=False)
    summary = handle.wait()
    total = summary.linked_bytes + summary.written_bytes
    return handle.stall_s, 100 * (disk_bytes(folder) - before) / total


if __name__ == "__main__":
    main()
