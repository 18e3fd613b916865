"""Which blocks of keys a block of queries attends to.

A sequence is cut into blocks of `block` tokens, the last of which may be short. A layout says for each pair of blocks
whether queries of the one attend to keys of the other. Sources: fixed, Child et al., "Generating Long Sequences with Sparse
Transformers" (arXiv 1904.10509); bigbird, Zaheer et al. (arXiv 2007.14062); bslongformer, Beltagy et al. (arXiv 2004.05150)
at the granularity of blocks; the arguments and defaults are those of DeepSpeed's section `sparse_attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zstore.errors import ConfigError

Layout = npt.NDArray[np.bool_]
Direction = Literal["unidirectional", "bidirectional"]
_LEAST = {"num_random_blocks": 0, "num_sliding_window_blocks": 1}
"""The least values of arguments that several patterns have."""


def _require(sound: bool, message: str) -> None:
    if not sound:
        raise ConfigError(f"sparse_attention: {message}")


@dataclass(frozen=True, kw_only=True)
class Pattern(ABC):
    """A family of layouts, one for each number of blocks."""

    block: int = 16
    """Tokens of a block, at least 1."""
    attention: Direction = "bidirectional"
    """"unidirectional": a token attends to itself and to earlier ones alone."""
    different_layout_per_head: bool = False
    """Whether heads have layouts of their own, if the pattern has several."""
    seed: int = 0
    """Seed of random blocks: the same on every rank and in every run."""

    def __post_init__(self) -> None:
        """Refuse values that no layout can have. Raises ConfigError."""
        _require(self.block >= 1, f"block must be at least 1, got {self.block}")
        allowed = ("unidirectional", "bidirectional")
        _require(self.attention in allowed, f"attention must be one of {', '.join(allowed)}, got {self.attention!r}")
        for name, least in _LEAST.items():
            _require(getattr(self, name, least) >= least, f"{name} must be at least {least}")

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to no later ones."""
        return self.attention == "unidirectional"

    def layout(self, num_heads: int, num_blocks: int) -> Layout:
        """Return which blocks of keys each block of queries attends to: [heads, queries, keys]; the first extent is 1 if all
        heads are alike. Every block attends to itself."""
        heads = range(num_heads if self.different_layout_per_head else 1)
        layouts = np.stack([self._of_head(head, num_blocks) for head in heads])
        if self.is_causal:
            layouts &= np.tri(num_blocks, dtype=np.bool_)
        layouts |= np.eye(num_blocks, dtype=np.bool_)
        return layouts[:1] if (layouts == layouts[:1]).all() else layouts

    @abstractmethod
    def _of_head(self, head: int, num_blocks: int) -> Layout:
        """Return the layout [queries, keys] of one head, before it is made causal."""

    def _random(self, head: int, num_blocks: int, count: int) -> Layout:
        """Return `count` random blocks of keys for each block of queries, of those that it may attend to."""
        chosen = np.zeros((num_blocks, num_blocks), np.bool_)
        random = np.random.default_rng([self.seed, head])
        for row in range(num_blocks if count else 0):
            among = row + 1 if self.is_causal else num_blocks
            chosen[row, random.choice(among, min(count, among), replace=False)] = True
        return chosen

    def _around(self, num_blocks: int, width: int) -> Layout:
        """Return the band of `width` blocks about the diagonal."""
        index = np.arange(num_blocks)
        near: Layout = np.abs(index[:, None] - index) <= width // 2
        return near


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """Every block attends to every other."""

    def _of_head(self, head: int, num_blocks: int) -> Layout:
        return np.ones((num_blocks, num_blocks), np.bool_)


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Local windows, and in each window the last blocks, which all later (or all) blocks attend to."""

    num_local_blocks: int = 4
    """Blocks of a window."""
    num_global_blocks: int = 1
    """Blocks of a window that others attend to."""
    horizontal_global_attention: bool = False
    """Whether those blocks also attend to all others; with "bidirectional" alone."""
    num_different_global_patterns: int = 1
    """Places of the global blocks in a window, over which the heads are spread: from its end towards its start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        local, each = self.num_local_blocks, self.num_global_blocks
        _require(each >= 1 and local >= 1, "num_local_blocks and num_global_blocks must be at least 1")
        _require(local % each == 0, f"num_local_blocks ({local}) must be a multiple of num_global_blocks ({each})")
        _require_horizontal(self.attention, self.horizontal_global_attention)
        count = self.num_different_global_patterns
        _require(
            1 <= count <= local // each,
            "num_different_global_patterns must be from 1 to num_local_blocks / num_global_blocks = "
            f"{local // each}, got {count}",
        )
        _require(
            count == 1 or self.different_layout_per_head,
            f"num_different_global_patterns is {count}: set different_layout_per_head to true",
        )

    def _of_head(self, head: int, num_blocks: int) -> Layout:
        window = np.arange(num_blocks) // self.num_local_blocks
        chosen: Layout = window[:, None] == window
        place = self.num_local_blocks - (1 + head % self.num_different_global_patterns) * self.num_global_blocks
        for start in range(0, num_blocks, self.num_local_blocks):
            first = min(start + place, max(num_blocks - self.num_global_blocks, 0))
            columns = slice(first, first + self.num_global_blocks)
            chosen[first if self.is_causal else 0 :, columns] = True
            if self.horizontal_global_attention:
                chosen[columns] = True
        return chosen


