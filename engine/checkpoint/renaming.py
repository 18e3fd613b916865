"""A checkpoint under other names: the arrays of a source, as the model calls its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from zstore.checkpoint import ABSENT_KEY, BASE_KEY, ArraySource, ReadStatistics
from zstore.errors import UsageError
from zstore.format import buffer_array, model_array
from zstore.io import Priority

Names = Mapping[str, str | None] | Callable[[str], str | None]
"""Names of parameters and buffers in a checkpoint -> their names in the model, None for those to leave out. A mapping may
have some of them: the others keep theirs."""


class Renamed(ArraySource):
    """`source`, whose parameters, their optimizer state, and buffers are called as `names` says.

    A weight under the name of one of `buffers` is that buffer. Raises UsageError for two of one name, for a name in a
    mapping that the checkpoint does not have, and for values that are no names. `source` stays the caller's.
    """

    def __init__(self, source: ArraySource, names: Names, buffers: Collection[str] = ()) -> None:
        super().__init__(source.location, source.tag, source.record, source.resources)
        self.kind, self.notes, self.is_remote = source.kind, source.notes, source.is_remote
        self._source = source
        found = {name: _parts(name) for name in source.arrays}
        named = {name for _, name in found.values() if name} | set(source.record.absent_parameters)
        self._new = _renamed(named, names, source.location)
        self.left_out: list[str] = []
        """Arrays that were to be left out, as the checkpoint calls them."""
        self._old: dict[str, str] = {}
        for old, (kind, name) in found.items():
            new = self._new[name] if name else ""
            if new is None:
                self.left_out.append(old)
                continue
            is_buffer = kind == "model" and new in buffers and buffer_array(name) not in source.arrays
            group = "buffer" if is_buffer else kind
            whole = f"{group}/{new}" if name else old
            if whole in self._old:
                raise UsageError(
                    f"names: {old!r} and {self._old[whole]!r} of {source.location} would both be {whole!r}"
                )
            self._old[whole] = old
            array = source.arrays[old]
            self.arrays[whole] = replace(array, spec=replace(array.spec, name=whole))
        self.record = replace(source.record, state=self._state(source.record.state))

    def _state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record's state, in which the engine has scalars by parameter."""
        engine = state.get("engine")
        scalars = engine.get("scalars") if isinstance(engine, Mapping) else None
        absent: dict[str, Any] = {ABSENT_KEY: [self._new[name] for name in self._source.record.absent_parameters]}
        base = state.get(BASE_KEY)
        if isinstance(base, Mapping) and isinstance(digests := base.get("digests"), Mapping):
            renamed = {new: one for name, one in digests.items() if (new := self._new.get(name, name)) is not None}
            absent[BASE_KEY] = {**base, "digests": renamed}
        if not isinstance(engine, Mapping) or not isinstance(scalars, Mapping):
            return {**state, **absent}
        named = {self._new.get(name, name): value for name, value in scalars.items()}
        named.pop(None, None)
        return {**state, **absent, "engine": {**engine, "scalars": named}}

    @property
    def read_bytes(self) -> int:
        return self._source.read_bytes

    def reading(self) -> ReadStatistics | None:
        return self._source.reading()

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any], priority: Priority = Priority.READ) -> None:
        self._source.read(self._old.get(name, name), first, stop, out, priority)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        return self._source.rank_state(rank)

    def shard_crcs(self, name: str, shard: int) -> Sequence[int] | None:
        return self._source.shard_crcs(self._old.get(name, name), shard)

    def file_of(self, name: str, shard: int) -> Path | None:
        return self._source.file_of(self._old.get(name, name), shard)


def _parts(array: str) -> tuple[str, str]:
    """Return (the prefix, the parameter's or buffer's name); no name for other arrays."""
    group, _, name = array.partition("/")
    if group == "optimizer":
        slot, _, name = name.partition("/")
        return f"{group}/{slot}", name
    return (group, name) if group in ("model", "buffer") else (array, "")


def _renamed(found: set[str], names: Names, location: str) -> dict[str, str | None]:
    """Return the new name of each name in `found`."""
    chosen: dict[str, Any]
    if isinstance(names, Mapping):
        for name in names:
            if name not in found:
                near = difflib.get_close_matches(str(name), sorted(found), 1, 0.0)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise UsageError(f"names: {location} has no parameter or buffer {name!r}{hint}")
        chosen = {name: names.get(name, name) for name in sorted(found)}
    elif callable(names):
        chosen = {name: names(name) for name in sorted(found)}
    else:
        raise UsageError(f"names: expected a mapping or a function of a name, got {type(names).__name__}")
    for name, new in chosen.items():
        if new is not None and (not isinstance(new, str) or not new):
            raise UsageError(f"names: {name!r} would be called {new!r}; expected a name, or None to leave it out")
    return chosen


def as_the_model_calls_it(source: ArraySource, names: Names | None, buffers: Collection[str]) -> ArraySource:
    """Return `source` under the names of the model, whose buffers are `buffers`; as it is if they are the same.

    Other software's state dicts do not say which of their tensors are buffers. Raises as `Renamed` does.
    """
    if names is not None:
        return Renamed(source, names, buffers)
    if any(model_array(name) in source.arrays and buffer_array(name) not in source.arrays for name in buffers):
        return Renamed(source, str, buffers)
    return source
