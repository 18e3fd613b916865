"""Ranks in groups: who is in which, what their collectives move, and bytes counted by whether they leave the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zstore.ranks.world import World, make_groups
from zstore.testing.ranks import run_ranks


def _in_groups_of_two(rank: int) -> dict[str, Any]:
    world = World.current()
    within, between = make_groups(world, 2)
    second = world.second()
    found: dict[str, Any] = {}
    mine = torch.full((3,), float(rank))
    for name, one in (("world", second), ("within", within), ("between", between)):
        everyone = torch.empty(3 * one.world_size)
        one.all_gather(everyone, mine)
        told = torch.full((1,), float(rank))
        one.broadcast(told, one.world_size - 1)
        found[name] = [one.rank, everyone[::3].tolist(), told.item()]
    moved = torch.full((2,), float(rank))
    if rank in (1, 2):
        world.transfer(moved, 1, 2)
    found["links"] = {name: link.bytes for name, link in world.links.statistics().items() if "group" in name}
    found["sent"] = sum(world.sent_bytes.values())
    for one in (second, within, between):
        one.release()
    return found


def test_groups_are_of_consecutive_ranks_and_bytes_are_counted_by_reach() -> None:
    for rank, found in enumerate(run_ranks(_in_groups_of_two, 4)):
        group, place = divmod(rank, 2)
        near, far = [2.0 * group, 2.0 * group + 1], [float(place), place + 2.0]
        assert found["world"] == [rank, [0.0, 1.0, 2.0, 3.0], 3.0]
        assert found["within"] == [place, near, near[-1]]
        assert found["between"] == [group, far, far[-1]]
        # Gathers of 12 bytes to 3, 1 and 1 others, broadcasts of 4 bytes from the last of each, 8 bytes from 1 to 2.
        within = 12 + 12 + (4 if rank == 3 else 0) + (4 if place == 1 else 0)
        between = 24 + 12 + (8 if rank == 3 else 0) + (4 if group == 1 else 0) + (8 if rank == 1 else 0)
        assert found["links"] == {"within_group": within, "between_groups": between}
        assert found["sent"] == within + between


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 2"):
        make_groups(World(), 2)
