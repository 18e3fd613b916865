"""Notes of a fit for the run's journal, and where that is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from zstore.engine.api.engine import Engine
from zstore.journal.names import CHECKPOINT_FOLDER, journal_file

_NAME = "ZstoreRunCallback"


def begin_journal(library: str, trainer: Any, engine: Engine) -> None:
    """Keep the journal with the checkpoints of the Trainer's checkpoint callback."""
    engine.journal.note(loop="lightning", total_steps=_total_steps(trainer))
    checkpoints = trainer.checkpoint_callback
    if getattr(checkpoints, "dirpath", None):
        engine.checkpoints.note_folder(str(checkpoints.dirpath))
    logged = [0]

    def log(self: Any, trainer: Any, *args: Any) -> None:
        """Record what the module logged."""
        if not trainer.sanity_checking:
            engine.log(trainer.logged_metrics)

    def on_train_batch_end(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Record what was logged, as often as loggers are told."""
        if trainer.global_step >= logged[0] + max(1, trainer.log_every_n_steps):
            logged[0] = trainer.global_step
            log(self, trainer)

    hooks = {"on_train_batch_end": on_train_batch_end, "on_train_epoch_end": log, "on_validation_end": log}
    kind = type(_NAME, (import_module(library).Callback,), hooks)
    # Before the callback that saves: those of Lightning come last.
    others = [callback for callback in trainer.callbacks if type(callback).__name__ != _NAME]
    trainer.callbacks = [kind(), *others]


@contextmanager
def journal_taken_along(engine: Engine, checkpoint: Path) -> Iterator[None]:
    """Save a checkpoint in the block; the run's journal is in it after that, not beside it: people list the folder."""
    keep_journal(engine, checkpoint)
    yield
    opened = engine.journal.file.current
    named = CHECKPOINT_FOLDER.fullmatch(checkpoint.name) is not None
    if named and opened is not None and opened.run_folder.resolve() == checkpoint.parent.resolve():
        engine.journal.file.follow(checkpoint)


def keep_journal(engine: Engine, checkpoint: Path) -> None:
    """Have the run's journal beside a checkpoint that is replaced or removed, if it is in it."""
    opened = engine.journal.file.current
    if opened is not None and (checkpoint / journal_file(opened.run_id)).is_file():
        engine.journal.file.follow(checkpoint.parent)


def _total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of the fit; None if its end is open."""
    if trainer.max_steps > 0:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs or -1
    if epochs < 0 or math.isinf(batches):
        return None
    steps: int = math.ceil(batches / trainer.accumulate_grad_batches) * int(epochs)
    return steps
