"""The audit log: a line of JSON for each upload committed, action, sign-in, token refused and link made. It has no token."""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
from pathlib import Path

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
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        unknown = dict.fromkeys(("what", "token", "address", "run", "path"), "")
        _log.info(json.dumps({"at": at, **unknown, "outcome": "ok", **fields}))
