"""Saving and loading the whole state of a run: what is collected, what is checked, what is brought back.

[Note: saving]
On every rank: the store's arrays are pinned, buffers and the client's tensors copied, the record built. Errors until
here are raised on every rank, and nothing was written. The rest runs in zstore.checkpoint's background thread.

[Note: loading]
The checkpoint is compared with the model first, on every rank before any changes anything; then each rank streams the
elements that it owns from the files into its arrays, casts masters into its parameters, and all ranks share the rows of
resident parameters. Where that fails half way the state is a mixture (`Training.torn`): the error says so, and it is
neither trained nor saved until a load mends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zstore.arrays import ArraySpec, numpy_dtype
from zstore.checkpoint import (
    ArraySource,
    CheckpointReader,
    SaveRequest,
    SaveSummary,
    new_save_id,
    step_tag,
    tag_text,
)
from zstore.checkpoint.ahead import ReadAhead
from zstore.checkpoint.split import complete_master
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError
from zstore.sources import open_source
from zstore.store import Snapshot
from zstore.tiers import PinnedShard
from zstore.weights import DTYPES, MAX_FILE_BYTES, list_weights, plan_files, write_weights

from . import client_state as client
from .destinations import Destination, Handle, destination_of, reading_text
from .interrupts import interrupts_wait
from .loading import LoadOptions, LoadPlan, plan_load
from .model import save_config, stored_buffers
from .record import apply_record, check_record, engine_record
from .rng import derive_rng_state, load_rng_state, rng_state
from .tensors import as_numpy, as_torch, dtype_name

if TYPE_CHECKING:
    from .training import Training

_log = logging.getLogger("zstore")

_END_WELL_S = 5.0
"""How long a save may go on after a rank failed."""


class SaveTicket:
    """A save under way, or done."""

    def __init__(self, handle: Handle, stall_s: float) -> None:
        self._handle = handle
        self.stall_s = stall_s
        """Seconds that training stood still for the save."""

    def wait(self, timeout_s: float | None = None) -> SaveSummary:
        """Return what was written once the checkpoint is committed; raise what went wrong."""
        return self._handle.wait(timeout_s)

    def done(self) -> bool:
        """Return whether `wait` would not wait."""
        return self._handle.done()

    def give_up(self) -> None:
        """Let `wait` fail soon, because a rank will not do its part."""
        self._handle.cancel()


class Checkpoints:
    """Saves and loads a run's state. See [Note: saving] and [Note: loading]."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._pending: SaveTicket | None = None
        self.stall_s = 0.0
        """Time for which saves held training up."""
        training.world.when_broken.append(self._give_up_later)

    def _give_up_later(self) -> None:
        """Give the save under way the time to end well, which it may where all ranks did their part before one failed."""
        ticket = self._pending
        if ticket is not None:
            timer = threading.Timer(_END_WELL_S, ticket.give_up)
            timer.daemon = True
            timer.start()

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self, folder: str, tag: str | float | None, state: Mapping[str, Any], *, wait: bool, overwrite: bool
    ) -> SaveTicket:
        """Begin a save, and with `wait` complete it (all ranks)."""
        started = time.perf_counter()
        self.wait()
        world = self._training.world
        error: BaseException | None = None
        mine, small = "", Small({}, {}, {})
        destination = Destination(Path())
        try:
            destination = destination_of(self._training, folder)
            self._training.require_whole()
            mine = tag_text(step_tag(self._training.counters.global_steps) if tag is None else tag)
            self._check_no_accumulation()
            small = self.collect_small(state)
        except Exception as raised:
            error = raised
        world.raise_together(error)
        chosen, save_id, described = world.broadcast_object([mine, new_save_id(), small.described()])
        if mine != chosen:
            _log.warning("rank %d: tag %r differs from rank 0's %r, which is used", world.rank, mine, chosen)
        if world.rank > 0:
            small = Small.standing_in(small.state, described)
        handle: Handle | None = None
        try:
            # Ctrl-C here would leave pins that no save releases, or a save that nobody knows of.
            with interrupts_wait():
                handle = self._begin(destination, chosen, save_id, small, overwrite=overwrite, wait=wait)
                self._pending = SaveTicket(handle, time.perf_counter() - started)
        except Exception as raised:
            error = raised
        try:
            world.raise_together(error)
        except Exception:
            self._pending = None
            if handle is not None:
                handle.cancel()
            raise
        ticket = self._pending
        if ticket is None:
            raise UsageError("the save did not begin")
        if wait:
            self.wait()
            ticket.stall_s = time.perf_counter() - started
        self.stall_s += ticket.stall_s
        return ticket

    def _check_no_accumulation(self) -> None:
        training = self._training
        done, steps = (
            training.counters.micro_steps % training.batch.accumulation_steps,
            training.batch.accumulation_steps,
        )
        if done or training.backwards:
            raise UsageError(
                f"save_checkpoint in the middle of a step ({done} of {steps} micro-batches are stepped, "
                f"{training.backwards} backward without step): gradients are not saved; save after the step"
            )

    def collect_small(self, state: Mapping[str, Any]) -> Small:
        """Return the record and copies of what rank 0 stores whole: module buffers and the client's tensors."""
        if not isinstance(state, Mapping):
            raise UsageError(f"client_state: expected a dict, got {type(state).__name__}")
        marked, tensors = client.split(state)
        tensors |= {
            f"buffer/{name}": buffer.detach().to("cpu", copy=True).contiguous()
            for name, buffer in stored_buffers(self._training.model)
        }
        specs, arrays = client.small_arrays(tensors)
        return Small({"client_state": marked, "engine": engine_record(self._training)}, specs, arrays)

    def _begin(
        self, destination: Destination, tag: str, save_id: str, small: Small, *, overwrite: bool, wait: bool
    ) -> Handle:
        """Pin the store's arrays and hand the save to its thread, which releases them whatever happens."""
        training = self._training
        store = training.state.store
        folder = destination.folder
        # What is copied to another drive before training goes on stays nobody's after that.
        drives = store.options.all_paths
        copied = wait and bool(drives) and not any(_one_drive(path, folder) for path in drives)
        names = [name for one in training.state.records for name in training.state.arrays_of(one)]
        reserve_bytes = 0 if copied else store.require_room(names, num_stores=training.world.local_world_size)
        return destination.begin(
            replace(
                self.pinned_request(folder, tag, save_id, small),
                keep=training.config.keep,
                overwrite=overwrite,
                before_commit=self._write_weights if training.config.gathers_16bit_weights else None,
                reserve_bytes=reserve_bytes,
            )
        )

    def pinned_request(self, folder: Path, tag: str, save_id: str, small: Small) -> SaveRequest:
        """Return the request of a save of the present state, whose arrays are pinned from here on."""
        training = self._training
        state, store = training.state, training.state.store
        grids = {name: state.grid_in_files(one, name) for one in state.records for name in state.arrays_of(one)}
        pins: dict[str, PinnedShard] = {}
        try:
            state.transfers.settle()  # the save reads memory of the device from threads of its own
            for one in state.records:
                pins |= training.updater.pin(one, state.arrays_of(one))
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
                small=small.arrays,
                rank_state=rng_state(),
                record=small.state,
                run_id=training.run_id,
                disk_folder=store.options.run_path,
                disk_folders=store.disk_folders(),
            )
        except BaseException:
            Snapshot(0, pins).release()
            raise

    def _write_weights(self, reader: CheckpointReader) -> list[str]:
        """Write the weights, as the model computes with them, beside the arrays of a checkpoint (rank 0)."""
        precision = self._training.config.precision
        layouts = plan_files(list_weights(reader, DTYPES[precision]), MAX_FILE_BYTES)
        lost = write_weights(reader, layouts, reader.path, overflow="inf", advance=lambda _: None)
        save_config(self._training.model, reader.path)
        return [f"{each.name}: {each.count} values do not fit {precision}: infinite in the weights" for each in lost]

    def wait(self) -> None:
        """Complete the save under way, if any (all ranks)."""
        if self._pending is None:
            return
        error: BaseException | None = None
        try:
            for message in self._pending.wait().messages:
                _log.warning("%s", message)
        except Exception as raised:
            error = raised
        # Not before: a save whose wait was interrupted is still under way.
        self._pending = None
        self._training.world.raise_together(error)

    def _end_save(self) -> None:
        """Complete the save under way, if any, before a load (all ranks): one that failed with the update that it waited
        for does not keep the load from mending that."""
        try:
            self.wait()
        except Exception as error:
            if not self._training.torn:
                raise
            _log.warning("the save under way failed: %s", error)

    def finish(self) -> None:
        """Complete the save under way, if any, without asking the other ranks (at the end of a run)."""
        ticket, self._pending = self._pending, None
        if ticket is not None:
            for message in ticket.wait().messages:
                _log.warning("%s", message)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, folder: str, tag: str | float | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
        """Load what `options` ask for of a checkpoint; return its path and the client's state (all ranks)."""
        training = self._training
        training.settle()
        self._end_save()
        error: Exception | None = None
        reader: ArraySource | None = None
        plan: LoadPlan | None = None
        with ExitStack() as opened:
            try:
                resources, options_of = training.state.store.resources, training.config.storage_options
                reader = opened.enter_context(open_source(folder, tag, resources=resources, storage_options=options_of))
                plan = plan_load(training, reader, options)
                check_record(training, _engine_of(reader), plan, reader.record.training_world_size)
            except CheckpointNotFoundError as missing:
                if tag is not None:
                    error = missing
            except Exception as raised:
                error = raised
            # Until here nothing was changed, on any rank.
            training.world.raise_together(error)
            self._check_all_found(reader is not None)
            if reader is None or plan is None:
                _log.warning("there is no checkpoint in %s: training starts from the beginning", folder)
                return None, {}
            training.give_up_within()
            training.updater.forget()
            if plan.left_out and training.world.rank == 0:
                _log.warning(
                    "%s is loaded in part:%s", reader.location, "".join(f"\n  {line}" for line in plan.left_out)
                )
            if reader.notes and training.world.rank == 0:
                _log.warning("%s is %s: not carried over: %s", reader.location, reader.kind, "; ".join(reader.notes))
            training.torn = True
            if training.hooks is not None:
                training.hooks.residence.forget()
            state: dict[str, Any] = {}
            try:
                state = self._bring_back(reader, plan)
                if (text := reading_text(reader)) is not None:
                    _log.info("rank %d: %s", training.world.rank, text)
            except Exception as raised:
                raised.add_note(
                    "The engine now holds a mixture of two states: load another checkpoint before going on."
                )
                error = raised
            training.world.raise_together(error)
        training.gather_resident(training.state.records)
        training.restart_accumulation()
        training.backwards = 0
        training.torn = False
        return reader.location, state

    def _bring_back(self, reader: ArraySource, plan: LoadPlan) -> dict[str, Any]:
        """Load what this rank owns; return the client's state."""
        training = self._training
        self._load_arrays(reader, plan)
        apply_record(training, _engine_of(reader), plan, reader.record.training_world_size)
        if plan.options.everything:
            training.run_id = reader.record.run or training.run_id
        if plan.options.progress:
            self._load_rng(reader)
        state: dict[str, Any] = client.join(reader.record.state.get("client_state", {}), reader.read_array)
        return state

    def _check_all_found(self, found: bool) -> None:
        ranks = self._training.world.all_gather_object(found)
        if any(ranks) and not all(ranks):
            raise CheckpointNotFoundError(
                f"ranks {[rank for rank, seen in enumerate(ranks) if not seen]} do not see the checkpoint that others "
                "loaded: the folder is local to a machine; give one that all ranks share"
            )

    def _load_arrays(self, reader: ArraySource, plan: LoadPlan) -> None:
        state, arrays = self._training.state, plan.arrays
        with (
            ReadAhead(reader, [one.stored for one in arrays]) as ahead,
            state.passing([one.into for one in arrays], "fill") as tiles,
        ):
            for tile in tiles:
                one, views = arrays[tile.group], [as_torch(view) for view in tile.views]
                name, first, _ = one.stored
                if one.converts:
                    values = _read_master(ahead, reader, name, first + tile.first, tile.stop - tile.first)
                    state.put_master(values, views)
                else:
                    read_into(ahead, reader.array(name).spec.dtype, name, first + tile.first, views[0])
        for name, buffer in stored_buffers(self._training.model):
            if name in plan.buffers:
                buffer.copy_(as_torch(reader.read_array(f"buffer/{name}")))
        state.refresh_parameters()

    def _load_rng(self, reader: ArraySource) -> None:
        world, step = self._training.world, self._training.counters.global_steps
        record = reader.record
        # A resharded checkpoint has no states of its own: they belong to the ranks that trained.
        if record.training_world_size == record.world_size == world.world_size:
            state = reader.rank_state(world.rank)
            if state:
                load_rng_state(dict(state))
                return
        derive_rng_state(self._training.config.seed, step, world.rank)
        if world.rank == 0 and not reader.notes:  # those say it
            _log.warning(
                "the checkpoint was trained by %d ranks and is loaded by %d: random number generators start anew, from seed "
                "%d, step %d and rank",
                record.training_world_size,
                world.world_size,
                self._training.config.seed,
                step,
            )


