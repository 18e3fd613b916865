"""The names of torch.distributed.checkpoint and ours, both ways. Pure.

[Note: paths]
DCP flattens a nested state dict: an entry's key is its path, joined with dots, and its planner keeps the paths. Here a
tensor of path
    (..., "model", fqn)                                    is `model/<fqn>`
    (fqn,)                                                 is `model/<fqn>`, as torchtitan names its weights
    (..., "optim", "state", fqn, slot)                     is `optimizer/<slot>/<fqn>`, with "optimizer(s)" likewise
    (..., "optim", "state.<fqn>.<slot>")                   is `optimizer/<slot>/<fqn>`, an optimizer that is flattened
and any other is `client/<key>`. The part before the name is a root. The record keeps the root of the weights and
that of the optimizer; if there are several, and for all others, it keeps the path of each array.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CorruptionError
from ..format.arrays import client_array, model_array, optimizer_array

Path = tuple[str | int, ...]

VERSION = 1
STATE = "dcp"
"""Key of the document in a record's state."""
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_STEP = re.compile(r"step[-_]?0*(\d{1,18})\Z")
_NESTED, _FLAT = "nested", "flat"


@dataclass(frozen=True)
class _Meaning:
    """The meaning of a path."""

    group: str
    root: Path = ()
    form: str = _NESTED
    slot: str = ""
    fqn: str = ""


def _meaning(path: Path) -> _Meaning | None:
    """Return the meaning of the path of a tensor; None if it is neither weight nor optimizer state, or oddly nested."""
    for at, part in enumerate(path[:-1]):
        root, rest = path[: at + 1], path[at + 1 :]
        if part == "model":
            fqn = rest[0]
            return _Meaning("model", root, fqn=fqn) if len(rest) == 1 and isinstance(fqn, str) and fqn else None
        if part in _OPTIMIZERS:
            return _optimizer_meaning(root, rest)
    if len(path) == 1 and isinstance(path[0], str) and path[0]:
        return _Meaning("model", fqn=path[0])
    return None


def _optimizer_meaning(root: Path, rest: Path) -> _Meaning | None:
    texts = [part for part in rest if isinstance(part, str)]
    form, fqn, slot = _NESTED, "", ""
    if len(texts) == len(rest) == 3 and texts[0] == "state":
        _, fqn, slot = texts
    elif len(texts) == len(rest) == 1 and texts[0].startswith("state."):
        form = _FLAT
        fqn, _, slot = texts[0].removeprefix("state.").rpartition(".")
    return _Meaning("optimizer", root, form, slot, fqn) if fqn and slot and "/" not in slot else None


def key_of(path: Path) -> str:
    """Return the key that DCP gives to the entry at `path`."""
    return ".".join(map(str, path))


def step_of(folder_name: str) -> int:
    """Return the training step in the name of a checkpoint's folder, such as `step-100`; 0 for any other name."""
    found = _STEP.search(folder_name)
    return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True)
class Names:
    """Which array each tensor of a state dict is; see [Note: paths]."""

    arrays: dict[str, str] = field(default_factory=dict)
    """Key -> array."""
    model: Path | None = None
    optimizer: Path | None = None
    form: str = _NESTED
    paths: dict[str, Path] = field(default_factory=dict)
    """Array -> path, of those that the roots do not give."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON, for the record."""
        return {
            "version": VERSION,
            "model": None if self.model is None else list(self.model),
            "optimizer": None if self.optimizer is None else list(self.optimizer),
            "optimizer_form": self.form,
            "paths": {name: list(path) for name, path in sorted(self.paths.items())},
        }


def name_arrays(paths: Mapping[str, Path]) -> Names:
    """Return the arrays' names for tensors, given the path of each key."""
    meanings = {key: _meaning(path) for key, path in paths.items()}
    roots = Counter((p.group, p.root, p.form) for p in meanings.values() if p is not None)
    alone = {group: [key for key in roots if key[0] == group] for group in ("model", "optimizer")}
    model, optimizer = (alone[g][0] if len(alone[g]) == 1 else None for g in ("model", "optimizer"))
    names = Names(
        model=model and model[1], optimizer=optimizer and optimizer[1], form=optimizer[2] if optimizer else _NESTED
    )
    taken: set[str] = set()
    for key, path in paths.items():
        meaning = meanings[key]
        name, plain = _name(key, meaning, meaning is not None and len(alone[meaning.group]) == 1)
        if name in taken:
            name, plain = client_array(key), False
        taken.add(name)
        names.arrays[key] = name
        if not plain:
            names.paths[name] = path
    return names


def _name(key: str, meaning: _Meaning | None, alone: bool) -> tuple[str, bool]:
    """Return the array's name, and whether the root alone gives the path back."""
    if meaning is None:
        return client_array(key), False
    fqn = meaning.fqn if alone else key_of((*meaning.root, meaning.fqn))
    return (model_array(fqn) if meaning.group == "model" else optimizer_array(meaning.slot, fqn)), alone


def paths_of(document: Mapping[str, Any], arrays: Iterable[str]) -> dict[str, Path]:
    """Return the path of each array of a checkpoint, given `record.state["dcp"]` (empty if it has none).

    Raises CorruptionError for a document of another kind.
    """
    kept = {name: path_from_json(path) for name, path in _mapping(document.get("paths", {})).items()}
    model = path_from_json(document.get("model") if document.get("model") is not None else ["model"])
    optimizer = path_from_json(document.get("optimizer") if document.get("optimizer") is not None else ["optimizer"])
    flat = document.get("optimizer_form") == _FLAT
    found: dict[str, Path] = {}
    names = dict.fromkeys(arrays)
    for name in names:
        group, _, rest = name.partition("/")
        if name in kept:
            found[name] = kept[name]
        elif group in ("model", "buffer"):
            found[name] = (*model, rest)
        elif group == "optimizer":
            slot, _, fqn = rest.partition("/")
            found[name] = (*optimizer, f"state.{fqn}.{slot}") if flat else (*optimizer, "state", fqn, slot)
        else:
            found[name] = (group, rest)
    return found


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptionError(f"expected an object in the record's `{STATE}`, got {value!r:.100}")
    return value


def path_from_json(value: object) -> Path:
    """Return a path that was written as JSON; raises CorruptionError for anything else."""
    if not isinstance(value, list) or not all(type(part) in (str, int) for part in value):
        raise CorruptionError(f"expected a path in the record's `{STATE}`, got {value!r:.100}")
    return tuple(value)
