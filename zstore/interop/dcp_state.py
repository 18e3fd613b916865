"""The state dicts of torch.distributed.checkpoint: the array of each tensor, and all other entries as JSON. Pure.

[Note: paths]
DCP flattens a nested state dict: an entry's key is its path, joined with dots, and its planner keeps the paths. Here a
tensor of path
    (..., "model", fqn)                                    is `model/<fqn>`
    (fqn,)                                                 is `model/<fqn>`, as torchtitan names its weights
    (..., "optim", "state", fqn, slot)                     is `optimizer/<slot>/<fqn>`, with "optimizer(s)" likewise
    (..., "optim", "state.<fqn>.<slot>")                   is `optimizer/<slot>/<fqn>`, an optimizer that is flattened
and any other is `client/<key>`. If there are several models, or optimizers, the path before the name is a part of the name.
The record keeps each path that `default_path` does not return.

[Note: values]
Numbers, text and containers of them are kept in the record, exactly: a tuple stays a tuple. `bytes` are an array
of uint8. For anything else torch's pickle is kept in an array of uint8, which zstore never unpickles.
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
"""Key of the document in a record's state."""
VERSION = 2
BYTES = "bytes"
"""An opaque array that is the content of a `bytes` object."""
PICKLE = "pickle"
"""An opaque array that is the output of torch.save for an object."""
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_STEP = re.compile(r"step[-_]?0*(\d{1,18})\Z")
_MAX_DEPTH = 24
_MAX_ENTRY_BYTES = 1024 * 1024
"""About the most that the JSON of one entry may take."""
_VALUE_BYTES = 4
_MAX_BITS = 10_000
"""Digits of a whole number: Python writes and reads at most 4300."""


def key_of(path: Path) -> str:
    """Return the key that DCP gives to the entry at `path`."""
    return ".".join(map(str, path))


def step_of(folder_name: str) -> int:
    """Return the training step in the name of a checkpoint's folder, such as `step-100`; 0 for any other name."""
    found = _STEP.search(folder_name)
    return int(found[1]) if found else 0


def name_arrays(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the array of each tensor, by key, given the path of each key. See [Note: paths]."""
    found = {key: _weight(path) or _optimizer_state(path) for key, path in paths.items()}
    roots: defaultdict[bool, set[Path]] = defaultdict(set)
    for root, slot, _ in filter(None, found.values()):
        roots[slot == ""].add(root)
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key, meaning in found.items():
        name = client_array(key)
        if meaning is not None:
            root, slot, fqn = meaning
            fqn = fqn if len(roots[slot == ""]) == 1 else key_of((*root, fqn))
            usual = optimizer_array(slot, fqn) if slot else model_array(fqn)
            name = name if usual in taken else usual
        taken.add(name)
        names[key] = name
    return names


def _weight(path: Path) -> tuple[Path, str, str] | None:
    """Return the root, no slot and the name of a weight; None for any other path."""
    at = path.index("model") + 1 if "model" in path[:-1] else 0
    fqn = path[-1]
    is_weight = len(path) == at + 1 and not any(part in _OPTIMIZERS for part in path[:at])
    return (path[:at], "", fqn) if is_weight and isinstance(fqn, str) and fqn else None


def _optimizer_state(path: Path) -> tuple[Path, str, str] | None:
    """Return the root, the slot and the parameter's name of optimizer state; None for any other path."""
    at = next((at + 1 for at, part in enumerate(path[:-1]) if part in _OPTIMIZERS), 0)
    rest, fqn, slot = path[at:], "", ""
    if not at or "model" in path[:at] or not all(isinstance(part, str) for part in rest):
        return None
    if len(rest) == 3 and rest[0] == "state":
        fqn, slot = map(str, rest[1:])
    elif len(rest) == 1 and str(rest[0]).startswith("state."):
        fqn, _, slot = str(rest[0]).removeprefix("state.").rpartition(".")
    return (path[:at], slot, fqn) if fqn and slot and "/" not in slot else None


def default_path(name: str) -> Path:
    """Return the path of an array without one in the record, as in a checkpoint that DCP did not write."""
    group, _, rest = name.partition("/")
    if group == "optimizer":
        slot, _, fqn = rest.partition("/")
        return (group, "state", fqn, slot)
    return ("model" if group == "buffer" else group, rest)


class NotPlainError(Exception):
    """A value that JSON cannot express."""


def encode_value(value: object) -> Any:
    """Return plain data as JSON: None, bool, int, float, text, bytes, lists, tuples and dicts of them, nothing else.

    Tuples, bytes and dicts with other keys than plain text are objects with one key that begins with `$`. Raises
    NotPlainError; subclasses are not plain, since they would be read as something else, nor are values that are nested deeply
    or take megabytes: a small pickle may contain one list a million times.
    """
    left_bytes = _MAX_ENTRY_BYTES

    def encode(value: Any, depth: int) -> Any:
        nonlocal left_bytes
        kind = type(value)
        left_bytes -= _VALUE_BYTES + (len(value) if kind in (str, bytes) else 0)
        endless = kind is int and value.bit_length() > _MAX_BITS
        if left_bytes < 0 or depth > _MAX_DEPTH or endless:
            raise NotPlainError("too large, or too deeply nested, for the record")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [encode(item, depth + 1) for item in value]
        if kind is tuple:
            return {"$tuple": [encode(item, depth + 1) for item in value]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is dict:
            plain = all(type(key) is str and not key.startswith("$") for key in value)
            pairs = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]
            return dict(pairs) if plain else {"$dict": pairs}
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is not plain data")

    return encode(value, 0)


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` encoded; raises CorruptionError for anything else."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode_value(item) for key, item in value.items()}
    inner = value[mark]
    try:
        if mark == "$tuple":
            return tuple(decode_value(item) for item in inner)
        if mark == "$bytes":
            return base64.b64decode(inner, validate=True)
        if mark == "$dict":
            return {decode_value(key): decode_value(item) for key, item in inner}
    except (TypeError, ValueError, binascii.Error) as error:
        raise CorruptionError(f"a value in the record's `{STATE}` is damaged: {error}") from error
    raise CorruptionError(f"a value in the record's `{STATE}` has the unknown type {mark!r:.50}")


@dataclass(kw_only=True)
class DcpState:
    """The part of the record for torch.distributed.checkpoint, under `state["dcp"]`."""

    paths: dict[str, Path]
    """Array -> path in the nested state dict."""
    values: list[tuple[Path, Any]] = field(default_factory=list)
    """Path and `encode_value` of each entry that is plain data."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Array of uint8 -> `BYTES` or `PICKLE`."""

    @classmethod
    def of(cls, state: Mapping[str, Any], arrays: Iterable[str]) -> DcpState:
        """Return the state of a checkpoint with this `record.state`, which DCP need not have written.

        Raises CorruptionError if it is damaged, CheckpointMismatchError if it is of another version.
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
        whole = isinstance(values, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in values)
        whole = whole and isinstance(opaque, dict) and set(opaque.values()) <= {BYTES, PICKLE}
        if not whole or not isinstance(paths, dict):
            raise CorruptionError(f"the values in the record's `{STATE}` are damaged")
        return cls(
            paths={name: _path(paths[name]) if name in paths else default_path(name) for name in arrays},
            values=[(_path(path), value) for path, value in values],
            opaque=opaque,
        )

    def document(self) -> dict[str, Any]:
        """Return it as JSON, for the record."""
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
