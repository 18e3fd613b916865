"""The parts of the training state that a rank holds, by ZeRO stage. Pure.

[Note: copies]
With `mics_shard_size` k of N ranks there are N / k copies of the shards, each over a group of k consecutive ranks. A
shard of a copy is N / k neighbouring shards of the grid over all ranks, so that the cuts are those of a run without copies:
chunks, updates and sums of squares have the same bits. Of its shards, a rank reduces the one with the number of its
group, and adds up the squares of that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from zstore.format import Grid, make_grid


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The parts of the training state of which each rank holds only its own rows, by ZeRO stage. A stage is data, and this
    is all of it.

    At world size 1 only `parameters` may be true: if they are offloaded, "its own rows" are all of them, and they are
    gathered from their store.
    """

    world_size: int
    """Ranks that share the state."""
    optimizer_state: bool
    """Masters and the optimizer's slots (stages 1 to 3)."""
    gradients: bool
    """Gradients, reduced to their owners during every backward (stages 2 and 3); else once a step, whole."""
    parameters: bool
    """Parameters, gathered by unit for forward and backward (stage 3)."""
    copy_size: int
    """Ranks that hold one copy of the shards: all, or with `mics_shard_size` groups of so many consecutive ones."""

    @staticmethod
    def of_stage(
        stage: int, world_size: int, *, offloads_parameters: bool = False, copy_size: int | None = None
    ) -> Sharding:
        """Return the sharding of `stage` (0 to 3) over `world_size` ranks, in copies over `copy_size` each (None: one)."""
        many = world_size > 1
        return Sharding(
            world_size=world_size,
            copy_size=copy_size or world_size,
            optimizer_state=many and stage >= 1,
            gradients=many and stage >= 2,
            parameters=stage >= 3 and (many or offloads_parameters),
        )

    @property
    def num_copies(self) -> int:
        """Copies of the shards."""
        return self.world_size // self.copy_size

    def state_grid(self, stored_shape: tuple[int, ...]) -> Grid:
        """Return how the state of a parameter of `stored_shape` is cut over the ranks of a copy. See [Note: copies]."""
        if not self.optimizer_state:
            return make_grid(stored_shape, 1)
        grid = make_grid(stored_shape, self.world_size)
        return grid if self.num_copies == 1 else grid.joined(self.num_copies)

    def state_shard(self, rank: int) -> int:
        """Return the number of the shard of the state that `rank` holds."""
        return rank % self.copy_size if self.optimizer_state else 0
