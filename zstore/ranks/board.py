"""Communication between ranks outside of collectives: a message board, and the TCP connections, which can be cut.

[Note: cutting]
Nothing in torch.distributed cancels a gloo collective: `abort` and `shutdown` leave it blocked, and destroying a group
waits for it. Shutting down its connection ends it immediately, on both ranks. To find the connections between ranks, all
ranks compare their lists: each connection is in two lists, with its endpoints swapped. On systems that do not list a
process's descriptors (other than Linux), no connection can be cut.
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

_MAX_VALUE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of one value: a torch.distributed store refuses 8 MiB."""
_CONNECT_TIMEOUT = timedelta(seconds=20)
"""Timeout for connecting to the ranks' store."""


class Board:
    """Values by key in a torch.distributed store. Methods may be called from any thread; if the store is lost with the
    process that hosts it, they raise RuntimeError."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store
        self._lock = threading.Lock()
        """Guards the connection, which only one thread at a time may use."""

    @staticmethod
    def connect(name: str) -> Board:
        """Return the ranks' board `name`, on a separate connection to the store of their rendezvous."""
        import torch.distributed as torch_dist

        default_store: Any = torch_dist.distributed_c10d._get_default_store()
        default_timeout = default_store.timeout
        default_store.set_timeout(_CONNECT_TIMEOUT)  # if the store has ended with rank 0, `clone` retries until then
        try:
            connection = default_store.clone()
        finally:
            default_store.set_timeout(default_timeout)
        return Board(torch_dist.PrefixStore(f"zstore/{name}", connection))  # type: ignore[attr-defined]

    def post(self, key: str, message: Any) -> None:
        """Set a key to JSON data."""
        self.post_bytes(key, json.dumps(message).encode())

    def read(self, key: str) -> Any:
        """Return the JSON data of a key; None if it has none."""
        data = self.read_bytes(key)
        return None if data is None else json.loads(data)

    def post_bytes(self, key: str, data: bytes) -> None:
        """Set a key to bytes, of any number; a key whose bytes span several values cannot be replaced."""
        starts = range(0, max(1, len(data)), _MAX_VALUE_BYTES)
        first, *rest = (data[start : start + _MAX_VALUE_BYTES] for start in starts)
        with self._lock:
            for number, part in enumerate(rest):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, f"{len(rest)} ".encode() + first)

    def read_bytes(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if it has none."""
        with self._lock:
            if not self._store.check([key]):
                return None
            num_rest, _, data = self._store.get(key).partition(b" ")
            rest = [self._store.get(f"{key}/{number}") for number in range(int(num_rest))]
            return b"".join([data, *rest])

    def add(self, key: str, number: int) -> int:
        """Add `number` to a counter, which starts at 0, and return the sum. A counter's key has no other use."""
        with self._lock:
            return int(self._store.add(key, number))

    def remove(self, key: str) -> None:
        """Remove a key, which must have a value."""
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


Endpoints = tuple[str, int, str, int]
"""Local address and port, then remote address and port."""

_DESCRIPTORS = Path("/proc/self/fd")
_IPV4_MAPPED_PREFIX = "::ffff:"


class Connections:
    """This process's connections to the other ranks, and to their store at `store_port`. See [Note: cutting]."""

    def __init__(self, store_port: int | None = None) -> None:
        self.store_port = store_port
        self._peers: set[Endpoints] = set()

    def list_endpoints(self) -> list[Endpoints]:
        """Return this process's TCP connections, except connections to the store."""
        return [ends for _, ends in _open_connections() if self.store_port not in ends]

    def learn(self, by_rank: Sequence[Sequence[Sequence[str | int]]], rank: int) -> None:
        """Find which connections lead to other ranks; `by_rank` has the `list_endpoints` of each rank."""
        remote = {tuple(ends) for other, listed in enumerate(by_rank) if other != rank for ends in listed}
        local = {(str(a), int(p), str(b), int(q)) for a, p, b, q in by_rank[rank]}
        self._peers = {ends for ends in local if ends[2:] + ends[:2] in remote}

    def still_open(self) -> set[Endpoints]:
        """Return the connections to other ranks that are still open; they close when a process ends."""
        return {ends for _, ends in _open_connections() if ends in self._peers}

    def cut(self, *, store: bool = False) -> None:
        """Shut down the connections to other ranks, or to the store, so that all waits on them fail."""
        for connection, ends in _open_connections():
            if ends[3] == self.store_port if store else ends in self._peers:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def limit_silence(self, timeout_s: float) -> None:
        """Let connections to the store fail once the remote machine has not responded for `timeout_s`.

        Otherwise a request to a lost machine waits for 15 minutes, or forever if all its data had already been sent.
        """
        pause_s = max(1, round(timeout_s / 9))
        for connection, ends in _open_connections():
            if sys.platform == "linux" and ends[3] == self.store_port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))


def _open_connections() -> Iterator[tuple[socket.socket, Endpoints]]:
    """Yield a new socket for each TCP connection, which is closed afterwards, and its endpoints."""
    if not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        # Other threads may close a descriptor at any time.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield connection, _endpoints(connection)


def _endpoints(connection: socket.socket) -> Endpoints:
    (address, port), (other_address, other_port) = connection.getsockname()[:2], connection.getpeername()[:2]
    return address.removeprefix(_IPV4_MAPPED_PREFIX), port, other_address.removeprefix(_IPV4_MAPPED_PREFIX), other_port
