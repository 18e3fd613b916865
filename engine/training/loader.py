"""The loader of training data: which samples each rank sees depends on the seed and the global sample number alone.

[Note: the order of samples]
Epoch e is one permutation of the data set, drawn from (seed, e). It is dealt in rounds of micro-batch x world size
samples; in a round, rank r has the r-th micro-batch. So a resumed run, at another world size too, goes on where the
saved one stopped. The last round of an epoch may be short: each rank then has the same, smaller number of samples,
and if they do not divide, the first samples of the epoch fill up; with `drop_last` an epoch ends with the last whole
`train_batch_size`. With a curriculum of `data_efficiency`, a `Sampler` draws a whole `train_batch_size` at a time,
dealt in the same rounds; an epoch is then as many batches as the data set has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from zstore.errors import CheckpointMismatchError, UsageError

from ..config.extra import IN_ORDER, Sampling
from ..config.resolve import BatchSizes

Collate = Callable[[list[Any]], Any]
PostProcess = Callable[[Any, dict[str, Any]], Any]
"""Returns a micro-batch from one as it was collated, and the state of the sampling."""


@dataclass(frozen=True)
class _Round:
    """One micro-batch of each rank."""

    stop: int
    """The loader's position after it."""
    indices: list[int]
    """Of this rank's samples."""
    drawn: dict[str, Any] | None = None
    """State of the curriculum after it."""


class TrainingLoader:
    """Micro-batches of one rank; each `iter` goes to the end of an epoch. `position` counts the samples handed out,
    over all ranks and epochs."""

    def __init__(  # noqa: PLR0913 - each by its name
        self,
        data: Dataset[Any],
        *,
        batch: BatchSizes,
        rank: int,
        world_size: int,
        seed: int,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        sampling: Sampling = IN_ORDER,
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
        self._sampling = sampling
        self.curriculum = sampling.sampler
        """Draws samples by their difficulty; None: in the order of a permutation."""
        self.post_process: PostProcess | None = None
        self.position = 0
        self.drawn = None if self.curriculum is None else _after(self.curriculum.state, 0)
        """State of the curriculum after the last micro-batch that was handed out, for a checkpoint, beside `position`; it may
        have drawn more since. None without one."""
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
        if self._drop_last or self.curriculum is not None:
            return self._num_samples // self._train_batch_size * self._train_batch_size
        return self._num_samples

    def __len__(self) -> int:
        """Return the micro-batches of an epoch on each rank."""
        return math.ceil(self.samples_per_epoch / self._round_size)

    @property
    def difficulties(self) -> dict[str, int]:
        """The difficulty of each metric at the batch of the next micro-batch; empty without a curriculum."""
        if self.curriculum is None or self.drawn is None:
            return {}
        step = int(self.drawn["step"]) + 1
        return {name: difficulty.at(step) for name, difficulty in self.curriculum.difficulties().items()}

    def require_same(self, state: Mapping[str, Any] | None) -> None:
        """Raise CheckpointMismatchError if `state` was saved with a curriculum and this run has none, or the other way
        round."""
        if (state is None) != (self.curriculum is None):
            has, lacks = ("run", "checkpoint") if state is None else ("checkpoint", "run")
            raise CheckpointMismatchError(
                f"the {has} draws its samples by a curriculum of data_efficiency and the {lacks} does not, so the order of its "
                "data cannot go on: write the same section, or pass load_module_only=True to begin with the data anew"
            )

    def restore(self, position: int, state: Mapping[str, Any] | None, batch: BatchSizes) -> None:
        """Continue from a checkpoint, with batches of these sizes. `require_same` was called."""
        self.position = position
        self._micro_batch_size, self._train_batch_size = batch.micro_batch_size, batch.train_batch_size
        if self.curriculum is not None and state is not None:
            self.curriculum.restore(state)  # which says what is wrong with it
            self.drawn = _after(state, int(state.get("offset", 0)))

    def __iter__(self) -> Iterator[Any]:
        epoch, first = divmod(self.position, self.samples_per_epoch)
        if self._sampling.num_epochs is not None and epoch >= self._sampling.num_epochs:
            return
        handed: deque[_Round] = deque()
        rounds = self._rounds(epoch, first) if self.drawn is None else self._drawn_rounds(self.drawn, epoch)
        # Otherwise each `iter` draws from torch's own, and a resumed run, which begins one more, has other dropout masks.
        generator = torch.Generator()
        if self._sampling.num_workers:
            generator.manual_seed(self._seed + self.position)

        def indices() -> Iterator[list[int]]:
            for one in rounds:  # recorded: torch's loader may be ahead of what it yields
                handed.append(one)
                yield one.indices

        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=indices(),
            collate_fn=self._collate_fn,
            generator=generator,
            num_workers=self._sampling.num_workers,
            pin_memory=self._sampling.pin_memory,
        )
        for batch in loader:
            # Counted before it is used: a checkpoint after the step on this batch holds it.
            one = handed.popleft()
            told = None if self.post_process is None else self._told()
            self.position, self.drawn = one.stop, one.drawn
            yield batch if self.post_process is None or told is None else self.post_process(batch, told)

    def _told(self) -> dict[str, Any]:
        """Return the arguments about the next micro-batch for a function that changes micro-batches."""
        step = 0 if self.drawn is None else int(self.drawn["step"]) + 1
        return {
            "consumed_samples": self.position,
            "curriculum_step": step,
            "current_difficulties": self.difficulties,
        }

    def _drawn_rounds(self, state: Mapping[str, Any], epoch: int) -> Iterator[_Round]:
        """Yield the rounds of an epoch from the curriculum's `state` on."""
        curriculum = self.curriculum
        if curriculum is None:
            return
        offset, position, end = int(state["offset"]), self.position, (epoch + 1) * self.samples_per_epoch
        if _after(curriculum.state, 0) != {**state, "offset": 0}:
            curriculum.restore(state)  # others were drawn ahead, by an abandoned iterator
        while position < end:
            before = curriculum.state
            batch = curriculum.draw(self._train_batch_size)
            for first in range(offset, len(batch), self._round_size):
                mine = first + self._rank * self._micro_batch_size
                stop = min(first + self._round_size, len(batch))
                position += stop - first
                drawn = _after(curriculum.state, 0) if stop == len(batch) else _after(before, stop)
                yield _Round(position, batch[mine : mine + self._micro_batch_size], drawn)
            offset = 0

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


def _after(state: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """Return the state of a curriculum with `offset` samples of its current batch handed out."""
    return {**state, "offset": offset}
