"""Other software reads what the engine saved, and every reader refuses a flipped byte."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch

import zstore
from zstore.errors import CorruptionError
from zstore.testing.ranks import run_ranks

CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
}
ARRAYS = ("model/0.weight", "model/2.weight", "optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/2.bias")


def make_engine(folder: Path) -> zstore.engine.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(150, 301), torch.nn.Tanh(), torch.nn.Linear(301, 7))
    (folder / "nvme").mkdir(exist_ok=True)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "nvme")}}
    return zstore.initialize(model=model, config=CONFIG | {"zero_optimization": zero})[0]


def train_and_save(rank: int, folder: str) -> dict[str, list[float]]:
    """Train two steps, save, and return the rows that this rank's engine has of each array."""
    with make_engine(Path(folder)) as engine:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            loss = engine(torch.randn(2, 150, generator=generator).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(str(Path(folder) / "ckpt"), tag="two")
        store = engine.training_state.state.store
        return {name: store.read(name).wait().tolist() for name in ARRAYS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("readers")
    ranks = run_ranks(train_and_save, 2, str(folder))
    values = {name: np.array(ranks[0][name] + ranks[1][name], dtype=np.float32) for name in ARRAYS}
    return folder / "ckpt" / "two", values


def read_by_zarr(checkpoint: Path, name: str) -> subprocess.CompletedProcess[bytes]:
    """Read in a process that imports zarr and numpy; of zstore only the data type that its entry point registers."""
    program = (
        "import sys, zarr\n"
        "values = zarr.open_array(sys.argv[1], mode='r')[:]\n"
        "assert not {'torch', 'zstore.checkpoint', 'zstore.io.shards'} & set(sys.modules)\n"
        "sys.stdout.buffer.write(values.tobytes())\n"
    )
    command = [sys.executable, "-c", program, str(checkpoint / name)]
    return subprocess.run(command, capture_output=True, timeout=200, check=False, cwd=checkpoint)


def read_by_tensorstore(checkpoint: Path, name: str) -> np.ndarray:
    path = str(checkpoint / name) + "/"
    opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, read=True).result()
    values: np.ndarray = opened.read().result()
    return values


@pytest.mark.parametrize("name", ARRAYS)
def test_zarr_and_tensorstore_give_the_values_that_the_engine_has(
    saved: tuple[Path, dict[str, np.ndarray]], name: str
) -> None:
    checkpoint, values = saved
    assert np.any(values[name])
    found = read_by_zarr(checkpoint, name)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout == values[name].tobytes()
    assert read_by_tensorstore(checkpoint, name).tobytes() == values[name].tobytes()


def test_a_flipped_byte_is_refused_by_all(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    checkpoint, _ = saved
    name = "model/0.weight"
    file = checkpoint / name / "c.1.0"
    mode = stat.S_IMODE(file.stat().st_mode)
    assert mode & 0o222 == 0, "published files are read-only"
    os.chmod(file, 0o644)
    data = bytearray(file.read_bytes())
    data[4096 + 100] ^= 1
    file.write_bytes(data)
    try:
        assert b"crc32c" in read_by_zarr(checkpoint, name).stderr.lower()
        with pytest.raises(ValueError, match=r"(?i)crc|checksum|digest"):
            read_by_tensorstore(checkpoint, name)
        command = [sys.executable, "-m", "zstore", "verify", str(checkpoint)]
        verified = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert verified.returncode == 1
        assert "model/0.weight" in verified.stdout + verified.stderr
        assert "c.1.0" in verified.stdout + verified.stderr
        with make_engine(tmp_path) as engine, pytest.raises(CorruptionError, match=r"0\.weight"):
            engine.load_checkpoint(str(checkpoint.parent), "two")
    finally:
        data[4096 + 100] ^= 1
        file.write_bytes(data)
        os.chmod(file, mode)