@dataclass(frozen=True, kw_only=True)
class _WithGlobalBlocks(Pattern):
    """Among others, global blocks at given places."""

    global_block_indices: tuple[int, ...] = (0,)
    """Blocks that all others attend to; the starts of ranges of them if `global_block_end_indices` is given."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Ends of those ranges, exclusive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        starts, ends = self.global_block_indices, self.global_block_end_indices
        _require(min(starts, default=0) >= 0, "global_block_indices: each must be at least 0")
        if ends is None:
            return
        _require(
            len(ends) == len(starts),
            f"global_block_end_indices has {len(ends)} entries, but global_block_indices {len(starts)}",
        )
        _require(
            all(start < end for start, end in zip(starts, ends, strict=True)),
            "global_block_end_indices: each end must be after its start",
        )

    def _with_global_blocks(self, chosen: Layout, *, horizontal: bool) -> Layout:
        """Return the layout with its global blocks; `horizontal`: they attend to all others too."""
        starts = self.global_block_indices
        stops = self.global_block_end_indices or [start + 1 for start in starts]
        for start, stop in zip(starts, stops, strict=True):
            chosen[:, start:stop] = True
            if horizontal:
                chosen[start:stop] = True
        return chosen


@dataclass(frozen=True, kw_only=True)
class Variable(_WithGlobalBlocks):
    """Windows of given sizes, random blocks, and global blocks at given places."""

    num_random_blocks: int = 0
    """Random blocks that each block attends to."""
    local_window_blocks: tuple[int, ...] = (4,)
    """Sizes of the windows in blocks, from the first on; the last repeats."""
    horizontal_global_attention: bool = False
    """Whether global blocks also attend to all others; with "bidirectional" alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(min(self.local_window_blocks, default=0) >= 1, "local_window_blocks: each must be at least 1")
        _require_horizontal(self.attention, self.horizontal_global_attention)

    def _of_head(self, head: int, num_blocks: int) -> Layout:
        chosen = self._random(head, num_blocks, self.num_random_blocks)
        start, number = 0, 0
        while start < num_blocks:
            size = self.local_window_blocks[min(number, len(self.local_window_blocks) - 1)]
            chosen[start : start + size, start : start + size] = True
            start, number = start + size, number + 1
        return self._with_global_blocks(chosen, horizontal=self.horizontal_global_attention)


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """A sliding window, random blocks, and the first blocks, which attend to all and all attend to."""

    num_random_blocks: int = 1
    """Random blocks that each block attends to."""
    num_sliding_window_blocks: int = 3
    """Width of the window in blocks: half of it before a block and half after."""
    num_global_blocks: int = 1
    """Blocks at the start of the sequence that are global."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.num_global_blocks >= 0, "num_global_blocks must be at least 0")

    def _of_head(self, head: int, num_blocks: int) -> Layout:
        chosen = self._random(head, num_blocks, self.num_random_blocks)
        chosen |= self._around(num_blocks, self.num_sliding_window_blocks)
        chosen[: self.num_global_blocks] = True
        chosen[:, : self.num_global_blocks] = True
        return chosen


@dataclass(frozen=True, kw_only=True)
class BSLongformer(_WithGlobalBlocks):
    """A sliding window, and global blocks at given places, which attend to all and all attend to."""

    num_sliding_window_blocks: int = 3
    """Width of the window in blocks: half of it before a block and half after."""

    def _of_head(self, head: int, num_blocks: int) -> Layout:
        return self._with_global_blocks(self._around(num_blocks, self.num_sliding_window_blocks), horizontal=True)


MODES: dict[str, type[Pattern]] = {
    "dense": Dense,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
}
"""The patterns by the config's `mode`."""


def pattern_of(mode: str, **arguments: Any) -> Pattern:
    """Return the pattern of a mode. Raises ConfigError for an unknown one, and for arguments that it cannot have."""
    if mode not in MODES:
        raise ConfigError(f"sparse_attention.mode: expected one of {', '.join(MODES)}, got {mode!r}")
    known = [field.name for field in fields(MODES[mode])]
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ConfigError(
            f"sparse_attention: {unknown[0]} is not an argument of mode {mode}; it has {', '.join(known)}"
        )
    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()
    }
    return MODES[mode](**lists)


def _require_horizontal(attention: str, horizontal: bool) -> None:
    _require(
        not horizontal or attention == "bidirectional",
        'horizontal_global_attention needs "attention": "bidirectional": global blocks would attend to later tokens',
    )
