"""Runs of `zstore train`: their options, and the rows that they write."""

import json
from pathlib import Path
from typing import Any

from zstore.tools.train import TrainOptions


def config_file(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "ds.json"
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 1},
    } | more
    path.write_text(json.dumps(config))
    return path


def options(tmp_path: Path, text: Path, config: Path, **more: Any) -> TrainOptions:
    chosen = {"model": "gpt-tiny", "steps": 4, "seq_len": 16, "data": text, "config": config} | more
    return TrainOptions(**chosen)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
