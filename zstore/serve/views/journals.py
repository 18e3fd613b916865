"""The files of journals in a run's folder, here or behind a URL, and reading their lines."""

from __future__ import annotations

import itertools
import os
import stat
import time
from dataclasses import dataclass

import numpy as np

from ...checkpoint.folder import Folder
from ...errors import ZstoreError
from ...journal.lines import decode_lines
from ...journal.reader import journals
from ..models import Session
from .journalview import JournalView, session_of

MOST_LINE_BYTES = 64 * 1024 * 1024
_BLOCK_BYTES = 4 * 1024 * 1024
_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 16 * 1024
_SAMPLE_BYTES = 8 * 1024


@dataclass(frozen=True, kw_only=True)
class JournalFile:
    """A journal in its folder."""

    nbytes: int
    written_ns: int
    """When it was written last; behind a URL, if that is not told, its bytes."""
    identity: tuple[int, int] = (0, 0)
    """Changes when another file takes its name."""


def journals_in(folder: Folder) -> dict[str, JournalFile]:
    """Return the journals in a folder by name; none if it cannot be read."""
    try:
        return {name: file for name in journals(folder) if (file := _journal_file(folder, name)) is not None}
    except (OSError, ZstoreError):
        return {}


def _journal_file(folder: Folder, name: str) -> JournalFile | None:
    if not folder.is_local:
        nbytes = folder.size(name)
        return JournalFile(nbytes=nbytes, written_ns=nbytes)
    try:
        status = os.stat(folder.path / name, follow_symlinks=False)
    except FileNotFoundError:  # it was removed meanwhile
        return None
    identity = (status.st_dev, status.st_ino)
    journal = JournalFile(nbytes=status.st_size, written_ns=status.st_mtime_ns, identity=identity)
    return journal if stat.S_ISREG(status.st_mode) else None


def arrival(folder: Folder, file: JournalFile, last_at: float, *, is_new: bool) -> float:
    """Return when a journal's last line came, by the clock here; behind a URL now, or its own time if the journal `is_new`."""
    if folder.is_local:
        return file.written_ns / 1e9
    return last_at if is_new else time.time()


def read_part(folder: Folder, name: str, start: int, stop: int) -> bytes:
    """Return bytes `[start, stop)` of a journal, fewer if it ends before; none if it cannot be read."""
    try:
        return folder.read_range(name, start, stop) if stop > start else b""
    except (OSError, ZstoreError):
        return b""


def read_on(folder: Folder, name: str, view: JournalView, until: int) -> None:
    """Read lines from where a view has got to, up to a byte of the journal."""
    left = b""
    position = view.offset
    while position < until and len(left) < MOST_LINE_BYTES:
        block = read_part(folder, name, position, min(until, position + _BLOCK_BYTES))
        if not block:
            return
        position += len(block)
        lines, newline, left = (left + block).rpartition(b"\n")
        view.offset += len(lines) + len(newline)
        for line in decode_lines(lines):
            view.take(line)


def read_some(folder: Folder, name: str, view: JournalView, until: int, *, samples: int) -> None:
    """Read as `read_on` does, but of much only the first and the last lines, and lines of steps at some places between."""
    if until - view.offset > 2 * _TAIL_BYTES:
        for text in () if view.offset else read_part(folder, name, 0, _HEAD_BYTES).split(b"\n")[:-1]:
            view.offset += len(text) + 1
            for line in decode_lines(text):
                view.take(line)
            if len(view.table):  # the first step
                break
    if until - view.offset > 2 * _TAIL_BYTES:
        view.skip()
        for position in np.linspace(view.offset, until - _TAIL_BYTES, samples + 1, dtype=np.int64)[1:].tolist():
            part = read_part(folder, name, position, position + _SAMPLE_BYTES)
            begin, end = part.find(b"\n") + 1, part.rfind(b"\n")
            steps = (each for each in decode_lines(part[begin:end]) if each["kind"] == "step")
            for step in itertools.islice(steps, 1):
                view.take(step)
            view.offset = position + begin
    read_on(folder, name, view, until)


def last_session(folder: Folder, name: str, start: int, stop: int) -> tuple[int, Session | None]:
    """Return the byte up to which a part of a journal was looked through, and the last session that begins there."""
    found = None
    while block := read_part(folder, name, start, min(stop, start + _BLOCK_BYTES)):
        if not (end := block.rfind(b"\n") + 1):
            break
        at = block.rfind(b'"kind":"start"', 0, end)
        for line in decode_lines(block[block.rfind(b"\n", 0, at) + 1 : block.find(b"\n", at)]) if at >= 0 else ():
            found = session_of(line)
        start += end
    return start, found
