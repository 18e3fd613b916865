"""The loop of `zstore train`: steps with metrics and saves."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from zstore.engine import Engine

from ..printing import PLAIN_LINE_S
from ..sample.corpus import Corpus
from ..sample.models import loss_of
from .config import TrainOptions
from .resume import STATE_KEY, Position

_log = logging.getLogger("zstore")


class TrainLoop:
    """Runs steps from the engine's current one to `options.steps`, with metrics and saves."""

    def __init__(self, options: TrainOptions, engine: Engine, corpus: Corpus, position: Position) -> None:
        self._options = options
        self._engine = engine
        self._corpus = corpus
        self._position = position
        self._first_step = engine.global_steps
        self._row: dict[str, Any] = {}
        """Metrics of the last step."""
        self._line_s = float("-inf")
        """When the last line of progress was printed."""
        engine.journal.note(total_steps=options.steps, tokens=engine.train_batch_size() * position.seq_len)

    def run(self) -> None:
        """Train; the last state is saved, and every save is complete when this returns."""
        options, engine = self._options, self._engine
        if engine.global_steps >= options.steps:
            self._say(f"the checkpoint is at step {engine.global_steps} of {options.steps}: nothing to do")
            return
        if options.metrics is not None and engine.global_rank == 0:
            _drop_lines_from(options.metrics, engine.global_steps + 1)
        if options.save is not None:
            engine.watch_signals()
        engine.module.train()
        while engine.global_steps < options.steps:
            self._row = self._step()
            self._report()
            stop = engine.stop_requested
            if self._is_save_due() or stop is not None:
                self._say(f"step {engine.global_steps}: save stall {1000 * self._save():.1f} ms")
            if stop is not None and engine.global_steps < options.steps:
                engine.save_and_stop(None)
        engine.wait_for_checkpoint()

    def _step(self) -> dict[str, Any]:
        """Take a step and return its row: the mean loss over ranks and micro-batches, sums of bytes over ranks."""
        engine = self._engine
        started_s, before = time.perf_counter(), engine.statistics().store
        losses = []
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, labels = self._batch(micro)
            loss = loss_of(engine(inputs, labels=labels))
            losses.append(loss.detach().float())
            engine.backward(loss)
            engine.step()
        step_s, now = time.perf_counter() - started_s, engine.statistics()
        mine = (
            sum(map(float, losses)) / len(losses),
            now.store.disk_read_bytes - before.disk_read_bytes,
            now.store.disk_write_bytes - before.disk_write_bytes,
            now.process_peak_bytes,
        )
        loss, read, written, peak = (sum(column) for column in zip(*engine.world.all_gather_object(mine), strict=True))
        return {
            "step": engine.global_steps,
            "loss": loss / engine.world_size,
            "lr": engine.get_lr()[0],
            "grad_norm": engine.get_global_grad_norm(),
            "tokens_per_s": engine.train_batch_size() * self._position.seq_len / step_s,
            "step_s": step_s,
            "disk_read_bytes": read,
            "disk_write_bytes": written,
            "peak_memory_bytes": peak,
        }

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return this rank's samples of micro-batch number `micro` as (inputs, labels), [micro-batch size, seq_len].

        A sample's number in the run does not depend on the world size, nor does the set of samples of a step.
        """
        engine = self._engine
        size = engine.train_micro_batch_size_per_gpu()
        first = self._samples + (micro * engine.world_size + engine.global_rank) * size
        ids = self._corpus.batch(range(first, first + size), self._position.seq_len, self._position.seed)
        return ids.to(engine.device), ids.to(engine.device)

    @property
    def _samples(self) -> int:
        """Samples of the run that its finished steps have seen."""
        steps = self._engine.global_steps - self._first_step
        return self._position.samples + steps * self._engine.train_batch_size()

    def _is_save_due(self) -> bool:
        options, step = self._options, self._engine.global_steps
        if options.save is None:
            return False
        return step == options.steps or (options.save_every is not None and step % options.save_every == 0)

    def _save(self) -> float:
        """Pin the state and let training go on; returns the seconds that took."""
        handle = self._engine.save_checkpoint(
            str(self._options.save),
            client_state={STATE_KEY: asdict(self._position) | {"samples": self._samples}},
            metrics={name: value for name in ("loss", "grad_norm") if (value := self._row[name]) is not None},
            wait=False,
        )
        return float(handle.stall_s)

    def _report(self) -> None:
        """Write the step's row to the file of metrics, and now and then a line on stderr."""
        row, path = self._row, self._options.metrics
        if self._engine.global_rank != 0:
            return
        if path is not None:
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                _log.warning("--metrics %s: lines are missing; training goes on: %s", path, error)
        now_s = time.monotonic()
        if row["step"] < self._options.steps and now_s - self._line_s < (1 if sys.stderr.isatty() else PLAIN_LINE_S):
            return
        self._line_s = now_s
        rate = (row["disk_read_bytes"] + row["disk_write_bytes"]) / row["step_s"] / 1e9
        self._say(
            f"step {row['step']}/{self._options.steps}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  "
            f"disk {rate:.2f} GB/s  memory {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )

    def _say(self, text: str) -> None:
        if self._engine.global_rank == 0:
            print(text, file=sys.stderr, flush=True)


def _drop_lines_from(path: Path, first_step: int) -> None:
    """Drop the lines of steps that a resumed run repeats, and the last one of a killed run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(kept), encoding="utf-8")
