"""The model's full state dict, read from the masters and loaded into them, and its export as safetensors."""

from __future__ import annotations

import glob
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from zstore.checkpoint import new_folder, temporary_folder
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError, listed, shortened
from zstore.format import FLOATING, STEM, SUFFIX, buffer_array, model_array
from zstore.io import Files
from zstore.io.memory import as_numpy, dtype_name, host_values
from zstore.weights.files import MAX_FILE_BYTES, FileLayout, Weight, WeightsWriter, index_file, lost_text, plan_files
from zstore.weights.from_checkpoint import DTYPES

from ..build.init import Init
from ..build.model import broadcast_bytes, save_config, stored_buffers
from ..params.record import ParameterRecord, Residency
from .access import Access, RankArray
from .safe_access import gather

_log = logging.getLogger("zstore")

CustomLoad = Callable[..., Any]
"""Called as `custom(src=state_dict, dst=model)`."""

_MAX_LISTED = 10
_ENGINE_PREFIX = "module."
"""Prefix of names in `engine.state_dict()`."""
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth"}
_PICKLE_STEM = "pytorch_model"
"""Transformers' name of a pickled model; in safetensors it is `STEM`."""


def module_state_dict(access: Access, *, exclude_frozen: bool) -> dict[str, Any]:
    """Return the model's state dict; see `Engine.module_state_dict` (all ranks)."""
    state: dict[str, Any] = access.model.state_dict() if access.units is None else _whole_state_dict(access)
    if exclude_frozen:
        for name in list(state):
            record = access.find(name)
            if record is not None and record.group is None:
                del state[name]
    return state


def _whole_state_dict(access: Access) -> dict[str, Any]:
    """Return CPU copies of all entries of the state dict on rank 0, and an empty dict on other ranks (all ranks)."""
    access.prepare("module_state_dict()", lambda: None)
    is_rank0 = access.world.rank == 0
    sharded = [record for record in access.state.records if record.residency is not Residency.RESIDENT]
    values = {record: torch.empty(record.numel if is_rank0 else 0, dtype=record.dtype) for record in sharded}
    access.read_into(values, [access.source(record, "model") for record in sharded], rank0_only=True)
    if not is_rank0:
        return {}
    entries = state_entries(access)
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            record = access.find(name)
            whole = None if record is None else values.get(record)
            entries[name] = value.detach().to("cpu", copy=True) if whole is None else whole.view(value.shape)
    return entries


def hand_back(access: Access, config: Any, remove_hooks: Callable[[], None]) -> None:
    """Set every parameter to its value (its fp32 master if it is trained), in its own storage, or sharded as a `config` says
    (all ranks). `remove_hooks` removes the engine's hooks; after that only reads can fail."""
    state, device, init = access.state, access.world.device, Init(config=config, enabled=config is not None)
    records = access.prepare("hand_back()", lambda: state.records, changes=True)
    remove_hooks()
    with init:
        for record in records:
            if record.residency is Residency.RESIDENT and state.is_master(record):
                values = record.full.view(record.shape)  # a call that failed may have released the parameter
            else:
                source = access.source(record, "model")
                values = torch.empty(record.shape, dtype=source.dtype)
                access.read_into({record: values.view(-1)}, [source])
            record.use_values(values.to(device))
            record.parameter.grad = None
            path, _, name = record.name.rpartition(".")
            init.shard_parameter(access.model.get_submodule(path), name)


