"""The state dicts of torch.distributed.checkpoint: the array of each tensor, and all other entries as JSON. Pure functions.

[Note: paths]
DCP flattens a nested state dict: an entry's key is its path, joined with dots, and its planner stores the paths. A tensor
with the path
    (..., "model", fqn)                                    is `model/<fqn>`
    (fqn,)                                                 is `model/<fqn>`, as torchtitan names its weights
    (..., "optim", "state", fqn, slot)                     is `optimizer/<slot>/<fqn>`, with "optimizer(s)" likewise
    (..., "optim", "state.<fqn>.<slot>")                   is `optimizer/<slot>/<fqn>`, for a flattened optimizer
and any other tensor is `client/<key>`. If there are several models or optimizers, the path before the name is part of the
name. The record stores each path that differs from `default_path`.

[Note: values]
Numbers, text and containers of them are stored exactly in the record: a tuple stays a tuple. `bytes` are an array of
uint8. For anything else, torch's pickle is stored in an array of uint8, which zstore never unpickles.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointMismatchError, CorruptionError
from ..format.arrays import client_array, model_array, optimizer_array

Path = tuple[str | int, ...]

STATE = "dcp"
"""Key of the DCP document in a record's state."""
VERSION = 2
BYTES = "bytes"
"""An opaque array with the content of a `bytes` object."""
PICKLE = "pickle"
"""An opaque array with the output of torch.save for an object."""
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_STEP = re.compile(r"step[-_]?0*(\d{1,18})\Z")
_MAX_DEPTH = 24
_MAX_ENTRY_BYTES = 1024 * 1024
"""Approximate maximum size of an entry's JSON."""
_VALUE_BYTES = 4
_MAX_BITS = 10_000
"""Maximum bits of an integer, since Python converts at most 4300 digits."""


def key_of(path: Path) -> str:
    """Return DCP's key for the entry at `path`."""
    return ".".join(map(str, path))


def step_of(folder_name: str) -> int:
    """Return the training step in the name of a checkpoint's folder, such as `step-100`; 0 for any other name."""
    match = _STEP.search(folder_name)
    return int(match[1]) if match else 0


