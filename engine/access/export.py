"""The model's weights for other software: safetensors files."""

from __future__ import annotations

import glob
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from torch import nn

from zstore.checkpoint import new_folder, temporary_folder
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError
from zstore.format import FLOATING, STEM, SUFFIX, buffer_array, model_array
from zstore.io import Files
from zstore.io.tensors import as_numpy, dtype_name, host_values
from zstore.weights.from_checkpoint import DTYPES
from zstore.weights.layout import MAX_FILE_BYTES, FileLayout, Weight, index_file, plan_files
from zstore.weights.writer import WeightsWriter, lost_text

from ..build.model import save_config, stored_buffers
from .full_tensors import ArrayPiece

if TYPE_CHECKING:
    from ..params.record import ParameterRecord
    from .access import Access

_log = logging.getLogger("zstore")
_PICKLED = {".bin", ".pt", ".pth"}
"""Endings of the names of files that other software pickles weights into."""
_PICKLED_STEM = "pytorch_model"
"""Transformers' name of a pickled model; one in safetensors it calls `STEM`."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The arguments of `save_16bit_model`."""

    filename: str | None = None
    """None: as `from_pretrained` finds it."""
    dtype: str
    """One of `DTYPES`."""
    max_file_bytes: int = MAX_FILE_BYTES
    without_frozen: bool = False
    overwrite: bool = False
    """Whether weights of that name are replaced."""

    @property
    def written_name(self) -> str | None:
        """The name of the file in place of one that other software pickles weights into."""
        if self.filename is None or PurePath(self.filename).suffix not in _PICKLED:
            return self.filename
        stem = PurePath(self.filename).stem
        return (STEM if stem == _PICKLED_STEM else stem) + SUFFIX


def save_weights(access: Access, folder: Path, options: ExportOptions) -> list[Path]:
    """Write the weights as safetensors and return the files, the index last; see `save_16bit_model` (all ranks)."""
    filename, precision = options.written_name, options.dtype
    stem = STEM if filename is None else filename.removesuffix(SUFFIX)

    def check() -> None:
        if precision not in DTYPES:
            raise UsageError(f"save_16bit_model(dtype={precision!r}): expected one of {', '.join(DTYPES)}")
        if filename is not None and (not filename.endswith(SUFFIX) or not stem or "/" in filename):
            raise UsageError(
                f"save_16bit_model(filename={filename!r}): expected a name that ends with {SUFFIX}, the format that is "
                "written"
            )
        if access.world.rank == 0:
            _check_free(folder, stem, overwrite=options.overwrite)

    which = "without frozen parameters" if options.without_frozen else "all parameters"
    access.finished(f"save_16bit_model({str(folder)!r}, {filename!r}, {precision}, {which})", check)
    if filename != options.filename and access.world.rank == 0:
        _log.warning(
            "save_16bit_model: %s is written in place of %s: weights are safetensors", filename, options.filename
        )
    records = [r for r in access.state.records if r.group is not None or not options.without_frozen]
    layouts = plan_files(_weights(access.model, records, DTYPES[precision]), options.max_file_bytes, stem)
    sources = {model_array(record.name): access.source(record, "model") for record in records}
    ordered = [sources[w.array] for layout in layouts for w in layout.weights if w.array in sources]
    names = [layout.name for layout in layouts]
    files = [folder / name for name in (names if len(names) == 1 else [*names, index_file(layouts)])]
    export = _Export(access, folder, layouts)
    with access.world.agreeing(), export.opened:
        access.each(ordered, export.put, rank0_only=True)
        if access.world.rank == 0:
            export.finish(precision)
            kept = {file.name for file in files}
            for former in [path for path in weight_files(folder, stem) if path.name not in kept]:
                former.unlink()
    return files


def weight_files(folder: Path, stem: str = STEM) -> list[Path]:
    """Return the files of weights of that name in a folder, the index last."""
    name = glob.escape(stem)
    patterns = (f"{name}{SUFFIX}", f"{name}{SUFFIX}.index.json", f"{name}-*-of-*{SUFFIX}")
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(found, key=lambda path: (path.suffix == ".json", path.name))


def _check_free(folder: Path, stem: str, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError if the folder has weights of that name already that may not be replaced."""
    if overwrite and folder.is_dir():
        return
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointExistsError(f"{folder} exists and is not a folder: choose another path")
    numbered = [path.name for path in folder.glob(f"*{SUFFIX}*") if path.name.startswith((f"{stem}-", f"{stem}."))]
    if numbered:
        raise CheckpointExistsError(
            f"{folder} already has weights ({min(numbered)}): remove them, or choose another folder or filename"
        )


def _weights(model: nn.Module, records: Sequence[ParameterRecord], dtype: str) -> list[Weight]:
    """Return the tensors to write: those that `zstore consolidate` finds in a checkpoint."""
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
    """Rank 0's part of `save_weights`. `opened` closes its files, and publishes them if there was no error."""

    def __init__(self, access: Access, target: Path, layouts: Sequence[FileLayout]) -> None:
        self.opened = ExitStack()
        self._model = access.model
        self._target = self._folder = target
        self._is_new = not target.exists()
        self._layouts = layouts
        self._files = Files()
        self._writer: WeightsWriter | None = None
        self._due = deque(weight for layout in layouts for weight in layout.weights)
        self._buffers = {buffer_array(name): buffer for name, buffer in stored_buffers(access.model)}

    def _open(self) -> WeightsWriter:
        """Return the writer. Opened with the first piece, so that an error here is one of `put`."""
        if self._writer is None:
            if self._is_new:
                place = new_folder(self._files, self._target)
            else:
                place = temporary_folder(self._files, self._target, self._layouts[0].name)
            self._folder = self.opened.enter_context(place)
            writer = WeightsWriter(self._files, self._layouts, self._folder, overflow="error")
            self._writer = self.opened.enter_context(writer)
        return self._writer

    def put(self, piece: ArrayPiece) -> None:
        """Write a piece, and the buffers that come before it in the files."""
        writer = self._open()
        self._put_buffers(writer, piece.source.name)
        writer.put(piece.source.name, piece.first, as_numpy(piece.values))

    def _put_buffers(self, writer: WeightsWriter, stop: str | None) -> None:
        while self._due and self._due[0].array != stop:
            array = self._due.popleft().array
            if array in self._buffers and self._buffers[array].numel():
                writer.put(array, 0, as_numpy(host_values(self._buffers[array]).view(-1)))

    def finish(self, precision: str) -> None:
        """Make everything durable under its name."""
        writer = self._open()
        self._put_buffers(writer, None)
        names = writer.finish()
        if writer.lost():
            raise CheckpointError(lost_text(writer.lost(), precision, 'Pass dtype="bf16"'))
        save_config(self._model, self._folder)
        if self._is_new:
            return
        # Weights go last, and the index after them: until then nobody takes the folder for a whole model.
        others = [name for name in os.listdir(self._folder) if name not in names]
        for name in [name for name in others if not (self._target / name).exists()] + names:
            self._files.rename(self._folder / name, self._target / name)
        self._files.sync_folder(self._target)
