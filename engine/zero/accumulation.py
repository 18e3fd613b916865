"""Which micro-batches make up a step: so many as the config says, or those up to the one that the caller names as last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Accumulation:
    """The step under way, in micro-batches."""

    stepped: int = 0
    """Micro-batches that `step()` ended since the last optimizer step."""
    backwards: int = 0
    """Backwards since the last call of `step()`."""
    named: bool | None = None
    """Whether the micro-batch under way is the last, as the caller says; None: the engine counts."""

    @property
    def is_new(self) -> bool:
        """Whether no micro-batch of the step has had its backward."""
        return not (self.stepped or self.backwards)

    def is_boundary(self, steps: int) -> bool:
        """Return whether the micro-batch under way is the last of its step, which by the config has so many."""
        return self.stepped + 1 >= steps if self.named is None else self.named

    def end_micro_batch(self, *, boundary: bool) -> None:
        """Note a call of `step()`; a `boundary` ended the accumulation."""
        self.backwards = 0
        self.stepped = 0 if boundary else self.stepped + 1

    def restart(self) -> None:
        """Forget the micro-batches of the step under way."""
        self.stepped = self.backwards = 0
