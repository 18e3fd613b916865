"""Batches: the micro-batches of a step, the loader of training data, and the loss of a micro-batch.

[Note: the order of samples]
A rank's samples depend only on the seed and the global sample number. Epoch e is a permutation of the data set, drawn from
(seed, e), and dealt in rounds of micro-batch x world size samples, of which rank r gets the r-th micro-batch. So a resumed run
continues where the saved one stopped, even at a different world size. In the last round of an epoch, ranks may have fewer
samples, all the same number; if they do not divide evenly, the first ones of the epoch are repeated. With `drop_last`, an
epoch ends with the last whole `train_batch_size`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zstore.errors import UsageError
from zstore.ranks.world import World

from ..config.resolve import BatchSizes

Collate = Callable[[list[Any]], Any]


@dataclass
class Counters:
    """Progress of training."""

    global_steps: int = 0
    """Optimizer steps, including skipped ones."""
    skipped_steps: int = 0
    """Steps that were skipped because gradients were not finite."""
    micro_steps: int = 0
    """Calls of `step()`, at boundaries or not."""


@dataclass(kw_only=True)
class Accumulation:
    """Counts the micro-batches of a step, which ends as the batch sizes determine, or where the caller sets its boundary."""

    batch: BatchSizes
    """The config's sizes; after a load at a different world size, computed from the saved global batch."""
    world_size: int
    earlier_samples: int = 0
    """Correction to the count of samples for steps taken with an earlier batch size."""
    micro_steps: int = 0
    """Calls of `step()` since the last optimizer step."""
    backwards: int = 0
    """Backwards since the last call of `step()`."""
    was_cleared: bool = False
    """Whether `zero_grad()` discarded backwards since the last call of `step()`; `step()` is still allowed."""
    boundary_override: bool | None = None
    """Whether the current micro-batch is the last of its step, if set by the caller; None if the engine counts."""

    @property
    def is_new(self) -> bool:
        """Whether the step has had no backward yet."""
        return not (self.micro_steps or self.backwards)

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self.boundary_override is not None:
            return self.boundary_override
        return self.micro_steps + 1 >= self.batch.accumulation_steps

    def end_micro_batch(self, *, boundary: bool) -> None:
        """Count a call of `step()`; at a `boundary` start the next accumulation."""
        self.backwards, self.was_cleared = 0, False
        self.micro_steps = 0 if boundary else self.micro_steps + 1

    def restart(self) -> None:
        """Discard the micro-batches of the current step."""
        self.micro_steps, self.backwards, self.was_cleared = 0, 0, False

    def resize(self, batch: BatchSizes, steps: int) -> None:
        """Change the batch sizes after `steps` optimizer steps."""
        self.earlier_samples += steps * (self.batch.train_batch_size - batch.train_batch_size)
        self.batch = batch

    def batch_with_size(self, train_batch_size: int) -> BatchSizes:
        """Return the batch sizes with that many samples per step, in a different number of micro-batches.

        Raises UsageError as `with_train_batch_size` does, and within a step.
        """
        batch = self.batch.with_train_batch_size(train_batch_size, self.world_size)
        if not self.is_new:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) in the middle of a step, whose losses were divided by "
                f"{self.batch.accumulation_steps} micro-batches: call it after the step() that ends an accumulation"
            )
        return batch


@dataclass(eq=False, repr=False)
class TrainingLoader:
    """Micro-batches of one rank; each `iter` ends with an epoch. `position` counts the used samples, over all ranks and
    epochs."""

    data: Dataset[Any]
    _: KW_ONLY
    batch: BatchSizes
    rank: int
    world_size: int
    seed: int
    drop_last: bool = False
    collate_fn: Collate | None = None
    position: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.data, Sized) or not hasattr(self.data, "__getitem__"):
            raise UsageError(
                f"training_data: expected a data set with a length and an index, got {type(self.data).__name__}; pass any "
                "other iterable directly to the training loop"
            )
        self.num_samples = len(self.data)
        if self.samples_per_epoch == 0:
            raise UsageError(
                f"training_data has {self.num_samples} samples, fewer than one batch ({self.batch.train_batch_size}); use "
                "more data or a smaller train_batch_size"
            )

    @property
    def _round_size(self) -> int:
        return self.batch.micro_batch_size * self.world_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples per epoch, by which `position` advances."""
        if self.drop_last:
            return self.num_samples // self.batch.train_batch_size * self.batch.train_batch_size
        return self.num_samples

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch."""
        return math.ceil(self.samples_per_epoch / self._round_size)

    def restore(self, position: int, batch: BatchSizes) -> None:
        """Continue from a checkpoint, with these batch sizes."""
        self.position, self.batch = position, batch

    def __iter__(self) -> Iterator[Any]:
        epoch, first = divmod(self.position, self.samples_per_epoch)
        positions: deque[int] = deque()  # after each micro-batch that torch's loader has drawn

        def indices() -> Iterator[list[int]]:
            for stop, samples in self._rounds(epoch, first):
                positions.append(stop)
                yield samples

        loader: DataLoader[Any] = DataLoader(
            self.data,
            batch_sampler=indices(),
            collate_fn=self.collate_fn,
            # Otherwise each `iter` draws from torch's default generator, and dropout differs in a resumed run.
            generator=torch.Generator(),
        )
        for batch in loader:
            # Set before the batch is used, so that a checkpoint after its step counts it.
            self.position = positions.popleft()
            yield batch

    def _rounds(self, epoch: int, first: int) -> Iterator[tuple[int, list[int]]]:
        """Yield, for each round of an epoch from its sample `first` on, the position after it and this rank's samples."""
        epoch_start = epoch * self.samples_per_epoch
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        while first < self.samples_per_epoch:
            stop = min(first + self._round_size, self.samples_per_epoch)
            per_rank = -(-(stop - first) // self.world_size)
            start = first + self.rank * per_rank
            yield epoch_start + stop, [order[i % self.num_samples] for i in range(start, start + per_rank)]
            first = stop


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the micro-batches of a loader, epoch after epoch, until an epoch is empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


def take_batches(data_iter: Iterator[Any], count: int) -> list[Any]:
    """Return the next `count` micro-batches. Raises StopIteration if there are fewer."""
    if not hasattr(data_iter, "__next__"):
        raise UsageError(f"expected an iterator of micro-batches, got {type(data_iter).__name__}: pass iter(...) of it")
    return [next(data_iter) for _ in range(count)]


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model on a micro-batch: a mapping of keyword arguments, a tuple or list of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode, without gradients, within the block; then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output: the output itself, `.loss`, the value of "loss", or the first element."""
    loss = getattr(output, "loss", None) if not isinstance(output, torch.Tensor) else output
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"expected a model that returns a loss of one element, got {what}: return it alone, as .loss, or as the first item"
        )
    return loss


def mean_loss(losses: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """Return the mean of the losses over all ranks, an fp32 scalar (all ranks)."""
    mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
    if world.world_size == 1:
        return mean
    means: list[float] = world.all_gather_object(mean.item())
    return torch.tensor(sum(means) / len(means), device=mean.device)
