"""Evaluation while a run trains: the mean loss over samples that were held out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zstore.engine import Engine
from zstore.engine.checkpoint.rng import load_rng_state, rng_state
from zstore.engine.data.batches import evaluating

from ..sample.models import loss_of


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
