"""Names of dimensions in Zarr metadata, which xarray needs and checkpoints do not have. Pure.

[Note: names of dimensions]
xarray opens an array only if its `zarr.json` names the dimensions, and a dataset only if a name has one size in all of it. So
a dimension is called after its size: `n192`, and `n192_1` if the array has one of that size already. xarray also wants
the metadata of all arrays below the group that it opens: a checkpoint has that at its root, each group gets its part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .unfolded import unfolded


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
