"""Batches: the micro-batches that make up a step, the loader of training data, and losses of what it gives.

[Note: the order of samples]
Which samples each rank sees depends on the seed and the global sample number alone.
Epoch e is one permutation of the data set, drawn from (seed, e). It is dealt in rounds of micro-batch x world size
samples; in a round, rank r has the r-th micro-batch. So a resumed run, at another world size too, goes on where the
saved one stopped. The last round of an epoch may be short: each rank then has the same, smaller number of samples,
and if they do not divide, the first samples of the epoch fill up; with `drop_last` an epoch ends with the last whole
`train_batch_size`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
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
    """How far training is."""

    global_steps: int = 0
    """Optimizer steps, skipped ones too."""
    skipped_steps: int = 0
    """Steps that overflowed in fp16 and changed nothing."""
    micro_steps: int = 0
    """Calls of `step()`, those that ended an accumulation and others."""


@dataclass(kw_only=True)
class Accumulation:
    """Which micro-batches make up a step: as many as the batch sizes say, or those up to the one that the caller names as
    the last."""

    batch: BatchSizes
    """Sizes in use: those of the config, or after a load at another world size, recomputed from the saved global
    batch."""
    world_size: int
    stepped: int = 0
    """Micro-batches that `step()` ended since the last optimizer step."""
    backwards: int = 0
    """Backwards since the last call of `step()`."""
    was_cleared: bool = False
    """Whether `zero_grad()` forgot backwards since the last call of `step()`, which may be called for them."""
    named: bool | None = None
    """Whether the micro-batch under way is the last of its step, as the caller says; None: the engine counts."""

    @property
    def is_new(self) -> bool:
        """Whether no micro-batch of the step has had its backward."""
        return not (self.stepped or self.backwards)

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return self.stepped + 1 >= self.batch.accumulation_steps if self.named is None else self.named

    def end_micro_batch(self, *, boundary: bool) -> None:
        """Note a call of `step()`; a `boundary` ended the accumulation."""
        self.backwards, self.was_cleared = 0, False
        self.stepped = 0 if boundary else self.stepped + 1

    def restart(self) -> None:
        """Forget the micro-batches of the step under way."""
        self.stepped, self.backwards, self.was_cleared = 0, 0, False

    def batch_of(self, train_batch_size: int) -> BatchSizes:
        """Return the batch sizes with that many samples a step, by more or fewer micro-batches.

        Raises UsageError as `of_train_batch_size` does, and in the middle of a step.
        """
        batch = self.batch.of_train_batch_size(train_batch_size, self.world_size)
        if not self.is_new:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) in the middle of a step, whose losses were divided by "
                f"{self.batch.accumulation_steps} micro-batches: call it after the step() that ends an accumulation"
            )
        return batch


class TrainingLoader:
    """Micro-batches of one rank; each `iter` goes to the end of an epoch. `position` counts the samples handed out,
    over all ranks and epochs."""

    def __init__(
        self,
        data: Dataset[Any],
        *,
        batch: BatchSizes,
        rank: int,
        world_size: int,
        seed: int,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
    ) -> None:
        if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise UsageError(
                f"training_data: expected a data set with a length and an index, got {type(data).__name__}; pass any other "
                "iterable straight to the training loop"
            )
        self._data = data
        self._num_samples = len(data)
        self._batch = batch
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self.position = 0
        if self.samples_per_epoch == 0:
            raise UsageError(
                f"training_data has {self._num_samples} samples, fewer than one batch ({batch.train_batch_size}); give more "
                "data or a smaller train_batch_size"
            )

    @property
    def _round_size(self) -> int:
        return self._batch.micro_batch_size * self._world_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples by which one epoch advances `position`."""
        if self._drop_last:
            return self._num_samples // self._batch.train_batch_size * self._batch.train_batch_size
        return self._num_samples

    def __len__(self) -> int:
        """Return the micro-batches of an epoch on each rank."""
        return math.ceil(self.samples_per_epoch / self._round_size)

    def restore(self, position: int, batch: BatchSizes) -> None:
        """Continue from a checkpoint, with batches of these sizes."""
        self.position, self._batch = position, batch

    def __iter__(self) -> Iterator[Any]:
        epoch, first = divmod(self.position, self.samples_per_epoch)
        handed: deque[int] = deque()  # positions after the micro-batches that are on their way

        def indices() -> Iterator[list[int]]:
            for stop, mine in self._rounds(epoch, first):  # recorded: torch's loader may be ahead of what it yields
                handed.append(stop)
                yield mine

        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=indices(),
            collate_fn=self._collate_fn,
            # Otherwise each `iter` draws from torch's own, and a resumed run, which begins one more, has other dropout masks.
            generator=torch.Generator(),
        )
        for batch in loader:
            # Counted before it is used: a checkpoint after the step on this batch holds it.
            self.position = handed.popleft()
            yield batch

    def _rounds(self, epoch: int, first: int) -> Iterator[tuple[int, list[int]]]:
        """Yield, for each round of an epoch from its sample `first` on, the position after it and this rank's samples."""
        start_of_epoch = epoch * self.samples_per_epoch
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
        while first < self.samples_per_epoch:
            stop = min(first + self._round_size, self.samples_per_epoch)
            each = -(-(stop - first) // self._world_size)
            start = first + self._rank * each
            yield start_of_epoch + stop, [order[i % self._num_samples] for i in range(start, start + each)]
            first = stop


# -- micro-batches that the engine draws itself: from an iterator, through the model, to the loss --------------------------


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the micro-batches of a loader, epoch after epoch, until one is empty."""
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
    """Call the model on a micro-batch and return its output: a mapping gives keyword arguments, a tuple or list arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode within the block, without gradients; afterwards each module has its former mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss from a model's output: the output itself, `.loss`, the value under "loss", or the first element."""
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


def mean_loss(losses: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """Return the mean of the losses over all ranks, fp32 without extents (all ranks)."""
    mean = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
    if world.world_size == 1:
        return mean
    found: list[float] = world.all_gather_object(mean.item())
    return torch.tensor(sum(found) / len(found), device=mean.device)
