"""The journal of an offloaded optimizer's run: its steps, the tier of its state, warnings. See [Note: the journal] in
`zstore.journal`."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import torch

from zstore.engine.extras.journal.journal import StepJournal
from zstore.engine.optim.state import OptimizerState
from zstore.engine.report.progress import Loss, value_of
from zstore.journal.names import journal_file
from zstore.journal.writer import FileSink
from zstore.ranks.world import World


class OptimizerJournal(StepJournal):
    """Records the steps of an optimizer in `folder`."""

    def __init__(self, state: OptimizerState, kind: str, folder: Path) -> None:
        super().__init__(World.current(), state, enabled=True)
        self._kind = kind
        self._folder = folder
        self._has_begun = False
        self._count = 0
        self._loss: Any = None

    @property
    def _step(self) -> int:
        return self._count

    def note(self, *, loss: Any = None, tokens: int | None = None, total_steps: int | None = None) -> None:
        """Note what the optimizer cannot know: the loss of the step under way, a tensor or a number; the tokens of a step over
        all ranks, until this is called again; the total steps of the run."""
        self._loss = loss
        self._tokens = self._tokens if tokens is None else tokens
        self._total_steps = self._total_steps if total_steps is None else total_steps

    def step_ended(self, *, began_s: float, lr: Any, grad_norm: torch.Tensor | None, skipped: bool) -> None:
        """Record a step that began at `began_s` of `time.perf_counter`."""
        if not self.enabled:
            return
        now_s = time.perf_counter()
        if not self._has_begun:
            self._has_begun = True
            self._open()
        self._count += 1
        loss, self._loss = self._loss, None
        self._add_step(
            now_s,
            loss=_value(loss),
            lr=float(lr),
            grad_norm=_value(grad_norm),
            skipped=skipped,
            optimizer_s=now_s - began_s,
        )

    def _open(self) -> None:
        run = uuid.uuid4().hex
        try:
            sink = FileSink(self._folder / journal_file(run))
        except (OSError, ValueError) as error:
            self._say_failure(f"{type(error).__name__}: {error}")
            return
        first = self._start(run, step=self._step, loop="offloaded", config={"optimizer": self._kind})
        self.writer.open(sink, first)


def _value(number: Any) -> Loss:
    if isinstance(number, torch.Tensor):
        return value_of(number.detach().float().reshape(()))
    return None if number is None else float(number)
