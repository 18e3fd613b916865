"""Metrics of a step of `zstore train`, and where they are written: a JSONL file and the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zstore.journal.writer import FileSink, JournalWriter

from ..progress import PLAIN_LINE_S, Bar

if TYPE_CHECKING:
    import torch

    from zstore.engine import Engine

_log = logging.getLogger("zstore")


class StepMeter:
    """Times the phases of a step and sums over all ranks, with one small exchange a step."""

    def __init__(self, engine: Engine, seq_len: int) -> None:
        self._engine = engine
        self.seq_len = seq_len
        """Tokens of a sample of the step."""
        self._losses: list[torch.Tensor] = []
        self._phases: dict[str, float] = {}
        self._started = 0.0
        self._before = engine.statistics()

    def start(self) -> None:
        """Begin a step."""
        self._losses = []
        self._phases = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._before = self._engine.statistics()
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block to a phase."""
        started = time.perf_counter()
        yield
        self._phases[name] += time.perf_counter() - started

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of a micro-batch."""
        self._losses.append(loss.detach().float())

    def finish(self) -> dict[str, Any]:
        """Return the step's row: means over ranks and micro-batches, sums of bytes over ranks; `links` is this rank's
        alone."""
        engine = self._engine
        step_s = time.perf_counter() - self._started
        before, now = self._before, engine.statistics()
        mine = (
            sum(float(loss) for loss in self._losses) / len(self._losses),
            now.store.disk_read_bytes - before.store.disk_read_bytes,
            now.store.disk_write_bytes - before.store.disk_write_bytes,
            now.memory.process_peak_bytes,
        )
        ranks = engine.world.all_gather_object(mine)
        tokens = engine.train_batch_size() * self.seq_len
        return {
            "step": engine.global_steps,
            "loss": sum(row[0] for row in ranks) / len(ranks),
            "lr": engine.get_lr()[0],
            "grad_norm": engine.get_global_grad_norm(),
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "mfu": engine.report.utilisation.of(step_s),
            **{f"{name}_s": seconds for name, seconds in self._phases.items()},
            "disk_read_bytes": sum(row[1] for row in ranks),
            "disk_write_bytes": sum(row[2] for row in ranks),
            "peak_memory_bytes": sum(row[3] for row in ranks),
            "links": now.links_since(before),
        }


class MetricsFile(contextlib.AbstractContextManager["MetricsFile"]):
    """One JSON object per line and step, by the writer of journals. A resumed run drops the lines of steps that it repeats.

    A file that cannot be written is a warning; training goes on.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = _lines_before(path, first_step) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(kept), encoding="utf-8")
        self._path = path
        self._writer = JournalWriter(self._warn)
        self._writer.open(FileSink(path))

    def _warn(self, text: str) -> None:
        _log.warning("--metrics %s: lines may be missing; training goes on: %s", self._path, text)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; it is in the file when this returns."""
        self._writer.append(row)
        self._writer.flush()

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _lines_before(path: Path, first_step: int) -> list[str]:
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line).get("step", 0)
        except (ValueError, AttributeError):
            continue  # the last line of a killed run
        if step < first_step:
            lines.append(line + "\n")
    return lines


class TrainProgress(Bar):
    """A bar with loss, tokens/s, disk GB/s and memory on a terminal; elsewhere a plain line every 30 s."""

    def __init__(self, total: int, done: int) -> None:
        super().__init__("", total, in_bytes=False)
        self._total = total
        self._done = done
        self._last_line_s = -PLAIN_LINE_S

    def __enter__(self) -> Self:
        super().__enter__()
        self.update(completed=self._done)
        return self

    def show(self, row: dict[str, Any]) -> None:
        """Show a step's row."""
        moved = row["disk_read_bytes"] + row["disk_write_bytes"]
        mfu = "" if row["mfu"] is None else f"MFU {100 * row['mfu']:.1f} %  "
        text = (
            f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  {mfu}"
            f"disk {moved / row['step_s'] / 1e9:.2f} GB/s  "
            f"memory {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )
        if self.update(completed=row["step"], description=text):
            return
        if row["step"] == self._total or time.monotonic() - self._last_line_s >= PLAIN_LINE_S:
            self._last_line_s = time.monotonic()
            self.say(f"step {row['step']}/{self._total}  {text}")
