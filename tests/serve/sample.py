"""A folder with two runs, as a service may find it: journals with every kind of line, checkpoints that share files, leavings
of saves, names that would be HTML or leave the folder, values that are not finite.
"""

import contextlib
import json
import math
import random
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tests.checkpoint.checkpoints import World, open_world
from zstore.checkpoint.commit import owner_json
from zstore.checkpoint.layout import step_tag, working_name

RUN = "gpt-small"
HOSTILE_RUN = "<img src=x onerror=alert(1)>"
HOSTILE_ARRAY = "model/<script>alert(1)<!script>"
RUN_ID = "5f0c1d2e3a4b5c6d7e8f901234567890"
HOSTILE_RUN_ID = "00112233445566778899aabbccddeeff"
NUM_STEPS = 300
SAVE_STEPS = (60, 120, 180, 240, 300)
_MIB = 1024 * 1024
_WIDTH = 48

Array = npt.NDArray[Any]


def arrays_of(seed: int = 0) -> dict[str, Array]:
    """Return the arrays of a small model with an optimizer: frozen ones, one with NaN and infinity, one with a hostile name."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    arrays: dict[str, Array] = {"model/wte.weight": normal(4 * _WIDTH, _WIDTH), "model/frozen.bias": normal(_WIDTH)}
    for layer in range(12):  # h.2 before h.10
        for name, shape in (("attn.weight", (_WIDTH, _WIDTH)), ("ln.weight", (_WIDTH,))):
            arrays[f"model/h.{layer}.{name}"] = normal(*shape)
            arrays[f"optimizer/exp_avg/h.{layer}.{name}"] = normal(*shape) * 0.01
    arrays["model/broken.weight"] = normal(64, 8)
    arrays["model/broken.weight"][3, :3] = np.nan
    arrays["model/broken.weight"][5, 1] = np.inf
    arrays[HOSTILE_ARRAY] = normal(8)
    arrays["buffer/h.0.mask"] = np.tri(16, dtype=np.float32)
    return arrays


@dataclass
class JournalWriter:
    """Writes lines as an engine does, at times of its own."""

    path: Path
    at: float
    step: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def write(self, kind: str, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            self._put(file, kind, values)

    def _put(self, file: IO[str], kind: str, values: Mapping[str, Any]) -> None:
        file.write(json.dumps({"kind": kind, "at": round(self.at, 3), **values}, separators=(",", ":")) + "\n")

    def start(self, run_id: str, *, pid: int | None = None, total_steps: int = 1000) -> None:
        self.write(
            "start",
            version=1,
            run=run_id,
            step=self.step,
            total_steps=total_steps,
            world_size=2,
            host=socket.gethostname(),
            pid=2**22 + 1 if pid is None else pid,  # one that no process has
            versions={"zstore": "0.0.0", "torch": "2.0.0"},
            config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}},
        )
        tiers = {"model": "host", "optimizer": "disk", "buffer": "device"}
        kinds = {"model": "parameters", "optimizer": "optimizer state", "buffer": "buffers"}
        arrays = [
            (name, tiers[name.split("/")[0]], kinds[name.split("/")[0]], a.nbytes) for name, a in arrays_of().items()
        ]
        self.write("memory", host_budget_bytes=64 * _MIB, device_bytes=256 * _MIB, arrays=arrays)

    def steps(self, count: int, *, step_s: float = 0.2) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for _ in range(count):
                self._put(file, "step", self._next_step(step_s))

    def _next_step(self, step_s: float) -> dict[str, Any]:
        self.step += 1
        self.at += step_s
        noise = self.rng.uniform(0.9, 1.1)
        skipped = self.step % 97 == 0
        loss = None if skipped else (4 * math.exp(-self.step / 120) + 1.5) * self.rng.uniform(0.98, 1.02)
        stall_s = {"stall/waiting for reads": 0.01 * noise, "stall/waiting for room": 0.004 * noise}
        return {
            "step": self.step,
            "loss": loss,
            "lr": 3e-4 * min(1, self.step / 20),
            "grad_norm": None if skipped else 1.2 * noise,
            "samples": 8,
            "tokens": 8 * 256,
            "skipped": skipped,
            "step_s": step_s * noise,
            "forward_s": step_s * 0.3 * noise,
            "backward_s": step_s * 0.5 * noise,
            "optimizer_s": step_s * 0.2 * noise,
            "tokens_per_s": 8 * 256 / (step_s * noise),
            "rate/disk read": 9 * _MIB / step_s,
            "rate/disk write": 7 * _MIB / step_s,
            **stall_s,
            "stall_s": sum(stall_s.values()),
            "memory/device": 20 * _MIB,
            "memory/host": int(40 * _MIB * noise),
            "memory/disk": 90 * _MIB,
            "memory/buffers": 16 * _MIB,
            "memory/process": int(300 * _MIB * noise),
            "memory/cuda": 0,
        }

    def saved(self, folder: Path, *, linked_bytes: int, written_bytes: int) -> None:
        place: dict[str, Any] = {"step": self.step, "tag": step_tag(self.step), "location": str(folder)}
        self.at += 0.05
        done = {"stall_s": 0.012, "elapsed_s": 0.05, "linked_bytes": linked_bytes, "written_bytes": written_bytes}
        self.write("save", **place, state="committed", **done)


@dataclass
class SampleRun:
    """A run whose checkpoints share the files of arrays that do not change."""

    folder: Path
    world: World
    journal: JournalWriter
    run_id: str
    _known: Mapping[str, Any] = field(default_factory=dict)

    def save(self, *, step: int | None = None) -> Path:
        """Save the present values as a checkpoint; all but the first array and the optimizer's stay as they were."""
        step = self.journal.step if step is None else step
        for name, array in self.world.arrays.items():
            if name == "model/wte.weight" or name.startswith("optimizer/"):
                np.add(array, np.float32(1e-3), out=array)
                self.world.stores[0].write(name, np.ascontiguousarray(array).reshape(-1)).wait()
        record = {
            "metrics": {"loss": 1.5 + 30 / (step + 10)},
            "client_state": {"epoch": step // 100},
            "scheduler": {"last": step},
        }
        summary = self.world.save(self.folder, step=step, known=self._known, record=record, run_id=self.run_id)[0]
        self._known = summary.known
        return summary.path


@contextlib.contextmanager
def opened_run(folder: Path, run_id: str, *, started_at: float) -> Iterator[SampleRun]:
    folder.mkdir(parents=True, exist_ok=True)
    swap = folder.parent / f".swap-{run_id[:8]}"
    swap.mkdir(exist_ok=True)
    journal = JournalWriter(folder / f"journal-{run_id}.jsonl", started_at)
    try:
        with open_world(arrays_of(), tier="disk", run_path=swap) as world:
            yield SampleRun(folder, world, journal, run_id)
    finally:
        shutil.rmtree(swap, ignore_errors=True)


def train(run: SampleRun, *, steps: tuple[int, ...] = SAVE_STEPS, first_process_ends: int = 130) -> None:
    """Train for a while: the first process is killed, the second goes on from its newest checkpoint, and ends."""
    journal = run.journal
    journal.start(run.run_id)
    for number, step in enumerate(steps):
        if journal.step < first_process_ends <= step:
            journal.steps(first_process_ends - journal.step)  # and then it is killed
            journal.at += 30
            journal.step = steps[number - 1]
            journal.start(run.run_id)
            cost = {"elapsed_s": 0.2, "read_bytes": 4096}
            journal.write("load", step=journal.step, tag=step_tag(journal.step), location=str(run.folder), **cost)
        journal.steps(step - journal.step)
        run.save()
        journal.saved(run.folder, linked_bytes=2**20, written_bytes=2**19)
    failed = {"state": "failed", "problem": "<b>no space left</b>"}
    journal.write("save", step=journal.step, tag="by-hand", location=str(run.folder), **failed)


def leave_behind(folder: Path) -> None:
    save_id = "ab" * 16
    lost = folder / working_name(step_tag(310), "tmp", save_id)
    (lost / "manifest").mkdir(parents=True)
    (lost / "model").mkdir()
    (lost / "model" / "c.0").write_bytes(bytes(5000))
    lock = folder / working_name(step_tag(310), "lock", save_id)
    lock.write_bytes(owner_json())
    damaged = folder / "step-00000001"
    damaged.mkdir()
    (damaged / "zstore.json").write_text('{"format":"zstore checkpoint","version":1}')


def make_sample(folder: Path, *, now: float | None = None) -> Path:
    now = time.time() if now is None else now
    with opened_run(folder / RUN, RUN_ID, started_at=now - 120) as run:
        train(run)
        run.journal.write("end", step=run.journal.step, reason="done")
    leave_behind(folder / RUN)
    with opened_run(folder / HOSTILE_RUN, HOSTILE_RUN_ID, started_at=now - 4000) as run:
        run.journal.start(HOSTILE_RUN_ID, total_steps=40)
        for step in (20, 40):
            run.journal.steps(20)
            run.folder = folder / HOSTILE_RUN / f"checkpoint-{step}"
            run.save()
            run.journal.saved(run.folder, linked_bytes=0, written_bytes=2**20)
    with (folder / HOSTILE_RUN / f"journal-{HOSTILE_RUN_ID}.jsonl").open("a") as journal:
        journal.write('{"kind":"step","at":17')  # a torn line
    return folder
