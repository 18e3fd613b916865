"""`zstore train`: a run on one process, under torch's elastic launcher, or on processes started here."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.errors import storage_error
from zstore.io import is_url
from zstore.remote.upload import require_uploads

from ..printing import PLAIN_LINE_S
from ..run.ranks import RunJob, run_ranks
from .config import (
    STATE_KEY,
    Position,
    Source,
    TrainOptions,
    auto_values,
    load_train_config,
    require_own_folder,
    resume_source,
    start_position,
)

if TYPE_CHECKING:
    from torch import Tensor

    from zstore.engine import Engine
    from zstore.engine.config.config import Config

    from ..sample import Corpus

OFFLOAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""Variables that torch reads once, when it is imported. Its threads do not spin while they wait, since I/O and the update
need the cores; storage that is refilled for every unit is in huge pages, which costs a tenth."""


def train_command(options: TrainOptions) -> None:
    """Train with `options`; with `nproc` over 1 in that many child processes."""
    config = load_train_config(options)
    if any(section.device != "none" for section in (config.offload_optimizer, config.offload_param)):
        for name, value in OFFLOAD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if options.nproc > 1 and "RANK" not in os.environ:
        _prepare(options, config)  # errors are reported once, not by every rank
        launch([sys.executable, "-m", "zstore", *sys.argv[1:]], options.nproc)  # RANK is set there
    else:
        _train(options, config)


def _prepare(options: TrainOptions, config: Config) -> tuple[Source | None, Position, Corpus]:
    """Return the checkpoint to resume from, the position in the data, and the data. Raises the errors that can be found before
    anything is built, and creates no files."""
    from ..sample import open_corpus

    storage = config.zstore.storage_options or {}
    source = resume_source(options.resume, options.save, storage_options=storage)
    position = start_position(options.seed, options.seq_len, source, storage_options=storage)
    corpus = open_corpus(options.data)
    corpus.require(position.seq_len)
    if options.save is not None:
        if source is None:
            require_own_folder(options.save, storage_options=storage)
        _require_writable(options.save, storage)
    return source, position, corpus


def _require_writable(location: str, storage_options: Mapping[str, Any]) -> None:
    """Raise StorageError if nothing can be saved in a folder or at a URL, before hours of training. A missing folder is not
    created."""
    if is_url(location):
        require_uploads(location, storage_options)
        return
    folder = Path(location)
    try:
        present = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        message = "--save: the folder cannot be written; give one that this user may write"
        raise storage_error(error, message, path=str(folder)) from error


def _train(options: TrainOptions, config: Config) -> None:
    import torch

    import zstore

    from ..sample import build_model

    source, position, corpus = _prepare(options, config)
    zstore.init_distributed()
    torch.manual_seed(position.seed)
    with zstore.Init(config=config):
        model = build_model(options.model, position.seq_len)
    engine, *_ = zstore.initialize(model=model, config=config, auto=auto_values(options, config))
    with engine:
        if options.save is not None:
            engine.note_save_folder(str(options.save))
        if source is not None:
            engine.load_checkpoint(*source)
        TrainLoop(options, engine, corpus, position).run()


_GRACE_PERIOD_S = 20.0
"""Time for ranks to exit after one failed: they exchange their errors meanwhile."""


def launch(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` in `num_ranks` processes of one group, each with the variables that torchrun sets.

    Raises SystemExit with the code of `zstore run` if any of them failed. None of them outlives this process."""
    result = run_ranks(RunJob(command=tuple(command), num_ranks=num_ranks, shutdown_timeout_s=_GRACE_PERIOD_S))
    result.print_failure()
    if result.exit_code:
        raise SystemExit(result.exit_code)


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
        """Time of the last printed line of progress."""
        engine.journal.note(total_steps=options.steps, tokens=engine.train_batch_size() * position.seq_len)

    def run(self) -> None:
        """Train, save the last state, and wait for all saves."""
        options, engine = self._options, self._engine
        if engine.global_steps >= options.steps:
            self._print(f"the checkpoint is at step {engine.global_steps} of {options.steps}: nothing to do")
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
                self._print(f"step {engine.global_steps}: save stall {1000 * self._save():.1f} ms")
            if stop is not None and engine.global_steps < options.steps:
                engine.save_and_stop(None)
        engine.wait_for_checkpoint()

    def _step(self) -> dict[str, Any]:
        """Take a step and return its row: the mean loss over ranks and micro-batches, sums of bytes over ranks."""
        from zstore.engine.training.loader import loss_of

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
        """Samples that the run's finished steps used."""
        steps = self._engine.global_steps - self._first_step
        return self._position.samples + steps * self._engine.train_batch_size()

    def _is_save_due(self) -> bool:
        options, step = self._options, self._engine.global_steps
        if options.save is None:
            return False
        return step == options.steps or (options.save_every is not None and step % options.save_every == 0)

    def _save(self) -> float:
        """Begin a save in the background; return the seconds for which it delayed training."""
        handle = self._engine.save_checkpoint(
            str(self._options.save),
            client_state={STATE_KEY: asdict(self._position) | {"samples": self._samples}},
            metrics={name: value for name in ("loss", "grad_norm") if (value := self._row[name]) is not None},
            wait=False,
        )
        return float(handle.stall_s)

    def _report(self) -> None:
        """Append the step's row to the metrics file, and print progress at intervals."""
        row, path = self._row, self._options.metrics
        if self._engine.global_rank != 0:
            return
        if path is not None:
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                _log.warning("--metrics %s: lines are missing; training continues: %s", path, error)
        now_s = time.monotonic()
        if row["step"] < self._options.steps and now_s - self._line_s < (1 if sys.stderr.isatty() else PLAIN_LINE_S):
            return
        self._line_s = now_s
        rate = (row["disk_read_bytes"] + row["disk_write_bytes"]) / row["step_s"] / 1e9
        self._print(
            f"step {row['step']}/{self._options.steps}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  "
            f"disk {rate:.2f} GB/s  memory {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )

    def _print(self, text: str) -> None:
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
