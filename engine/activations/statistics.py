"""Counters of tensors kept for backwards, and of blocks that were computed again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class ActivationStatistics:
    """Counters of this rank since the engine was made; callers get a copy."""

    tier: str
    """Tier of the activations: device, host or disk."""
    kept: int = 0
    """Pieces of memory that were taken off the device, or were to be."""
    kept_bytes: int = 0
    written_bytes: int = 0
    """Bytes that reached the tier, without those that the backward needed before."""
    read_bytes: int = 0
    """Bytes brought back."""
    used_in_place: int = 0
    """Pieces that the backward needed before they had left."""
    read_ahead: int = 0
    """Pieces that were on their way back, or there, when they were needed."""
    resting_bytes: int = 0
    """Bytes on the tier now."""
    resting_peak_bytes: int = 0
    """Peak of these."""
    write_wait_s: float = 0.0
    """Seconds for which the forward waited for earlier pieces to leave."""
    read_wait_s: float = 0.0
    """Seconds for which the backward waited for pieces to come back."""
    blocks: int = 0
    """Blocks of `zstore.checkpointing.checkpoint` that ran forward, if `profile` is on."""
    forward_s: float = 0.0
    """Their time, the device's too."""
    recomputed: int = 0
    """Of those, how many were computed again."""
    recompute_s: float = 0.0

    def rests(self, nbytes: int) -> None:
        """Note that `nbytes` more are on the tier, or fewer."""
        self.resting_bytes += nbytes
        self.resting_peak_bytes = max(self.resting_peak_bytes, self.resting_bytes)
