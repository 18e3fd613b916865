"""How far training is: its steps, and the micro-batches of the step under way."""

from __future__ import annotations

from dataclasses import dataclass

from zstore.errors import UsageError

from ..config.resolve import BatchSizes


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
