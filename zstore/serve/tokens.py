"""Tokens by their names, in a file, and links that its key signs.

[Note: the file of tokens]
JSON that `zstore serve token` writes: one process at a time, each time as a new file that takes the place of the former one. It
has the SHA-256 of each token and no token. That is enough: a token has 256 random bits, which nobody finds by trying, so a slow
hash or salt would add nothing (NIST SP 800-63B, section 5.1.2.2: from 112 bits on an approved hash function is what is asked
for). Whoever reads the file cannot sign in, but can make links with its key: it is for its owner alone.

[Note: links]
`?share=PAYLOAD.MAC`: the payload is JSON that says what may be read and until when, the MAC is HMAC-SHA-256 of it. Nothing is
stored for a link, so it ends by its time, or with the key and all other links.
"""

from __future__ import annotations

import base64
import fnmatch
import glob
import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from ..checkpoint.lock import SaveLock
from ..errors import UsageError
from ..io.files import Files

_log = logging.getLogger("zstore.serve")


class Role(StrEnum):
    """What a token is for: each role may do all that those before it may."""

    READ = "read"
    WRITE = "write"
    """Uploads."""
    ACT = "act"
    """What the page's buttons do."""


class Token(BaseModel, extra="forbid", frozen=True):
    """A token as the file has it, and so what a request may do. Times are seconds since 1970."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")
    role: Role
    runs: tuple[str, ...] = ("*",)
    """Patterns (`fnmatch`) of the names of runs."""
    created: int
    expires: int | None = None
    quota: int | None = Field(None, gt=0)
    """Bytes that it may hold; see [Note: quotas]."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def has_expired(self) -> bool:
        """Whether it is valid no more."""
        return self.expires is not None and self.expires <= time.time()

    def sees(self, run: str) -> bool:
        """Return whether the run of that name is there for it."""
        return any(fnmatch.fnmatchcase(run, pattern) for pattern in self.runs)

    def may(self, role: Role) -> bool:
        """Return whether it may do what needs `role`."""
        return list(Role).index(self.role) >= list(Role).index(role)


class TokenFile(BaseModel, extra="forbid", frozen=True):
    """The content of a file of tokens."""

    zstore_tokens: Literal[1] = 1
    """Version of the format."""
    tokens: tuple[Token, ...] = ()
    link_key: str = Field("", pattern="^([0-9a-f]{64})?$")
    """Signs links; empty: there are none."""


class Link(BaseModel, extra="forbid", frozen=True):
    """What a link lets its holder read: a run, or one file of its weights, until `expires`."""

    run: str
    weights: str = ""
    """Path below `/weights/<run>/`."""
    expires: int


def digest_of(token: bytes) -> str:
    """Return the SHA-256 by which a token is known."""
    return hashlib.sha256(token).hexdigest()


def sign(key: str, link: Link) -> str:
    """Return the text of a link's parameter."""
    payload = _base64(link.model_dump_json().encode())
    return f"{payload}.{_mac(key, payload)}"


def read_link(key: str, text: str, path: str = "") -> Token | None:
    """Return what a link that `sign` made gives at the URL's `path`, as a token whose hash is that of the key; None for any
    other text, once the link has ended, and for one to a file of weights if the path is another."""
    payload, _, mac = text.partition(".")
    if not key or not hmac.compare_digest(_mac(key, payload).encode(), mac.encode()):
        return None
    link = Link.model_validate_json(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    if link.weights and path != f"/weights/{link.run}/{link.weights}":
        return None
    runs, sha256 = (glob.escape(link.run),), digest_of(key.encode())
    token = Token(name="link", role=Role.READ, runs=runs, created=0, expires=link.expires, sha256=sha256)
    return None if token.has_expired else token


def _mac(key: str, payload: str) -> str:
    return _base64(hmac.digest(bytes.fromhex(key), b"zstore link 1\0" + payload.encode(), "sha256"))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def read_tokens(path: Path) -> TokenFile:
    """Return the content of a file of tokens. Raises UsageError for one that is missing, unreadable or broken."""
    make = "`zstore serve token add NAME --role ROLE --file FILE` makes one"
    try:
        return TokenFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the file of tokens {path}: {error.strerror}; {make}") from error
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in found["loc"]) or "the file"
        raise UsageError(
            f"{path} is no file of tokens: expected JSON as `zstore serve token` writes it, got {place}: {found['msg']}; "
            f"restore it, or remove it: {make}"
        ) from None


def edit_tokens(path: Path, change: Callable[[TokenFile], TokenFile], files: Files | None = None) -> TokenFile:
    """Give a file of tokens, which `change` may make, new content, and return it. See [Note: the file of tokens]."""
    files, path = files or Files(), path.resolve()
    part = path.with_name(f".{path.name}.part")
    with SaveLock(path.with_name(f".{path.name}.lock")):
        owner = path.stat() if path.exists() else None
        content = change(TokenFile() if owner is None else read_tokens(path))
        files.unlink(part)  # of a process that was killed
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        files.write_small(part, content.model_dump_json(indent=2).encode() + b"\n")
        if owner is not None:  # so that the service can still read what root has changed
            os.chown(part, owner.st_uid, owner.st_gid)
        files.rename(part, path)
        files.sync_folder(path.parent)
    return content


class Tokens:
    """The content of a file of tokens, read again when the file has changed. Usable from any thread."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._signature = self._look()
        self._content = TokenFile() if path is None else read_tokens(path)

    def now(self) -> TokenFile:
        """Return the content; of a file that cannot be read any more the last one, with one warning."""
        with self._lock:
            signature = self._look()
            if self._path is not None and signature != self._signature:
                self._signature = signature
                try:
                    self._content = read_tokens(self._path)
                except UsageError as error:
                    _log.warning("the tokens that were read before stay valid: %s", error)
            return self._content

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path or "")
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_ctime_ns
