"""Names of the files that a run has beside its checkpoints."""

from __future__ import annotations

import os
import re

from ..errors import UsageError

_JOURNAL = re.compile(r"journal-([A-Za-z0-9_.-]+)\.jsonl")
CHECKPOINT_FOLDER = re.compile(r"checkpoint[-_]\d+|.+\.ckpt")
"""Names of the checkpoints of loops in which a journal may be, so that beside them there is nothing else."""
_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def journal_file(run_id: str) -> str:
    """Return the name of a run's journal. Raises UsageError for an id that cannot be part of a file's name."""
    return f"journal-{_checked(run_id)}.jsonl"


def run_of(file: str) -> str | None:
    """Return the id of the run whose journal a file is, by its name or path; None for any other file."""
    found = _JOURNAL.fullmatch(file.rpartition("/")[2])
    return None if found is None else found.group(1)


def pid_namespace() -> str:
    """Return the name of the namespace in which this process's pid counts, as in a container; empty if it has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _checked(run_id: str) -> str:
    if _RUN_ID.fullmatch(run_id) is None:
        raise UsageError(f"expected a run's id (letters, digits and `-_.`), got {run_id!r:.120}")
    return run_id
