"""Loads a checkpoint: compares it with the model, links or reads its arrays, and restores the engine.

[Note: loading]
The checkpoint is first compared with the model, on every rank before any rank changes anything. Then each rank streams the
elements that it owns from the files into its arrays and casts masters into its parameters, and all ranks exchange the rows of
resident parameters. If that fails partway the state is inconsistent (`Update.torn`): the error says so, and training and
saving are refused until a load replaces it.

[Note: loading by links]
An array on disk that the checkpoint stores in the same layout on the same file system is not read: its file is linked into
the run folder, and the next change writes a new file. Its chunks are verified when training first reads them: a damaged chunk
raises CorruptionError then, and a different checkpoint must be loaded. Masters that parameters are cast from are read, and
verified, during the load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zstore.checkpoint import MEMORY_BYTES, ArraySource, KnownFile, Range, ReadAhead, read_into
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError, shortened
from zstore.format import buffer_array, layout_of, model_array, numpy_dtype
from zstore.io.memory import as_numpy, as_torch, dtype_name
from zstore.open.sources import open_source
from zstore.store import LocalShard

from ..build.model import stored_buffers, unsharded_tensors
from ..optim.rules import STATE_KEY, Stepper
from ..optim.state import OptimizerState
from ..runtime.device import one_thread
from ..runtime.process import warn_once
from .record import (
    LoadOptions,
    LoadPlan,
    LoadReport,
    apply_record,
    check_record,
    derive_rng_state,
    join_tensors,
    load_rng_state,
)

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_MAX_LISTED = 10
"""The most differences of each kind that an error message lists."""
_MISSING, _UNEXPECTED = "missing: ", "not in the model or its optimizer: "
_PIECE_NUMEL = 1 << 18
"""How many elements of two arrays are compared at a time."""
_MIN_AHEAD_BYTES = 6 * 1024 * 1024
"""Memory for read-ahead even if the host budget is exhausted: one chunk for each of its buffers."""


class Restore:
    """One load of a checkpoint into `training`. See [Note: loading]."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._linked_bytes = 0
        self.report: LoadReport | None = None
        """The result; None before the load, or if there was no checkpoint."""
        self.tag = ""
        """Tag of the loaded checkpoint."""
        self.resumes = False
        """Whether this run continues the checkpoint's run."""
        self.known: dict[str, KnownFile] = {}
        """Files of the checkpoint with the current values of frozen parameters."""

    def load(self, folder: str, tag: str | float | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
        """Load as `options` say; return the checkpoint's path and the client's state (all ranks)."""
        training = self._training
        reader: ArraySource | None = None
        plan: LoadPlan | None = None
        with ExitStack() as opened:
            with training.world.agreeing():  # nothing is changed yet, on any rank
                try:
                    resources, remote = training.state.store.resources, training.config.zstore.storage_options or {}
                    reader = opened.enter_context(open_source(folder, tag, resources=resources, storage_options=remote))
                    plan = self._plan(reader, options)
                    check_record(training, _engine_state(reader, options), plan, reader.record.training_world_size)
                except CheckpointNotFoundError:
                    if tag is not None:
                        raise
            self._check_same_checkpoint(reader)
            if reader is None or plan is None:
                warn_once("there is no checkpoint in %s: training starts from the beginning", folder)
                return None, {}
            state = self._replace(reader, plan)
        if training.world.rank == 0:
            position = "" if training.config.frozen else f"; at step {training.counters.global_steps}"
            _log.info("loaded %s%s", reader.location, position)
        return reader.location, state

    def _plan(self, reader: ArraySource, options: LoadOptions) -> LoadPlan:
        """Return the plan of the load. Raises as `plan_load` does, and UsageError if it would leave state inconsistent."""
        training = self._training
        plan = plan_load(training.model, training.state, reader, options)
        if training.update.is_in_backward and not plan.is_whole:
            raise UsageError(
                'a partial load between backward() and step(): with "step_overlap": "backward" the state '
                "is being changed then; call step() first, or load a whole checkpoint, without options"
            )
        if training.update.torn and not plan.is_whole:
            raise UsageError(
                "a previous step or load failed partway, so the state is inconsistent; load a whole checkpoint, without "
                "options, before continuing"
            )
        stepper = training.update.stepper
        if stepper is not None and stepper.needs_saved and options.optimizer:
            check_saved_state(stepper, reader)
        return plan

    def _check_same_checkpoint(self, reader: ArraySource | None) -> None:
        ids = self._training.world.all_gather_object(None if reader is None else reader.record.id)
        missing = [rank for rank, id_ in enumerate(ids) if id_ is None]
        if len(set(ids)) > 1:
            raise CheckpointNotFoundError(
                f"ranks {missing} do not see the checkpoint: pass a folder that all ranks share"
                if missing
                else "ranks found different checkpoints: a tag moved, or a checkpoint was saved, during the load; load again"
            )

    def _replace(self, reader: ArraySource, plan: LoadPlan) -> dict[str, Any]:
        """Replace the state with the checkpoint's, or raise on every rank; return the client's state."""
        training = self._training
        training.update.forget()
        unsaved = {model_array(name) for name in reader.record.absent_parameters}.intersection(plan.missing)
        missing = [name for name in plan.missing if name not in unsaved]
        omitted = [*_lines(_MISSING, missing), *_lines(_UNEXPECTED, plan.unexpected)]
        if unsaved:
            omitted.append(f"{len(unsaved)} frozen parameters, omitted by the save, keep the model's values")
        if omitted and training.world.rank == 0:
            _log.warning("%s is loaded partially:%s", reader.location, "".join(f"\n  {line}" for line in omitted))
        if reader.notes and training.world.rank == 0:
            _log.warning("%s is %s: not carried over: %s", reader.location, reader.kind, "; ".join(reader.notes))
        if training.world.rank == 0 and (conversions := converted_moments(training.state, reader, plan)):
            _log.info("moments are converted: %s", conversions)
        state: dict[str, Any] = {}
        note = "The engine's state is inconsistent now: load another checkpoint before continuing."
        with training.update.changing():
            if training.hooks is not None:
                training.hooks.units.invalidate()
            with training.world.agreeing(note):
                state = self._restore(reader, plan)
                if (reads := reader.reading()) is not None and reads.requests:  # of a URL
                    _log.info("rank %d: read %s: %s", training.world.rank, reader.location, reads.text())
            training.gather_resident(training.state.records)
        self.report = LoadReport(
            path=reader.location,
            missing=tuple(plan.missing),
            unexpected=tuple(plan.unexpected),
            read_bytes=reader.read_bytes,
            linked_bytes=self._linked_bytes,
        )
        return state

    def _restore(self, reader: ArraySource, plan: LoadPlan) -> dict[str, Any]:
        """Load this rank's elements; return the client's state."""
        training = self._training
        cast_masters = self._load_arrays(reader, [array for array in plan.arrays if not self._link(reader, array)])
        for name, tensor in list(unsharded_tensors(training.model, (r.parameter for r in training.state.records))):
            if name in plan.resized:
                values = {name.partition("/")[2]: as_torch(reader.read_array(plan.whole[name])).to(tensor.device)}
                training.model.load_state_dict(values, strict=False)
            elif name in plan.whole:
                tensor.copy_(as_torch(reader.read_array(plan.whole[name])))
        training.state.refresh_parameters(skip=cast_masters)
        self._note_frozen_files(reader, plan)
        training.restart_accumulation()
        record = _engine_state(reader, plan.options)
        apply_record(training, record, plan, reader.record.training_world_size)
        self.tag = reader.record.tag
        self.resumes = plan.options.everything and bool(reader.record.run)
        if self.resumes:
            training.run_id = reader.record.run
        if not plan.options.load_module_only:
            self._load_rng(reader)
        state: dict[str, Any] = join_tensors(reader.record.state.get("client_state", {}), reader.read_array)
        return state

    def _link(self, reader: ArraySource, array: Range) -> bool:
        """Link an array's file into the run folder if it has the run's layout. See [Note: loading by links]."""
        name, store = array[0], self._training.state.store
        local = store.local(name)
        if not local.valid_numel or store.tier(name).name != "disk":
            return False
        file = _shard_file(reader, name, local)
        if file is None or not store.adopt(name, *file):
            return False
        self._linked_bytes += layout_of(local.grid, local.shard, local.spec.dtype).file_bytes
        return True

    def _load_arrays(self, reader: ArraySource, arrays: list[Range]) -> set[str]:
        """Load arrays; return the masters among them that were also cast into their parameters."""
        direct: list[Range] = []
        by_tiles: list[Range] = []
        store = self._training.state.store
        for array in arrays:
            name, tier = array[0], store.tier(array[0]).name
            on_host = tier == "host" or (tier == "device" and store.options.device == "cpu")
            is_direct = on_host and reader.array(name).spec.dtype == store.spec(name).dtype
            (direct if is_direct else by_tiles).append(array)
        cast_masters = self._load_into_memory(reader, direct) if direct else set()
        if by_tiles:
            self._load_by_tiles(reader, by_tiles)
        return cast_masters

    def _load_into_memory(self, reader: ArraySource, arrays: list[Range]) -> set[str]:
        """Read into the arrays' own memory in several threads, and cast every piece into its parameter; return the masters."""
        names, state = [name for name, _, _ in arrays], self._training.state
        parameters = state.rows_in_memory()
        with state.store.changing(names):
            masters = [as_torch(state.store.memory(name)) for name in names]

            def cast(index: int, first: int, stop: int) -> None:
                rows = parameters.get(names[index])
                if rows is not None:
                    with one_thread():
                        rows[first:stop].copy_(masters[index][first:stop])

            read_into(reader, [(array, as_numpy(m)) for array, m in zip(arrays, masters, strict=True)], cast)
        return parameters.keys() & names

    def _load_by_tiles(self, reader: ArraySource, arrays: list[Range]) -> None:
        """Load arrays tile by tile: read ahead, convert and copy."""
        state = self._training.state
        free_bytes = state.store.budget.free_bytes
        memory_bytes = MEMORY_BYTES if free_bytes is None else max(_MIN_AHEAD_BYTES, min(MEMORY_BYTES, free_bytes))
        memory_bytes = min(memory_bytes, reader.resources.pool.nbytes // 2)
        with (
            ReadAhead(reader, arrays, memory_bytes=memory_bytes) as ahead,
            state.open_pass([[name] for name, _, _ in arrays], "fill") as tiles,
        ):
            for tile in tiles:
                name, first, _ = arrays[tile.group]
                dtype = reader.array(name).spec.dtype
                _read_into(ahead, dtype, name, first + tile.first, as_torch(tile.views[0]))

    def _note_frozen_files(self, reader: ArraySource, plan: LoadPlan) -> None:
        """Record the files of frozen parameters, which the next save may link."""
        state, world = self._training.state, self._training.world
        frozen = {model_array(record.name): record for record in state.records if record.group is None}
        for name, _, _ in plan.arrays:
            if name not in frozen:
                continue
            grid = state.grid_in_files(frozen[name], name)
            shard = LocalShard(state.store.spec(name), grid, world.rank)
            file = _shard_file(reader, name, shard) if shard.valid_numel else None
            version = state.store.tier(name).version(name)
            known = None if file is None else KnownFile.of(file[0], version=version, crcs=tuple(file[1]))
            self.known |= {} if known is None else {name: known}

    def _load_rng(self, reader: ArraySource) -> None:
        world, step = self._training.world, self._training.counters.global_steps
        record = reader.record
        # A resharded checkpoint has the generator states of the ranks that trained it.
        if record.training_world_size == record.world_size == world.world_size:
            state = reader.rank_state(world.rank)
            if state:
                load_rng_state(dict(state))
                return
        derive_rng_state(self._training.config.settings.seed, step, world.rank)
        if world.rank == 0 and not reader.notes:  # the notes mention it
            _log.warning(
                "the checkpoint has world size %d, this run %d: random number generators are reseeded from seed %d, "
                "step %d and rank",
                record.training_world_size,
                world.world_size,
                self._training.config.settings.seed,
                step,
            )


def _engine_state(reader: ArraySource, options: LoadOptions) -> dict[str, Any]:
    engine = reader.record.state.get("engine")
    if isinstance(engine, dict):
        return engine
    if options.load_module_only:
        return {"groups": []}  # enough to load weights
    raise CheckpointMismatchError(
        f"checkpoint {reader.location} was not saved by an engine, so it has no counters to resume from: pass "
        "load_module_only=True for its weights"
    )


def _shard_file(reader: ArraySource, name: str, shard: LocalShard) -> tuple[Path, Sequence[int]] | None:
    """Return the checkpoint's file of a shard and its chunks' checksums; None if the checkpoint has the array in a different
    layout or dtype, or has no such file."""
    stored = reader.array(name)
    if (stored.grid, stored.spec.dtype) != (shard.grid, shard.spec.dtype):
        return None
    path, crcs = reader.file_of(name, shard.shard), reader.shard_crcs(name, shard.shard)
    return None if path is None or crcs is None else (path, crcs)


def _read_into(ahead: ReadAhead, stored: str, name: str, first: int, target: torch.Tensor) -> None:
    """Read global flat elements from `first` on, of dtype `stored`, into `target`, 1-D, on any device and of any dtype."""
    stop = first + target.numel()
    if target.device.type == "cpu" and dtype_name(target.dtype) == stored:
        ahead.read(name, first, stop, as_numpy(target))
        return
    values = np.empty(stop - first, numpy_dtype(stored))
    ahead.read(name, first, stop, values)
    target.copy_(as_torch(values))


def plan_load(model: nn.Module, state: OptimizerState, reader: ArraySource, options: LoadOptions) -> LoadPlan:
    """Return the plan of a load.

    Raises CheckpointMismatchError, with all differences, if the checkpoint is from a different model or optimizer.
    """
    names = {r: state.array_names[r][: None if options.optimizer else 1] for r in state.records}
    whole = {name: tuple(t.shape) for name, t in unsharded_tensors(model, (r.parameter for r in state.records))}
    stored_as = _stored_names(model, reader)
    shapes = {name: reader.arrays[stored].spec.shape for name, stored in stored_as.items()}
    resized = {
        name: shapes[name]
        for name, shape in whole.items()
        if name in shapes and shapes[name] != shape and _may_resize(model, name)
    }
    expected = whole | resized
    for arrays in names.values():
        expected |= {name: tuple(state.store.spec(name).shape) for name in arrays}
    missing, unexpected = _differences(state, reader, options, expected, shapes)
    present = {name for name in expected if name in shapes}
    return LoadPlan(
        options=options,
        arrays=[
            (name, *state.owned_range(record, name))
            for record, arrays in names.items()
            for name in arrays
            if name in present
        ],
        whole={name: stored_as[name] for name in whole if name in present},
        resized=set(resized),
        updated=[r for r in state.scalars if options.optimizer and present.issuperset(names[r])],
        missing=missing,
        unexpected=unexpected,
    )


def _stored_names(model: nn.Module, reader: ArraySource) -> dict[str, str]:
    """Return the name of each array in the checkpoint by its name in the engine: state dicts of other software do not say
    which of their tensors are buffers."""
    buffers = {model_array(name): buffer_array(name) for name, _ in stored_buffers(model)}
    names: dict[str, str] = {}
    for stored in reader.arrays:
        name = buffers.get(stored, stored)
        names[stored if name in reader.arrays else name] = stored
    return names


def _may_resize(model: nn.Module, array: str) -> bool:
    """Return whether the model's own code loads the buffer of an array and may change its shape."""
    name = array.partition("/")[2]
    if array != buffer_array(name):
        return False
    owner = model.get_submodule(name.rpartition(".")[0])
    base = nn.Module
    return (type(model).load_state_dict, type(owner)._load_from_state_dict) != (
        base.load_state_dict,
        base._load_from_state_dict,
    )


def check_saved_state(stepper: Stepper, reader: ArraySource) -> None:
    """Raise CheckpointMismatchError if the checkpoint lacks the state of an optimizer that steps whole tensors."""
    state = reader.record.state.get("client_state")
    saved = state.get(STATE_KEY) if isinstance(state, dict) else None
    if not isinstance(saved, dict):
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} has no state of an optimizer that steps whole tensors, as {stepper.name} does: use "
            "the optimizer that it was trained with, or pass load_optimizer_states=False"
        )
    unexpected = sorted(saved.keys() - {record.name for record in stepper.records})
    if unexpected:
        listed = ", ".join(map(repr, unexpected[:_MAX_LISTED]))
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} has state of {stepper.name} for {listed}, which it does not update now: pass "
            "the optimizer the same parameters, under the same names"
        )


