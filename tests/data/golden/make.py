"""Makes the golden checkpoints of one version of the format: python -m tests.data.golden.make FOLDER [KIND ...]

Each is a checkpoint of a few kilobytes, with `NAME.npz` (every array's bytes) and `NAME.json` (what else it holds) beside it,
which are written from the values that were saved, not from what a reader finds. Goldens are kept as they are: a new version
of the format gets a new folder, and every later reader reads all of them.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import zstore
import zstore.dcp
from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.build import reshard_checkpoint
from zstore.checkpoint.reader import open_checkpoint
from zstore.engine import Engine
from zstore.engine.access.safe_access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from zstore.testing.ranks import run_ranks

Array = npt.NDArray[Any]

ENGINE = "engine-2"
CLIENT: dict[str, Any] = {"epoch": 3, "history": [0.5, None]}
STATE = {"text": "ü", "numbers": [1, 2.5, None, True], "worst": float("inf")}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).float(), tokens)


CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 0,
}
"""What an engine's golden was made with, and can be resumed with."""


def start() -> Engine:
    torch.manual_seed(0)
    return zstore.initialize(model=Tied(), config=CONFIG)[0]


def step(engine: Engine) -> float:
    share = 4 // engine.world_size
    first = engine.global_steps * 4 + engine.global_rank * share  # the same samples at any world size
    loss = engine(torch.arange(first, first + share) % 40)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def save_engine(rank: int, folder: str) -> dict[str, Any]:
    """Train two steps, save, and train one more; return what the checkpoint must hold, and the loss after it."""
    with start() as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", ENGINE, CLIENT)
        return {"values": _values(engine), "loss": step(engine)}


def _values(engine: Engine) -> dict[str, Any]:
    """Return the parameter's arrays as the engine itself gives them, by name in the checkpoint."""
    weight = engine.module.embed.weight
    found = {
        "master": safe_get_full_fp32_param(weight),
        **{
            f"optimizer/{slot}/embed.weight": safe_get_full_optimizer_state(weight, slot)
            for slot in ("exp_avg", "exp_avg_sq")
        },
    }
    return {key: value.tolist() for key, value in found.items() if value is not None}


def plain_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "model/h.0.weight": rng.standard_normal((2, 10, 6)).astype(np.float32),
        "model/h.0.bias": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "model/odd name/ü%": np.arange(5, dtype=np.int64) - 2,
        "model/none": np.zeros((0, 5), np.float16),
    }


SMALL = {"buffer/flags": np.arange(40) % 3 == 0}
PACKED = ("model/h.0.weight", "model/h.0.bias")


def write_expected(folder: Path, name: str, arrays: dict[str, Array], facts: dict[str, Any]) -> None:
    """Write the expected values beside a golden: each array's bytes, its type and true shape."""
    described = {key: [array.dtype.name, list(array.shape)] for key, array in arrays.items()}
    raw = {key: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for key, array in arrays.items()}
    np.savez_compressed(folder / f"{name}.npz", **{key.replace("/", "|"): value for key, value in raw.items()})
    (folder / f"{name}.json").write_text(json.dumps({"arrays": described, **facts}) + "\n")


def make_engine(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        results = run_ranks(save_engine, 2, made)
        shutil.copytree(Path(made) / "ckpt" / ENGINE, folder / ENGINE)
    values = {key: np.array(value, np.float32) for key, value in results[0]["values"].items()}
    values["model/embed.weight"] = values.pop("master")
    facts = {
        "step": 2,
        "world_size": 2,
        "aliases": {"model/embed.weight": ["head.weight"]},
        "loss": float(np.mean([result["loss"] for result in results])),
    }
    write_expected(folder, ENGINE, values, facts)


def make_arrays(folder: Path) -> None:
    arrays = plain_arrays()
    facts = {"step": 60, "world_size": 2, "aliases": {}, "state": STATE}
    with tempfile.TemporaryDirectory() as made:
        path = save_arrays(Path(made), arrays, world_size=2, step=60, tag="arrays", record=STATE, small=SMALL)
        shutil.copytree(path, folder / "arrays")
        write_expected(folder, "arrays", {**arrays, **SMALL}, facts)
        few = {name: arrays[name] for name in PACKED}
        path = save_arrays(Path(made), few, step=60, tag="few", record=STATE)
        with open_checkpoint(path) as reader:
            reshard_checkpoint(reader, Path(made) / "zstd", codec="zstd")
        shutil.copytree(Path(made) / "zstd" / "few", folder / "archive-zstd")
        write_expected(folder, "archive-zstd", few, {**facts, "world_size": 1})


KINDS: dict[str, Callable[[Path], None]] = {"arrays": make_arrays, ENGINE: make_engine}


def main(folder: Path, kinds: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds or KINDS:
        KINDS[kind](folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
