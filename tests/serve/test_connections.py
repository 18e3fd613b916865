"""Connections of slow and greedy clients, TLS, and how the service starts and ends."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.raw import Answer, ask, connect, read_all
from tests.waiting import until
from zstore.errors import UsageError
from zstore.serve.files import downloads
from zstore.serve.guard.connections import ConnectionLimits
from zstore.serve.guard.guard import HEADERS
from zstore.serve.guard.tls import make_context
from zstore.serve.server import listen, serving
from zstore.serve.settings import Root, Settings

HEAD = b"GET /api HTTP/1.1\r\nHost: localhost\r\n"
LIMITS = ConnectionLimits(
    most_connections=20,
    head_s=0.3,
    body_s=0.3,
    body_bytes=1000,
    send_s=0.4,
    idle_s=1.0,
    most_ignored_bytes=4 * 1024 * 1024,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a file that no socket buffers hold."""
    return save_arrays(tmp_path_factory.mktemp("runs") / "one", {"model/a": np.zeros(8 * 2**20, np.float32)}).parent


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    """A service that waits for nobody."""
    with serving(Settings(roots=(Root.parse(str(folder)),), port=0), LIMITS) as url:
        yield url


@pytest.mark.parametrize("cached", [True, False, None])
def test_a_large_file_comes_whole_and_the_connection_goes_on(
    cached: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel alone if the page cache has it, read by threads otherwise; None: as it happens to be here."""
    sent: list[int] = []
    sendfile = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *given: sent.append(sendfile(*given)) or sent[-1])
    if cached is not None:
        monkeypatch.setattr(downloads, "_is_cached", lambda *_: cached)
    values = np.random.default_rng(0).standard_normal(6 * 2**20).astype(np.float32)
    file = save_arrays(tmp_path / "one", {"model/a": values}) / "model/a/c.0"
    with serving(Settings(roots=(Root.parse(str(tmp_path)),), port=0)) as url, connect(url) as connection:
        path = f"/zarr/one/step-00000001/{file.relative_to(file.parents[2])}"
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{request}\r\n{request}Range: bytes=5-{2**21}\r\n\r\n".encode())
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, rest = read_all(connection).partition(b"\r\n\r\n")
    data = file.read_bytes()
    assert f"content-length: {len(data)}".encode() in head.lower()
    assert rest[: len(data)] == data
    head, _, rest = rest[len(data) :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 206 ")
    assert rest[: 2**21 - 4] == data[5 : 2**21 + 1]
    assert f'zstore_sent_bytes_total{{part="zarr"}} {len(data) + 2**21 - 4}\n'.encode() in rest[2**21 - 4 :]
    if cached is not None:
        assert (
            sum(sent) > len(data) // 2 if cached else not sent
        )  # blocks that find others in the buffer come after these


def test_a_file_that_becomes_shorter_ends_the_connection(tmp_path: Path) -> None:
    file = save_arrays(tmp_path / "one", {"model/a": np.zeros(8 * 2**20, np.float32)}) / "model/a/c.0"
    size = file.stat().st_size
    with serving(Settings(roots=(Root.parse(str(tmp_path)),), port=0)) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(HEAD.replace(b"/api", b"/zarr/one/step-00000001/model/a/c.0") + b"\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")
        file.chmod(0o644)
        os.truncate(file, size // 2)
        assert len(read_all(connection)) < size


def test_a_request_whose_head_does_not_come_is_ended(base: str) -> None:
    for sent in (b"", b"G", HEAD, HEAD + b"X: "):
        with connect(base) as connection:
            connection.sendall(sent)
            answer = Answer.of(read_all(connection))  # as far as the service's end of the connection
            assert answer.status == (408 if sent else 0)
            assert not sent or answer.error


def test_a_head_that_comes_byte_by_byte_is_ended(base: str) -> None:
    head, sent = HEAD + b"X: " + b"x" * 1000, 0
    with connect(base) as connection:
        try:
            for byte in head:
                connection.sendall(bytes([byte]))
                sent += 1
                connection.settimeout(0.01)
                try:
                    if not connection.recv(1):
                        break
                except TimeoutError:
                    continue
                break
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < len(head)


def test_a_body_that_does_not_come_is_ended(base: str) -> None:
    for framing in (b"Content-Length: 1000", b"Transfer-Encoding: chunked"):
        with connect(base) as connection:
            connection.sendall(
                b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + framing
                + b"\r\n\r\n1"
            )
            assert read_all(connection) == b""


def test_a_client_that_reads_nothing_is_ended(base: str) -> None:
    with connect(base) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /zarr/one/step-00000001/model/a/c.0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: not _established(base, connection))
        received = len(read_all(connection))
        assert received < 32 * 2**20


def _established(base: str, connection: socket.socket) -> bool:
    """Return whether the service still has the connection, as the kernel tells."""
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 1


def test_an_idle_connection_is_closed_after_its_time(base: str) -> None:
    with connect(base) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert Answer.of(read_all(connection)).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (HEAD + b"X: y\r\n" * 20_000 + b"\r\n", 431),
        (HEAD + b"x" * 300_000, 431),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /api/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: -2\r\n\r\n{}", 400),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (HEAD.replace(b"/api", b"http://[/api") + b"\r\n", 400),
        (
            HEAD
            + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n"
            + b"X: "
            + b"x" * 70_000
            + b"\r\n\r\n",
            200,
        ),
    ],
)
def test_what_is_no_decent_request_is_refused(base: str, sent: bytes, status: int) -> None:
    with connect(base) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        answer = Answer.of(read_all(connection))
    assert answer.status in (status, 0 if len(sent) > 65_536 else status)  # a reset may come before the answer
    if answer.status >= 400:
        assert answer.error
        assert {name.lower() for name in HEADERS} <= set(answer.headers)


def test_a_body_behind_its_answer_is_read_only_so_far(base: str) -> None:
    with connect(base) as connection:
        connection.sendall(b"PUT /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(chunk * 1000)


def test_connections_are_limited_and_then_free_again(base: str) -> None:
    held = [connect(base) for _ in range(LIMITS.most_connections)]
    try:
        with connect(base) as connection:
            answer = Answer.of(read_all(connection))
            assert answer.status in (503, 0)
    finally:
        for each in held:
            each.close()
    until(lambda: ask(base, "/api").status == 200)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and its key; return both."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "zstore")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(1)
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = builder.add_extension(names, False).sign(key, hashes.SHA256())
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    locked = key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret"))
    (folder / "locked.pem").write_bytes(locked)
    return files


def test_tls(folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    options = Settings(
        roots=(Root.parse(str(folder)),), port=0, tls_certificate=certificate, tls_key=key, token="a-token-of-the-tests"
    )
    with serving(options) as base, urllib3.PoolManager(ca_certs=str(certificate), retries=False) as http:
        assert base.startswith("https://127.0.0.1:")
        assert http.request("GET", f"{base}/api").json()["service"] == "zstore"
        answer = http.request("POST", f"{base}/api/session", json={"token": "a-token-of-the-tests"})
        assert "Secure" in answer.headers["set-cookie"]
        data = http.request(
            "GET", f"{base}/zarr/one/latest/model/a/c.0", headers={"Authorization": "Bearer a-token-of-the-tests"}
        ).data
        assert data == (folder / "step-00000001" / "model" / "a" / "c.0").read_bytes()
        with pytest.raises(ssl.SSLError), connect(base) as connection:  # another certificate is asked for
            ssl.create_default_context().wrap_socket(connection, server_hostname="127.0.0.1")


def test_tls_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = make_certificate(tmp_path / "other")
    garbled = tmp_path / "garbled.pem"
    garbled.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (tmp_path / "text").write_text("hello")
    for files, message in (
        ((tmp_path / "none", key), "cannot read the certificate .*none"),
        ((certificate, tmp_path / "none"), "cannot read the private key .*none"),
        ((tmp_path / "text", key), "text is no PEM file"),
        ((garbled, key), "garbled.pem has no valid certificate"),
        ((key, key), "key.pem has no valid certificate: it has none"),
        ((certificate, certificate), "certificate.pem has no valid private key"),
        ((certificate, other_key), "other/key.pem is not the private key of the certificate"),
        ((certificate, tmp_path / "locked.pem"), "locked.pem has a password"),
    ):
        with pytest.raises(UsageError, match=message):
            make_context(*files)


def test_a_port_that_is_taken_and_an_address_of_nobody_are_errors(base: str, folder: Path) -> None:
    roots = (Root.parse(str(folder)),)
    port = int(base.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use; choose"):
        listen(Settings(roots=roots, port=port))
    with pytest.raises(UsageError, match="no address of this machine"):
        listen(Settings(roots=roots, host="nowhere.invalid", token="a-token-of-the-tests"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_service_with_downloads_and_live_pages_open(folder: Path, number: signal.Signals) -> None:
    token = folder / "token"
    token.write_text("a-token-of-the-tests\n")
    os.chmod(token, 0o644)
    command = [sys.executable, "-m", "zstore", "serve", str(folder), "--port", "0", "--token-file", str(token)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline(), process.stderr.readline()]
            assert lines[0] == f"warning: others can read the token file {token}: run chmod 600 {token}\n"
            assert lines[1].startswith("serving on http://127.0.0.1:")
            base = lines[1].split()[-1]
            with connect(base) as live, connect(base) as download:
                bearer = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-token-of-the-tests\r\n\r\n"
                live.sendall(b"GET /api/runs/one/events" + bearer)
                assert b" 200 " in live.recv(100)
                download.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                download.sendall(b"GET /zarr/one/latest/model/a/c.0" + bearer)
                assert b" 200 " in download.recv(100)
                process.send_signal(number)
                process.wait(200)
                assert read_all(live).endswith(b"0\r\n\r\n")  # ended, not cut off
            assert process.returncode == (-number if number == signal.SIGTERM else 130)
            assert process.stderr.read() in ("", "zstore: interrupted\n")
        finally:
            process.kill()
