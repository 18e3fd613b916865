"""Write how many files of zstore a run on one rank passes through, in the default config at stage 3 from disk.

`python tests/journeys.py FOLDER`: a line for each journey, its name and the count.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from torch import nn

import zstore
from zstore.engine.api.engine import Engine

_ROOT = Path(zstore.__file__).resolve().parent.parent
_TOPS = tuple(f"{_ROOT}/{top}/" for top in ("engine", "zstore", "tools"))
_Result = TypeVar("_Result")

_passed: set[str] = set()


def _note(frame: FrameType, event: str, arg: object) -> None:
    if event == "call":
        _passed.add(frame.f_code.co_filename)


def journey(name: str, go: Callable[[], _Result]) -> _Result:
    """Run `go` and write how many files it passes through, on any thread."""
    _passed.clear()
    result = go()
    files = {os.path.realpath(file) for file in _passed.copy()}
    sys.stdout.write(f"{name} {sum(file.startswith(_TOPS) for file in files)}\n")
    return result


def start(folder: Path) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    tier = {"device": "nvme", "nvme_path": str(folder / "swap")}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": tier, "offload_param": tier},
    }
    return zstore.initialize(model=model, config=config)[0]


def command(*words: str) -> None:
    from zstore.tools.cli import main

    sys.argv = ["zstore", *words]
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
        main()


def main(folder: Path) -> None:
    start(folder).close()  # imports what it needs
    threading.setprofile(_note)
    sys.setprofile(_note)
    engine = journey("initialize", lambda: start(folder))
    batch = torch.ones(2, 256, dtype=torch.bfloat16)

    def backward() -> None:
        engine.backward(engine(batch).float().mean())

    def iteration() -> None:
        backward()
        engine.step()

    iteration()
    engine.save_checkpoint(folder / "first")
    iteration()
    backward()
    journey("step", engine.step)
    journey("iteration", iteration)
    journey("save", lambda: engine.save_checkpoint(folder / "ckpt"))
    engine.close()
    again = start(folder)
    journey("load", lambda: again.load_checkpoint(folder / "ckpt"))
    again.close()
    journey("reshard", lambda: command("reshard", str(folder / "ckpt"), str(folder / "four"), "--world-size", "4"))
    journey("consolidate", lambda: command("consolidate", str(folder / "ckpt"), str(folder / "weights")))
    sys.setprofile(None)
    threading.setprofile(None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
