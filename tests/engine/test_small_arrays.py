"""A model of many small arrays: a step moves them in few requests, and nothing else about it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from zstore.engine import Engine
from zstore.format.arrays import Bytes
from zstore.io.files import Files, OpenFile, ScatteredMemory

WIDTH = 160
"""A matrix of fp32 is 100 KiB."""


class CountedFiles(Files):
    """Files that note the bytes of each request to a run folder."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[int] = []

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        self.requests.append(out.size)
        return super()._preadv(file, out, offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        self.requests.append(data.size)
        return super()._pwritev(file, data, offset)


def start(tier: str, folder: Path, files: Files | None = None, **own: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)), nn.Linear(WIDTH, 4 * WIDTH))
    model.extend(nn.Linear(4 * WIDTH, WIDTH) if n == 0 else nn.Linear(WIDTH, WIDTH) for n in range(12))
    offload = {"device": tier} | ({"nvme_path": str(folder)} if tier == "nvme" else {})
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "steps_per_print": 0,
        "zstore": own,
    }
    return zstore.initialize(model=model, config=config, _files=files)[0]


def take_steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().mean())
        engine.step()


def test_no_request_of_a_step_is_under_256_kib_and_bits_are_those_of_memory(tmp_path: Path) -> None:
    files = CountedFiles()
    with start("nvme", tmp_path, files) as engine, start("cpu", tmp_path) as other:
        planned = engine.training_state.plan
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.shard")) == planned.file_bytes
        take_steps(engine, 2)
        files.requests.clear()
        take_steps(engine, 1)
        assert sum(files.requests) == planned.traffic_total.total
        assert min(files.requests) >= 256 * 1024
        take_steps(other, 3)
        assert engine_digests(engine) == engine_digests(other)
