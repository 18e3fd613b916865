"""Which bytes of a representation a request asks for: `Range` and the preconditions of RFC 9110. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_ONE_RANGE = re.compile(r"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The answer to give: a status, and bytes `[start, stop)` of `size` for 200 and 206."""

    status: int
    start: int
    stop: int
    size: int

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with the status, beside those of the representation."""
        if self.status == 206:
            return {
                "Content-Range": f"bytes {self.start}-{self.stop - 1}/{self.size}",
                "Content-Length": str(self.nbytes),
            }
        if self.status == 416:
            return {"Content-Range": f"bytes */{self.size}"}
        return {"Content-Length": str(self.nbytes)} if self.status == 200 else {}

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return self.stop - self.start


def choose(method: str, headers: Mapping[str, str], etag: str | None, size: int) -> Part:
    """Return the part that a request gets of a representation of `size` bytes with the strong tag `etag` (None: it has none).

    `headers` has lower-case names. The status is 200, 206, 304, 412 or 416. Several ranges in one request are answered with
    all bytes, which RFC 9110 allows; so is a range that is not written as it should be, and any in a HEAD request.
    """
    whole = Part(status=200, start=0, stop=size, size=size)
    if "if-match" in headers and not _lists(headers["if-match"], etag, weak=False):
        return Part(status=412, start=0, stop=0, size=size)
    if "if-none-match" in headers and _lists(headers["if-none-match"], etag, weak=True):
        return Part(status=304, start=0, stop=0, size=size)
    if method != "GET" or "range" not in headers:
        return whole
    if "if-range" in headers and (etag is None or headers["if-range"].strip() != etag):
        return whole
    return _range_of(headers["range"], whole)


def _range_of(text: str, whole: Part) -> Part:
    found = _ONE_RANGE.fullmatch(text)
    if found is None or not (found[1] or found[2]):
        return whole
    size = whole.size
    if not found[1]:  # the last bytes
        start, stop = max(size - int(found[2]), 0), size
    else:
        start, stop = int(found[1]), size
        if found[2]:
            if int(found[2]) < start:
                return whole
            stop = min(int(found[2]) + 1, size)
    if start >= stop:
        return Part(status=416, start=0, stop=0, size=size)
    return Part(status=206, start=start, stop=stop, size=size)


def _lists(header: str, etag: str | None, *, weak: bool) -> bool:
    """Return whether a list of tags has `etag`."""
    tags = [tag.strip() for tag in header.split(",")]
    if weak:
        tags = [tag.removeprefix("W/") for tag in tags]
    return "*" in tags or etag in tags
