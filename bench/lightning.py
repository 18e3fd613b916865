"""Lightning's Trainer on zstore beside Lightning alone, and what a save takes under it.

One transformer of random weights (29 M parameters by default) on random inputs, one process, fp32. **Step**: a pair is a short
`fit()` of each, in turn in one process, so that noise meets both; who is first changes from pair to pair. The engine keeps all
in memory. A ratio is the median over pairs of the engine's median step to the other's, by the clock and of the processor's
time. **Save**: state and parameters rest on disk; the bytes of files that `trainer.save_checkpoint()` makes anew, of all that
belong to the checkpoint.

    python -m bench.lightning [--pairs 10] [--steps 5] [--width 512] [--layers 9] [--path FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.machine import machine
from zstore.checkpoint.usage import stored_files
from zstore.lightning import ZstoreStrategy

_GOALS = {"step": 1.03, "save_percent": 2.0}
_SEQUENCES, _TOKENS = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of short trainings, after one to warm up")
    parser.add_argument("--steps", type=int, default=5, help="steps of each")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--path", type=Path, help="folder on the drive to be measured; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "zstore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        figures = {"machine": machine(Path(folder)), "goals": _GOALS, **measure(options, Path(folder))}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures; print each as it comes."""
    save = _save(options, folder)
    print(
        f"save: {save['new_bytes'] / 1e6:.2f} MB anew of {save['total_bytes'] / 1e6:.1f} MB, {save['percent']:.2f} % (goal "
        f"{_GOALS['save_percent']:.0f} %)"
    )
    step = _steps(options)
    print(
        f"step: zstore {step['engine_s']:.4f} s, Lightning alone {step['other_s']:.4f} s; ratio {step['ratio']:.3f} "
        f"(goal {_GOALS['step']:.2f}), of processor time {step['processor_ratio']:.3f}"
    )
    return {"save": save, "step": step}


class _Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [
            nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        ]
        self.layers = nn.ModuleList(made)
        self.seconds: list[tuple[float, float]] = []
        """Of each step but the first: by the clock, and of the processor in all threads."""
        self._since: tuple[float, float] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (hidden,) = batch
        for layer in self.layers:
            hidden = layer(hidden)
        loss: torch.Tensor = hidden.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def on_train_start(self) -> None:
        self.seconds, self._since = [], None

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the seconds since the step before; the first has none."""
        now = time.perf_counter(), time.process_time()
        if self._since is not None:
            self.seconds.append((now[0] - self._since[0], now[1] - self._since[1]))
        self._since = now


class _Run:
    """A Trainer, and its module."""

    def __init__(self, options: argparse.Namespace, strategy: Any) -> None:
        self.module = _Model(options.width, options.layers)
        self.trainer = lightning.Trainer(
            max_epochs=0, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        samples = _SEQUENCES * (options.steps + 1)
        data = torch.randn(samples, _TOKENS, options.width, generator=torch.Generator().manual_seed(0))
        self._loader = DataLoader(TensorDataset(data), _SEQUENCES)

    def fit(self) -> tuple[float, float]:
        """Train for one more epoch; return the median seconds of a step, by the clock and of the processor."""
        self.trainer.fit_loop.max_epochs += 1
        self.trainer.fit(self.module, self._loader)
        clock, processor = zip(*self.module.seconds, strict=True)
        return statistics.median(clock), statistics.median(processor)


def _steps(options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the seconds of a step of both, and their ratio."""
    pair = [_Run(options, ZstoreStrategy(stage=0)), _Run(options, "auto")]
    rows: list[list[tuple[float, float]]] = []
    for number in range(options.pairs + 1):
        row = [(0.0, 0.0), (0.0, 0.0)]
        for which in (0, 1) if number % 2 else (1, 0):
            row[which] = pair[which].fit()
        if number:
            rows.append(row)
    pair[0].trainer.strategy.close()
    return {
        "engine_s": statistics.median(mine[0] for mine, _ in rows),
        "other_s": statistics.median(theirs[0] for _, theirs in rows),
        "ratio": statistics.median(mine[0] / theirs[0] for mine, theirs in rows),
        "processor_ratio": statistics.median(mine[1] / theirs[1] for mine, theirs in rows),
        "pairs_s": rows,
    }


def _save(options: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    """Return what one save takes of a run from disk."""
    offload = {"device": "nvme", "nvme_path": os.fspath(folder)}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    run = _Run(options, ZstoreStrategy({"zero_optimization": zero}))
    run.fit()
    run.trainer.save_checkpoint(folder / "checkpoints" / "one.ckpt")
    files = stored_files(folder / "checkpoints" / "one.ckpt")
    new_bytes, total_bytes = files.freed_bytes, files.size_bytes
    run.trainer.strategy.close()
    return {"new_bytes": new_bytes, "total_bytes": total_bytes, "percent": 100 * new_bytes / total_bytes}


if __name__ == "__main__":
    main()