def converted_moments(state: OptimizerState, reader: ArraySource, plan: LoadPlan) -> str:
    """Describe the dtypes of moments in the checkpoint and in the store if they differ; otherwise return an empty string."""
    pairs = {
        (reader.array(name).spec.dtype, state.store.spec(name).dtype)
        for name, _, _ in plan.arrays
        if name.startswith("optimizer/")
    }
    return "; ".join(f"{saved} in the checkpoint, {own} in this run" for saved, own in sorted(pairs) if saved != own)


def _differences(
    state: OptimizerState,
    reader: ArraySource,
    options: LoadOptions,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected arrays; `shapes` are the checkpoint's. Raises CheckpointMismatchError if `options`
    do not allow them."""
    frozen = {record.name for record in state.records if record.group is None}

    def is_compared(name: str) -> bool:
        if name.startswith(("client/", "gradient")):
            return False
        # Slots of parameters that are frozen now are ignored.
        return not name.startswith("optimizer/") or (options.optimizer and name.split("/", 2)[2] not in frozen)

    stored = {name: shape for name, shape in shapes.items() if is_compared(name)}
    # torch's state dicts repeat a tied parameter under each of its names. A checkpoint in which their values differ, in this
    # rank's rows, is from a different model.
    for record in state.records:
        for alias in map(model_array, record.aliases):
            if _same_values(reader, model_array(record.name), alias, record.owned_range):
                del stored[alias]
    missing = [name for name in expected if name not in stored]
    # Parameters that the save was asked to omit keep the model's values and are named in the report.
    unsaved = {model_array(name) for name in reader.record.absent_parameters}
    unexpected = [name for name in stored if name not in expected]
    reshaped = [
        f"{name}: shape {stored[name]} in the checkpoint, {shape} in the model"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    absent = [name for name in missing if name not in unsaved]
    faults = [*_lines(_MISSING, absent), *_lines(_UNEXPECTED, unexpected)] if options.load_module_strict else []
    faults += _lines("", reshaped)
    if faults:
        raise CheckpointMismatchError(
            f"checkpoint {reader.location} is from a different model or optimizer:"
            + "".join(f"\n  {line}" for line in faults)
        )
    return missing, unexpected


def _same_values(reader: ArraySource, array: str, alias: str, rows: tuple[int, int]) -> bool:
    """Return whether both arrays exist, with the same dtype and shape, and the same bytes in the elements `rows`."""
    if array not in reader.arrays or alias not in reader.arrays:
        return False
    spec, alias_spec = reader.arrays[array].spec, reader.arrays[alias].spec
    if (spec.shape, spec.dtype) != (alias_spec.shape, alias_spec.dtype):
        return False
    first, stop = rows
    for start in range(first, stop, _PIECE_NUMEL):
        end = min(start + _PIECE_NUMEL, stop)
        pieces = np.empty((2, (end - start) * spec.itemsize), np.uint8)
        reader.read(array, start, end, pieces[0])
        reader.read(alias, start, end, pieces[1])
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True


def _lines(prefix: str, names: list[str]) -> list[str]:
    return shortened([prefix + name for name in names], _MAX_LISTED) if names else []