@dataclass(frozen=True)
class Small:
    """The record of a save, and the arrays that rank 0 stores whole."""

    state: dict[str, Any]
    specs: dict[str, ArraySpec]
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]

    def described(self) -> list[list[Any]]:
        """Return names, shapes and types as JSON."""
        return [[name, list(spec.shape), spec.dtype] for name, spec in self.specs.items()]

    @staticmethod
    def standing_in(state: dict[str, Any], described: list[list[Any]]) -> Small:
        """Return what another rank names in place of rank 0's arrays, whose values alone count."""
        specs = {n: ArraySpec(name=n, shape=tuple(shape), dtype=dtype) for n, shape, dtype in described}
        arrays = {n: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for n, spec in specs.items()}
        return Small(state, specs, arrays)


def _one_drive(one: Path, other: Path) -> bool:
    """Return whether two folders, of which the second may be made yet, are on one file system."""
    made = next(path for path in (other.absolute(), *other.absolute().parents) if path.exists())
    return one.stat().st_dev == made.stat().st_dev


def _engine_of(reader: ArraySource) -> dict[str, Any]:
    engine = reader.record.state.get("engine")
    if not isinstance(engine, dict):
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} was not saved by an engine, so it has no counters to go on from"
        )
    return engine


def _read_master(ahead: ReadAhead, reader: ArraySource, name: str, first: int, numel: int) -> torch.Tensor:
    """Return global flat elements of a stored master, 1-D, in the type that they have all their digits in."""
    stored = np.empty(numel, numpy_dtype(reader.array(name).spec.dtype))
    ahead.read(name, first, first + numel, stored)
    master = complete_master(reader, name, first, stored)
    return as_torch(stored if master is None else master)


def read_into(ahead: ReadAhead, stored: str, name: str, first: int, target: torch.Tensor) -> None:
    """Read global flat elements from `first` on, of type `stored`, into `target`, 1-D, on any device and of any type."""
    stop = first + target.numel()
    if target.device.type == "cpu" and dtype_name(target.dtype) == stored:
        ahead.read(name, first, stop, as_numpy(target))
        return
    values = np.empty(stop - first, numpy_dtype(stored))
    ahead.read(name, first, stop, values)
    target.copy_(as_torch(values))
