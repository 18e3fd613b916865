"""Clients of HTTP servers that cost little: what they receive is thrown away."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

_BUFFER_BYTES = 1024 * 1024


class Connection:
    """A connection that is kept open, to `host:port`."""

    def __init__(self, port: int, headers: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._headers = headers

    def get(self, path: str, first: int | None = None, stop: int | None = None) -> int:
        """Return the bytes of the body of the answer to a request for a file, or bytes `[first, stop)` of it."""
        ranged = "" if first is None or stop is None else f"Range: bytes={first}-{stop - 1}\r\n"
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{ranged}{self._headers}\r\n".encode())
        return self._read_answer(206 if ranged else 200)

    def _read_answer(self, expected: int) -> int:
        head = b""
        while b"\r\n\r\n" not in head:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection before its answer")
            head += data
        head, _, body = head.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        if int(lines[0].split(" ")[1]) != expected:
            raise http.client.HTTPException(lines[0])
        (length,) = (int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:"))
        left = length - len(body)
        while left:
            received = self._socket.recv_into(self._buffer, min(left, _BUFFER_BYTES))
            if not received:
                raise ConnectionError(f"the server closed the connection {left} bytes before the end")
            left -= received
        return length

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def at_once(works: list[Callable[[], None]]) -> float:
    """Do all works at once, in threads; return the seconds. Raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - started


def ranges(nbytes: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of `each` bytes that make up `nbytes`."""
    for first in range(0, nbytes, each):
        yield first, min(first + each, nbytes)