def name_arrays(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the array of each tensor, by key, given the path of each key. See [Note: paths]."""
    meanings = {key: _weight(path) or _optimizer_state(path) for key, path in paths.items()}
    roots: defaultdict[bool, set[Path]] = defaultdict(set)
    for root, slot, _ in filter(None, meanings.values()):
        roots[slot == ""].add(root)
    names: dict[str, str] = {}
    used: set[str] = set()
    for key, meaning in meanings.items():
        name = client_array(key)
        if meaning is not None:
            root, slot, fqn = meaning
            fqn = fqn if len(roots[slot == ""]) == 1 else key_of((*root, fqn))
            default = optimizer_array(slot, fqn) if slot else model_array(fqn)
            name = name if default in used else default
        used.add(name)
        names[key] = name
    return names


def _weight(path: Path) -> tuple[Path, str, str] | None:
    """Return the root, an empty slot and the name of a weight; None for any other path."""
    start = path.index("model") + 1 if "model" in path[:-1] else 0
    fqn = path[-1]
    is_weight = len(path) == start + 1 and not any(part in _OPTIMIZERS for part in path[:start])
    return (path[:start], "", fqn) if is_weight and isinstance(fqn, str) and fqn else None


def _optimizer_state(path: Path) -> tuple[Path, str, str] | None:
    """Return the root, the slot and the parameter's name of optimizer state; None for any other path."""
    start = next((start + 1 for start, part in enumerate(path[:-1]) if part in _OPTIMIZERS), 0)
    tail, fqn, slot = path[start:], "", ""
    if not start or "model" in path[:start] or not all(isinstance(part, str) for part in tail):
        return None
    if len(tail) == 3 and tail[0] == "state":
        fqn, slot = map(str, tail[1:])
    elif len(tail) == 1 and str(tail[0]).startswith("state."):
        fqn, _, slot = str(tail[0]).removeprefix("state.").rpartition(".")
    return (path[:start], slot, fqn) if fqn and slot and "/" not in slot else None


def default_path(name: str) -> Path:
    """Return the path of an array that has none in the record, as in a checkpoint that DCP did not write."""
    group, _, name_in_group = name.partition("/")
    if group == "optimizer":
        slot, _, fqn = name_in_group.partition("/")
        return (group, "state", fqn, slot)
    return ("model" if group == "buffer" else group, name_in_group)


class NotPlainError(Exception):
    """A value that JSON cannot express."""


def encode_value(value: object) -> Any:
    """Return plain data as JSON: None, bool, int, float, str, bytes, and lists, tuples and dicts of them, nothing else.

    Tuples, bytes and dicts with keys other than plain text are objects with a single key that starts with `$`. Raises
    NotPlainError; subclasses are not plain, since they would be read as another type, nor are values that are nested deeply
    or take megabytes, since a small pickle may contain the same list a million times.
    """
    remaining_bytes = _MAX_ENTRY_BYTES

    def encode(value: Any, depth: int) -> Any:
        nonlocal remaining_bytes
        kind = type(value)
        remaining_bytes -= _VALUE_BYTES + (len(value) if kind in (str, bytes) else 0)
        is_huge = kind is int and value.bit_length() > _MAX_BITS
        if remaining_bytes < 0 or depth > _MAX_DEPTH or is_huge:
            raise NotPlainError("too large or too deeply nested for the record")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [encode(item, depth + 1) for item in value]
        if kind is tuple:
            return {"$tuple": [encode(item, depth + 1) for item in value]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is dict:
            has_plain_keys = all(type(key) is str and not key.startswith("$") for key in value)
            pairs = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]
            return dict(pairs) if has_plain_keys else {"$dict": pairs}
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is not plain data")

    return encode(value, 0)


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` encoded. Raises CorruptionError for anything else."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode_value(item) for key, item in value.items()}
    inner = value[tag]
    try:
        if tag == "$tuple":
            return tuple(decode_value(item) for item in inner)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
        if tag == "$dict":
            return {decode_value(key): decode_value(item) for key, item in inner}
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptionError(f"a value in the record's `{STATE}` is damaged: {error}") from error
    raise CorruptionError(f"a value in the record's `{STATE}` has the unknown type {tag!r:.50}")


@dataclass(kw_only=True)
class DcpState:
    """The part of the record for torch.distributed.checkpoint, in `state["dcp"]`."""

    paths: dict[str, Path]
    """Array -> path in the nested state dict."""
    values: list[tuple[Path, Any]] = field(default_factory=list)
    """Path and encoded value of each entry that is plain data."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Array of uint8 -> `BYTES` or `PICKLE`."""

    @classmethod
    def of(cls, state: Mapping[str, Any], arrays: Iterable[str]) -> DcpState:
        """Return the DCP state of a checkpoint with this `record.state`, even if DCP did not write it.

        Raises CorruptionError if it is damaged, CheckpointMismatchError if it has another version.
        """
        document = state.get(STATE, {})
        if not isinstance(document, dict):
            raise CorruptionError(f"expected an object as the record's `{STATE}`, got {document!r:.100}")
        if document and document.get("version") != VERSION:
            raise CheckpointMismatchError(
                f"expected version {VERSION} of the record's `{STATE}`, got {document.get('version')!r:.50}: another release "
                "of zstore wrote the checkpoint; save or convert it again with this one"
            )
        paths, values, opaque = document.get("paths", {}), document.get("values", []), document.get("opaque", {})
        is_valid = isinstance(values, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in values)
        is_valid = is_valid and isinstance(opaque, dict) and set(opaque.values()) <= {BYTES, PICKLE}
        if not is_valid or not isinstance(paths, dict):
            raise CorruptionError(f"the values in the record's `{STATE}` are damaged")
        return cls(
            paths={name: _path(paths[name]) if name in paths else default_path(name) for name in arrays},
            values=[(_path(path), value) for path, value in values],
            opaque=opaque,
        )

    def document(self) -> dict[str, Any]:
        """Return the state as JSON for the record."""
        ordered = sorted(self.values, key=lambda pair: key_of(pair[0]))
        return {
            "version": VERSION,
            "paths": {n: list(path) for n, path in sorted(self.paths.items()) if path != default_path(n)},
            "values": [[list(path), value] for path, value in ordered],
            "opaque": dict(sorted(self.opaque.items())),
        }


def _path(value: object) -> Path:
    if not isinstance(value, list) or not all(type(part) in (str, int) for part in value):
        raise CorruptionError(f"expected a path in the record's `{STATE}`, got {value!r:.100}")
    return tuple(value)
