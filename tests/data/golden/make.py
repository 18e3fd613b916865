"""Makes the golden checkpoints of one version of the format: python -m tests.data.golden.make FOLDER [KIND ...]

Each is a checkpoint of a few kilobytes, with `NAME.npz` (every array's bytes) and `NAME.json` (what else it holds) beside it,
which are written from the values that were saved, not from what a reader finds. Goldens are kept as they are: a new version
of the format gets a new folder, and every later reader reads all of them.
"""

from __future__ import annotations

import io
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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zstore
import zstore.dcp
from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.engine import Engine
from zstore.engine.access.safe_access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from zstore.testing.ranks import run_ranks

Array = npt.NDArray[Any]

ENGINES = ("engine-1", "engine-2")
ON_DISK = "engine-1"
CLIENT: dict[str, dict[str, Any]] = {
    "engine-1": {"epoch": 3, "history": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4},
    "engine-2": {"epoch": 3, "history": [0.5, None]},
}
STATE = {"text": "ü", "numbers": [1, 2.5, None, True], "worst": float("inf")}


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of giving the tokens back."""
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).float(), tokens)


def config(name: str, folder: str) -> dict[str, Any]:
    """Return the config that an engine's golden was made with, and can be resumed with."""
    on_disk = name == ON_DISK
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}} if on_disk else {"stage": 2}
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "bf16": {"enabled": on_disk},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }


def start(name: str, folder: str) -> Engine:
    """Return an engine over `Tied` that a golden can be loaded into."""
    torch.manual_seed(0)
    return zstore.initialize(model=Tied(), config=config(name, folder))[0]


