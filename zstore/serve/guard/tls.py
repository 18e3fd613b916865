"""The TLS context of certificate files."""

from __future__ import annotations

import ssl
from pathlib import Path

from ...errors import UsageError


def make_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a server with a certificate (PEM, with those between it and the root) and its key.

    Raises UsageError that says which file is wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for file, what in ((certificate, "certificate"), (key, "private key")):
        text = _read(file, what)
        if "-----BEGIN " not in text:
            raise UsageError(f"{file} is no PEM file: expected the {what}, as -----BEGIN ...-----")
    try:
        ssl.create_default_context(cadata=_first(certificate))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{certificate} has no valid certificate: {_reason(error)}") from error
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise UsageError(f"{key} is not the private key of the certificate in {certificate}") from error
        raise UsageError(f"{key} has no valid private key: {_reason(error)}") from error
    return context


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="latin-1")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {file}: {error.strerror}") from error


def _first(certificate: Path) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = certificate.read_text(encoding="latin-1")
    start, stop = text.find(begin), text.find(end)
    if start < 0 or stop < start:
        raise ValueError("it has none")
    return text[start : stop + len(end)] + "\n"


def _refuse_password(key: Path) -> str:
    raise UsageError(f"{key} has a password: give a key without one, that only this user can read")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
