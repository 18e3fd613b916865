"""Saves the whole state of a run, and loads it again.

[Note: saving]
Every rank pins the store's arrays, copies buffers and the client's tensors, and builds the record. Errors up to this point are
raised on every rank, before anything is written. The save itself runs in zstore.checkpoint's background thread.
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
from zstore.io.closing import complete_or_warn, deferred_interrupts, start_threads
from zstore.io.memory import as_numpy, dtype_name, host_values
from zstore.ranks.board import Board
from zstore.remote.service import UploadPlace
from zstore.remote.upload import save_to_url
from zstore.store import PinnedShard, Snapshot

from ..build.model import companion_files, unsharded_tensors
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
"""Time allowed for a save to finish after a rank failed: it succeeds if all ranks have completed their parts."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The arguments of `save_checkpoint`."""

    folder: str
    tag: str | float | None = None
    """None: `step-<step>`."""
    state: ClientValues
    """The client's state."""
    metrics: Mapping[str, Any]
    """Numbers by name, for retention rules."""
    wait: bool = True
    overwrite: bool = False
    is_latest: bool = True
    """Whether a load without a tag may choose it as the newest."""
    excludes_frozen: bool = False
    kept_frozen: frozenset[str] = frozenset()
    """Names of frozen parameters that are saved nevertheless."""


