"""Requests that no decent client sends, byte by byte."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """What came back until the connection was closed; status 0: nothing."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> Answer:
        """Return the first answer in `data`."""
        if not data:
            return cls(0, {}, b"")
        head, _, body = data.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return cls(int(line.split(" ")[1]), headers, body)

    @property
    def error(self) -> str:
        """What the body says is wrong."""
        document = json.loads(self.body)
        assert set(document) == {"error"}
        assert self.headers["content-type"] == "application/json"
        return str(document["error"])


def connect(base: str) -> socket.socket:
    """Return a connection to the service at `base`."""
    place = urlsplit(base)
    return socket.create_connection((place.hostname, place.port), timeout=200)


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes the connection."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def ask(
    base: str, path: str, *headers: str, method: str = "GET", host: str | None = "localhost", body: bytes = b""
) -> Answer:
    """Return the answer to a request with these header lines."""
    lines = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), "Connection: close", *headers]
    if body or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body)}")
    with connect(base) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return Answer.of(read_all(connection))
