"""Zarr metadata for xarray: names of dimensions, which checkpoints do not have, and arrays in their own shape. Pure.

[Note: names of dimensions]
xarray opens an array only if its `zarr.json` names the dimensions, and a dataset only if a name has one size in all of it. So
a dimension is called after its size: `n192`, and `n192_1` if the array has one of that size already. xarray also wants
the metadata of all arrays below the group that it opens: a checkpoint has that at its root, each group gets its part of it.

[Note: unfolded arrays]
An array whose files have two extents instead of more, or one instead of none, is shown as one of plain chunks, each of
elements that are next to each other, which the service reads from the shard files as they are asked for: chunks of these end
anywhere in the array's own extents.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...format.arrays import numpy_dtype

_CHUNK_BYTES = 4 * 1024 * 1024
_KEY = re.compile(r"c((?:\.\d{1,18})*)", re.ASCII)


def name_dimensions(shape: list[int]) -> list[str]:
    """Return a name for each dimension of an array."""
    seen: Counter[int] = Counter()
    names = []
    for size in shape:
        names.append(f"n{size}_{seen[size]}" if seen[size] else f"n{size}")
        seen[size] += 1
    return names


def named(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `zarr.json` with names of dimensions and in its array's own shape, in the metadata of arrays below a group too.
    Names that are there stay."""
    found = dict(unfolded(document))
    shape = found.get("shape")
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        found["dimension_names"] = found.get("dimension_names") or name_dimensions(shape)
    inner = _inner(document)
    if inner is not None:
        entries = {path: named(entry) if isinstance(entry, dict) else entry for path, entry in inner.items()}
        found["consolidated_metadata"] = {**document["consolidated_metadata"], "metadata": entries}
    return found


def is_bare_group(document: Mapping[str, Any]) -> bool:
    """Return whether a `zarr.json` is that of a group without the metadata of its children."""
    return document.get("node_type") == "group" and "consolidated_metadata" not in document


def below(root: Mapping[str, Any], folder: str) -> dict[str, Any] | None:
    """Return the `consolidated_metadata` of the group in `folder`, out of the root's; None if the root has none."""
    inner = _inner(root)
    if inner is None:
        return None
    start = f"{folder}/"
    part = {path.removeprefix(start): entry for path, entry in inner.items() if path.startswith(start)}
    return {**root["consolidated_metadata"], "metadata": part}


def _inner(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of all below a group, by path."""
    consolidated = document.get("consolidated_metadata")
    inner = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    return inner if isinstance(inner, dict) else None


def unfolded(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `zarr.json` of an array in its own shape; any other document as it is."""
    attributes = document.get("attributes")
    own = attributes.get("zstore") if isinstance(attributes, dict) else None
    shape = own.get("shape") if isinstance(own, dict) else None
    if not isinstance(shape, list) or not all(type(n) is int for n in shape) or shape == document.get("shape"):
        return document
    try:
        itemsize = numpy_dtype(str(document.get("data_type"))).itemsize
    except ValueError:
        return document
    chunk_grid = {"name": "regular", "configuration": {"chunk_shape": list(_box(shape, itemsize))}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    return {**document, "shape": shape, "chunk_grid": chunk_grid, "codecs": codecs}


def chunk_range(shape: Sequence[int], itemsize: int, key: str) -> tuple[int, int, int] | None:
    """Return (first, stop, numel) of the flat elements of the chunk `key`, of which it has `numel` with the padding behind
    them; None if there is no such chunk."""
    found = _KEY.fullmatch(key)
    places = [] if found is None else [int(text) for text in found[1].split(".")[1:]]
    if found is None or len(places) != len(shape):
        return None
    box = _box(shape, itemsize)
    first, numel = 0, 1
    for i, (place, part, extent) in enumerate(zip(places, box, shape, strict=True)):
        if place * part >= extent:
            return None
        first += place * part * math.prod(shape[i + 1 :])
        numel *= min(part, extent - place * part)
    return first, first + numel, math.prod(box)


def _box(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the extents of a chunk: all of the last ones, a part of one before them, 1 of those before that."""
    box: list[int] = []
    room = _CHUNK_BYTES // itemsize
    for extent in reversed(shape):
        box.append(max(1, min(extent, room)))
        room = room // extent if box[-1] == extent else 0
    return tuple(reversed(box))
