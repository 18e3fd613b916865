"""Loops with an offloaded optimizer that are killed and start again, and what they must be equal to."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.killing import notes_of
from zstore.io.files import Files
from zstore.optim import Offloaded
from zstore.testing.faults import DeadlyFiles
from zstore.testing.ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how."""

    world_size: int = 1
    parallel: str = "none"
    """"none", "ddp" or "fsdp"."""
    kind: str = "AdamW"
    device: str = "nvme"
    overlap: str = "none"
    dtype: str = "float32"
    clip: float | None = None
    frees: bool = False


@dataclass
class Loop:
    """A loop on one rank, with all that it has to remember."""

    model: nn.Module
    optimizer: Any
    schedule: Any
    drawn: int = 0
    """Batches that were drawn."""

    @staticmethod
    def make(run: Run, folder: Path, *, durable: bool, files: Files | None = None) -> Loop:
        torch.manual_seed(1)
        # Large enough for the disk, but for the last.
        model: nn.Module = nn.Sequential(nn.Linear(64, 601), nn.Tanh(), nn.Linear(601, 71)).to(
            getattr(torch, run.dtype)
        )
        if run.parallel == "fsdp":
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)
        if run.parallel == "ddp":
            model = DistributedDataParallel(model)
        folder.mkdir(parents=True, exist_ok=True)
        kind = getattr(torch.optim, run.kind)
        more: dict[str, Any] = {"_files": files} | ({"durability": "step"} if durable else {})
        optimizer = Offloaded(
            kind,
            [{"params": list(model.parameters())[:1], "weight_decay": 0.1}, {"params": list(model.parameters())[1:]}],
            lr=1e-2,
            device=run.device,  # type: ignore[arg-type]
            path=folder,
            overlap=run.overlap,  # type: ignore[arg-type]
            max_grad_norm=run.clip,
            free_grads=run.frees,
            **more,
        )
        loop = Loop(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
        # Ranks draw numbers of their own.
        torch.manual_seed(100 + (torch_dist.get_rank() if torch_dist.is_initialized() else 0))
        optimizer.loop_state = lambda: {
            "schedule": loop.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "drawn": loop.drawn,
        }
        return loop

    def resume(self) -> int:
        """Go on from the newest snapshot; return its step."""
        resumed = self.optimizer.resume()
        if resumed is None:
            return 0
        self.schedule.load_state_dict(resumed.loop_state["schedule"])
        torch.set_rng_state(resumed.loop_state["random"])
        self.drawn = resumed.loop_state["drawn"]
        self.schedule.step()
        return resumed.step

    def step(self) -> None:
        """One step, whose bits depend on all that a loop remembers."""
        self.drawn += 1
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(self.drawn)) * (1 + torch.rand(()))
        dtype = next(self.model.parameters()).dtype
        self.model(x.to(dtype)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of every tensor of this rank, and the settings."""
        self.optimizer.wait()
        found = hashlib.sha256(json.dumps([group["lr"] for group in self.optimizer.param_groups]).encode())
        for parameter, entry in self.optimizer.state.items():
            for name, value in [("", parameter), *sorted(entry.items())]:
                local = (value.to_local() if isinstance(value, DTensor) else value).detach()
                found.update(name.encode() + local.float().contiguous().numpy().tobytes())
        return found.hexdigest()


def _straight(rank: int, run: dict[str, Any], steps: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop.make(Run(**run), Path(folder) / str(rank), durable=False)
        found = [loop.digest()]
        for _ in range(steps):
            loop.step()
            found.append(loop.digest())
        loop.optimizer.close()
        return found


def uninterrupted(run: Run, steps: int) -> list[list[str]]:
    """Return the hashes by rank and step, of a loop that is not killed and takes no snapshots."""
    return run_ranks(_straight, run.world_size, asdict(run), steps)


def train_until_killed(rank: int, run: dict[str, Any], folder: str, stop: int, points: list[int]) -> None:
    """Resume and train to step `stop`, with a file operation of each rank at which it dies, where there is one."""
    base = Path(folder)
    files = DeadlyFiles(points[rank] if points and points[rank] >= 0 else None)
    note = notes_of(base, rank)
    note(started=True)
    loop = Loop.make(Run(**run), base / "state", durable=True, files=files)
    step = loop.resume()
    note(resumed=step, digests=loop.digest())
    while step < stop:
        loop.step()
        step += 1
        note(step=step, durable=loop.optimizer.durable_step)
    digest = loop.digest()
    loop.optimizer.close()
    note(ended=step, digests=digest, operations=len(files.operations))
