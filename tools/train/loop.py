"""The loop of `zstore train`: steps with metrics, evaluations and saves."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zstore.checkpoint import LocalFolder
from zstore.engine import Engine
from zstore.engine.api.batches import evaluating
from zstore.engine.checkpoint.rng import load_rng_state, rng_state
from zstore.open.sources import folder_of
from zstore.weights.companions import companions

from ..sample.corpus import TrainingData, validation_samples
from ..sample.models import loss_of
from .config import TrainOptions
from .metrics import MetricsFile, StepMeter, TrainProgress
from .resume import STATE_KEY, Position


class TrainLoop:
    """Runs steps from the engine's current one to `options.steps`, with metrics and saves."""

    def __init__(self, options: TrainOptions, engine: Engine, data: TrainingData, position: Position) -> None:
        self._options = options
        self._engine = engine
        self._corpus = data.train
        self._position = position
        self._evaluation = None
        if data.validation is not None:
            samples = validation_samples(data.validation, options.eval_samples, position.seq_len)
            self._evaluation = Evaluation(engine, samples, options.eval_every, options.steps)
        self._evaluated: dict[str, float] = {}
        """Results of the last evaluation."""
        self._first_step = engine.global_steps
        self._row: dict[str, Any] = {}
        """Metrics of the last step."""
        self._saved = False
        engine.journal.note(
            loop="train", total_steps=options.steps, tokens=engine.train_batch_size() * position.seq_len
        )
        if options.metrics is not None:
            engine.report.want(measures=True)
        self._meter = StepMeter(engine, position.seq_len)

    def run(self) -> None:
        """Train; the last state is saved, and every save is complete when this returns."""
        options, engine = self._options, self._engine
        leader = engine.global_rank == 0
        if engine.global_steps >= options.steps:
            if leader:
                print(
                    f"the checkpoint is at step {engine.global_steps} of {options.steps}: nothing to do",
                    file=sys.stderr,
                )
            return
        with contextlib.ExitStack() as opened:
            metrics = progress = None
            if leader and options.metrics is not None:
                metrics = opened.enter_context(MetricsFile(options.metrics, first_step=engine.global_steps + 1))
            if leader:
                progress = opened.enter_context(TrainProgress(options.steps, engine.global_steps))
            if options.save is not None:
                engine.watch_signals()
            while engine.global_steps < options.steps:
                row = self._row = self._step()
                if self._evaluation is not None and self._evaluation.is_due:
                    self._evaluated = self._evaluation.run()
                    row |= self._evaluated
                if metrics is not None:
                    metrics.write(row)
                if progress is not None:
                    progress.show(row)
                    if "eval_loss" in row:
                        progress.say(
                            f"step {row['step']}: evaluation loss {row['eval_loss']:.4f}, perplexity {row['perplexity']:.2f}"
                        )
                due, stop = self._is_save_due(), engine.stop_requested
                if due or stop is not None:
                    stall_s = self._save()
                    if progress is not None:
                        progress.say(f"step {engine.global_steps}: save stall {1000 * stall_s:.1f} ms")
                if stop is not None and engine.global_steps < options.steps:
                    engine.save_and_stop(None)
            engine.wait_for_checkpoint()

    def _keep_model_files(self) -> None:
        """Put config and tokenizer of a transformers model beside the checkpoints, where `consolidate` finds them."""
        model, save = Path(self._options.model).expanduser(), self._options.save
        if save is None or not model.exists():
            return
        files = {name: model / name for name in companions(LocalFolder(model))} if model.is_dir() else {}
        place = folder_of(save, self._engine.training_state.config.storage_options)
        for name, path in (files or {"config.json": model}).items():
            place.write_small(name, path.read_bytes())

    def _step(self) -> dict[str, Any]:
        engine, meter = self._engine, self._meter
        meter.start()
        model = engine.module
        model.train()
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, labels = self._batch(micro)
            with meter.phase("forward"):
                loss = loss_of(engine(inputs, labels=labels))
            meter.add_loss(loss)
            with meter.phase("backward"):
                engine.backward(loss)
            with meter.phase("optimizer"):
                engine.step()
        return meter.finish()

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return this rank's samples of micro-batch number `micro` as (inputs, labels), [micro-batch size, seq_len].

        A sample's number in the run does not depend on the world size, nor does the set of samples of a step.
        """
        engine = self._engine
        size = engine.train_micro_batch_size_per_gpu()
        first = self._samples + (micro * engine.world_size + engine.global_rank) * size
        inputs, labels = self._corpus.batch(range(first, first + size), self._position.seq_len, self._position.seed)
        return inputs.to(engine.device), labels.to(engine.device)

    @property
    def _samples(self) -> int:
        """Samples of the run that its finished steps have seen."""
        steps = self._engine.global_steps - self._first_step
        return self._position.samples + steps * self._engine.train_batch_size()

    def _state(self) -> dict[str, Any]:
        return {STATE_KEY: asdict(self._position) | {"samples": self._samples}}

    def _is_save_due(self) -> bool:
        options, step = self._options, self._engine.global_steps
        if options.save is None:
            return False
        return step == options.steps or (options.save_every is not None and step % options.save_every == 0)

    def _save(self) -> float:
        """Pin the state and let training go on; returns the seconds that took."""
        if not self._saved and self._engine.global_rank == 0:
            self._keep_model_files()
        self._saved = True
        handle = self._engine.save_checkpoint(
            str(self._options.save),
            client_state=self._state(),
            metrics={name: value for name in ("loss", "grad_norm") if (value := self._row[name]) is not None}
            | {name: value for name, value in self._evaluated.items() if math.isfinite(value)},
            wait=False,
        )
        return float(handle.stall_s)


class Evaluation:
    """Evaluates a model on `samples`, int64 [samples, seq_len], the same ones each time."""

    def __init__(self, engine: Engine, samples: Tensor, every: int | None, last_step: int) -> None:
        self._engine = engine
        self._batches = torch.split(samples, engine.train_micro_batch_size_per_gpu())
        self._num_samples = len(samples)
        self._every = every
        self._last_step = last_step

    @property
    def is_due(self) -> bool:
        """Whether the step that has just ended is one to evaluate after."""
        step = self._engine.global_steps
        return step == self._last_step or (self._every is not None and step % self._every == 0)

    def run(self) -> dict[str, float]:
        """Return `eval_loss`, the mean over all samples, and `perplexity`, its exponential; tell monitors and journal (all
        ranks). Generators of random numbers and the model's modes are as before."""
        engine, world = self._engine, self._engine.world
        before, total = rng_state(), 0.0
        try:
            with evaluating(engine):
                for first in range(0, len(self._batches), world.world_size):
                    # Every rank calls the model equally often, since its parameters may be gathered.
                    mine = first + world.rank
                    batch = self._batches[min(mine, len(self._batches) - 1)].to(engine.device)
                    loss = loss_of(engine(batch, labels=batch))
                    total += float(loss) * len(batch) if mine < len(self._batches) else 0.0
        finally:
            load_rng_state(before)
        mean = math.fsum(world.all_gather_object(total)) / self._num_samples
        found = {"eval_loss": mean, "perplexity": _exp(mean)}
        self._tell(found)
        return found

    def _tell(self, found: dict[str, float]) -> None:
        engine = self._engine
        engine.journal.evaluated(found["eval_loss"], found["perplexity"], self._num_samples)
        events: list[tuple[Any, ...]] = [
            (f"Train/Samples/{name}", value, engine.global_samples) for name, value in found.items()
        ]
        engine.monitor.write_events(events)


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
