"""The address of a service, and the run or checkpoint that is meant, from a URL that people type or copy. Pure.

[Note: URLs of a service]
`http://host:port/<run>` is a run, `http://host:port/<run>/<checkpoint>` a checkpoint of it. The same behind `/zarr/`,
`/xarray/`, `/weights/` or `/run/`, as the browser shows them, means the same. So a run that is called like one of these is
written `/zarr/run/<checkpoint>`. Each part is percent-encoded.

A proxy may serve it below a path, and nothing in a URL tells that path from a run: `readings` has each, and who asks a
server finds out (`ServiceConnection.find`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote, urlsplit

from ..errors import UsageError
from .url import shown

_PREFIXES = ("zarr", "xarray", "weights", "run")
"""First parts of the service's own URLs, before the run."""
_PAGE = "run"
"""The page's: the part behind the run is a view and no folder."""


@dataclass(frozen=True, kw_only=True)
class ServiceUrl:
    """A run of a service, and a folder in it."""

    base: str
    """Scheme, host and port, and the path below which a proxy serves it; no `/` at its end, no user's name."""
    run: str
    """Empty if the URL names none."""
    folder: str
    """Path inside the run's folder, empty for that itself."""
    user: tuple[str, str] | None = field(default=None, repr=False)
    """Name and password in the URL."""

    @classmethod
    def parse(cls, url: str, num_above: int = 0) -> ServiceUrl:
        """Return the place that an `http://` or `https://` URL means, of a service below `num_above` parts of its path.

        Raises UsageError if it cannot be that of a service.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{shown(url)} is not a URL: {error}") from error
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"expected a URL like http://host:8700/RUN, got {shown(url)}")
        segments = [unquote(segment) for segment in parts.path.split("/") if segment]
        if any(segment in (".", "..") or "/" in segment for segment in segments):
            raise UsageError(f"{shown(url)} has a part that is `.`, `..` or holds a `/`: name the run and its folder")
        above, segments = segments[:num_above], segments[num_above:]
        if len(segments) > 1 and segments[0] in _PREFIXES:
            is_page = segments.pop(0) == _PAGE
            if is_page and len(segments) > 1:
                segments = segments[:1] + _viewed(segments[1:])
        address = f"[{host}]" if ":" in host else host
        return cls(
            base="/".join([f"{parts.scheme}://{address}{'' if port is None else f':{port}'}", *map(quote_path, above)]),
            run=segments[0] if segments else "",
            folder="/".join(segments[1:]),
            user=None if parts.username is None else (unquote(parts.username), unquote(parts.password or "")),
        )

    @classmethod
    def readings(cls, url: str) -> Iterator[ServiceUrl]:
        """Yield the places that a URL may mean, of a service at its root first, then of one further and further below."""
        num_parts = sum(1 for part in urlsplit(url).path.split("/") if part)
        yield from (cls.parse(url, num_above) for num_above in range(num_parts + 1))

    @property
    def above(self) -> ServiceUrl:
        """The folder above; above a run's is one of no run."""
        return replace(
            self, run=self.run if self.folder else "", folder=self.folder.rpartition("/")[0] if self.folder else ""
        )

    def child(self, name: str) -> ServiceUrl:
        """Return the place of a folder in this one; of a URL that names no run that is a run."""
        if not self.run:
            return replace(self, run=name)
        return replace(self, folder=f"{self.folder}/{name}" if self.folder else name)

    def file(self, path: str) -> str:
        """Return the URL's path, encoded, of a file or folder in the folder: `/zarr/<run>/...`."""
        return "/zarr/" + quote_path("/".join(part for part in (self.run, self.folder, path) if part))

    @property
    def text(self) -> str:
        """The URL as people write it. See [Note: URLs of a service]."""
        path = quote_path("/".join(part for part in (self.run, self.folder) if part))
        return f"{self.base}/{'zarr/' if self.run in _PREFIXES else ''}{path}".rstrip("/")


def _viewed(view: list[str]) -> list[str]:
    """Return the folder that a view of the page is about, if it is one checkpoint."""
    return view[1:] if view[0] in ("checkpoint", "checkpoints") else []


def quote_path(path: str) -> str:
    """Return a path, percent-encoded part by part."""
    return quote(path, safe="/=+@,~")
