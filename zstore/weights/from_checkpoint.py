"""The model in a checkpoint: its weights, listed, chosen, read in any precision and written as safetensors; and the files that
`from_pretrained` expects with them.

[Note: the pipeline]
Threads take spans of the arrays in the order of the output, a request each. The thread that reads a span verifies it and casts
it directly into tensors, or into 4-MiB blocks of the output file, each written by the thread that completes it. Nothing is
passed between threads. Memory holds a span of each thread and a few blocks, whatever the model's size.

[Note: which files]
    a model's folder         its files except other weights; the modules that `modules.json` names, with their weights; other
                             small folders without weights
    a checkpoint's folder    all that is not part of the checkpoint, except weights
    a folder above one, or   files with a name of `COMPANIONS`
    other software's
Links are followed in a folder that the user named, as in the hub's cache, whose files are links: the copies are files. A
checkpoint of ours has no links; one found there may lead anywhere, and is not copied.
"""

from __future__ import annotations

import difflib
import errno
import io
import json
import os
import re
import shutil
import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..checkpoint.folder import Folder
from ..checkpoint.layout import ABORT_FILE, MANIFEST_FOLDER, METADATA_FILE, RECORD_FILE
from ..checkpoint.lookahead import Range, Span, cut_spans, use_spans
from ..checkpoint.reader import ArraySource, CheckpointReader
from ..errors import CheckpointMismatchError, CorruptionError
from ..format.arrays import FLOATING, Array, empty_array, numpy_dtype
from ..io.files import Files
from .cast import Overflow, cast_into
from .files import FileLayout, Lost, Weight, WeightsWriter

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Name of a precision -> Zarr's name of its data type."""

_GROUPS = ("model/", "buffer/")
_READ_BYTES = 8 * 1024 * 1024

Advance = Callable[[int], None]
"""Called from several threads with the bytes of arrays read and stored."""
Put = Callable[[str, int, Array], None]
"""`put(array, first, values)`, from several threads: flat elements of an array from `first` on, 1-D."""


def list_weights(reader: ArraySource, dtype: str | None) -> list[Weight]:
    """Return the parameters and buffers of a checkpoint; floating parameters are written as `dtype` (None: as stored), buffers
    as stored.

    Tied parameters are listed once, under their first name. Raises CheckpointMismatchError without weights.
    """
    weights: dict[str, Weight] = {}
    for name, stored in reader.arrays.items():
        spec = stored.spec
        if not name.startswith(_GROUPS):
            continue
        key = name.partition("/")[2]
        if key in weights:
            raise CheckpointMismatchError(f"{reader.location} has both a parameter and a buffer called {key!r}")
        casts = spec.dtype in FLOATING and name.startswith("model/")
        target = dtype if dtype is not None and casts else spec.dtype
        weights[key] = Weight(name=key, array=name, shape=spec.shape, dtype=target)
    if not weights:
        raise CheckpointMismatchError(f"{reader.location} has no weights: expected arrays under `model/`")
    return list(weights.values())


