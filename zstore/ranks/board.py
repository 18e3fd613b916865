"""Texts that ranks leave for each other in the store of the process group, from any thread and without collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as torch_dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class StoreBoard:
    """A connection of its own to the store by which the ranks found each other; for one thread at a time. Its keys are those
    of the board `name`."""

    def __init__(self, name: str = "") -> None:
        store: Store = torch_dist.distributed_c10d._get_default_store()
        clone = getattr(store, "clone", None)  # not in every version of torch that is served
        own: Store = store if clone is None else clone()
        self._store: Store = torch_dist.PrefixStore(f"zstore/board{name}", own)  # type: ignore[attr-defined]

    def post(self, key: str, text: str) -> None:
        """Set a key."""
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return its value; None if it has none."""
        return self._store.get(key).decode() if self._store.check([key]) else None
