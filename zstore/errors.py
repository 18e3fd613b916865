"""Errors of zstore, grouped by what a handler would do, and the text of sizes, names and lists in messages.

ZstoreError
    ConfigError             (ValueError)          the configuration is wrong: fix it and start again
    UsageError              (RuntimeError)        a call at the wrong time or with the wrong arguments
    BudgetError             (MemoryError)         the host budget has no room for a request
    NonFiniteError          (ArithmeticError)     a loss or gradient is NaN or infinite; no state was changed
    StorageError            (OSError)             a transfer failed; carries path, offset, size, errno, rank
        DiskFullError                             no space or quota left
        RunFolderError                            a run folder is missing, locked by another run or not writable
    CorruptionError         (ValueError)          stored bytes differ from those written
    CheckpointError         (RuntimeError)        a checkpoint could not be saved or loaded
        CheckpointNotFoundError (FileNotFoundError, ValueError)
        CheckpointExistsError   (FileExistsError)
        CheckpointMismatchError (ValueError)      the checkpoint is whole, but of another model or layout
    RankError               (RuntimeError)        another rank failed; carries the ranks and their tracebacks
"""

from __future__ import annotations

import errno as errno_codes
import os
import re
from collections.abc import Mapping, Sequence

_PASSWORD = re.compile(r"(://[^/@:]*):[^/@]*@")
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class ZstoreError(Exception):
    """Base of every error that zstore raises on purpose."""


class ConfigError(ZstoreError, ValueError):
    """The configuration is wrong; the message names each key, what was expected and what was received."""


class UsageError(ZstoreError, RuntimeError):
    """A call at the wrong time or with the wrong arguments."""


class BudgetError(ZstoreError, MemoryError):
    """The host budget cannot hold a request; the message gives both numbers."""


class NonFiniteError(ZstoreError, ArithmeticError):
    """The loss or the gradients of a step are NaN or infinite; parameters and optimizer state were not touched."""


class StorageError(ZstoreError, OSError):
    """A transfer failed. `path`, `offset`, `nbytes`, `errno` and `rank` say where (None if unknown)."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        errno: int | None = None,
        rank: int | None = None,
    ) -> None:
        where = [
            f"{name}={value}"
            for name, value in (("path", path), ("offset", offset), ("bytes", nbytes), ("rank", rank))
            if value is not None
        ]
        cause = "" if errno is None else f": {os.strerror(errno)} [{errno_codes.errorcode.get(errno, errno)}]"
        super().__init__(f"{message}{cause}" + (f" ({', '.join(where)})" if where else ""))
        self.path, self.offset, self.nbytes, self.errno, self.rank = path, offset, nbytes, errno, rank


class DiskFullError(StorageError):
    """No space, or no quota, is left on the file system."""


class RunFolderError(StorageError):
    """A run folder is missing, is held by another run, or cannot be written."""


class CorruptionError(ZstoreError, ValueError):
    """Stored bytes differ from those written; the message names array, file and offset."""


class CheckpointError(ZstoreError, RuntimeError):
    """A checkpoint could not be saved or loaded."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError, ValueError):
    """There is no committed checkpoint of that name. Trainer raises ValueError for one."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint of that name exists and must not be replaced."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is whole, but belongs to another model or cannot be laid out as asked."""


class RankError(ZstoreError, RuntimeError):
    """Another rank failed. `failures` maps each failed rank to its traceback."""

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        shown = {rank: text.rstrip() for rank, text in sorted(failures.items())}
        # For a rank interrupted by Ctrl-C the place says nothing.
        details = [
            f"\n--- rank {rank} ---\n{text}" for rank, text in shown.items() if not text.endswith("KeyboardInterrupt")
        ]
        super().__init__(message + "".join(details))
        self.failures = dict(failures)


_FULL = (errno_codes.ENOSPC, errno_codes.EDQUOT)


def storage_error(
    error: OSError, message: str, *, path: str, offset: int | None = None, nbytes: int | None = None
) -> StorageError:
    """Return the StorageError (or DiskFullError) that describes `error`, an OSError of the operating system."""
    kind = DiskFullError if error.errno in _FULL else StorageError
    return kind(message, path=path, offset=offset, nbytes=nbytes, errno=error.errno)


def listed(names: Sequence[str], most: int) -> str:
    """Return names for a message, up to `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shortened(lines: list[str], most: int) -> list[str]:
    """Return the lines of a message, up to `most` of them, and a last one that says how many more there are."""
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def shown(url: str) -> str:
    """Return the URL for messages: without a password."""
    return _PASSWORD.sub(r"\1:***@", url)


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in decimal units, as drives and networks are sold: 1304000000 is "1.30 GB"."""
    for size, unit in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def format_count(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "1,024 ranks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def parse_bytes(text: str) -> int:
    """Return the bytes in a size like "5GB" (decimal), "512MiB" (binary) or "1000000"; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgt])(i?))?b?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"expected a size like 5GB, 512MiB or a number of bytes, got {text!r}")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower()) if prefix else 0
    num_bytes = int(float(number) * (1024 if binary else 1000) ** power)
    if num_bytes < 1:
        raise ValueError(f"expected a size of at least one byte, got {text!r}")
    return num_bytes
