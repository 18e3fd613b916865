"""Folders on several drives, and which of them a shard goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Drives:
    """Folders on the drives that shards are spread over: a new shard goes to the folder with the fewest bytes."""

    usual: tuple[Path, ...]
    groups: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Other folders by the first part of an array's name."""
    given_bytes: Counter[Path] = field(default_factory=Counter)

    def choose(self, name: str, nbytes: int) -> Path:
        """Return the folder for `nbytes` of array `name`; the same for the same order of calls."""
        folders = self.groups.get(name.split("/", 1)[0], self.usual)
        chosen = min(folders, key=lambda folder: self.given_bytes[folder])
        self.given_bytes[chosen] += nbytes
        return chosen
