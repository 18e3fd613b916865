"""Which of a checkpoint's weights are meant: by patterns of their names, and without those that were frozen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint.reader import ArraySource
from ..errors import CheckpointMismatchError


def choose(names: Iterable[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Return those of `names` that match a pattern of `include` (none: all), and none of `exclude`, in their order.

    A pattern is a name, which means that one alone, or has `*`, `?` and `[...]` as in a shell; `*` matches dots too.
    Raises CheckpointMismatchError for a pattern that matches no name: it is a mistake more often than not.
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
    """Return the parameters that the optimizer did not train, by the record or by the optimizer's state.

    Raises CheckpointMismatchError if neither is there, so that all would look frozen.
    """
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
    """Return the parameters for which the engine's part of a record has step counts."""
    scalars = engine.get("scalars") if isinstance(engine, dict) else None
    return {name for name in scalars if isinstance(name, str)} if isinstance(scalars, dict) else set()
