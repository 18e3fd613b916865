"""What `"durability": "step"` costs: whole iterations with and without it, in turn, for state on disk and in memory.

    python -m bench.durability [--path FOLDER] [--model gpt-small] [--steps 8] [--rounds 3] [--tokens 256] [--json FILE]

Steps come in blocks, one block of each in turn; the last snapshot of a block is waited for. Beside the time: the bytes
that snapshots write a step, the time for which they hold training up, and the processor time of the process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import zstore
from zstore.checkpoint.reader import open_checkpoint
from zstore.tools.sample.models import build_model

DURABILITIES = ("checkpoint", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    parser.add_argument("--rounds", type=int, default=3, help="measured blocks of each, after one warm-up block")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tiers", default="nvme,cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = []
    for tier in options.tiers.split(","):
        with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-bench-") as name:
            figures.append(measure(options, tier, Path(name)))
        print(describe(options.model, figures[-1]))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, tier: str, folder: Path) -> dict[str, Any]:
    """Return the figures of steps of two engines in turn, one of which takes snapshots."""
    with ExitStack() as engines:
        blocks = {name: _blocks(engines, options, _config(tier, name, folder)) for name in DURABILITIES}
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in DURABILITIES}
        for number in range(options.rounds + 1):
            for name in DURABILITIES:
                row = next(blocks[name])
                if number > 0:
                    rows[name].append(row)
        with open_checkpoint(_steps(folder, tier)) as reader:
            entries = reader.manifest(0).shards
    figures: dict[str, Any] = {"tier": tier, "files": len(entries)}
    for name in DURABILITIES:
        figures[name] = {key: statistics.median(row[key] for row in rows[name]) for key in rows[name][0]}
    figures["snapshot_bytes"] = sum(entry.file_bytes for entry in entries)
    figures["written_bytes"] = sum(entry.file_bytes for entry in entries if not entry.linked)
    shutil.rmtree(folder, ignore_errors=True)
    return figures


def _steps(folder: Path, tier: str) -> Path:
    return folder / "step" / "zstore-run" / "steps" if tier == "nvme" else folder / "steps"


def _config(tier: str, durability: str, folder: Path) -> dict[str, Any]:
    offload = {"device": tier}
    if tier == "nvme":
        (folder / durability).mkdir(parents=True)
        offload["nvme_path"] = str(folder / durability)
    own = {"durability": durability} | ({"durability_path": str(folder / "steps")} if durability == "step" else {})
    return {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "steps_per_print": 0,
        "zstore": own if tier != "nvme" else {"durability": durability},
    }


def _blocks(engines: ExitStack, options: argparse.Namespace, config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Yield the figures of one block of steps after another, a step."""
    torch.manual_seed(0)
    engine, *_ = zstore.initialize(model=build_model(options.model, options.tokens), config=config)
    engines.enter_context(engine)
    while True:
        held, processor, started = engine.steps.order.stall_s, time.process_time(), time.perf_counter()
        for _ in range(options.steps):
            generator = torch.Generator().manual_seed(engine.global_steps)
            ids = torch.randint(0, 256, (1, options.tokens), generator=generator)
            engine.backward(engine(ids, labels=ids))
            engine.step()
        engine.wait_for_checkpoint()
        sums = {
            "step_s": time.perf_counter() - started,
            "held_s": engine.steps.order.stall_s - held,
            "processor_s": time.process_time() - processor,
        }
        yield {name: value / options.steps for name, value in sums.items()}


def describe(model: str, figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    without, taken = figures["checkpoint"], figures["step"]
    return (
        f"{model}, state: {figures['tier']}, {figures['files']} files of {figures['snapshot_bytes'] / 1e6:.0f} MB a snapshot\n"
        f"  written a step: {figures['written_bytes'] / 1e6:.2f} MB\n"
        f"  iteration: {without['step_s']:.3f} s without, {taken['step_s']:.3f} s with; held up {taken['held_s']:.3f} s\n"
        f"  processor time: {without['processor_s']:.3f} s, {taken['processor_s']:.3f} s"
    )


if __name__ == "__main__":
    main()
