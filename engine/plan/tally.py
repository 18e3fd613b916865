"""Sums of bytes: those that rest, by place, and those that a step moves."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes by resting place, padding left out, as the store counts them. Each byte is in one of the four."""

    device: int = 0
    host: int = 0
    """Host memory that is not pinned."""
    pinned: int = 0
    disk: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    @property
    def total(self) -> int:
        """Bytes on all tiers."""
        return self.device + self.host + self.pinned + self.disk


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one step moves between memory and disk, checksums and padding included."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(read=self.read + other.read, written=self.written + other.written)

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written
