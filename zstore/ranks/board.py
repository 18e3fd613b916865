"""Messages that ranks leave for each other, from any thread and without collectives."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_VALUE_BYTES = 4 * 1024 * 1024
"""Most bytes of one value: a store of torch.distributed refuses 8 MiB."""
_CONNECT = timedelta(seconds=20)
"""Most time until a connection to the ranks' store is there."""


class Board:
    """Values by key in a store of torch.distributed. Methods may be called from any thread; if the store is gone, with the
    process that held it, they raise RuntimeError."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store
        self._lock = threading.Lock()
        """A connection is for one thread at a time."""

    @staticmethod
    def connect(name: str) -> Board:
        """Return the ranks' board `name`, on a connection of its own to the store by which they found each other."""
        import torch.distributed as torch_dist

        shared: Any = torch_dist.distributed_c10d._get_default_store()
        usual = shared.timeout
        shared.set_timeout(_CONNECT)  # a store that went with rank 0 is asked again and again until then
        try:
            own = shared.clone()
        finally:
            shared.set_timeout(usual)
        return Board(torch_dist.PrefixStore(f"zstore/{name}", own))  # type: ignore[attr-defined]

    def post(self, key: str, message: Any) -> None:
        """Set a key to JSON data."""
        self.post_bytes(key, json.dumps(message).encode())

    def read(self, key: str) -> Any:
        """Return the JSON data of a key; None if it has none."""
        data = self.read_bytes(key)
        return None if data is None else json.loads(data)

    def post_bytes(self, key: str, data: bytes) -> None:
        """Set a key to bytes, as many as there are; those of more than one value cannot be replaced."""
        first, *more = (data[at : at + _VALUE_BYTES] for at in range(0, max(1, len(data)), _VALUE_BYTES))
        with self._lock:
            for number, part in enumerate(more):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, f"{len(more)} ".encode() + first)

    def read_bytes(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if it has none."""
        with self._lock:
            if not self._store.check([key]):
                return None
            num_more, _, data = self._store.get(key).partition(b" ")
            more = [self._store.get(f"{key}/{number}") for number in range(int(num_more))]
            return b"".join([data, *more])

    def add(self, key: str, number: int) -> int:
        """Return the number of a key, first 0, after adding `number` to it; keys of numbers are no others'."""
        with self._lock:
            return int(self._store.add(key, number))

    def remove(self, key: str) -> None:
        """Remove a key, which has a value."""
        with self._lock:
            for number in range(int(self._store.get(key).partition(b" ")[0])):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)


def store_port() -> int | None:
    """Return the port of the store by which the ranks found each other, if that is reached over TCP."""
    import torch.distributed as torch_dist

    store: Any = torch_dist.distributed_c10d._get_default_store()
    while isinstance(store, torch_dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store.port if isinstance(store, torch_dist.TCPStore) else None  # type: ignore[attr-defined]
