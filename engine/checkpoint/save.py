"""Saves the whole state of a run: collects, pins and hands it over; and loads it again.

[Note: saving]
Every rank pins the store's arrays, copies buffers and the client's tensors, and builds the record. Errors until then are raised
on every rank, before anything is written. The save itself runs in zstore.checkpoint's background thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zstore.checkpoint import (
    ABSENT_KEY,
    LATEST_KEY,
    KnownFile,
    SaveHandle,
    SaveRequest,
    SaveSummary,
    new_save_id,
    save_checkpoint,
    step_tag,
    tag_text,
)
from zstore.errors import UsageError
from zstore.format import ArraySpec
from zstore.io import is_url
from zstore.io.closing import interrupts_wait, settle, start_threads
from zstore.io.memory import as_numpy, dtype_name, host_values
from zstore.ranks.board import Board
from zstore.remote.service import UploadPlace
from zstore.remote.upload import save_to_url
from zstore.store import PinnedShard, Snapshot

from ..build.model import companion_files, stored_whole
from ..optim.rules import STATE_KEY
from ..params.record import ParameterRecord
from ..report.progress import RunJournal
from .load import Restore
from .record import (
    ClientValues,
    LoadOptions,
    LoadReport,
    as_mapping,
    as_numbers,
    engine_record,
    rng_state,
    split_tensors,
)

if TYPE_CHECKING:
    from ..training.training import Training


_log = logging.getLogger("zstore")

_FOLDER = "zstore-uploads"
_GRACE_PERIOD_S = 5.0
"""Time for a save to end after a rank failed: it succeeds if all ranks had done their part."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The arguments of `save_checkpoint`."""

    folder: str
    tag: str | float | None = None
    """None: `step-` and the step."""
    state: ClientValues
    """The client's state."""
    metrics: Mapping[str, Any]
    """Numbers by name, for retention rules."""
    wait: bool = True
    overwrite: bool = False
    is_latest: bool = True
    """Whether a load without a tag may take it as the newest."""
    leaves_out_frozen: bool = False
    keeps: frozenset[str] = frozenset()
    """Names of frozen parameters that are saved nevertheless."""


