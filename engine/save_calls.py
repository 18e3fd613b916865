"""What a training script may ask of checkpoints: the engine's calls that save, load, and stop a run for good or a while."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from zstore.checkpoint.handle import SaveHandle
from zstore.errors import CheckpointExistsError

from .batches import BatchCalls
from .calls import StateCalls
from .checkpoint.client_state import ClientValues, check
from .checkpoint.load_plan import LoadOptions, LoadReport
from .checkpoint.renaming import Names
from .checkpoint.save import Checkpoints, SaveOptions
from .checkpoint.snapshots import ClientState, StepSnapshots, present
from .runtime.distributed import phase
from .runtime.signals import STOP_SIGNALS, STOPPED_EXIT_CODE, StopSignals

_log = logging.getLogger("zstore")


class SaveCalls(StateCalls, BatchCalls):
    """The part of the engine that saves and loads."""

    checkpoints: Checkpoints
    steps: StepSnapshots
    signals: StopSignals
    _complete_saves: Callable[[], None]
    _unchecked: list[ClientState]
    """Client state that saves to come will have, and that was not looked at yet."""
    _when_asked: Callable[[], NoReturn] | None = None

    @phase("save")
    def save_checkpoint(  # noqa: PLR0913 - DeepSpeed's signature, and ours behind it
        self,
        save_dir: str,
        tag: str | float | None = None,
        client_state: ClientValues | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: ClientValues | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Save the whole state in `save_dir` under `tag`, by default `step-` and the step (all ranks).

        Committed when this returns; with `wait=False` when the ticket's `wait()` or `wait_for_checkpoint()` does, and
        the state may change meanwhile. `client_state` (or `client_sd`) is a dict of JSON data, tensors, numpy arrays and
        numbers and `argparse.Namespace`; see [Note: what comes back] in `client_state`. `metrics` are numbers by name, by
        which the best checkpoint can be kept. A checkpoint of this run under the same tag is replaced, with one line in the
        log. Without `save_latest` the checkpoint is loaded by its tag alone: `latest` stays, and so does what a load
        without a tag takes. `exclude_frozen_parameters` leaves those out; a load then keeps the model's.

        Raises UsageError in the middle of an accumulation and for client state that cannot be stored,
        CheckpointExistsError for a tag that another run committed unless `overwrite`.
        """
        state = client_state if client_state is not None else client_sd
        options = SaveOptions(
            folder=save_dir,
            tag=tag,
            state={} if state is None else state,
            metrics=metrics or {},
            wait=wait,
            overwrite=overwrite,
            is_latest=save_latest,
            leaves_out_frozen=exclude_frozen_parameters,
        )
        self.steps.note_folder(save_dir)
        return self.checkpoints.save(options)

    def load_checkpoint(
        self, load_dir: str, tag: str | float | None = None, *, names: Names | None = None, **options: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint, by default the newest, and return its path and client state (all ranks).

        `options` are DeepSpeed's, all true or false: `load_module_only`, `load_optimizer_states`,
        `load_lr_scheduler_states`, `load_module_strict`; see `LoadOptions`. What is not loaded stays as it is, and
        `load_report` names it. `names` says what the checkpoint's parameters and buffers are called in the model: a dict
        of those whose names differ, or a function of the name; None as a name leaves one out.
        (None, {}) and a warning where no tag was given and nothing is there. Raises CheckpointNotFoundError for a tag
        that is not there, CheckpointMismatchError for another model or a batch size that cannot be.
        """
        chosen = LoadOptions.of(options, names)
        self.forget_batches()
        self.access.require_no_block("engine.load_checkpoint()")
        with self.world.calling("load"):
            return self.checkpoints.load(*self.steps.choose(load_dir, tag, chosen), chosen)

    @property
    def load_report(self) -> LoadReport | None:
        """What the last load read and linked on this rank, and what was missing or not used; None before the first."""
        return self.checkpoints.report

    @phase("save")
    def wait_for_checkpoint(self) -> None:
        """Return once a save with `wait=False` is committed, and the snapshot of the last step with `"durability": "step"`;
        raise what went wrong, on every rank (all ranks)."""
        self._complete_saves()

    @property
    def step_client_state(self) -> ClientState:
        """What the snapshots of steps have as client state: a dict as it is at the end of `step()`, or a function that is
        called there (rank 0's counts); empty at first. `load_checkpoint` returns it. The first `step()` after it was set
        raises UsageError for what cannot be stored."""
        return self.steps.client_state

    @step_client_state.setter
    def step_client_state(self, state: ClientState) -> None:
        self.steps.client_state = state
        self._unchecked.append(state)

    @property
    def durable_step(self) -> int | None:
        """The last step that a kill does not take back, by the snapshots of this engine; None where there is none yet."""
        return self.steps.committed_step

    # -- stopping ---------------------------------------------------------------------------------------------------

    def save_on_signal(
        self,
        save_dir: str,
        tag: str | float | None = None,
        client_state: ClientState | None = None,
        *,
        signals: Iterable[int] = STOP_SIGNALS,
    ) -> None:
        """When one of `signals` comes on any rank, let the next `step()` save and end the process, with code 75 (all
        ranks).

        By default SIGTERM and SIGUSR1; a second one ends the process at once. A function as `client_state` is called
        within that `step()`, and once in the next one, which raises UsageError for what cannot be stored. Raises UsageError
        outside the main thread.
        """
        self.watch_signals(signals)
        if client_state is not None:
            self._unchecked.append(client_state)
        self._when_asked = lambda: self.save_and_stop(save_dir, tag, client_state)

    def watch_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        """Note these signals in `stop_requested` in place of ending the process; a second one ends it at once (all
        ranks). Raises UsageError outside the main thread."""
        self.signals.watch(signals)

    @property
    def stop_requested(self) -> signal.Signals | None:
        """The signal that some rank got, None where none did: the same on every rank after each `step()`, one that was skipped
        too, so that all may leave the loop together, with `save_and_stop`."""
        return self.signals.requested

    def save_and_stop(
        self, save_dir: str | None, tag: str | float | None = None, client_state: ClientState | None = None
    ) -> NoReturn:
        """Save, and raise SystemExit with code 75 (all ranks).

        What went wrong with an earlier save that is still under way is a warning: it must not cost this one. A tag that another
        run committed is not replaced: this run's id is put behind it. With None as `save_dir` only a save under way is
        completed. Ranks that all leave so are no failure of the run.
        """
        with self.world.calling("save"):
            if save_dir is not None:
                state = None if client_state is None else present(client_state)
                self.checkpoints.settle()
                try:
                    self.save_checkpoint(save_dir, tag, state)
                except CheckpointExistsError as error:
                    other = self.checkpoints.tag_beside(tag)
                    if self.world.rank == 0:
                        _log.warning("%s; this one is saved as %r", error, other)
                    self.save_checkpoint(save_dir, other, state)
                self.steps.settle()
            self.wait_for_checkpoint()
            self.world.leave_together()
            raise SystemExit(STOPPED_EXIT_CODE)

    def check_client_state(self) -> None:
        """Raise UsageError, at the end of a step, for client state that was announced since and cannot be stored: before
        hours of training, and not at a save that must not fail (the engine's own call)."""
        while self._unchecked:
            check(present(self._unchecked.pop()))

    def stop_if_asked(self) -> None:
        """Do what `save_on_signal` asked for, where a signal came (the engine's own call, at the end of a step)."""
        if self._when_asked is not None and self.stop_requested is not None:
            self._when_asked()
