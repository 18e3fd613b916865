"""Ranks in groups of consecutive ones: a machine's, or those that share one copy of the training state.

[Note: groups]
With groups of k, rank r is member r % k of group r // k. `within` is the world of its group, `between` that of the ranks with
its place in every group, in the order of the groups. A group may have any number of ranks; k is best the number of devices with
a fast link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as torch_dist

from .world import World


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's two worlds beside that of all ranks. See [Note: groups]."""

    within: World
    """The ranks of this rank's group."""
    between: World
    """The ranks with this rank's place in all groups."""

    def release(self) -> None:
        """Destroy the process groups, once no collective on them is under way; a second call does nothing."""
        self.within.release()
        self.between.release()


def make_groups(world: World, size: int) -> Groups:
    """Return the groups of `size` ranks, which divides the world size (a collective).

    From now on `world`, worlds made of it later, and the groups count the bytes they send as `within_group` or
    `between_groups`.
    """
    if size < 1 or world.world_size % size:
        raise ValueError(f"groups of {size} ranks cannot be made of {world.world_size}")
    if world.group is not None:
        raise ValueError("groups are made of all ranks, on the default process group")
    world.near_ranks = size - 1
    num_groups = world.world_size // size
    within = [range(first, first + size) for first in range(0, world.world_size, size)]
    between = [range(first, world.world_size, size) for first in range(size)]
    groups = Groups(
        within=_world_of(world, within, rank=world.rank % size, size=size, near_ranks=size - 1),
        between=_world_of(world, between, rank=world.rank // size, size=num_groups, near_ranks=0),
    )
    world.know_connections()
    return groups


def _world_of(world: World, groups: Sequence[range], *, rank: int, size: int, near_ranks: int) -> World:
    """Return the one of `groups` with this rank; all ranks make them in the same order."""
    if size == 1:
        return replace(world, rank=0, world_size=1, near_ranks=0)
    made = [torch_dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in groups]
    mine = next(group for ranks, group in zip(groups, made, strict=True) if world.rank in ranks)
    return replace(world, rank=rank, world_size=size, group=mine, near_ranks=near_ranks)
