"""Proxies: of TCP, which does something once so many bytes went from the client to the server, a fault at a known moment;
and of HTTP, as nginx is one: below a path."""

import contextlib
import http.client
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Proxy:
    """Forwards connections to a local port. `after` says when `happen` is called: by the thread that forwards, before the
    bytes from that one on are. Counts bytes over all connections."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._due: list[tuple[int, Callable[[], object]]] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.sent_bytes = 0
        """From clients to the server."""
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, num_bytes: int, happen: Callable[[], object]) -> None:
        """Call `happen` once so many bytes more have been forwarded."""
        with self._lock:
            self._due.append((self.sent_bytes + num_bytes, happen))

    def cut(self) -> None:
        with self._lock:
            broken, self._sockets = self._sockets, set()
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            with self._lock:
                self._sockets |= {client, server}
            with selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ, server)
                selector.register(server, selectors.EVENT_READ, client)
                while True:
                    for key, _ in selector.select():
                        source, target = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        data = source.recv(16384)
                        if not data:
                            return
                        if source is client:
                            data = self._count(data, target)
                        target.sendall(data)

    def _count(self, data: bytes, target: socket.socket) -> bytes:
        """Do what is due within `data`; return what is still to be forwarded of it."""
        with self._lock:
            before, self.sent_bytes = self.sent_bytes, self.sent_bytes + len(data)
            due = [one for one in self._due if one[0] <= self.sent_bytes]
            self._due = [one for one in self._due if one not in due]
        done = 0
        for at, happen in sorted(due, key=lambda one: one[0]):
            target.sendall(data[done : max(at - before, done)])
            done = max(at - before, done)
            happen()
        return data[done:]


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


class _Forwards(BaseHTTPRequestHandler):
    """What `location /above/ { proxy_pass http://host:port/; proxy_set_header Host $http_host; }` of nginx does."""

    target: tuple[str, int]
    above: str
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        if not self.path.startswith(f"{self.above}/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        with contextlib.closing(http.client.HTTPConnection(*self.target, timeout=100)) as connection:
            connection.request(self.command, self.path.removeprefix(self.above), body=body, headers=headers)
            answer = connection.getresponse()
            data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                self.send_header(name, value)
        self.send_header(
            "Content-Length", answer.headers["Content-Length"] if self.command == "HEAD" else str(len(data))
        )
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(b"" if self.command == "HEAD" else data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = forward

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def reverse_proxy(target: str, *, above: str) -> Iterator[str]:
    """Yield the URL of a proxy that serves the URL `target` below the path `above`."""
    place = urlsplit(target)
    handler = type("Handler", (_Forwards,), {"target": (place.hostname, place.port), "above": above})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}{above}"
        proxy.shutdown()
        thread.join()
