"""The TCP connections between the ranks' processes and to their store, and how to cut them.

[Note: cutting]
Nothing in torch.distributed cancels a gloo collective: `abort` and `shutdown` leave it blocked, and destroying a
group waits for it. A connection that is shut down ends it at once, here and on the rank at its other end. To find the
connections between two ranks, all ranks compare theirs: each is in two lists, with its ends swapped. If the system does
not list a process's descriptors (other than Linux), there is nothing to cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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
        """Return this process's TCP connections, without those to the store."""
        return [ends for _, ends in _open_connections() if self.store_port not in ends]

    def learn(self, everyone: Sequence[Sequence[Sequence[str | int]]], rank: int) -> None:
        """Note which of this process's connections lead to another rank: `everyone` has what each rank `listed`."""
        theirs = {tuple(ends) for other, rows in enumerate(everyone) if other != rank for ends in rows}
        mine = {(str(a), int(p), str(b), int(q)) for a, p, b, q in everyone[rank]}
        self._known = {ends for ends in mine if ends[2:] + ends[:2] in theirs}

    def __len__(self) -> int:
        return len(self._known)

    def there(self) -> set[Ends]:
        """Return those to other ranks that are open: when a process ends, its connections do."""
        return {ends for _, ends in _open_connections() if ends in self._known}

    def cut(self, *, store: bool = False) -> None:
        """Shut those to other ranks, or to the store, down, whoever waits on them."""
        for connection, ends in _open_connections():
            if ends[3] == self.store_port if store else ends in self._known:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def give_up_store(self, silent_s: float) -> None:
        """End those to the store once the machine at the other end has not answered for so long.

        Otherwise who asks a machine that was lost, or cut off, waits a quarter of an hour, and for ever if all was sent before.
        """
        pause_s = max(1, round(silent_s / 9))
        for connection, ends in _open_connections():
            if sys.platform == "linux" and ends[3] == self.store_port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silent_s))


def _open_connections() -> Iterator[tuple[socket.socket, Ends]]:
    """Yield each TCP connection as a socket of its own, closed after its turn, and its ends."""
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
    (here, port), (there, other) = connection.getsockname()[:2], connection.getpeername()[:2]
    return here.removeprefix(_MAPPED), port, there.removeprefix(_MAPPED), other