def load_module_state(
    access: Access, state: Mapping[str, Any], *, strict: bool, custom: CustomLoad | None = None
) -> _IncompatibleKeys:
    """Load rank 0's state dict into parameters, masters and buffers of all ranks; return the missing and unexpected names (all
    ranks).

    Raises UsageError, which lists the keys that do not fit, on every rank before any change. `custom` replaces the load, with
    all parameters gathered.
    """
    world, model = access.world, access.model
    if state and all(name.startswith(_ENGINE_PREFIX) for name in state):
        state = {name.removeprefix(_ENGINE_PREFIX): value for name, value in state.items()}
    if custom is not None:
        with gather(model, modifier_rank=0):
            if world.rank == 0:
                custom(src=state, dst=model)
        _broadcast_buffers(access, (v for v in state_entries(access).values() if isinstance(v, torch.Tensor)))
        return _IncompatibleKeys([], [])
    entries = state_entries(access)
    given = dict(state) if world.rank == 0 else {}

    def check() -> None:
        if world.rank == 0:
            _check_entries(entries, given, strict=strict)

    access.prepare("load_module_state_dict()", check, changes=True)
    names: list[str] = world.broadcast_object([name for name in entries if name in given])
    unexpected: list[str] = world.broadcast_object([name for name in given if name not in entries])
    loaded: dict[torch.Tensor, None] = {}  # in the same order on all ranks
    for name in names:
        target = entries[name]
        if not isinstance(target, torch.Tensor) or target in loaded:
            continue
        loaded[target] = None
        record = access.guard.records.get(target) if isinstance(target, nn.Parameter) else None
        if record is not None:
            access.set_from_rank0(record, given.get(name))
        elif world.rank == 0:
            target.copy_(given[name])
    _broadcast_buffers(access, loaded)
    return _IncompatibleKeys([name for name in entries if name not in names], unexpected)


def state_entries(access: Access) -> dict[str, Any]:
    """Return the model's parameters and buffers themselves, by their names in its state dict."""
    with access.guard.allow_state_dicts():
        found: dict[str, Any] = access.model.state_dict(keep_vars=True)
    return found


