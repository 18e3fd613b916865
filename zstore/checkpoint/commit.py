"""Rank 0's part of a save: begin, commit or abort; and the removal of the leftovers of dead saves, which are
distinguished from running ones by their locks.

[Note: the order of a commit]
    1  <tag>.lock-<id>      made and locked while the save runs
    2  <tag>.tmp-<id>/      made; other ranks see it, unless their folder is not rank 0's
    3  shards, metadata, manifests in it, every file and folder made durable
    4  zstore.json          in it, durable
    5  <tag> -> <tag>.old-<id>          only if a committed checkpoint is replaced
    6  <tag>.tmp-<id> -> <tag>          the commit
    7  `latest` replaced; the folder above made durable; the set-aside and older checkpoints removed; the lock removed

If one flush of the file system is enough for 3 and 4 (`Flush`), the new `latest` is written before it too.

After a crash before 6, nothing has the tag's name, or the previous checkpoint has it; between 5 and 6, a scan uses the
set-aside checkpoint for the tag, and the next save renames it back; after 6, the checkpoint is whole, `latest` is old
(it is a hint), and the next save removes the leftovers. Each removal begins with a rename to `<tag>.tmp-<id>`, so that
half of a checkpoint never looks like one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointExistsError, StorageError
from ..io.files import Files, Flush, make_read_only
from .catalog import NOT_LATEST, NOT_REMOVED, TagInfo, check_tag_is_free, is_committed, meant_of, noting, scan, stamped
from .folder import folder_at
from .format import Record
from .layout import (
    ABORT_FILE,
    LATEST_FILE,
    LOCK,
    MANIFEST_FOLDER,
    RECORD_FILE,
    SET_ASIDE,
    TEMPORARY,
    new_save_id,
    own_name,
    parse_own_name,
    tag_folder,
)
from .retention import Keep, retire

try:
    import fcntl
except ImportError:  # Windows: nothing saves there
    fcntl = None  # type: ignore[assignment]


_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
FOREIGN_LIFE_S = 24 * 3600
"""Without file locks, a save of another machine counts as running for this long."""


class SaveLock:
    """Locks the new lock file `path`, which names the process, until `release()`, the end of a `with` block, or of the
    process. Waits while another process holds it. Raises StorageError if it cannot be created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            try:
                self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise _not_writable(path.parent, error.errno) from error
            _flock(self._fd, wait=True)
            # A sweep may have removed the file, as a dead save's, between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(self._fd).st_ino:
                    break
            os.close(self._fd)
        os.pwrite(self._fd, owner_document(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if fcntl is not None:
            # Explicitly: a forked child, such as a data loader's worker, shares the lock with us.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _not_writable(folder: Path, number: int | None) -> StorageError:
    text = "cannot write to the folder: name one that this user may write to"
    return StorageError(text, path=str(folder), errno=number)


@contextlib.contextmanager
def owner_is_dead(path: Path) -> Iterator[bool]:
    """Yield whether the save that made the lock file `path` has ended; a missing file is a dead save's. If so, the lock
    is held during the block, so that no save of that name can begin."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # another user's
        yield False
        return
    try:
        locked = _flock(fd, wait=False)
        yield not _owner_lives(fd) if locked is None else locked
    finally:
        os.close(fd)


def _flock(fd: int, *, wait: bool) -> bool | None:
    """Take the lock and return whether that succeeded; None if the system or the file system has no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    return None


def _owner_lives(fd: int) -> bool:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner = json.loads(os.pread(fd, 4096, 0))
        if owner["host"] == socket.gethostname():
            return not process_ended(owner)
    return time.time() - os.fstat(fd).st_mtime < FOREIGN_LIFE_S


def owner_document(**more: str | int) -> bytes:
    """Return a lock's description of this process, with `more`."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more}).encode()


def process_ended(owner: Mapping[str, Any]) -> bool:
    """Return whether the process of a lock ran on this machine and has ended."""
    pid = int(owner["pid"])
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: a process of another user
        return isinstance(error, ProcessLookupError)
    return False


class Committer:
    """One save into `folder` under `tag`. Calls, all by rank 0: `check`, `begin`, then `commit` or `abort`."""

    def __init__(self, files: Files, folder: Path, tag: str, save_id: str) -> None:
        self.folder = folder
        name = tag_folder(tag)
        self.target = folder / name
        self.temporary = folder / own_name(name, TEMPORARY, save_id)
        self.lock_path = folder / own_name(name, LOCK, save_id)
        self._tag = tag
        self._hint = folder / own_name(LATEST_FILE, TEMPORARY, save_id)
        self._aside = folder / own_name(name, SET_ASIDE, save_id)
        self._files = files
        self._lock: SaveLock | None = None

    def check(self, *, overwrite: bool, run: str = "") -> TagInfo | None:
        """Check that the save may begin; runs in the caller's thread, and changes nothing except that it makes `folder`.

        Returns the checkpoint that it will replace. Raises CheckpointExistsError for a committed tag (unless `overwrite`,
        or it is one of the run `run`), StorageError if the folder cannot be created.
        """
        if not self.folder.is_dir():
            self._files.make_folder(self.folder)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise _not_writable(self.folder, errno.EACCES)
        return check_tag_is_free(self.folder, self._tag, overwrite=overwrite, run=run)

    def begin(self, move: Callable[[Path], object] | None = None) -> None:
        """Make the temporary folder, with its lock. Not in the caller's thread: a busy journal may hold it up. `move`
        renames an existing folder to it."""
        self._lock = SaveLock(self.lock_path)
        try:
            if move is not None:
                move(self.temporary)
            self._files.make_folder(self.temporary / MANIFEST_FOLDER)
        except BaseException:
            self.close()
            raise

    def commit(self, record: Record, flush: Flush | None = None, keep: Keep | None = None) -> list[str]:
        """Publish the temporary folder, whose files are durable, or are made durable by `flush`, with `record`; then
        apply `keep` to the checkpoints of its run. Returns what failed after the commit. Sets `record.committed_ns`
        unless it is set."""
        record = record if record.committed_ns else stamped(record, self.folder)
        path = self.temporary / RECORD_FILE
        self._files.write_small(path, record.encode(), sync=flush is None)
        make_read_only(path)
        messages: list[str] = []
        if self.target.is_dir() and not (self.target / RECORD_FILE).exists():
            # Other programs' files are kept next to the checkpoint's.
            shutil.copytree(self.target, self.temporary, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
        if flush is None:
            self._files.sync_folder(self.temporary)
        else:
            self._write_hint(record, messages, sync=False)
            flush.sync()
        replaces = self.target.exists()
        if replaces:
            self._files.rename(self.target, self._aside)
        try:
            self._files.rename(self.temporary, self.target)
        except BaseException:
            if replaces:
                self._files.rename(self._aside, self.target)
            raise
        # From here on, failures do not harm the checkpoint and are noted.
        if flush is None:
            self._write_hint(record, messages)
        with noting(messages, NOT_LATEST):
            if record.is_latest and not messages:
                self._files.rename(self._hint, self.folder / LATEST_FILE)
        if messages:  # it names an older checkpoint, as if the user had gone back to it
            with contextlib.suppress(StorageError):
                self._files.unlink(self.folder / LATEST_FILE)
        # The tag and `latest`.
        self._files.sync_folder(self.folder)
        with noting(messages, NOT_REMOVED):
            if replaces:
                discard(self._files, self._aside)
        if keep is not None:
            remove = lambda info: discard(self._files, info.path)  # noqa: E731
            messages += retire(self.folder, keep=keep, run=record.run, remove=remove)
        return messages

    def _write_hint(self, record: Record, messages: list[str], *, sync: bool = True) -> None:
        """Write the new content of `latest` to a temporary file."""
        with noting(messages, NOT_LATEST):
            if record.is_latest:
                self._files.write_small(self._hint, f"{self._tag}\n".encode(), sync=sync)

    def abort(self, reason: str, *, alone: bool) -> None:
        """Write the reason for the other ranks, unless `alone`, and remove the save's files. Never raises. Files that
        cannot be removed now are swept by the next save."""
        with contextlib.suppress(OSError):
            self._files.unlink(self._hint)
        with contextlib.suppress(OSError):
            if alone:
                self._files.remove_tree(self.temporary)
            elif self.temporary.is_dir():
                with contextlib.suppress(OSError):
                    self._files.write_small(self.temporary / ABORT_FILE, json.dumps({"reason": reason}).encode())
                for entry in list(os.scandir(self.temporary)):
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            self._files.remove_tree(entry.path)
                        elif entry.name != ABORT_FILE:
                            self._files.unlink(entry.path)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()


def abort_reason(path: Path) -> str | None:
    """Return the reason in the file that an aborting rank wrote; None if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        message = json.loads(path.read_bytes())
        return str(message.get("reason")) if isinstance(message, dict) else None
    return None


def discard(files: Files, path: Path) -> None:
    """Remove a folder so that a partly removed folder never looks like a checkpoint."""
    own = parse_own_name(path.name)
    if own is None or own[1] != TEMPORARY:
        doomed = path.with_name(own_name(own[0] if own else path.name, TEMPORARY, new_save_id()))
        files.rename(path, doomed)
        path = doomed
    files.remove_tree(path)


@contextlib.contextmanager
def temporary_folder(files: Files, parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, named after `name`, and remove what is left of it at the end. First sweeps the
    leftovers of a dead process for the same name."""
    files.make_folder(parent)
    sweep(files, parent, only=name)
    save_id = new_save_id()
    temporary = parent / own_name(name, TEMPORARY, save_id)
    with SaveLock(parent / own_name(name, LOCK, save_id)):
        try:
            files.make_folder(temporary)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                files.remove_tree(temporary)


@contextlib.contextmanager
def new_folder(files: Files, target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends, and is removed if it raises. The caller makes
    the files in it durable. Raises CheckpointExistsError if `target` exists."""
    if target.exists() or target.is_symlink():
        raise CheckpointExistsError(f"{target} exists: remove it, or choose another folder to write to")
    with temporary_folder(files, target.parent, target.name) as temporary:
        yield temporary
        files.sync_folder(temporary)
        files.rename(temporary, target)
        files.sync_folder(target.parent)


def sweep(files: Files, folder: Path, *, only: str | None = None) -> list[str]:
    """Remove the leftovers of dead saves in `folder` (of the tag folder `only`), and rename set-aside checkpoints back.
    Returns a message for each file or folder that could not be removed."""
    by_save: dict[str, list[tuple[str, str, Path]]] = {}
    for name in os.listdir(folder):
        own = parse_own_name(name)
        if own is not None and only in (None, own[0]):
            by_save.setdefault(own[2], []).append((own[1], own[0], folder / name))
    messages: list[str] = []
    for save_id, left in by_save.items():
        # The lock last: files that could not be removed keep an owner that is known to be dead.
        left.sort(key=lambda entry: (entry[0] == LOCK, entry[0]))
        locks = [path for kind, _, path in left if kind == LOCK]
        with owner_is_dead(locks[0]) if locks else contextlib.nullcontext(True) as dead:
            if dead:
                if locks:
                    messages.extend(_drop_stale_latest(files, folder, save_id))
                messages.extend(_sweep_one(files, left))
    return messages


def _drop_stale_latest(files: Files, folder: Path, save_id: str) -> list[str]:
    """Remove `latest` if the dead save `save_id` committed the newest checkpoint but did not update it: without the
    lock it would look as if the user had gone back to an older one."""
    messages: list[str] = []
    with noting(messages, NOT_LATEST):
        catalog = scan(folder)
        if catalog.tags and catalog.tags[-1].record.id == save_id:
            meant, line = meant_of(folder_at(folder), catalog)
            if line and meant.record.id == save_id:
                files.unlink(folder / LATEST_FILE)
    return messages


def _sweep_one(files: Files, left: Sequence[tuple[str, str, Path]]) -> list[str]:
    messages: list[str] = []
    for kind, name, path in left:
        target = path.with_name(name)
        with noting(messages, "leftovers of an earlier save could not be removed"):
            if kind == SET_ASIDE and not is_committed(target):
                if not target.exists() and is_committed(path):
                    files.rename(path, target)
                    files.sync_folder(target.parent)
            elif path.is_dir():
                discard(files, path)
            else:
                files.unlink(path)
    return messages
