"""Arrays for xarray in their own shape, whose files have two extents instead of more, or one instead of none. Pure.

[Note: unfolded arrays]
Such an array is shown as one of plain chunks, each of elements that are next to each other, which the service reads from the
shard files as they are asked for: chunks of these end anywhere in the array's own extents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...format.arrays import numpy_dtype

_CHUNK_BYTES = 4 * 1024 * 1024
_KEY = re.compile(r"c((?:\.\d{1,18})*)", re.ASCII)


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
