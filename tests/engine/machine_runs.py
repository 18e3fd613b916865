"""What runs on machines that share nothing: a rank that saves each step to a bucket, and one that looks at the bucket."""

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn

from tests.engine.bits import digest, engine_digests
from tests.engine.models import batch
from zstore import init_distributed, initialize
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointNotFoundError
from zstore.remote.service import open_folder

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BATCH = 12
"""Samples of a step, one a micro-batch, whatever the world size."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1203, 24)
        self.head = nn.Linear(24, 1203)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.embed(ids[:, :-1])).float().flatten(0, 1), ids[:, 1:].flatten()
        )


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def say(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def settings(stage: int, tier: str, options: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier, "nvme_path": "swap"}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 0,
        "zstore": {"storage_options": options, "keep": 20, "silent_rank_s": 9.0},
    }


def train(url: str, stage: str, tier: str, steps: str, every: str, options: str) -> None:
    """Resume a run and train it to a step; each that divides by `every` is saved, every other one behind training."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    init_distributed("gloo", timeout=datetime.timedelta(seconds=int(os.environ["TEST_TIMEOUT_S"])))
    engine = initialize(model=make_net(), config=settings(int(stage), tier, json.loads(options)))[0]
    with engine:
        with contextlib.suppress(CheckpointNotFoundError):
            engine.load_checkpoint(url)
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        say(resumed=engine.global_steps, rows=rows, digests=engine_digests(engine))
        while engine.global_steps < int(steps):
            losses = []
            for micro in range(engine.gradient_accumulation_steps()):
                loss = engine(*batch(engine.global_steps, micro, engine.global_rank, samples=1))
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            say(step=engine.global_steps, losses=losses)
            if engine.global_steps % int(every) == 0:
                engine.save_checkpoint(url, wait=engine.global_steps % 2 == 0)
    say(ended=True)


def make(url: str, options: str) -> None:
    bucket = url.removeprefix("s3://").partition("/")[0]
    open_folder("s3://none", json.loads(options)).fs.mkdir(bucket)  # type: ignore[attr-defined]


def look(url: str, options: str) -> None:
    """Tell of each checkpoint its step and world size, and what zarr-python reads of the newest."""
    folder = open_folder(url, json.loads(options))
    saved: list[tuple[int, int]] = []
    with contextlib.suppress(CheckpointNotFoundError):
        saved = [(info.record.step, info.record.training_world_size) for info in tags(folder)]
    faults: list[str] = []
    digests: dict[str, str] = {}
    if saved:
        with open_checkpoint(folder) as reader:
            faults = [str(fault) for fault in verify_checkpoint(reader)]
            digests = by_zarr(reader.location, json.loads(options))
    say(saved=saved, faults=faults, digests=digests)


def by_zarr(url: str, options: dict[str, Any]) -> dict[str, str]:
    import zarr

    group = zarr.open_group(url, mode="r", storage_options=options)
    names = [name for name, _ in group.members(max_depth=None)]
    arrays = {name: group[name] for name in names if isinstance(group[name], zarr.Array)}
    return {name: digest(torch.from_numpy(array[:].astype("float32")).reshape(-1)) for name, array in arrays.items()}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