class Checkpoints:
    """Saves and loads a run's state. See [Note: saving], and [Note: loading] in `load`."""

    def __init__(self, training: Training, journal: RunJournal) -> None:
        self._training = training
        self._journal = journal
        self._running: list[SaveHandle] = []
        """The running save, at most one: started by all ranks or by none, and given up if a rank fails."""
        training.world.watch.on_broken.append(partial(_give_up_later, self._running))  # without a reference to training
        self._known: dict[str, KnownFile] = {}
        """Files of the last checkpoint, saved or loaded, which the next save may link."""
        self.folder: str | None = None
        """The run's folder of checkpoints, the same on every rank; None if it is not known yet."""
        self.stall_s = 0.0
        """Total time by which saves delayed training."""
        self.report: LoadReport | None = None
        """The result of the last load; None before the first."""

    def save(self, options: SaveOptions) -> SaveHandle:
        """Start a save, and complete it if the options say `wait` (all ranks)."""
        started = time.perf_counter()
        self.wait()
        stepper = self._training.update.stepper
        stepper_state = {STATE_KEY: stepper.state()} if stepper is not None and stepper.keeps_state else {}
        world = self._training.world
        with world.agreeing():
            folder, upload = self._destination(options.folder)
            self._training.update.require_consistent()
            own_tag = self._tag(options.tag)
            require_saveable(self._training)
            unsharded = self.collect_unsharded(options.state, stepper_state, options.metrics)
            unsharded.record.update({} if options.is_latest else {LATEST_KEY: False})
            if options.excludes_frozen:
                unsharded.record[ABSENT_KEY] = [record.name for record in self._excluded(options)]
        location = str(options.folder) if is_url(str(options.folder)) else os.path.realpath(options.folder)
        agreed_tag, save_id, rank0_location = world.broadcast_object([own_tag, new_save_id(), location])
        with world.agreeing():
            if location != rank0_location:
                raise UsageError(
                    f"save_checkpoint: rank {world.rank} saves to {location}, rank 0 to {rank0_location}: pass a shared folder"
                )
        if own_tag != agreed_tag:
            _log.warning("rank %d: tag %r differs from rank 0's %r, which is used", world.rank, own_tag, agreed_tag)
        report = self._journal.begin_save(agreed_tag, folder, upload)

        def begin() -> SaveHandle:
            # Before anything is pinned.
            board = Board.connect(f"board/{save_id}") if upload is not None and world.world_size > 1 else None
            request = self.pinned_request(options, folder, agreed_tag, save_id, unsharded, report)
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
        """Set the folder of later checkpoints. Raises UsageError for a URL that no registered file system supports."""
        self.folder = self.folder or folder
        self._journal.set_save_folder(*self._destination(folder))

    def _destination(self, location: str) -> tuple[Path, UploadPlace | None]:
        """Return the folder of a save; for a URL, the local folder of its files until they are uploaded, and the destination
        of the upload. Raises the errors of `UploadPlace`."""
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
        """Return a unique tag, for a save whose tag another run has already used."""
        return f"{self._tag(tag)}-{self._training.run_id[:8]}"

    def collect_unsharded(self, state: ClientValues, own: Mapping[str, Any], metrics: Mapping[str, Any]) -> Unsharded:
        """Return the record and copies of the tensors that rank 0 stores whole: buffers, parameters that were added later,
        and the tensors of the client and of `own`, the engine's state."""
        marked, tensors = split_tensors({**as_mapping(state), **own})
        known = (record.parameter for record in self._training.state.records)
        tensors |= {
            name: host_values(tensor.detach().to("cpu", copy=True))
            for name, tensor in unsharded_tensors(self._training.model, known)
        }
        stored = {} if self._training.world.rank else tensors
        specs = {
            name: ArraySpec(name=name, shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in stored.items()
        }
        record = {
            "client_state": marked,
            "engine": engine_record(self._training),
            "metrics": as_numbers(metrics),
        }
        return Unsharded(record, specs, {name: as_numpy(tensor) for name, tensor in stored.items()})

    def _begin(self, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Start a save on every rank, or raise the error of any rank on all (all ranks)."""
        error: Exception | None = None
        handle: SaveHandle | None = None
        try:
            # Ctrl-C here would leave pins that no save releases, or a save without an owner.
            with deferred_interrupts():
                handle = start()
                self._running.append(handle)
        except Exception as raised:
            error = raised
        try:
            self._training.world.raise_on_all_ranks(error)
        except BaseException:
            self._running.clear()
            if handle is not None:
                handle.cancel()
                handle.wait_for_end(_GRACE_PERIOD_S)  # otherwise the next save finds a running one in its folder
            raise
        if handle is None:
            raise RuntimeError("the save did not begin")
        return handle

    def _excluded(self, options: SaveOptions) -> list[ParameterRecord]:
        """Return the parameters that a save omits."""
        frozen = [record for record in self._training.state.records if record.group is None and options.excludes_frozen]
        return [record for record in frozen if options.kept_frozen.isdisjoint((record.name, *record.aliases))]

    def pinned_request(
        self,
        options: SaveOptions,
        folder: Path,
        tag: str,
        save_id: str,
        unsharded: Unsharded,
        report: Callable[[SaveSummary | BaseException], None],
    ) -> SaveRequest:
        """Pin the current state, and return the request to save it. Rank 0 stores small arrays whole."""
        training = self._training
        state, store = training.state, training.state.store
        excluded = set(self._excluded(options))
        records = [record for record in state.records if record not in excluded]
        arrays = [(record, name) for record in records for name in state.array_names[record]]
        rank_grids = {name: state.grid_of_ranks(record, name) for record, name in arrays}
        grids = {name: state.grid_in_files(record, name) for record, name in arrays}
        pieces = {name: grid for name, grid in rank_grids.items() if grids[name] != grid}
        reserve_bytes = self._reserve_bytes(options, folder)
        before_commit = companion_files(training.model, training.config)
        pins: dict[str, PinnedShard] = {}
        try:
            state.transfers.synchronize()  # the save's threads read device memory
            for record in records:
                pins |= training.update.tickets.pin(record, state.array_names[record])
            return SaveRequest(
                resources=store.resources,
                folder=folder,
                tag=tag,
                step=training.counters.global_steps,
                rank=training.world.rank,
                world_size=training.world.world_size,
                save_id=save_id,
                specs={name: store.spec(name) for name in grids} | unsharded.specs,
                grids=grids,
                pins=pins,
                pieces=pieces,
                small=unsharded.arrays,
                rank_state=rng_state(),
                record=unsharded.record,
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

    def _reserve_bytes(self, options: SaveOptions, folder: Path) -> int:
        """Return the bytes that the next step needs for new files while the save keeps the current ones."""
        training, store = self._training, self._training.state.store
        # A save that waits and copies to a different drive keeps no files once training continues.
        drives = store.options.all_paths
        if options.wait and drives:
            # The folder may not exist yet.
            existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            if all(path.stat().st_dev != existing.stat().st_dev for path in drives):
                return 0
        changing = [name for record in training.state.scalars for name in training.state.array_names[record]]
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
        self._training.world.raise_on_all_ranks(error)

    def finish(self) -> None:
        """Complete the running save, if any, independently of the other ranks (at the end of a run)."""
        if not self._running:
            return
        try:
            self._complete()
        except Exception:
            self._training.world.watch.raise_if_rank_lost()  # otherwise the error of an abandoned save hides the lost rank
            raise

    def _complete(self) -> None:
        """Wait for the running save, and record its result or raise its error.

        The wait may be interrupted: the save continues, and the next call waits again.
        """
        if (handle := next(iter(self._running), None)) is None:
            return
        handle.wait_for_end()
        self._running.clear()
        summary = handle.wait()
        # Earlier files of arrays that the save omitted stay known.
        self._known = {**self._known, **summary.known}
        for message in summary.messages:
            _log.warning("%s", message)

    def load(self, folder: str, tag: str | float | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint as `options` say; return its path and the client's state (all ranks)."""
        if self._training.config.frozen:
            options = replace(options, load_module_only=True)
        # If the update failed on any rank, the state is torn on all.
        complete_or_warn(self._training.update.wait, "the running update failed: ")
        # The load repairs a torn state even if a save that waited for the failed update failed too.
        if self._training.update.torn:
            complete_or_warn(self.wait, "the running save failed: ")
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
            self._journal.record_load(path, restore.tag, elapsed_s, read_bytes, resumes=resumes)
        stepper_state = state.pop(STATE_KEY, None)
        stepper = self._training.update.stepper
        if stepper is not None and path is not None and options.optimizer:
            stepper.load(stepper_state or {})
        return path, state


@dataclass(frozen=True)
class Unsharded:
    """The record of a save, and the arrays that rank 0 stores whole (empty on other ranks)."""

    record: dict[str, Any]
    specs: dict[str, ArraySpec]
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]


def _give_up_later(running: list[SaveHandle]) -> None:
    for handle in running[:]:
        if not start_threads(1, partial(_give_up, handle), "zstore-give-up"):
            handle.cancel()  # the interpreter is shutting down: no thread can be started


def _give_up(handle: SaveHandle) -> None:
    if not handle.wait_for_end(_GRACE_PERIOD_S):
        handle.cancel()


def require_saveable(training: Training) -> None:
    """Raise UsageError if the state after the last complete step cannot be saved."""
    if training.update.is_in_backward:
        raise UsageError(
            'save_checkpoint between backward and step(): with "step_overlap": "backward" the state is being '
            'changed then; call step() first, or set "step_overlap" to "forward" or "none"'
        )
    if training.loader is not None and not training.accumulation.is_new:
        raise UsageError(
            "save_checkpoint within a step: the loader from initialize() has already consumed some of the step's micro-"
            "batches, which a resumed run would skip; save between two steps"
        )
