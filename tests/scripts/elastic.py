"""A training script that goes on at whatever world size it is started with: ELASTIC.py FOLDER STEPS.

It writes down each step's samples and loss, and takes no step before the number in FOLDER/gate allows it.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import zstore
from zstore.errors import CheckpointNotFoundError

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return len(rows)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, rows[number]


engine, _, loader, _ = zstore.initialize(model=model, config=str(folder / "ds.json"), training_data=Numbered())
with engine:
    with contextlib.suppress(CheckpointNotFoundError):
        engine.load_checkpoint(str(folder / "saved"))
    assert loader is not None
    with open(folder / f"steps-{engine.world_size}-{os.getpid()}.jsonl", "a", encoding="utf-8") as log:
        while engine.global_steps < steps:
            for numbers, samples in loader:
                while int((folder / "gate").read_text() or 0) <= engine.global_steps:
                    time.sleep(0.05)
                loss = (engine(samples) - samples.sum(1, keepdim=True)).square().mean()
                engine.backward(loss)
                step = engine.global_steps
                engine.step()
                line = {"step": step, "world": engine.world_size, "rank": engine.global_rank}
                line |= {"pid": os.getpid(), "agent": os.getppid()}
                line |= {"numbers": numbers.tolist(), "loss": loss.item(), "batch": engine.train_batch_size()}
                log.write(json.dumps(line) + "\n")
                log.flush()
                if engine.global_steps > step:
                    engine.save_checkpoint(str(folder / "saved"))
                    if engine.global_steps == steps:
                        break
