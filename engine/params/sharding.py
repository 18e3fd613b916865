"""What a ZeRO stage shards: a stage is data, and this is all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Which parts of the training state each rank holds only its own rows of.

    At world size 1 only `parameters` may be true: where they are offloaded, "its own rows" are all of them, and they are
    gathered from where they rest.
    """

    world_size: int
    """Ranks that share the state."""
    optimizer_state: bool
    """Masters and the optimizer's slots (stages 1 to 3)."""
    gradients: bool
    """Gradients, reduced to their owners during every backward (stages 2 and 3); else once a step, whole."""
    parameters: bool
    """Parameters, gathered by unit for forward and backward (stage 3)."""

    @staticmethod
    def of_stage(stage: int, world_size: int, *, offloads_parameters: bool = False) -> Sharding:
        """Return what `stage` (0 to 3) shards over `world_size` ranks."""
        many = world_size > 1
        return Sharding(
            world_size=world_size,
            optimizer_state=many and stage >= 1,
            gradients=many and stage >= 2,
            parameters=stage >= 3 and (many or offloads_parameters),
        )


class Persistence:
    """Says of one parameter after the other, in the order of the model, whether it keeps its gathered copy (stage 3)."""

    def __init__(self, threshold_numel: int, most_numel: int | None) -> None:
        self._threshold_numel = threshold_numel
        self._left_numel = most_numel

    def keeps(self, numel: int) -> bool:
        """Return whether a parameter of `numel` elements is below the threshold, and its copy within what is left."""
        if numel >= self._threshold_numel:
            return False
        if self._left_numel is None:
            return True
        fits = numel <= self._left_numel
        self._left_numel -= numel if fits else 0
        return fits
