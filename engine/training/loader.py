"""The loader of training data: which samples each rank sees depends on the seed and the global sample number alone.

[Note: the order of samples]
Epoch e is one permutation of the data set, drawn from (seed, e). It is dealt in rounds of micro-batch x world size
samples; in a round, rank r has the r-th micro-batch. So a resumed run, at another world size too, goes on where the
saved one stopped. The last round of an epoch may be short: each rank then has the same, smaller number of samples,
and if they do not divide, the first samples of the epoch fill up; with `drop_last` an epoch ends with the last whole
`train_batch_size`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from zstore.errors import UsageError

from ..config.resolve import BatchSizes

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Round:
    """One micro-batch of each rank."""

    stop: int
    """The loader's position after it."""
    indices: list[int]
    """Of this rank's samples."""


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
        self._micro_batch_size = batch.micro_batch_size
        self._train_batch_size = batch.train_batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self.position = 0
        if self.samples_per_epoch == 0:
            raise UsageError(
                f"training_data has {self._num_samples} samples, fewer than one batch ({self._train_batch_size}); give more "
                "data or a smaller train_batch_size"
            )

    @property
    def _round_size(self) -> int:
        return self._micro_batch_size * self._world_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples by which one epoch advances `position`."""
        if self._drop_last:
            return self._num_samples // self._train_batch_size * self._train_batch_size
        return self._num_samples

    def __len__(self) -> int:
        """Return the micro-batches of an epoch on each rank."""
        return math.ceil(self.samples_per_epoch / self._round_size)

    def restore(self, position: int, batch: BatchSizes) -> None:
        """Continue from a checkpoint, with batches of these sizes."""
        self.position = position
        self._micro_batch_size, self._train_batch_size = batch.micro_batch_size, batch.train_batch_size

    def __iter__(self) -> Iterator[Any]:
        epoch, first = divmod(self.position, self.samples_per_epoch)
        handed: deque[_Round] = deque()

        def indices() -> Iterator[list[int]]:
            for one in self._rounds(epoch, first):  # recorded: torch's loader may be ahead of what it yields
                handed.append(one)
                yield one.indices

        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=indices(),
            collate_fn=self._collate_fn,
            # Otherwise each `iter` draws from torch's own, and a resumed run, which begins one more, has other dropout masks.
            generator=torch.Generator(),
        )
        for batch in loader:
            # Counted before it is used: a checkpoint after the step on this batch holds it.
            one = handed.popleft()
            self.position = one.stop
            yield batch

    def _rounds(self, epoch: int, first: int) -> Iterator[_Round]:
        """Yield the rounds of an epoch from its sample `first` on."""
        start_of_epoch = epoch * self.samples_per_epoch
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
        while first < self.samples_per_epoch:
            stop = min(first + self._round_size, self.samples_per_epoch)
            each = -(-(stop - first) // self._world_size)
            start = first + self._rank * each
            indices = [order[i % self._num_samples] for i in range(start, start + each)]
            yield _Round(start_of_epoch + stop, indices)
            first = stop
