"""The settings of a service: what it serves, its address, and who may do what."""

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
    """Whoever shows it may read and upload. None: nobody uploads."""
    read_token: str | None = field(default=None, repr=False)
    """Whoever shows it may read."""
    files: Files = field(default_factory=Files, repr=False)
    """Makes uploads durable."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.roots:
            raise UsageError("name at least one folder or URL to serve")
        for token in filter(None, (self.token, self.read_token)):
            if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
                raise UsageError(
                    f"a token has {LEAST_TOKEN} or more ASCII characters without blanks: make one with `openssl rand -hex 16`"
                )
        if self.is_open and not self.is_loopback:
            raise UsageError(
                f"whoever reaches {self.host} could read all runs: set a token (ZSTORE_TOKEN, or ZSTORE_READ_TOKEN for one "
                "that only reads), or leave --host out"
            )

    @property
    def is_open(self) -> bool:
        """Whether reading needs no token."""
        return self.token is None and self.read_token is None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
