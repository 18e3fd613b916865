"""Whole steps over an iterator: `train_batch` and `eval_batch`, with the accumulation inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zstore.errors import UsageError

if TYPE_CHECKING:
    from .training import Training


class BatchCalls:
    """The part of the engine that takes its micro-batches from an iterator itself.

    A micro-batch is what the model is called with: a tuple or list its arguments, a mapping its keyword arguments, anything
    else its one argument. The model returns its loss, or what has one as `loss`, under the key "loss" or in front.
    """

    training_state: Training
    _repeated: Iterator[Any] | None = None
    """The engine's own loader, over and over."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take one optimizer step over `gradient_accumulation_steps` micro-batches of `data_iter`; return the mean of their
        losses over all ranks (all ranks).

        By default they come from the loader that `initialize` returned, epoch after epoch. The model is set to train.
        Raises StopIteration, before anything is computed, where the iterator has fewer, UsageError in the middle of an
        accumulation.
        """
        engine: Any = self
        if self.training_state.counters.micro_steps % self.training_state.batch.accumulation_steps:
            raise UsageError(
                "train_batch() in the middle of an accumulation: complete the step with engine.step() first"
            )
        if data_iter is None:
            data_iter = self._own_batches()
        batches = _take(data_iter, self.training_state.batch.accumulation_steps)
        engine.train()
        losses = []
        for batch in batches:
            loss = _loss_of(_call(engine, batch))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> torch.Tensor:
        """Return the mean loss, over all ranks, of `num_micro_batches` of `data_iter` (default:
        `gradient_accumulation_steps`), without gradients and with the model set to evaluate meanwhile (all ranks)."""
        engine: Any = self
        batches = _take(data_iter, num_micro_batches or self.training_state.batch.accumulation_steps)
        modes = [(module, module.training) for module in engine.modules()]
        engine.eval()
        try:
            with torch.no_grad():
                losses = [_loss_of(_call(engine, batch)) for batch in batches]
        finally:
            for module, training in modes:
                module.training = training
        return self._mean(losses)

    def _own_batches(self) -> Iterator[Any]:
        if self.training_state.loader is None:
            raise UsageError("train_batch() without an iterator: pass one, or training_data=... to initialize()")
        if self._repeated is None:
            self._repeated = _repeat(self.training_state.loader)
        return self._repeated

    def forget_batches(self) -> None:
        """Let the next `train_batch` begin where the loader's position says (the engine's own call, before a load)."""
        self._repeated = None

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
        world = self.training_state.world
        if world.world_size == 1:
            return mean
        found: list[float] = world.all_gather_object(mean.item())
        return torch.tensor(sum(found) / len(found), device=mean.device)


def _repeat(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _take(data_iter: Iterator[Any], count: int) -> list[Any]:
    if not hasattr(data_iter, "__next__"):
        raise UsageError(f"expected an iterator of micro-batches, got {type(data_iter).__name__}: pass iter(...) of it")
    return [next(data_iter) for _ in range(count)]


def _call(engine: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple | list) else engine(batch)


def _loss_of(output: Any) -> torch.Tensor:
    found = getattr(output, "loss", None) if not isinstance(output, torch.Tensor) else output
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"train_batch() and eval_batch() expect the model to return its loss of one element, got {what}: return it alone, "
            "as .loss, or in front"
        )
    return found