def _broadcast_buffers(access: Access, tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast the buffers among `tensors` from rank 0 (all ranks)."""
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            broadcast_bytes(access.world, tensor)


def _check_entries(entries: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> None:
    mismatches: list[str] = []
    missing, unexpected = [n for n in entries if n not in given], [n for n in given if n not in entries]
    for what, names in (("missing", missing), ("not in the model", unexpected)) if strict else ():
        if names:
            mismatches.append(f"{what}: {listed(names, _MAX_LISTED)}")
    for name, target in entries.items():
        if name not in given:
            continue
        if not isinstance(target, torch.Tensor):
            mismatches.append(f"{name}: extra state of a module, which cannot be loaded during training")
        elif not isinstance(given[name], torch.Tensor) or given[name].shape != target.shape:
            got = tuple(given[name].shape) if isinstance(given[name], torch.Tensor) else type(given[name]).__name__
            mismatches.append(f"{name}: expected a tensor of shape {tuple(target.shape)}, got {got}")
    if mismatches:
        lines = shortened(mismatches, _MAX_LISTED)
        raise UsageError("the state dict does not fit the model:" + "".join(f"\n  {line}" for line in lines))


def save_weights(
    access: Access,
    folder: Path,
    requested_name: str | None = None,
    *,
    precision: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    without_frozen: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Write the weights as safetensors, with `precision` one of `DTYPES`; return the files, the index last (all ranks). See
    `Engine.save_16bit_model`."""
    filename = requested_name
    if filename is not None and PurePath(filename).suffix in _PICKLE_SUFFIXES:
        stem = PurePath(filename).stem
        filename = (STEM if stem == _PICKLE_STEM else stem) + SUFFIX
    stem = STEM if filename is None else filename.removesuffix(SUFFIX)

    def check() -> None:
        if precision not in DTYPES:
            raise UsageError(f"save_16bit_model(dtype={precision!r}): expected one of {', '.join(DTYPES)}")
        if filename is not None and (not filename.endswith(SUFFIX) or not stem or "/" in filename):
            raise UsageError(
                f"save_16bit_model(filename={filename!r}): expected a name that ends with {SUFFIX}, the written format"
            )
        if access.world.rank == 0:
            _require_no_weights(folder, stem, overwrite=overwrite)

    scope = "without frozen parameters" if without_frozen else "all parameters"
    access.prepare(f"save_16bit_model({str(folder)!r}, {filename!r}, {precision}, {scope})", check)
    if filename != requested_name and access.world.rank == 0:
        _log.warning(
            "save_16bit_model: writing %s instead of %s: weights are saved as safetensors", filename, requested_name
        )
    records = [r for r in access.state.records if r.group is not None or not without_frozen]
    layouts = plan_files(_planned_weights(access.model, records, DTYPES[precision]), max_file_bytes, stem)
    sources = {model_array(record.name): access.source(record, "model") for record in records}
    ordered = [sources[w.array] for layout in layouts for w in layout.weights if w.array in sources]
    names = [layout.name for layout in layouts]
    files = [folder / name for name in (names if len(names) == 1 else [*names, index_file(layouts)])]
    export, is_rank0 = _Export(access.model, folder, layouts), access.world.rank == 0
    with access.world.agreeing(), ExitStack() as stack:
        with access.world.agreeing():
            if is_rank0:
                export.open(stack)
        access.for_each_piece(ordered, export.put, rank0_only=True)
        if is_rank0:
            export.finish(precision)
            written = {file.name for file in files}
            for stale in [path for path in weight_files(folder, stem) if path.name not in written]:
                stale.unlink()
    return files


def weight_files(folder: Path, stem: str = STEM) -> list[Path]:
    """Return the weight files with the name `stem` in a folder, the index last."""
    name = glob.escape(stem)
    patterns = (f"{name}{SUFFIX}", f"{name}{SUFFIX}.index.json", f"{name}-*-of-*{SUFFIX}")
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(paths, key=lambda path: (path.suffix == ".json", path.name))


def _require_no_weights(folder: Path, stem: str, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError if the folder has weights with the name `stem` that must not be replaced."""
    if overwrite and folder.is_dir():
        return
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointExistsError(f"{folder} exists and is not a folder: choose a different path")
    existing = [path.name for path in folder.glob(f"*{SUFFIX}*") if path.name.startswith((f"{stem}-", f"{stem}."))]
    if existing:
        raise CheckpointExistsError(
            f"{folder} already has weights ({min(existing)}): remove them, or choose a different folder or filename"
        )


def _planned_weights(model: nn.Module, records: Sequence[ParameterRecord], dtype: str) -> list[Weight]:
    """Return the tensors to write: those that `zstore consolidate` writes."""
    weights = []
    for record in records:
        kind = dtype_name(record.dtype)
        kind, shape = dtype if kind in FLOATING else kind, tuple(record.parameter.shape)
        weights.append(Weight(name=record.name, array=model_array(record.name), shape=shape, dtype=kind))
    for name, buffer in stored_buffers(model):
        array, kind = buffer_array(name), dtype_name(buffer.dtype)
        weights.append(Weight(name=name, array=array, shape=tuple(buffer.shape), dtype=kind))
    return weights


class _Export:
    """Writes the files of `save_weights` (rank 0)."""

    _folder: Path
    _writer: WeightsWriter

    def __init__(self, model: nn.Module, target: Path, layouts: Sequence[FileLayout]) -> None:
        self._model = model
        self._target = target
        self._is_new = not target.exists()
        self._layouts = layouts
        self._files = Files()
        self._remaining = deque(weight for layout in layouts for weight in layout.weights)
        self._buffers = {buffer_array(name): buffer for name, buffer in stored_buffers(model)}

    def open(self, stack: ExitStack) -> None:
        """Create the files, which `stack` closes; unless there is an error, it then gives a new folder its final name."""
        if self._is_new:
            destination = new_folder(self._files, self._target)
        else:
            destination = temporary_folder(self._files, self._target, self._layouts[0].name)
        self._folder = stack.enter_context(destination)
        self._writer = stack.enter_context(WeightsWriter(self._files, self._layouts, self._folder, overflow="error"))

    def put(self, source: RankArray, first: int, values: torch.Tensor) -> None:
        """Write a piece, after the buffers that precede it in the files."""
        self._put_buffers(source.name)
        self._writer.put(source.name, first, as_numpy(values))

    def _put_buffers(self, stop: str | None) -> None:
        while self._remaining and self._remaining[0].array != stop:
            array = self._remaining.popleft().array
            if array in self._buffers and self._buffers[array].numel():
                self._writer.put(array, 0, as_numpy(host_values(self._buffers[array]).view(-1)))

    def finish(self, precision: str) -> None:
        """Flush all files and give them their final names."""
        self._put_buffers(None)
        names = self._writer.finish()
        if lost := self._writer.lost():
            raise CheckpointError(lost_text(lost, precision, 'Pass dtype="bf16"'))
        save_config(self._model, self._folder)
        if self._is_new:
            return
        # Weights last, then the index: until then readers do not mistake the folder for a complete model.
        companions = [name for name in os.listdir(self._folder) if name not in names]
        for name in [name for name in companions if not (self._target / name).exists()] + names:
            self._files.rename(self._folder / name, self._target / name)
        self._files.sync_folder(self._target)
