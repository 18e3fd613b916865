"""Connections: limits that uvicorn's protocol lacks - size of a request's head, slow clients, and their number."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..auth import network_of
from ..files.downloads import ZERO_COPY
from ..models import Problem
from .guard import HEADERS


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of a connection. An instance serves one server."""

    most_connections: int = 2048
    most_from_address: int = 512
    """Of them from one address, or network of IPv6, unless it is a trusted proxy's."""
    most_head_bytes: int = 64 * 1024
    """Most bytes of a request's line and headers."""
    head_s: float = 20.0
    """Time within which the head of a request must arrive, from its first byte, or from the start of the connection."""
    body_s: float = 30.0
    """A body must bring `body_bytes` in each such period while the application waits for it."""
    body_bytes: int = 16 * 1024
    most_ignored_bytes: int = 64 * 1024 * 1024
    """Most bytes that are read of a body that is answered before its end, so that a client sees the answer."""
    send_s: float = 60.0
    """Time within which a client must take the bytes that are buffered for it, about a block."""
    idle_s: float = 60.0
    """How long a connection is kept for another request."""

    def protocol(self, proxies: Collection[str] = ()) -> type[asyncio.Protocol]:
        """Return the protocol class with these limits, which `proxies` may exceed together."""
        members = {"limits": self, "proxies": proxies, "addresses": Counter[str]()}
        return type("LimitedProtocol", (_Protocol,), members)


class _Protocol(HttpToolsProtocol):
    """Adds limits to uvicorn's protocol. One timer runs for bytes to be received, one for bytes to be sent."""

    limits = ConnectionLimits()
    proxies: Collection[str] = ()
    addresses: Counter[str]
    """Connections by the network that they come from."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes kept of the head of the incoming request."""
        self._held_bytes = 0
        """Bytes received since the last complete element: the parser may hold them."""
        self._window_bytes = 0
        """Bytes of a body since the timer began."""
        self._ignored_bytes = 0
        """Bytes of a body that was answered before it ended."""
        address = self.client[0] if self.client else ""
        self._source = network_of(address)
        self._writable = asyncio.Event()
        """The socket takes more, or the connection is lost."""
        self.addresses[self._source] += 1
        if len(self.connections) > self.limits.most_connections:
            self._refuse(503, "the service has too many connections: try again")
        elif self.addresses[self._source] > self.limits.most_from_address and address not in self.proxies:
            self._refuse(429, "there are too many connections from this address: close some")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()
        self._writable.set()
        self.addresses[self._source] -= 1
        if not self.addresses[self._source]:
            del self.addresses[self._source]
        super().connection_lost(exc)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._receiving is None:
            self._expect_head()
        self._held_bytes += len(data)
        self._window_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._held_bytes > self.limits.most_head_bytes:
            self._refuse_head()
        elif self._ignored_bytes > self.limits.most_ignored_bytes:
            self._abort()

    def on_message_begin(self) -> None:
        self._head_bytes = self._ignored_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._held_bytes = self._window_bytes = 0
        self._expect(self.limits.body_s, self._body_late)
        super().on_headers_complete()
        if self.scheme == "http" and sys.platform == "linux":
            self.scope["extensions"] = {ZERO_COPY: {}}
            self.cycle.__class__ = _SendingCycle
            cast(_SendingCycle, self.cycle).protocol = self

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        if self.cycle.response_complete:
            self._ignored_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_bytes = 0
        self._stop_receiving()
        super().on_message_complete()

    def _count_head(self, nbytes: int) -> None:
        """Count the kept bytes of a head, or of trailers. An error ends the parser, which asks for `send_400_response`."""
        self._head_bytes += nbytes
        if self._head_bytes > self.limits.most_head_bytes:
            raise ValueError("the head is too large")

    def _expect_head(self) -> None:
        self._expect(self.limits.head_s, self._head_late)

    def _head_late(self) -> None:
        if self._held_bytes:
            self._refuse(408, "the request did not come in time")
        else:
            self.transport.close()

    def _body_late(self) -> None:
        if self._window_bytes < self.limits.body_bytes and not self.flow.read_paused:
            self._abort()
        else:
            self._window_bytes = 0
            self._expect(self.limits.body_s, self._body_late)

    def _expect(self, seconds: float, late: Any) -> None:
        self._stop_receiving()
        self._receiving = self.loop.call_later(seconds, late)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    # -- sending ------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            # Closing would wait until the client takes the bytes that it does not take.
            self._sending = self.loop.call_later(self.limits.send_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    async def send_file(self, cycle: RequestResponseCycle, file: BinaryIO, start: int, stop: int) -> None:
        """Send bytes of a file, which the page cache has, after the start of an answer: the kernel copies them."""
        await cycle.flow.drain()
        await asyncio.sleep(0)  # uvloop writes after its callbacks
        connection = self.transport.get_extra_info("socket")
        if cycle.disconnected or self.transport.is_closing() or connection is None:
            return
        if self.transport.get_write_buffer_size():  # these bytes come after others
            data = os.pread(file.fileno(), stop - start, start)
            sent = len(data)
            self.transport.write(data)
        else:
            descriptor = os.dup(connection.fileno())  # a loop does not let a transport's own be waited for
            try:
                async with asyncio.timeout(self.limits.send_s):
                    sent = await self._send_by_kernel(descriptor, file.fileno(), start, stop)
            except OSError:  # the client is gone, or does not take it: a TimeoutError
                self._abort()
                return
            finally:
                os.close(descriptor)
        cycle.expected_content_length -= sent
        if sent < stop - start:
            raise EOFError(f"the file ended {stop - start - sent} bytes early")

    async def _send_by_kernel(self, connection: int, file: int, start: int, stop: int) -> int:
        at = start
        while at < stop:
            try:
                sent = os.sendfile(connection, file, at, stop - at)
            except BlockingIOError:
                self._writable.clear()
                self.loop.add_writer(connection, self._writable.set)
                try:
                    await self._writable.wait()
                finally:
                    self.loop.remove_writer(connection)
                if self.transport.is_closing():
                    raise ConnectionResetError from None
                continue
            if not sent:
                break
            at += sent
        return at - start

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > self.limits.most_head_bytes:
            self._refuse_head()
        else:
            self._refuse(400, "this is no HTTP request")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers of a request may have {self.limits.most_head_bytes} bytes")

    def shutdown(self) -> None:
        if self.scheme == "https" and not self._answers():
            self.transport.abort()  # closing waits until the client closes too
        else:
            super().shutdown()

    def _answers(self) -> bool:
        """Return whether an answer is under way."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _abort(self) -> None:
        """End the connection, and drop the bytes that the kernel has still to send."""
        if (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        """Answer without asking the application, and end the connection; silently if an answer is under way."""
        self._stop_receiving()
        if self._answers():
            self._abort()
            return
        body = Problem(error=text).model_dump_json().encode()
        headers = {
            **HEADERS,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


class _SendingCycle(RequestResponseCycle):
    """A request and its answer, to which the kernel may send files."""

    protocol: _Protocol

    async def send(self, message: Any) -> None:
        if message["type"] == ZERO_COPY:
            start = message["offset"]
            await self.protocol.send_file(self, message["file"], start, start + message["count"])
        else:
            await super().send(message)
