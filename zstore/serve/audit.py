"""The audit log: a line of JSON for each upload committed, action, sign-in, token refused, and change of tokens and links. It
has no token."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import UsageError

_log = logging.getLogger("zstore.serve.audit")


def append_to(file: Path, log: logging.Logger = _log) -> None:
    """Write the lines of a log to the end of a file from now on, each at once; a file that was moved away is made anew."""
    log.addHandler(logging.handlers.WatchedFileHandler(file))
    log.setLevel(logging.INFO)
    log.propagate = False


def record(**fields: str | int) -> None:
    """Write a line: `what` was done to which `run`, at which `path`, with the `token` of that name, from which `address`; its
    `outcome` is the status of the answer to a request."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(_line(fields))


@contextlib.contextmanager
def recording(file: Path | None, **fields: str | int) -> Iterator[None]:
    """Write a line as `record` does to the end of a file, if one is given and the `with` block ends well. Raises UsageError,
    before the block, for a file that cannot be written."""
    try:
        log = None if file is None else file.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the audit log {file}: {error.strerror}; nothing was changed") from error
    with log or contextlib.nullcontext():
        yield
        if log is not None:
            log.write(_line(fields) + "\n")


def _line(fields: Mapping[str, str | int]) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    unknown = dict.fromkeys(("what", "token", "address", "run", "path"), "")
    return json.dumps({"at": at, **unknown, "outcome": "ok", **fields})