def choose(names: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Return the `names` that match a pattern of `include` (empty: all) and none of `exclude`, in their order.

    A pattern is a name, which matches only itself, or has `*`, `?` and `[...]` as in a shell; `*` matches dots too.
    Raises CheckpointMismatchError for a pattern that matches no name, which is most often a mistake.
    """
    known = list(names)
    chosen, left_out = _matched(known, include) if include else set(known), _matched(known, exclude)
    return [name for name in known if name in chosen and name not in left_out]


def _matched(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    known, found = set(names), set[str]()
    for pattern in patterns:
        matched = [pattern] if pattern in known else [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            hint = f"; close matches: {', '.join(near)}" if near else ""
            raise CheckpointMismatchError(f"{pattern!r} matches none of the {len(names)} names{hint}")
        found.update(matched)
    return found


def frozen_weights(source: ArraySource) -> set[str]:
    """Return the parameters that the optimizer did not train, by the record or by the optimizer's state. Raises
    CheckpointMismatchError if there is neither, and all would look frozen."""
    trained = {name.split("/", 2)[2] for name in source.arrays if name.startswith("optimizer/")}
    trained |= _stepped(source.record.state.get("engine"))
    parameters = {name.partition("/")[2] for name in source.arrays if name.startswith("model/")}
    if parameters and not trained:
        raise CheckpointMismatchError(
            f"{source.location} does not say which parameters were frozen: it has no optimizer state, and its record "
            "no engine state"
        )
    return parameters - trained


def _stepped(engine: Any) -> set[str]:
    """Return the parameters with step counts in the engine's part of a record."""
    scalars = engine.get("scalars") if isinstance(engine, dict) else None
    return {name for name in scalars if isinstance(name, str)} if isinstance(scalars, dict) else set()


def put_weights(
    reader: ArraySource,
    weights: Sequence[Weight],
    put: Put,
    advance: Advance | None = None,
) -> None:
    """Read `weights` whole and hand their values to `put`, every element once. See [Note: the pipeline]."""
    ranges: list[Range] = [(weight.array, 0, weight.numel) for weight in weights if weight.numel > 0]

    def use(span: Span) -> None:
        put(span.name, span.first, span.data.view(numpy_dtype(reader.arrays[span.name].spec.dtype)))
        if advance is not None:
            advance(span.nbytes)

    use_spans(reader, ranges, use, "zstore-weights")


def read_weight(reader: ArraySource, weight: Weight, first: int, out: Array, overflow: Overflow) -> int:
    """Read flat elements of a weight from `first` on into `out`, 1-D and of the weight's data type; return how many finite
    values it could not hold."""
    array = reader.array(weight.array)
    if weight.dtype == array.spec.dtype:
        reader.read(weight.array, first, first + out.size, out)
        return 0
    lost = 0
    for span in cut_spans(array, first, first + out.size, _READ_BYTES):
        stored = np.empty(span.stop - span.first, numpy_dtype(array.spec.dtype))
        reader.read(span.name, span.first, span.stop, stored)
        lost += cast_into(stored, out[span.first - first : span.stop - first], weight.dtype, overflow)
    return lost


def read_file(
    reader: ArraySource, layout: FileLayout, start: int, stop: int, overflow: Overflow, *, block_bytes: int
) -> Iterator[memoryview]:
    """Yield bytes `[start, stop)` of a weights file without writing it, in blocks of at most `block_bytes`, or one element; a
    block ends at a stored chunk's end, if chunks are not larger, so that none is read twice. Small weights share a block.

    Raises CheckpointMismatchError if a value does not fit its type and `overflow` is "error", and any error from reading.
    """
    if stop <= start:
        return
    header = memoryview(layout.header)[start:stop]
    yield from (header[at : at + block_bytes] for at in range(0, len(header), block_bytes))
    parts: list[memoryview] = []
    nbytes = 0
    for part in _weight_parts(reader, layout, start, stop, overflow, block_bytes):
        if parts and nbytes + len(part) > block_bytes:
            yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            parts, nbytes = [], 0
        parts.append(part)
        nbytes += len(part)
    if parts:
        yield memoryview(b"".join(parts))


def _weight_parts(
    reader: ArraySource, layout: FileLayout, start: int, stop: int, overflow: Overflow, part_bytes: int
) -> Iterator[memoryview]:
    """Yield the bytes of weights, in parts of at most `part_bytes` of one weight; see `read_file`."""
    for number in range(max(0, bisect_right(layout.offsets, start) - 1), len(layout.weights)):
        weight, offset = layout.weights[number], layout.offsets[number]
        if offset >= stop:
            return
        array, size = reader.array(weight.array), weight.itemsize
        first, last = max(0, start - offset) // size, min(weight.numel, -(-(stop - offset) // size))
        step = max(1, part_bytes // size)
        for span in cut_spans(array, first, last, step * array.spec.itemsize):
            for at in range(span.first, span.stop, step):
                values = np.empty(min(at + step, span.stop) - at, numpy_dtype(weight.dtype))
                lost = read_weight(reader, weight, at, values, overflow)
                if lost and overflow == "error":
                    raise CheckpointMismatchError(
                        f"{weight.name} has values that {weight.dtype} cannot hold ({lost} among elements {at} to "
                        f"{at + values.size}): choose bf16, or how they are written: overflow clamp or inf"
                    )
                place = offset + at * size  # a range may begin or end inside an element
                yield values.view(np.uint8).data[max(0, start - place) : stop - place]


def read_weights(
    reader: ArraySource, weights: Sequence[Weight], overflow: Overflow
) -> tuple[dict[str, Array], list[Lost]]:
    """Return `weights` by name, in their shapes and data types, and the values that these could not hold."""
    found: dict[str, Array] = {
        weight.name: empty_array(weight.name, weight.shape, numpy_dtype(weight.dtype)) for weight in weights
    }
    by_array: Mapping[str, Weight] = {weight.array: weight for weight in weights}
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def put(array: str, first: int, values: Array) -> None:
        weight = by_array[array]
        target = found[weight.name].reshape(-1)[first : first + values.size]
        if count := cast_into(values, target, weight.dtype, overflow):
            with lock:
                counts[weight.name] = counts.get(weight.name, 0) + count

    put_weights(reader, weights, put)
    return found, [Lost(name=name, count=count) for name, count in sorted(counts.items())]


def write_weights(
    reader: ArraySource,
    layouts: Sequence[FileLayout],
    folder: Path,
    *,
    overflow: Overflow,
    advance: Advance,
) -> list[Lost]:
    """Write `layouts` into `folder`, durably; return the values that could not be held, after which "error" keeps no file. See
    [Note: the pipeline]."""
    weights = [weight for layout in layouts for weight in layout.weights]
    with WeightsWriter(reader.resources.files, layouts, folder, overflow=overflow) as writer:
        put_weights(reader, weights, writer.put, advance)
        lost = writer.lost()
        if not lost or overflow != "error":
            writer.finish()
        return lost


COMPANIONS = (
    "config.json", "generation_config.json", "adapter_config.json", "*tokenizer*.json", "*.model", "*.tiktoken", "*.spm",
    "*processor_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "normalizer.json", "tekken.json", "chat_template.*", "modules.json", "config_sentence_transformers.json",
    "sentence_bert_config.json", "configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py",
    "image_processing_*.py", "feature_extraction_*.py",
)  # fmt: skip
"""Patterns of the names of companions."""
_FOLDERS = ("additional_chat_templates",)
"""Names of folders of companions."""
_WEIGHTS = (
    "*.safetensors", "*.safetensors.index*.json", "*.bin", "*.bin.index*.json", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5",
    "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.npz", "*.distcp",
)  # fmt: skip
_MAX_BYTES = 64 * 1024 * 1024
"""Of a file or folder in a model's folder that has no name of a companion."""
_MAX_ENTRIES = 10_000
_BLOB = re.compile(r"(\.\./)+blobs/[0-9a-f]+")
"""Links of the hub's cache."""

_Place = Path | tuple[Folder, str]
"""A local file, or a file's name in a folder of checkpoints."""


@dataclass
class Companions:
    """Files that belong to a checkpoint's weights, by path inside the target."""

    files: dict[str, _Place] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Files that are not copied, with the reason if it is not obvious."""

    @classmethod
    def of(cls, source: ArraySource, *, with_parent: bool) -> Companions:
        """Return the files of `source`; `with_parent` adds the folder above other software's. See [Note: which files]."""
        found = cls()
        if isinstance(source, CheckpointReader):
            if source.folder.is_local:
                found.add_named(source.folder.path.parent)
            else:
                found.add_folder(source.folder.parent, is_companion)
            own = {METADATA_FILE, RECORD_FILE, MANIFEST_FOLDER, *(name.partition("/")[0] for name in source.arrays)}
            own |= {folder.partition("/")[0] for folder in source.documents["consolidated_metadata"]["metadata"]}
            found.add_folder(source.folder, lambda name: name not in own)
        elif (path := Path(source.location)).is_dir():
            if source.weight_files:
                found.add_model(path, source.weight_files)
            else:
                for place in (path.parent, path) if with_parent else (path,):
                    found.add_named(place)
        return found

    def add_named(self, folder: Path) -> None:
        """Add the files of a local folder with names of `COMPANIONS`."""
        for entry in _entries(folder):
            if is_companion(entry.name):
                self.files[entry.name] = entry
            elif entry.name in _FOLDERS and entry.is_dir():
                self._add_all(entry.name, _walk(entry))

    def add_model(self, folder: Path, weight_files: Collection[str]) -> None:
        """Add the files of a model's folder, whose weights are in `weight_files`."""
        modules = _modules(folder)
        for entry in _entries(folder):
            name = entry.name
            if name in weight_files:
                continue
            if entry.is_dir():
                inside = {} if name.startswith(".") else _walk(entry)
                is_plain = inside and not any(map(_is_weights, inside)) and _bytes_of(inside.values()) <= _MAX_BYTES
                if name in modules or name in _FOLDERS or is_plain:
                    self._add_all(name, inside)
                else:
                    self.skipped.append(f"{name}/")
            elif is_companion(name) or not (
                name.startswith(".") or _is_weights(name) or _bytes_of([entry]) > _MAX_BYTES
            ):
                self.files[name] = entry
            else:
                self.skipped.append(name)

    def add_folder(self, folder: Folder, chosen: Callable[[str], bool], inside: str = "") -> None:
        """Add the files named `chosen` of a folder of checkpoints, or of a checkpoint in it, except links."""
        entries = folder.entries()
        for name in filter(chosen, sorted(entries.files)):
            if not inside and _is_weights(name):  # the arrays again; a module's arrays are in its folder
                self.skipped.append(name)
            else:
                self.files[inside + name] = folder, name
        for name in filter(chosen, sorted(entries.folders)) if chosen is not is_companion else ():
            if folder.is_local and (folder.path / name).is_symlink():
                self.skipped.append(f"{inside}{name}/ (a link)")
            else:
                self.add_folder(folder.child(name), lambda _: True, f"{inside}{name}/")

    def _add_all(self, name: str, inside: dict[str, Path]) -> None:
        self.files |= {f"{name}/{path}": file for path, file in inside.items()}

    def copy(self, target: Path, files: Files, reserved: Collection[str] = ()) -> Companions:
        """Copy the files into `target`, durably, and return this; files that exist, have a name of `reserved` or cannot be
        read are skipped. Raises StorageError if one cannot be written."""
        folders: set[Path] = set()
        for name, source in self.files.items():
            place = target / name
            if name.partition("/")[0] in reserved:
                self.skipped.append(f"{name} (a checkpoint has its own file of that name)")
            elif not place.exists():
                try:
                    content = _opened(source)
                except (OSError, CorruptionError) as error:
                    self.skipped.append(f"{name} ({_reason(error)})")
                    continue
                with content:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with place.open("xb") as out:
                        shutil.copyfileobj(content, out, 1024 * 1024)
                files.sync_file(place)
                folders |= {place.parent} - {target}
                self.copied.append(_shown(name, source))
        for folder in sorted(folders):
            files.sync_folder(folder)
        return self

    def copy_into_checkpoint(self, folder: Path, files: Files) -> None:
        """Copy the files, as `copy` does, into a tag's folder that is complete but not committed."""
        self.copy(folder, files, {RECORD_FILE, ABORT_FILE, *os.listdir(folder)})

    @property
    def text(self) -> str:
        """The copied files, for the end of a line; empty without any."""
        return f", with {', '.join(self.copied)}" if self.copied else ""


def companions(folder: Folder) -> list[str]:
    """Return the names of config and tokenizer files in a folder."""
    return sorted(filter(is_companion, folder.entries().files))


def is_companion(name: str) -> bool:
    """Return whether a file of that name is the config or tokenizer of a model."""
    return any(fnmatchcase(name, pattern) for pattern in COMPANIONS)


def _is_weights(path: str) -> bool:
    return any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in _WEIGHTS)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _walk(folder: Path) -> dict[str, Path]:
    """Return the files anywhere below a folder by path inside it; links are followed, but to no folder twice."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or len(found) > _MAX_ENTRIES:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found |= {os.path.relpath(os.path.join(place, name), folder): Path(place, name) for name in sorted(names)}
    return found


def _bytes_of(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue  # it is reported when it cannot be opened
    return total


def _modules(folder: Path) -> set[str]:
    """Return the folders that the model's `modules.json`, from sentence-transformers, names."""
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        return {str(module["path"]).partition("/")[0] for module in listed} - {""}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _opened(source: _Place) -> BinaryIO:
    """Open a file; a local one may be a link."""
    if isinstance(source, tuple):
        folder, name = source
        if folder.is_local and (folder.path / name).is_symlink():
            raise CorruptionError("a link, which may lead out of the checkpoint")
        return io.BytesIO(folder.read_small(name))
    file = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would block
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptionError("not a file")
    return os.fdopen(file, "rb")


def _reason(error: OSError | CorruptionError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return "a link to a missing file"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _shown(name: str, source: _Place) -> str:
    """Return the name of a file, with the target if it is a link, but not one of the hub's cache."""
    if isinstance(source, tuple) or not source.is_symlink() or _BLOB.fullmatch(os.readlink(source)):
        return name
    return f"{name} (a link to {os.readlink(source)})"
