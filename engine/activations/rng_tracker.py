"""Named streams of random numbers beside the default one, as scripts with model parallelism fork them for dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zstore.errors import UsageError

MODEL_PARALLEL_STREAM = "model-parallel-rng"
"""Name of the stream that differs among the ranks of a model-parallel group."""

_SEED_OFFSET = 2718
"""Offset from the seed that these ranks share to their own, as in Megatron."""


class RngTracker:
    """States of random generators by name; of the CUDA device if there is one, else of the CPU."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state of each stream."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the streams by those of `get_states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Add a stream that begins with `seed`. Raises UsageError for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds:
            raise UsageError(f"the random stream {name!r} with seed {seed}: that name or seed is taken; reset() first")
        self._seeds.add(seed)
        present = _state()
        _seed(seed)
        self._states[name] = _state()
        _set_state(present)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream `name` in the block, which continues from the end of the last block."""
        if name not in self._states:
            known = ", ".join(self._states) or "none"
            raise UsageError(f"there is no random stream {name!r} (there are: {known}): add(name, seed) first")
        present = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(present)


def seed_model_parallel(tracker: RngTracker, seed: int, rank: int) -> None:
    """Seed the default stream with `seed`, the same on the ranks of a model-parallel group, and the tracker's stream with
    one that is rank number `rank`'s own; other streams are forgotten."""
    tracker.reset()
    _seed(seed)
    tracker.add(MODEL_PARALLEL_STREAM, seed + _SEED_OFFSET + rank)


def _cuda() -> Any:
    return torch.cuda if torch.cuda.is_available() else None


def _state() -> torch.Tensor:
    cuda = _cuda()
    state: torch.Tensor = torch.get_rng_state() if cuda is None else cuda.get_rng_state()
    return state


def _set_state(state: torch.Tensor) -> None:
    cuda = _cuda()
    (torch.set_rng_state if cuda is None else cuda.set_rng_state)(state)


def _seed(seed: int) -> None:
    cuda = _cuda()
    if cuda is None:
        torch.manual_seed(seed)
    else:
        cuda.manual_seed(seed)
