"""A run with very many checkpoints and arrays, made in seconds: all checkpoints but the newest are links to one small one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from tests.checkpoint.checkpoints import save_arrays
from tests.checkpoint.forging import record_digest
from zstore.checkpoint.names import step_tag


def make_large(folder: Path, *, num_checkpoints: int = 1000, num_arrays: int = 10_000) -> Path:
    """Make a run in `folder` whose newest checkpoint has `num_arrays` arrays; returns it."""
    first = save_arrays(folder, {"model/w": np.arange(64.0)}, step=1)
    document = json.loads((first / "zstore.json").read_text())
    for step in range(2, num_checkpoints):
        copy = folder / step_tag(step)
        shutil.copytree(first, copy, copy_function=os.link)
        document |= {"tag": step_tag(step), "step": step}
        document["committed_ns"] += 1_000_000
        document["digest"] = record_digest(document)
        (copy / "zstore.json").unlink()
        (copy / "zstore.json").write_text(json.dumps(document))
    whole = {f"model/h.{n // 20}.part{n % 20}.weight": np.float32([n, -n]) for n in range(num_arrays)}
    save_arrays(folder, {"model/w": np.arange(64.0)}, small=whole, step=num_checkpoints)
    return folder
