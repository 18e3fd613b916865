"""The ways of ranks to each other besides collectives: messages on a board, and their TCP connections, which can be cut.

[Note: cutting]
Nothing in torch.distributed cancels a gloo collective: `abort` and `shutdown` leave it blocked, and destroying a
group waits for it. Shutting down a connection ends it at once, here and on the rank at its other end. To find the
connections between two ranks, all ranks compare theirs: each is in two lists, with its ends swapped. If the system does
not list a process's descriptors (other than Linux), there is nothing to cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_VALUE_BYTES = 4 * 1024 * 1024
"""Most bytes of one value: a store of torch.distributed refuses 8 MiB."""
_CONNECT = timedelta(seconds=20)
"""Limit for connecting to the ranks' store."""


class Board:
    """Values by key in a store of torch.distributed. Methods may be called from any thread; if the store is lost, with the
    process that hosted it, they raise RuntimeError."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store
        self._lock = threading.Lock()
        """A connection is for one thread at a time."""

    @staticmethod
    def connect(name: str) -> Board:
        """Return the ranks' board `name`, on a separate connection to the store of their rendezvous."""
        import torch.distributed as torch_dist

        shared: Any = torch_dist.distributed_c10d._get_default_store()
        usual = shared.timeout
        shared.set_timeout(_CONNECT)  # a store that ended with rank 0 is asked repeatedly until then
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
        """Set a key to bytes, however many; a key whose bytes span several values cannot be replaced."""
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
        """Return the number of a key, first 0, after adding `number` to it; number keys are used for nothing else."""
        with self._lock:
            return int(self._store.add(key, number))

    def remove(self, key: str) -> None:
        """Remove a key, which has a value."""
        with self._lock:
            for number in range(int(self._store.get(key).partition(b" ")[0])):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)


def store_port() -> int | None:
    """Return the port of the store that the ranks' rendezvous used, if it is reached over TCP."""
    import torch.distributed as torch_dist

    store: Any = torch_dist.distributed_c10d._get_default_store()
    while isinstance(store, torch_dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store.port if isinstance(store, torch_dist.TCPStore) else None  # type: ignore[attr-defined]


Ends = tuple[str, int, str, int]
"""Address and port of this end, then of the other."""

_DESCRIPTORS = Path("/proc/self/fd")
_MAPPED = "::ffff:"


class Connections:
    """This process's connections to the other ranks, and to their store, by its port. See [Note: cutting]."""

    def __init__(self, store_port: int | None = None) -> None:
        self.store_port = store_port
        self._known: set[Ends] = set()

    def listed(self) -> list[Ends]:
        """Return this process's TCP connections, except connections to the store."""
        return [ends for _, ends in _open_connections() if self.store_port not in ends]

    def learn(self, everyone: Sequence[Sequence[Sequence[str | int]]], rank: int) -> None:
        """Note which of this process's connections lead to another rank: `everyone` has what each rank `listed`."""
        theirs = {tuple(ends) for other, rows in enumerate(everyone) if other != rank for ends in rows}
        mine = {(str(a), int(p), str(b), int(q)) for a, p, b, q in everyone[rank]}
        self._known = {ends for ends in mine if ends[2:] + ends[:2] in theirs}

    def open_now(self) -> set[Ends]:
        """Return the connections to other ranks that are still open: they close when a process ends."""
        return {ends for _, ends in _open_connections() if ends in self._known}

    def cut(self, *, store: bool = False) -> None:
        """Shut down the connections to other ranks, or to the store: all waits on them fail."""
        for connection, ends in _open_connections():
            if ends[3] == self.store_port if store else ends in self._known:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def give_up_store(self, silent_s: float) -> None:
        """End the connections to the store once the machine at the other end has not answered for `silent_s`.

        Otherwise a request to a lost machine waits a quarter of an hour, or forever if everything had been sent before.
        """
        pause_s = max(1, round(silent_s / 9))
        for connection, ends in _open_connections():
            if sys.platform == "linux" and ends[3] == self.store_port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silent_s))


def _open_connections() -> Iterator[tuple[socket.socket, Ends]]:
    """Yield a new socket for each TCP connection, closed after its turn, and its ends."""
    if not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        # A descriptor may be closed at any moment.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield connection, _ends(connection)


def _ends(connection: socket.socket) -> Ends:
    (address, port), (other_address, other_port) = connection.getsockname()[:2], connection.getpeername()[:2]
    return address.removeprefix(_MAPPED), port, other_address.removeprefix(_MAPPED), other_port
