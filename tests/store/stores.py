"""Arrays of random values for tests of a whole store."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from zstore.format import ArraySpec, make_grid
from zstore.store import Store, TierName, Tile
from zstore.testing.oracle import random_values

Array = npt.NDArray[Any]

LARGE = (600, 1000)
"""2.4 MB in fp32: rests on disk where that is asked for."""


def create(
    store: Store,
    tier: str,
    shape: tuple[int, ...] = LARGE,
    dtype: str = "float32",
    *,
    name: str = "model/w",
    world_size: int = 1,
    shard: int = 0,
) -> Array:
    """Register an array, and return random values for this rank's shard, which the store does not hold yet."""
    spec = ArraySpec(name=name, shape=shape, dtype=dtype)
    store.create(spec, grid=make_grid(spec.stored_shape, world_size), shard=shard, tier=cast("TierName", tier))
    return random_values(dtype, store.local(name).valid_numel, seed=len(store.names()))


def flip(tiles: Iterable[Tile]) -> None:
    for tile in tiles:
        for view in tile.views:
            view.view(np.uint8)[:] = ~view.view(np.uint8)


def other_than(values: Array) -> Array:
    return cast(Array, (~values.view(np.uint8)).view(values.dtype))


def turn_in_place(values: Array) -> None:
    """Change every element in place: any order of applying it to parts gives the same."""
    if values.dtype == np.bool_:
        np.logical_not(values, out=values)
    else:
        as_bytes = values.view(np.uint8)
        as_bytes += np.uint8(3)
