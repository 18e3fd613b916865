"""`durability: "step"`: a snapshot after every step, so that a killed run resumes at its last finished step.

A snapshot is saved as a checkpoint is: the same pins, the same save in the background, the same commit. State in memory is
written while it is pinned, and state on disk goes on in new files. `SnapshotOrder` has the order of snapshots and steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zstore.checkpoint import Keep, KnownFile, SaveHandle, SaveRequest, SaveSummary, Spare, save_checkpoint, step_tag
from zstore.io import UnsyncedFiles
from zstore.io.closing import settle

from .client_state import ClientValues
from .pending import PendingSave
from .snapshot_folder import BOOT, KEY, boot_id, choose_snapshot, choose_together, place_of, snapshots, sweep
from .snapshot_order import SnapshotOrder

if TYPE_CHECKING:
    from ..training.training import Training
    from .load_plan import LoadOptions
    from .save import Checkpoints

_log = logging.getLogger("zstore")

ClientState = ClientValues | Callable[[], ClientValues]

_MOST_PAUSE_S = 0.005


def present(state: ClientState) -> ClientValues:
    """Return the client's state as it is now."""
    return state() if callable(state) else state


class StepSnapshots:
    """Takes a snapshot after every step, if the config asks for it. See [Note: step snapshots] in `snapshot_order`."""

    def __init__(self, training: Training, checkpoints: Checkpoints) -> None:
        self._training = training
        self._checkpoints = checkpoints
        self._folder = training.config.step_folder
        self.enabled = self._folder is not None
        """Whether the config asks for a snapshot after every step."""
        self._files = UnsyncedFiles(training.state.store.resources.files)
        self._resources = replace(training.state.store.resources, files=self._files)
        self._id = training.world.broadcast_object(uuid.uuid4().hex) if self._folder else ""
        self._count = 0
        """Snapshots begun; with the above it gives each an id that all ranks know."""
        self._folders: list[str] = []
        """The run's folder of checkpoints."""
        self.order = SnapshotOrder(pending=PendingSave(training.world), committed=self._note)
        self._said: set[str] = set()
        self._known: Mapping[str, KnownFile] = {}
        """Files of the last snapshot, which the next one may link. Not a checkpoint: they are not made durable."""
        self._spare: Spare | None = None
        """The folder of the last snapshot but one, on rank 0."""
        self.client_state: ClientState = {}
        if self.enabled:
            training.before_change = self.order.complete
        self._look_after_folder()

    def _look_after_folder(self) -> None:
        """Remove superseded snapshots of earlier runs, and name those that stay if no snapshots are taken."""
        folder = self._training.config.possible_step_folder
        # They may belong to another engine of this process.
        if self._training.world.rank > 0 or folder is None or not self._training.state.store.is_first:
            return
        stay = sweep(folder, self._files)
        if self._folder is None and stay:
            _name(folder, [info.record.step for info in stay])

    # -- one step ---------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Begin the snapshot of the step that ended (all ranks). Raises, on every rank, if one cannot."""
        folder, step = self._folder, self._training.counters.global_steps
        if folder is not None:
            self.order.begin(step, lambda: self._begin(folder, step))

    def _check_first(self, folder: Path) -> None:
        """Check once that the drives hold a second generation of the state."""
        training = self._training
        names = [name for record in training.state.records for name in training.state.arrays_of(record)]
        training.state.store.require_room(names, num_stores=training.world.local_world_size)
        if training.world.rank == 0:
            others = [info.record.step for info in snapshots(folder) if info.record.run != training.run_id]
            if others:
                _name(folder, others)

    def _begin(self, folder: Path, step: int) -> SaveHandle:
        try:
            if not self._count:
                self._check_first(folder)
            return save_checkpoint(self._request(folder, step))
        except Exception as error:
            error.add_note(f"The snapshot of step {step} could not be taken; the state in memory is intact.")
            raise

    def _request(self, folder: Path, step: int) -> SaveRequest:
        training = self._training
        tag = f"{step_tag(step)}-{training.run_id[:8]}"
        self._count += 1
        save_id = hashlib.sha256(f"{self._id} {self._count}".encode()).hexdigest()[:32]
        # Rank 0 stores these whole; the other ranks' copies do not count.
        state = present(self.client_state) if training.world.rank == 0 else {}
        small = self._checkpoints.collect_small(state)
        # The number of a snapshot's files does not matter, but a step waits for it.
        request = self._checkpoints.pinned_request(folder, tag, save_id, small, few_files=False)
        spare, self._spare = self._spare, None
        return replace(
            request,
            resources=self._resources,
            record={**request.record, KEY: {"folders": self._folders}},
            rank_state={**request.rank_state, BOOT: boot_id()},
            keep=Keep(last=1),
            known={**request.known, **self._known},
            spares=True,
            spare=spare,
            overwrite=True,
            most_pause_s=_MOST_PAUSE_S,
        )

    def _note(self, summary: SaveSummary) -> None:
        self._known, self._spare = summary.known, summary.spare
        for message in summary.messages:
            if message not in self._said:
                self._said.add(message)
                _log.warning("%s", message)

    # -- saves, loads and the end -----------------------------------------------------------------------------------

    def note_folder(self, folder: str) -> None:
        """Remember a folder or URL of the run's checkpoints: its snapshots belong to it."""
        place = place_of(str(folder))
        if self._folder is not None and place not in self._folders:
            self._folders = [*self._folders, place]

    def choose(self, folder: str, tag: str | float | None, options: LoadOptions) -> tuple[str, str | float | None]:
        """Return the folder and tag to load in place of these: the run's snapshot if that is newer (all ranks)."""
        mine = self._folder
        if mine is None or tag is not None or not options.everything:
            return folder, tag
        settle(self.order.complete)
        training = self._training
        choose = partial(choose_snapshot, mine, folder, storage_options=training.config.storage_options)
        chosen = choose_together(training.world, choose)
        self.note_folder(folder)
        if chosen is None:
            return folder, tag
        if training.world.rank == 0:
            _log.info(
                "resuming from the step snapshot %s, which is newer than the checkpoints in %s", chosen.name, folder
            )
        return str(chosen.parent), chosen.name

    def finish(self) -> None:
        """Complete the snapshot under way, without asking the other ranks (at the end of a run); if the last step was saved
        as a checkpoint too, nothing is kept."""
        training = self._training
        settle(self.order.complete)
        if self._spare is not None:
            with contextlib.suppress(OSError):
                self._spare.remove(self._files)
            self._spare = None
        if self._folder is None or not self._count or training.world.rank > 0:
            return
        sweep(self._folder, self._files, self._folders)


def _name(folder: Path, steps: list[int]) -> None:
    """Warn of snapshots of other runs, which may be all that is left of them."""
    _log.warning(
        "%s holds step %s of earlier runs, newer than their last checkpoints: load one with load_checkpoint(%r), or remove "
        "the folder",
        folder,
        ", ".join(map(str, steps)),
        str(folder),
    )
