"""A report: the page's views of one run as one file, with what the API answers inside. Knows no web server.

[Note: what a report holds]
Answers of the API by their paths, as `assets/data.js` asks for them. Those without which a view is empty come first, then the
arrays of the newest checkpoints, then differences and statistics. What would make the file larger than its limit is left
out, and a line at the top of the page says so.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, quote_plus

from pydantic import BaseModel

from ..errors import CheckpointExistsError, storage_error
from .bundle import Inside, one_file

ASSETS = Path(__file__).with_name("assets")
_SEGMENT = "-_.!~*'()"
_ROOM_BYTES = 4096
"""For what stands around the answers."""


@dataclass
class Answers:
    """Answers of the API by their paths, of at most `most_bytes` together."""

    most_bytes: int
    found: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, path: str, answer: BaseModel) -> bool:
        """Take in an answer; False where it is too large for what is left."""
        text = answer.model_dump_json()
        # `<` takes six bytes, see `bundle`.
        num_bytes = len(text.encode()) + 5 * text.count("<") + len(path) + _PER_ANSWER_BYTES
        if self.num_bytes + num_bytes > self.most_bytes:
            return False
        self.found[path] = text
        self.num_bytes += num_bytes
        return True


_PER_ANSWER_BYTES = 8


def api(*segments: str, **query: str) -> str:
    """Return the path of an answer as the page writes it: `api` of `assets/data.js`, character by character."""
    path = "/".join(quote(segment, safe="/" + _SEGMENT) for segment in segments)
    text = "&".join(f"{name}={_in_query(value)}" for name, value in query.items())
    return f"/api/{path}" + (f"?{text}" if text else "")


def _in_query(value: str) -> str:
    return quote_plus(value, safe="*").replace("~", "%7E")


def read_assets() -> dict[str, bytes]:
    """Return the files of the page by their names."""
    found = sorted(path for path in ASSETS.rglob("*") if path.is_file())
    return {path.relative_to(ASSETS).as_posix(): path.read_bytes() for path in found}