def step(engine: Engine) -> float:
    """Train one step; return the loss."""
    share = 4 // engine.world_size
    first = engine.global_steps * 4 + engine.global_rank * share  # the same samples at any world size
    loss = engine(torch.arange(first, first + share) % 40)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def save_engine(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Train two steps, save, and train one more; return what the checkpoint must hold, and the loss after it."""
    with start(name, folder) as engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(f"{folder}/ckpt", name, CLIENT[name])
        return {"values": _values(engine, name), "loss": step(engine)}


def _values(engine: Engine, name: str) -> dict[str, Any]:
    """Return the parameter's arrays as the engine itself gives them, by name in the checkpoint."""
    weight = engine.module.embed.weight
    found = {
        "master": safe_get_full_fp32_param(weight),
        **{
            f"optimizer/{slot}/embed.weight": safe_get_full_optimizer_state(weight, slot)
            for slot in ("exp_avg", "exp_avg_sq")
        },
        "client/history": CLIENT[name]["history"] if name == ON_DISK else None,
    }
    return {key: value.tolist() for key, value in found.items() if value is not None}


def plain_arrays() -> dict[str, Array]:
    """Return arrays of many kinds."""
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


def make_engine(folder: Path, name: str, world_size: int) -> None:
    """Make a golden that an engine saved."""
    with tempfile.TemporaryDirectory() as made:
        results = run_ranks(save_engine, world_size, name, made)
        shutil.copytree(Path(made) / "ckpt" / name, folder / name)
    values = {key: np.array(value, np.float32) for key, value in results[0]["values"].items()}
    values["model/embed.weight"] = values.pop("master")
    facts = {
        "step": 2,
        "world_size": world_size,
        "aliases": {"model/embed.weight": ["head.weight"]},
        "loss": float(np.mean([result["loss"] for result in results])),
    }
    write_expected(folder, name, values, facts)


DCP_ODD = {1, 2}
"""What only a pickle can bring back."""
DCP_VALUES: dict[str, Any] = {"step": 4, "betas": (0.9, 0.95), "best": float("inf"), "raw": b"\x00\xffraw"}
DCP_STATE = {
    "version": 1,
    "model": ["model"],
    "optimizer": ["optim"],
    "optimizer_form": "nested",
    "paths": {
        "client/extra.count": ["extra", "count"],
        "client/odd": ["odd"],
        "client/progress.raw": ["progress", "raw"],
    },
    "values": [
        [["progress", "best"], float("inf")],
        [["progress", "betas"], {"$tuple": [0.9, 0.95]}],
        [["progress", "step"], 4],
    ],
    "opaque": {"client/odd": "pickle", "client/progress.raw": "bytes"},
}
"""What the record keeps for torch.distributed.checkpoint."""


def dcp_arrays() -> dict[str, Array]:
    """Return the tensors that go through torch.distributed.checkpoint, by array."""
    rng = np.random.default_rng(1)
    return {
        "model/up.weight": rng.standard_normal((13, 6)).astype(np.float32),
        "model/down.weight": rng.standard_normal((6, 10)).astype(ml_dtypes.bfloat16),
        "model/scale": np.array(1.5, np.float32),
        "optimizer/exp_avg/up.weight": rng.standard_normal((13, 6)).astype(np.float32),
        "client/extra.count": np.arange(3),
    }


def dcp_state() -> dict[str, Any]:
    """Return the state dict of whole tensors."""
    arrays = dcp_arrays()
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    up, down = tensors["model/up.weight"], tensors["model/down.weight"].bfloat16()
    return {
        "model": {"up.weight": up, "down.weight": down, "scale": tensors["model/scale"]},
        "optim": {"state": {"up.weight": {"exp_avg": tensors["optimizer/exp_avg/up.weight"]}}},
        "extra": {"count": torch.from_numpy(arrays["client/extra.count"])},
        "progress": dict(DCP_VALUES),
        "odd": DCP_ODD,
    }


def save_dcp(rank: int, folder: str) -> None:
    """Save through torch.distributed.checkpoint: rows, cut unevenly, columns, and what each rank has whole."""
    mesh = init_device_mesh("cpu", (2,))
    state = dcp_state()
    moments = state["optim"]["state"]["up.weight"]
    for tensors, name, placement in (
        (state["model"], "up.weight", Shard(0)),
        (state["model"], "down.weight", Shard(1)),
        (state["model"], "scale", Replicate()),
        (moments, "exp_avg", Shard(0)),
    ):
        tensors[name] = distribute_tensor(tensors[name], mesh, [placement])
    dcp.save(state, storage_writer=zstore.dcp.Writer(f"{folder}/dcp", step=4))


def make_dcp(folder: Path) -> None:
    """Make a golden that torch.distributed.checkpoint saved."""
    with tempfile.TemporaryDirectory() as made:
        run_ranks(save_dcp, 2, made)
        shutil.copytree(Path(made) / "dcp", folder / "dcp")
    pickled = io.BytesIO()
    torch.save(DCP_ODD, pickled)
    opaque = {"client/progress.raw": DCP_VALUES["raw"], "client/odd": pickled.getvalue()}
    arrays = dcp_arrays() | {name: np.frombuffer(content, np.uint8) for name, content in opaque.items()}
    write_expected(folder, "dcp", arrays, {"step": 4, "world_size": 2, "aliases": {}, "state": {"dcp": DCP_STATE}})


def make_arrays(folder: Path) -> None:
    """Make goldens of arrays of many kinds, as they are and packed."""
    arrays = plain_arrays()
    facts = {"step": 60, "world_size": 2, "aliases": {}, "state": STATE}
    with tempfile.TemporaryDirectory() as made:
        path = save_arrays(Path(made), arrays, world_size=2, step=60, tag="arrays", record=STATE, small=SMALL)
        shutil.copytree(path, folder / "arrays")
        write_expected(folder, "arrays", {**arrays, **SMALL}, facts)
        few = {name: arrays[name] for name in PACKED}
        path = save_arrays(Path(made), few, step=60, tag="few", record=STATE)
        for codec in ("zstd", "blosc"):
            with open_checkpoint(path) as reader:
                reshard_checkpoint(reader, Path(made) / codec, codec=codec)
            shutil.copytree(Path(made) / codec / "few", folder / f"archive-{codec}")
            write_expected(folder, f"archive-{codec}", few, {**facts, "world_size": 1})


KINDS: dict[str, Callable[[Path], None]] = {
    "arrays": make_arrays,
    "engine-1": lambda folder: make_engine(folder, "engine-1", 1),
    "engine-2": lambda folder: make_engine(folder, "engine-2", 2),
    "dcp": make_dcp,
}


def main(folder: Path, kinds: Sequence[str]) -> None:
    """Make goldens of all kinds, or of those that are named, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds or KINDS:
        KINDS[kind](folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