class Checkpoints:
    """Saves and loads a run's state. See [Note: saving], and [Note: loading] in `load`."""

    def __init__(self, training: Training, journal: RunJournal) -> None:
        self._training = training
        self._journal = journal
        self._running: list[SaveHandle] = []
        """The running save, at most one: begun by all ranks or by none, and given up if a rank fails."""
        training.world.watch.when_broken.append(
            partial(_give_up_later, self._running)
        )  # without a reference to training
        self._known: dict[str, KnownFile] = {}
        """Files of the last checkpoint, saved or loaded, which the next one may link."""
        self.folder: str | None = None
        """The run's folder of checkpoints, the same on every rank; None: not known yet."""
        self.stall_s = 0.0
        """Total delay of training by saves."""
        self.report: LoadReport | None = None
        """The result of the last load; None before the first."""

    def save(self, options: SaveOptions) -> SaveHandle:
        """Begin a save, and with `wait` complete it (all ranks)."""
        started = time.perf_counter()
        self.wait()
        stepper = self._training.update.stepper
        kept = {STATE_KEY: stepper.state()} if stepper is not None and stepper.keeps_state else {}
        world = self._training.world
        with world.agreeing():
            folder, upload = self._destination(options.folder)
            self._training.update.require_consistent()
            mine = self._tag(options.tag)
            require_last_step(self._training)
            small = self.collect_small(options.state, kept, options.metrics)
            small.state.update({} if options.is_latest else {LATEST_KEY: False})
            if options.leaves_out_frozen:
                small.state[ABSENT_KEY] = [one.name for one in self._left_out(options)]
        location = str(options.folder) if is_url(str(options.folder)) else os.path.realpath(options.folder)
        chosen, save_id, theirs = world.broadcast_object([mine, new_save_id(), location])
        with world.agreeing():
            if location != theirs:
                raise UsageError(
                    f"save_checkpoint: rank {world.rank} saves in {location}, rank 0 in {theirs}: pass one shared folder"
                )
        if mine != chosen:
            _log.warning("rank %d: tag %r differs from rank 0's %r, which is used", world.rank, mine, chosen)
        report = self._journal.save_begins(chosen, folder, upload)

        def begin() -> SaveHandle:
            # Before anything is pinned.
            board = Board.connect(f"board/{save_id}") if upload is not None and world.world_size > 1 else None
            request = self.pinned_request(options, folder, chosen, save_id, small, report)
            return save_checkpoint(request) if upload is None else save_to_url(request, upload, board)

        try:
            handle = self._begin(begin)
        except BaseException as error:
            report(error)
            raise
        report(handle)
        self.folder = self.folder or str(options.folder)
        if options.wait:
            self.wait()
        handle.stall_s = time.perf_counter() - started
        self.stall_s += handle.stall_s
        return handle

    def note_folder(self, folder: str) -> None:
        """Set the folder of later checkpoints. Raises UsageError for a URL that no file system opens."""
        self.folder = self.folder or folder
        self._journal.saves_in(*self._destination(folder))

    def _destination(self, location: str) -> tuple[Path, UploadPlace | None]:
        """Return the folder of a save; of one to a URL, the local folder of its files until they are uploaded, and the place of
        the upload. Raises as `UploadPlace`."""
        if not is_url(location):
            return Path(location), None
        config, drives = self._training.config, self._training.state.store.options.all_paths
        remote = UploadPlace(location, config.zstore.storage_options or {})
        # A folder for each URL, so that tags of different runs do not collide.
        name = hashlib.sha256(remote.location.encode()).hexdigest()[:16]
        if config.zstore.upload_folder is not None:
            return config.zstore.upload_folder / name, remote
        parent = drives[0] if drives else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return parent / _FOLDER / name, remote

    def _tag(self, tag: str | float | None) -> str:
        return tag_text(step_tag(self._training.counters.global_steps) if tag is None else tag)

    def unique_tag(self, tag: str | float | None) -> str:
        """Return a unique tag, for a save whose tag another run used."""
        return f"{self._tag(tag)}-{self._training.run_id[:8]}"

    def collect_small(self, state: ClientValues, kept: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> Small:
        """Return the record and copies of the tensors that rank 0 stores whole: module buffers, parameters that were added
        later, and the tensors of the client and of `kept`."""
        marked, tensors = split_tensors({**as_mapping(state), **kept})
        known = (record.parameter for record in self._training.state.records)
        tensors |= {
            name: host_values(tensor.detach().to("cpu", copy=True))
            for name, tensor in stored_whole(self._training.model, known)
        }
        stored = {} if self._training.world.rank else tensors
        specs = {
            name: ArraySpec(name=name, shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in stored.items()
        }
        record = {
            "client_state": marked,
            "engine": engine_record(self._training),
            "metrics": as_numbers({} if metrics is None else metrics),
        }
        return Small(record, specs, {name: as_numpy(tensor) for name, tensor in stored.items()})

    def _begin(self, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Begin a save on every rank, or raise the error of any rank on all (all ranks)."""
        error: Exception | None = None
        handle: SaveHandle | None = None
        try:
            # Ctrl-C in between would leave pins that no save releases, or a save without an owner.
            with interrupts_wait():
                handle = start()
                self._running.append(handle)
        except Exception as raised:
            error = raised
        try:
            self._training.world.raise_together(error)
        except BaseException:
            self._running.clear()
            if handle is not None:
                handle.cancel()
                handle.wait_for_end(_GRACE_PERIOD_S)  # until then the next save takes its folder for a running save's
            raise
        if handle is None:
            raise RuntimeError("the save did not begin")
        return handle

    def _left_out(self, options: SaveOptions) -> list[ParameterRecord]:
        """Return the parameters that a save omits."""
        frozen = [one for one in self._training.state.records if one.group is None and options.leaves_out_frozen]
        return [one for one in frozen if options.keeps.isdisjoint((one.name, *one.aliases))]

    def pinned_request(
        self,
        options: SaveOptions,
        folder: Path,
        tag: str,
        save_id: str,
        small: Small,
        report: Callable[[SaveSummary | BaseException], None],
    ) -> SaveRequest:
        """Pin the current state, and return the request to save it. Rank 0 stores small arrays whole."""
        training = self._training
        state, store = training.state, training.state.store
        left_out = set(self._left_out(options))
        records = [one for one in state.records if one not in left_out]
        arrays = [(one, name) for one in records for name in state.array_names[one]]
        of_ranks = {name: state.grid_of_ranks(one, name) for one, name in arrays}
        grids = {name: state.grid_in_files(one, name) for one, name in arrays}
        pieces = {name: grid for name, grid in of_ranks.items() if grids[name] != grid}
        reserve_bytes, before_commit = self._reserved(options, folder), companion_files(training.model, training.config)
        pins: dict[str, PinnedShard] = {}
        try:
            state.transfers.synchronize()  # the save's threads read memory of the device
            for one in records:
                pins |= training.update.tickets.pin(one, state.array_names[one])
            return SaveRequest(
                resources=store.resources,
                folder=folder,
                tag=tag,
                step=training.counters.global_steps,
                rank=training.world.rank,
                world_size=training.world.world_size,
                save_id=save_id,
                specs={name: store.spec(name) for name in grids} | small.specs,
                grids=grids,
                pins=pins,
                pieces=pieces,
                small=small.arrays,
                rank_state=rng_state(),
                record=small.state,
                run_id=training.run_id,
                known=self._known,
                disk_folder=store.options.run_path,
                disk_folders=store.disk_folders(),
                keep=training.config.zstore.keep,
                overwrite=options.overwrite,
                before_commit=before_commit,
                reserve_bytes=reserve_bytes,
                on_end=report,
            )
        except BaseException:
            Snapshot(pins).release()
            raise

    def _reserved(self, options: SaveOptions, folder: Path) -> int:
        """Return the bytes that the next step needs for new files while the save keeps the current ones."""
        training, store = self._training, self._training.state.store
        # A save that waits and copies to another drive keeps no files when training continues.
        drives = store.options.all_paths
        if options.wait and drives:
            # The folder may not exist yet.
            existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            if all(path.stat().st_dev != existing.stat().st_dev for path in drives):
                return 0
        changing = [name for one in training.state.scalars for name in training.state.array_names[one]]
        return store.require_room(changing, num_stores=training.world.local_world_size)

    def wait(self) -> None:
        """Complete the running save, if any (all ranks)."""
        if not self._running:
            return
        error: Exception | None = None
        try:
            self._complete()
        except Exception as raised:
            error = raised
        self._training.world.raise_together(error)

    def finish(self) -> None:
        """Complete the running save, if any, without the other ranks (at the end of a run)."""
        if not self._running:
            return
        try:
            self._complete()
        except Exception:
            self._training.world.watch.raise_if_rank_lost()  # else the error of an abandoned save hides the lost rank
            raise

    def _complete(self) -> None:
        """Wait for the running save, and take its result or raise its error.

        The wait may be interrupted: the save continues, and the next call waits again.
        """
        if (handle := next(iter(self._running), None)) is None:
            return
        handle.wait_for_end()
        self._running.clear()
        summary = handle.wait()
        # Earlier files of arrays that the save left out stay known.
        self._known = {**self._known, **summary.known}
        for message in summary.messages:
            _log.warning("%s", message)

    def load(self, folder: str, tag: str | float | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint by `options`; return its path and the client's state (all ranks)."""
        if self._training.config.frozen:
            options = replace(options, load_module_only=True)
        # If the update failed on any rank, the state is torn on all.
        settle(self._training.update.wait, "the running update failed: ")
        # The load repairs a torn state even if a save, which waited for its update, failed too.
        if self._training.update.torn:
            settle(self.wait, "the running save failed: ")
        else:
            self.wait()
        started = time.perf_counter()
        restore = Restore(self._training)
        path, state = restore.load(folder, tag, options)
        if path is not None and restore.report is not None:
            self.report, self._known = restore.report, restore.known
            if restore.resumes and self.folder is None:
                self.folder = path.rpartition("/")[0]
            elapsed_s = time.perf_counter() - started
            read_bytes, resumes = restore.report.read_bytes, restore.resumes
            self._journal.loaded(path, restore.tag, elapsed_s, read_bytes, resumes=resumes)
        kept = state.pop(STATE_KEY, None)
        stepper = self._training.update.stepper
        if stepper is not None and path is not None and options.optimizer:
            stepper.load(kept or {})
        return path, state


@dataclass(frozen=True)
class Small:
    """The record of a save, and the arrays that rank 0 stores whole (empty on other ranks)."""

    state: dict[str, Any]
    specs: dict[str, ArraySpec]
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]


def _give_up_later(running: list[SaveHandle]) -> None:
    for handle in running[:]:
        if not start_threads(1, partial(_give_up, handle), "zstore-give-up"):
            handle.cancel()  # the interpreter is ending: no thread can wait


def _give_up(handle: SaveHandle) -> None:
    if not handle.wait_for_end(_GRACE_PERIOD_S):
        handle.cancel()


def require_last_step(training: Training) -> None:
    """Raise UsageError if the state of the last complete step cannot be saved."""
    if training.update.is_in_backward:
        raise UsageError(
            'save_checkpoint between backward and step(): with "step_overlap": "backward" the state is being '
            'changed then; call step() first, or set "step_overlap" to "forward" or "none"'
        )
    if training.loader is not None and not training.accumulation.is_new:
        raise UsageError(
            "save_checkpoint within a step: the loader of initialize() is past its micro-batches, which a resume would "
            "miss; save between two steps"
        )
