"""Training runs that are killed and start again, and what they must be equal to."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import batch, make_net
from tests.killing import notes_of
from zstore.engine import Engine
from zstore.io.files import Files
from zstore.testing.faults import DeadlyFiles
from zstore.testing.ranks import run_ranks

Digests = dict[str, str]

SAMPLES = 22
"""In the data set; an epoch ends in the middle of a step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how."""

    world_size: int = 1
    stage: int = 2
    tier: str = "nvme"
    parameters: str = "none"
    overlap: str = "none"
    accumulation: int = 1
    split: bool = False
    precision: str = "bf16"
    save_every: int = 0
    """Steps from one checkpoint to the next; 0: none is saved."""

    def config(self, folder: Path, *, durable: bool) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 100}
        for section, tier in (("offload_optimizer", self.tier), ("offload_param", self.parameters)):
            if tier != "none":
                zero[section] = {"device": tier} | ({"nvme_path": str(folder / "nvme")} if tier == "nvme" else {})
        own: dict[str, Any] = {"step_overlap": self.overlap, "split_master": self.split}
        if durable:
            own["durability"] = "step"
            if "nvme" not in (self.tier, self.parameters):
                own["durability_path"] = str(folder / "steps")
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0 if self.overlap == "backward" else 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": own,
        }
        if self.precision != "fp32":
            found[self.precision] = {"enabled": True} | (
                {"initial_scale_power": 20} if self.precision == "fp16" else {}
            )
        return found


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Token rows by number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        ids: torch.Tensor = batch(number, 0, 0, samples=1)[0][0]
        return ids


def start(run: Run, folder: Path, *, durable: bool = True, files: Files | None = None) -> tuple[Engine, Any]:
    (folder / "nvme").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    random.seed(2)
    np.random.seed(3)
    config = run.config(folder, durable=durable)
    state = torch.get_rng_state()
    model = make_net()
    torch.set_rng_state(state)
    engine, _, loader, _ = zstore.initialize(model=model, config=config, training_data=Data(), _files=files)
    return engine, loader


def endless(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def step(engine: Engine, batches: Iterator[torch.Tensor]) -> None:
    """One step, whose bits depend on the state of every generator."""
    for _ in range(engine.gradient_accumulation_steps()):
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        engine.backward(engine(next(batches)) * (1 + noise))
        engine.step()


def _straight(rank: int, run: dict[str, Any], steps: int) -> list[Digests]:
    with tempfile.TemporaryDirectory() as folder:
        engine, loader = start(Run(**run), Path(folder), durable=False)
        with engine:
            batches = endless(loader)
            found = [engine_digests(engine)]
            for _ in range(steps):
                step(engine, batches)
                found.append(engine_digests(engine))
            return found


def uninterrupted(run: Run, steps: int) -> list[list[Digests]]:
    """Return the hashes of every tensor by rank and step, of a run that is not killed and takes no snapshots."""
    return run_ranks(_straight, run.world_size, asdict(run), steps)


def train_until_killed(rank: int, run: dict[str, Any], folder: str, stop: int, points: list[int]) -> None:
    """Resume and train to step `stop`, with a file operation of each rank at which it dies, where there is one."""
    what, base = Run(**run), Path(folder)
    files = DeadlyFiles(points[rank] if points[rank] >= 0 else None) if points else None
    note = notes_of(base, rank)
    note(started=True)
    engine, loader = start(what, base, files=files)
    with engine:
        path, _ = engine.load_checkpoint(f"{folder}/ckpt")
        note(resumed=engine.global_steps, path=path, digests=engine_digests(engine))
        batches = endless(loader)
        while engine.global_steps < stop:
            step(engine, batches)
            note(step=engine.global_steps, durable=engine.durable_step)
            if what.save_every and engine.global_steps % what.save_every == 0:
                engine.save_checkpoint(f"{folder}/ckpt", wait=False, overwrite=True)
        engine.wait_for_checkpoint()
        note(ended=engine.global_steps, digests=engine_digests(engine))
