"""The settings of a service: its roots, its address, and its limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..io.files import Files, user_location

DEFAULT_PORT = 8700
LEAST_TOKEN = 16
"""Characters of a token: fewer could be guessed."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A folder or URL that is served: a run's own folder, or a folder of runs."""

    location: str
    name: str
    """The name of its run, if it is a run's own folder."""

    @classmethod
    def parse(cls, text: str) -> Root:
        """Return the root of `PATH_OR_URL` or `NAME=PATH_OR_URL`. Raises UsageError for an empty name or place."""
        name, equals, location = text.partition("=")
        if not equals or "/" in name or "://" in name:
            name, location = "", text
        name = name or location.rstrip("/").rpartition("/")[2] or "root"
        if not location:
            raise UsageError(f"expected a folder, a URL, or NAME=FOLDER, got {text!r}")
        location = user_location(location)
        if name in (".", ".."):
            name = Path(location).name or "root"
        return cls(location=location, name=name)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service runs. Raises UsageError for settings that are not safe or make no sense."""

    roots: tuple[Root, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free one."""
    token: str | None = field(default=None, repr=False)
    """Clients that show it may use all of the service. None: anybody may read, and nobody act."""
    tokens: Path | None = None
    """File of further tokens, with names, roles and runs; see `zstore.serve.tokens`."""
    allow_actions: bool = False
    """Take uploads, and carry out the page's actions: save, stop, verify, prune."""
    upload_folder: Path | None = None
    """Folder in which uploads to runs behind URLs are put together; None: those are refused."""
    keep_last: int | None = None
    """Most checkpoints of a run that stay as its newest when another is uploaded; None: as many as its client asks for."""
    run_quota: int | None = None
    """Bytes that a run may hold; see [Note: quotas]. None: no limit."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies, whose `X-Forwarded-For` says from where a request came; nobody else's does."""
    hosts: tuple[str, ...] = ()
    """Names by which the service is reached, beside the address that it listens on and those of this machine."""
    webhooks: tuple[str, ...] = ()
    """URLs that are told what happens to runs. See [Note: webhooks]."""
    webhook_secret: str | None = field(default=None, repr=False)
    """Signs what they are told."""
    stalled_s: float = 900.0
    """After how long without a line a run that trains counts as stalled."""
    memory_bytes: int = 512 * 1024 * 1024
    """Most that buffers and cached metadata take together; see `zstore.serve.views.readers`."""
    files: Files = field(default_factory=Files, repr=False)
    """Writes uploads."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    upstreams: tuple[str, ...] = ()
    """URLs of other services, whose runs are served too; see [Note: pull-through]."""
    cache: Path | None = None
    """Keeps files of them that were read, and weights that were cast; None: nothing is kept."""
    cache_bytes: int | None = None
    """Most bytes of files that are kept; None: any number."""

    def __post_init__(self) -> None:
        if not self.roots and not self.upstreams:
            raise UsageError("name at least one folder or URL to serve, or another service with --upstream")
        if odd := [url for url in self.upstreams if not url.startswith(("http://", "https://"))]:
            raise UsageError(f"expected another service's URL, as http://host:8700, got {odd[0]!r}")
        if self.cache is None and self.cache_bytes is not None:
            raise UsageError("--cache-size limits what --cache keeps: name that folder too")
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(f"keep {self.keep_last} checkpoints: expected at least 1")
        if self.upload_folder is not None and not self.upload_folder.is_dir():
            raise UsageError(f"there is no folder {self.upload_folder} for uploads: make it")
        if odd := [url for url in self.webhooks if not url.startswith(("http://", "https://"))]:
            raise UsageError(f"expected a webhook's URL to begin with http:// or https://, got {odd[0]!r}")
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise UsageError("TLS takes two files: give --tls-certificate and --tls-key, or neither")
        if self.token is not None and not (
            self.token.isascii() and self.token.isprintable() and self.token.split() == [self.token]
        ):
            raise UsageError("a token is one word of printable ASCII characters: it is sent in a header")
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            raise UsageError(
                f"the token has {len(self.token)} characters, expected at least {LEAST_TOKEN}: make one with "
                'python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        if not self.needs_token and not self.is_loopback:
            raise UsageError(
                f"{self.host} can be reached from other machines: give a token (--tokens, --token-file, or the variable "
                "ZSTORE_TOKEN), or listen on 127.0.0.1"
            )
        if not self.needs_token and self.allow_actions:
            raise UsageError("actions need a token: give --tokens or --token-file, or set the variable ZSTORE_TOKEN")

    @property
    def needs_token(self) -> bool:
        """Whether nothing is read without a token."""
        return self.token is not None or self.tokens is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
