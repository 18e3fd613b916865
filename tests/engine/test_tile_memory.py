"""Tiles of gradients are cast in memory that is used again."""

from __future__ import annotations

import pytest
import torch

from zstore.engine.runtime.device import GradientTiles, Scratch, Streams, Transfers
from zstore.io.links import LinkCounters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_tile_of_a_narrow_gradient_is_cast_in_the_memory_of_the_one_before(dtype: torch.dtype) -> None:
    rows = torch.linspace(-3, 3, 160).to(dtype)
    whole, kept = rows.float(), rows.clone()
    tiles, beside = GradientTiles(Transfers(Streams(), LinkCounters()), rows, Scratch()), torch.zeros(64)
    places = set()
    for first in (0, 64, 128):
        tile = tiles.tile(first, min(first + 64, 160), beside)
        assert tile.dtype == torch.float32
        assert torch.equal(tile, whole[first : first + 64])
        tile.mul_(2)
        places.add(tile.data_ptr())
    assert len(places) == 1
    assert torch.equal(rows, kept)


def test_without_such_memory_tiles_are_apart_and_fp32_is_not_copied() -> None:
    transfers, beside = Transfers(Streams(), LinkCounters()), torch.zeros(8)
    narrow = GradientTiles(transfers, torch.ones(16, dtype=torch.bfloat16))
    one, other = narrow.tile(0, 8, beside), narrow.tile(8, 16, beside)
    assert one.data_ptr() != other.data_ptr()
    rows = torch.ones(16)
    assert GradientTiles(transfers, rows, Scratch()).tile(8, 16, beside).data_ptr() == rows[8:].data_ptr()
